// The recording on its stage. Owns one function of time: `draw(t)` shows the moment t, so playing, pausing, dragging and
// a change of the window are the same thing. `judge(n)` shows what the n-th round came to. Times are the recording's
// seconds; what is shown is slowed down.

import { fate, labelled, labels, rolledBack, says, totals } from "/page/round.js";
import { GIVEN, PARENT, SENT, TEXT, TOKEN, curve, layout, lines, measure, shape, word } from "/page/tree.js";

const A_TOKEN = 0.8; // seconds in which plain decoding's next token is shown
const FLIGHT = 0.42, SPREAD = 0.22, FADE = 0.32, GLIDE = 0.4, CLEAR = 0.24, BIRTH = 0.2; // seconds as shown
const SMALL = 14; // size of a word in the tree
const NARROW = 560; // below that nodes are dots
const NAMES = { target: "target: large, decides", draft: "draft: small, guesses" };
const GUTTER = 148; // pixels for these names; on a narrow stage they stand above their bars

const clamp = (x) => Math.min(Math.max(x, 0), 1);
const ease = (x) => { const u = clamp(x); return u * u * (3 - 2 * u); };
const mix = (a, b, u) => a + (b - a) * u;

export class Stage {
  constructor(recording, root) {
    this.recording = recording;
    this.slow = A_TOKEN / (recording.plain.seconds / (recording.plain.pieces.length - 1));
    this.end = recording.plain.seconds + 0.7 / this.slow;
    this.now = 0;
    this.judged = -1; // the round whose verdict is shown, or -1: time runs
    this.runs = ["plain", "ours"].map((name) => this.run(recording[name], root.querySelector(`#${name}`)));
    this.box = root.querySelector("#ours");
    this.fan = root.querySelector(".fan");
    this.state = root.querySelector("#state");
    this.rolled = root.querySelector("#rolled");
    this.shapes = new Map();
    this.frames = this.runs[1].frames.filter((frame) => frame.until > 0);
    this.resize();
  }

  // One of the two: its words with the moments they come at, its rounds, its parts of the page.
  run(told, box) {
    const sentence = box.querySelector(".sentence"), frames = told.frames.map(known);
    sentence.textContent = "";
    const words = told.pieces.map(([text]) => {
      const span = document.createElement("span");
      span.textContent = text;
      sentence.append(span);
      return { text, span, at: 0, after: 0 };
    });
    let place = 0;
    for (const frame of frames) {
      frame.first = place;
      const flown = frame.path.length + (frame.hit === null ? 0 : 1);
      for (let n = 0; n < frame.added; n++, place++) {
        const lags = frame.until > 0 && n < flown ? FLIGHT + (SPREAD * n) / Math.max(flown - 1, 1) : 0;
        Object.assign(words[place], { at: frame.until, after: lags / this.slow });
      }
    }
    return { told, box, words, frames, clock: box.querySelector(".clock"), lanes: box.querySelector(".lanes") };
  }

  resize() {
    const box = this.box.getBoundingClientRect();
    const room = this.box.querySelector(".fan-room").getBoundingClientRect();
    const style = getComputedStyle(this.box.querySelector(".sentence"));
    this.size = parseFloat(style.fontSize);
    this.wide = measure(SMALL);
    this.lefts = parseFloat(getComputedStyle(this.box).paddingLeft);
    const narrow = room.width < NARROW, lane = 23;
    this.room = {
      width: this.lefts + room.width, middle: room.top - box.top + Math.min(room.height, 236) / 2 + 13, labels: room.top - box.top + 15, lane, gap: 26, dots: narrow,
      lanes: Math.floor((Math.min(room.height, 236) - 34) / 2 / lane), most: narrow ? 34 : 40, long: 4,
    };
    for (const one of this.runs[1].words) {
      const spot = one.span.getClientRects()[0];
      one.x = spot.left - box.left;
      one.y = spot.top + spot.height / 2 - box.top;
    }
    for (const frame of this.frames) this.place(frame);
    this.reserve();
    this.shapes.forEach((one) => one.remove());
    this.shapes.clear();
    this.draw(this.now, this.judged);
  }

  // Room for the longest sentence about a round, so that no sentence moves what stands below it.
  reserve() {
    const now = this.state.textContent;
    this.state.style.minHeight = "";
    const heights = this.frames.flatMap((frame, nth) => [sentence(frame), this.said(nth)]).map((said) => { this.state.textContent = said; return Math.ceil(this.state.getBoundingClientRect().height); });
    this.state.textContent = now;
    this.state.style.minHeight = `${Math.max(...heights)}px`;
  }

