// Draft and target over time, on a canvas: the target's forwards above, the draft's work below, green as far as it came
// into the answer. Owns the scale: a usual round is wide enough for its number.

import { GIVEN } from "/page/tree.js";

const USUAL = 46, LEFT = 8, HIGH = 92, MOST = 16000; // pixels
const ROWS = { target: [16, 24], draft: [50, 24] };

export class Lanes {
  constructor(canvas, scroll) {
    this.canvas = canvas;
    this.scroll = scroll;
    this.clear();
    new ResizeObserver(() => this.draw()).observe(scroll);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  clear() { this.frames = []; this.used = new Map(); this.marked = -1; this.draw(); }

  add(frames) {
    for (const frame of frames) {
      for (const at of [...frame.path, ...(frame.hit === null ? [] : [frame.hit])]) {
        const given = frame.nodes[at][GIVEN];
        this.used.set(given, (this.used.get(given) || 0) + 1);
      }
    }
    this.frames.push(...frames);
    this.draw();
    this.scroll.scrollLeft = this.scroll.scrollWidth;
  }

  mark(number) { this.marked = number; this.draw(); this.show(number); }

  show(number) {
    const frame = this.frames.find((one) => one.number === number), span = frame?.target || frame?.draft;
    if (span) this.scroll.scrollLeft = this.x(span[0]) - this.scroll.clientWidth / 2;
  }

  x(time) { return LEFT + Math.max(time - this.zero, 0) * this.scale; }

  draw() {
    const rounds = this.frames.filter((one) => one.number > 0);
    const spans = rounds.flatMap((one) => [one.draft, one.target]).filter(Boolean);
    const forwards = rounds.map((one) => one.target).filter(Boolean).map((one) => one[1] - one[0]).sort((a, b) => a - b);
    this.zero = spans.length ? Math.min(...spans.map((one) => one[0])) : 0;
    const whole = (spans.length ? Math.max(...spans.map((one) => one[1])) : 0) - this.zero;
    this.scale = forwards.length ? Math.min(USUAL / forwards[forwards.length >> 1], (MOST - LEFT) / (whole || 1)) : 1;
    const width = Math.max(this.scroll.clientWidth, spans.length ? this.x(this.zero + whole) + 16 : 0);
    const sharp = Math.min(window.devicePixelRatio || 1, width > 8000 ? 1 : 2);
    this.canvas.width = width * sharp;
    this.canvas.height = HIGH * sharp;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${HIGH}px`;
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    pen.scale(sharp, sharp);
    pen.font = `500 11px ${colour("--sans")}`;
    pen.textBaseline = "middle";
    for (const frame of rounds) this.round(pen, frame, colour);
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", this.words(rounds));
  }

  round(pen, frame, colour) {
    if (frame.target) {
      const [y, high] = ROWS.target, x = this.x(frame.target[0]), wide = this.x(frame.target[1]) - x - 1.5;
      bar(pen, x, y, wide, high, colour(frame.number === this.marked ? "--ink" : "--target"));
      if (wide > 18) { pen.fillStyle = colour("--paper"); pen.fillText(`+${frame.added}`, x + 5, y + high / 2 + 1); }
    }
    if (frame.draft) {
      const [y, high] = ROWS.draft, x = this.x(frame.draft[0]), wide = this.x(frame.draft[1]) - x - 1.5;
      const born = frame.drafted, used = this.used.get(frame.number) || 0;
      bar(pen, x, y, wide, high, colour("--lost"));
      if (born && used) bar(pen, x, y + high * (1 - Math.min(used / born, 1)), wide, high * Math.min(used / born, 1), colour("--kept"));
    }
  }

  words(rounds) {
    if (!rounds.length) return "Nothing has happened yet";
    const forwards = rounds.filter((one) => one.target).length, together = rounds.filter((one) => one.target && one.draft).length;
    return `${forwards} forwards of the target, in ${together} of which the draft worked in the same round`;
  }
}

function bar(pen, x, y, wide, high, colour) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.roundRect(x, y, Math.max(wide, 1), high, 3);
  pen.fill();
}