  // Where a frame's nodes stand. What the target will take stands in the middle, also while nobody knows it yet.
  place(frame) {
    const last = this.runs[1].words[Math.max(frame.first - 1, 0)];
    frame.root = word(last.text);
    const left = this.lefts + (this.room.dots ? 14 : this.wide(frame.root) + this.room.gap);
    const judged = this.frames.find((one) => one.until >= frame.until && one.token !== null);
    const sure = new Set();
    if (judged) {
      const taken = new Set([...judged.path, ...(judged.hit === null ? [] : [judged.hit])].map((at) => judged.keys[at]));
      frame.keys.forEach((key, at) => taken.has(key) && sure.add(at));
    }
    const checked = new Set(frame.nodes.map((_, at) => at).filter((at) => frame.nodes[at][SENT]));
    const found = layout(frame.nodes, sure, { ...this.room, left }, this.wide, checked);
    frame.places = new Map([...found].map(([at, place]) => [frame.keys[at], { ...place, at }]));
    frame.left = this.lefts + (this.room.dots ? 4 : this.wide(frame.root));
  }

  draw(t, judged = -1) {
    this.now = Math.min(Math.max(t, 0), this.end);
    this.judged = judged;
    for (const run of this.runs) this.drawRun(run, this.now);
    const seen = new Set();
    if (judged < 0) this.drawFan(this.now, seen); else this.drawVerdict(judged, seen);
    const words = judged < 0 ? this.saidAt(this.now) : this.said(judged);
    if (this.state.textContent !== words) this.state.textContent = words;
    const over = this.frames.filter((frame, nth) => frame.until <= this.now + 1e-9 && (judged < 0 || nth <= judged));
    this.rolled.textContent = rolledBack(totals(over));
    this.shapes.forEach((one, key) => { if (!seen.has(key)) { one.remove(); this.shapes.delete(key); } });
  }

  // Show what a round came to: time stands still at its end.
  judge(nth) { this.draw(this.frames[nth].until, nth); }

  // Show the next round; behind the last one the end, behind that the first one again.
  step() {
    const next = this.judged >= 0 ? this.judged + 1 : this.now >= this.end ? 0 : this.frames.findIndex((frame) => frame.until > this.now + 1e-9);
    if (this.frames[next]) this.judge(next); else this.draw(this.end);
  }

  // The round whose verdict comes between two moments, or -1.
  verdictIn(from, to) { return this.frames.findIndex((frame) => frame.token !== null && frame.until > from + 1e-9 && frame.until <= to); }

  said(nth) { return `round ${nth + 1} of ${this.frames.length}: ${says(this.frames[nth])}`; }

  saidAt(t) {
    const at = this.at(t);
    return at < 0 ? "" : sentence(this.frames[at]);
  }

  at(t) { return this.frames.findIndex((frame) => t >= frame.from && t < frame.until); }

  drawRun(run, t) {
    for (const one of run.words) {
      const shown = t - one.at - (this.judged < 0 ? one.after : 0);
      one.span.classList.toggle("there", shown >= -1e-9);
      one.span.classList.toggle("fresh", one.at > 0 && shown >= -1e-9 && shown * this.slow < 0.25);
    }
    const over = t >= run.told.seconds;
    run.box.classList.toggle("over", over);
    run.clock.textContent = `${Math.round(Math.min(t, run.told.seconds) * 1000)} ms`;
    this.drawLanes(run, t);
  }

  drawLanes(run, t) {
    const width = run.lanes.clientWidth, narrow = this.room.dots, left = narrow ? 0 : GUTTER, scale = (width - left - 2) / this.recording.plain.seconds;
    const rows = narrow ? { target: 15, draft: 45 } : { target: 2, draft: 20 };
    const parts = [];
    for (const who of run.told === this.recording.plain ? ["target"] : ["target", "draft"]) {
      parts.push(shape("text", { x: 0, y: rows[who] + (narrow ? -4 : 9) }, NAMES[who]));
      for (const frame of run.frames) {
        const span = frame[who];
        if (!span || span[1] <= 0 || span[0] >= t) continue;
        const from = Math.max(span[0], 0), x = left + from * scale, wide = (span[1] - from) * scale - 1.5;
        const done = clamp((t - from) / (span[1] - from)), beat = Math.abs(Math.sin((t - from) * this.slow * 4.2));
        if (who === "target") parts.push(shape("rect", { x, y: rows[who], width: Math.max(wide, 1), height: 10, rx: 3, class: "lane-room" }));
        const glow = done < 1 ? 0.55 + 0.45 * beat : 1;
        parts.push(shape("rect", { x, y: rows[who], width: Math.max(wide * done, 1), height: 10, rx: 3, class: `lane-${who}`, opacity: glow.toFixed(2) }));
      }
    }
    run.lanes.replaceChildren(...parts);
  }

  drawFan(t, seen) {
    for (const frame of this.frames) {
      const since = (t - frame.until) * this.slow;
      if (since >= 0 && since < FLIGHT + SPREAD && frame.token !== null) this.drawLeaving(frame, since, seen);
    }
    const at = this.at(t), frame = this.frames[at];
    if (at < 0) return;
    this.drawTree(frame, at ? this.frames[at - 1] : null, t, seen);
    const checks = frame.target && frame.checked ? [[`the target checks ${frame.checked}`, "checks"]] : [];
    this.label([...checks, ...(frame.draft ? [[checks.length ? "the draft guesses on" : "the draft guesses, the target waits", ""]] : [])], seen);
  }

  // A round at its end: what is kept is green, what is rolled back is struck out.
  drawVerdict(nth, seen) {
    const frame = this.frames[nth];
    this.drawTree(frame, null, frame.until - 1e-9, seen, true);
    this.label(labels(frame), seen);
  }

  label(parts, seen) {
    const one = this.part("labels", "text", seen);
    one.setAttribute("class", "say");
    one.setAttribute("transform", `translate(${this.lefts} ${this.room.labels})`);
    labelled(one, parts);
  }

  // What a verdict took flies into the sentence; what it did not take fades.
  drawLeaving(frame, since, seen) {
    const won = [...frame.path, ...(frame.hit === null ? [] : [frame.hit])];
    const below = frame.survives;
    for (const [key, place] of frame.places) {
      if (below.has(key)) continue;
      const nth = won.indexOf(place.at), id = `${frame.number}/${key}`;
      if (nth < 0) {
        const left = 1 - ease(since / FADE);
        this.node(id, frame, place, { opacity: left * 0.9, down: 5 * (1 - left), kind: fate(frame, place.at) }, seen);
        this.link(id, frame, place, frame.places, { opacity: left * 0.9, down: 5 * (1 - left) }, seen);
      } else {
        const goal = this.runs[1].words[frame.first + nth], lag = (SPREAD * nth) / Math.max(won.length - 1, 1);
        const u = ease((since - lag) / FLIGHT);
        this.link(id, frame, place, frame.places, { opacity: 1 - ease(since / 0.3), kind: fate(frame, place.at) }, seen);
        if (u < 1 && goal && nth < frame.added) this.fly(id, frame, place, goal, u, seen);
      }
    }
  }

  fly(id, frame, place, goal, u, seen) {
    const size = mix(SMALL, this.size, u) / SMALL, x = mix(place.x, goal.x + this.size * 0.22, u), y = mix(place.y, goal.y, u);
    const text = this.part(`${id}#w`, "text", seen);
    text.textContent = word(frame.nodes[place.at][TEXT]);
    text.setAttribute("class", fate(frame, place.at));
    text.setAttribute("opacity", this.room.dots ? Math.min(u * 4, 1).toFixed(2) : "1");
    text.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size.toFixed(3)})`);
  }

  // A tree as it grows: what is left of the last one glides to its place, what is new appears in the order it came in.
  drawTree(frame, before, t, seen, judged = false) {
    const since = judged ? Infinity : (t - frame.from) * this.slow, glide = ease(since / GLIDE), now = new Map();
    const alive = before && (before.token === null ? "" : `${before.top} `);
    for (const [key, place] of frame.places) {
      const old = alive === null ? undefined : before.places.get(alive + key);
      const born = judged ? undefined : frame.births.get(key);
      const free = (since - (before?.token == null ? 0 : CLEAR)) / BIRTH; // the last tree leaves first
      const shown = old ? 1 : Math.min(ease(free), born === undefined ? 1 : ease(((t - born) * this.slow) / BIRTH));
      if (shown <= 0) continue;
      now.set(key, { ...place, x: old ? mix(old.x, place.x, glide) : place.x - 6 * (1 - shown), y: old ? mix(old.y, place.y, glide) : place.y, shown });
    }
    const checking = frame.target && t >= frame.target[0];
    const root = this.part(`${frame.number}/root`, this.room.dots ? "circle" : "text", seen);
    root.setAttribute("class", "root");
    root.setAttribute("opacity", ease((since - CLEAR / 2) / 0.25).toFixed(2));
    if (this.room.dots) { root.setAttribute("r", 4); root.setAttribute("transform", `translate(${this.lefts + 4} ${this.room.middle})`); }
    else { root.textContent = frame.root; root.setAttribute("transform", `translate(${this.lefts} ${this.room.middle})`); }
    for (const [key, place] of now) {
      const id = `${frame.number}/${key}`, kind = judged ? fate(frame, place.at) : checking && frame.nodes[place.at][SENT] ? "sent" : "";
      this.link(id, frame, place, now, { opacity: place.shown * (kind ? 1 : 0.75), kind }, seen);
      this.node(id, frame, place, { opacity: place.shown * (judged && !kind ? 0.6 : 1), kind }, seen);
      if (kind === "sent") this.glow(id, place, 0.45 + 0.55 * Math.abs(Math.sin((t - frame.target[0]) * this.slow * 4.2)), seen);
    }
  }

  node(id, frame, place, look, seen) {
    const dots = this.room.dots, one = this.part(`${id}#w`, dots ? "circle" : "text", seen);
    one.setAttribute("class", look.kind || "");
    one.setAttribute("opacity", look.opacity.toFixed(2));
    if (dots) one.setAttribute("r", look.kind ? 3.8 : 2.8);
    else one.textContent = word(frame.nodes[place.at][TEXT]);
    one.setAttribute("transform", `translate(${(place.x + (dots ? 4 : 0)).toFixed(1)} ${(place.y + (look.down || 0)).toFixed(1)})`);
  }

  // What the target is reading lies in its light, which beats as its bar does.
  glow(id, place, opacity, seen) {
    if (this.room.dots) return;
    const one = this.part(`${id}#g`, "rect", seen);
    const set = { x: (place.x - 4).toFixed(1), y: (place.y - 10).toFixed(1), width: (place.wide + 6).toFixed(1), height: 20, rx: 5, opacity: opacity.toFixed(2) };
    for (const [name, value] of Object.entries(set)) one.setAttribute(name, value);
  }

  link(id, frame, place, places, look, seen) {
    const parent = frame.nodes[place.at][PARENT], from = parent < 0 ? null : places.get(frame.keys[parent]);
    if (parent >= 0 && !from) return;
    const one = this.part(`${id}#l`, "path", seen), down = look.down || 0;
    const x0 = from ? from.x + from.wide + (this.room.dots ? 0 : 3) : frame.left + 5, y0 = (from ? from.y : this.room.middle) + down;
    one.setAttribute("d", curve(x0, y0, place.x - (this.room.dots ? 0 : 5), place.y + down));
    one.setAttribute("class", look.kind === "sent" ? "" : look.kind || "");
    one.setAttribute("opacity", look.opacity.toFixed(2));
  }

  part(key, name, seen) {
    seen.add(key);
    let one = this.shapes.get(key);
    if (!one) {
      one = shape(name);
      this.shapes.set(key, one);
      if (name === "path" || name === "rect") this.fan.prepend(one); else this.fan.append(one);
    }
    return one;
  }
}

// What the drawing needs of a frame: when it is, the names of its nodes, who is born in it and when, who survives it.
function known(told) {
  const spans = [told.draft, told.target].filter(Boolean), keys = lines(told.nodes);
  const frame = { ...told, keys, from: Math.min(...spans.map((one) => one[0])), until: Math.max(...spans.map((one) => one[1])) };
  const born = told.nodes.map((node, at) => at).filter((at) => told.nodes[at][GIVEN] === told.number);
  const [begin, end] = told.draft || [frame.from, frame.from];
  frame.births = new Map(born.map((at, nth) => [keys[at], mix(begin, end, (nth + 0.5) / (born.length + 1))]));
  frame.top = [...told.path.map((at) => told.nodes[at][TOKEN]), told.token].join(" ");
  frame.survives = new Set(told.token === null ? keys : keys.filter((key) => key.startsWith(`${frame.top} `)));
  return frame;
}

function sentence(frame) {
  if (!frame.target) return "the draft guesses ahead, the target waits";
  const checks = frame.checked ? `the target checks ${frame.checked} guess${frame.checked === 1 ? "" : "es"} at once` : "the target says one word";
  return frame.draft ? `${checks}, the draft branches on meanwhile` : checks;
}

// The number of places at which two texts differ, and what one has more than the other.
export function differences(a, b) {
  const one = [...a], other = [...b];
  let count = Math.abs(one.length - other.length);
  for (let n = 0; n < Math.min(one.length, other.length); n++) count += one[n] !== other[n];
  return count;
}
