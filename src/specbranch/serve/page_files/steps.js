// The rounds of the answer under way: run, pause, step. Owns the three buttons and which round is shown; an answer owns
// its rounds, as many as have come.

import { picture, says, share } from "/page/round.js";
import { word } from "/page/tree.js";

const OFTEN = 220; // milliseconds between two pictures while the answer runs

export class Steps {
  constructor() {
    const find = (name) => document.getElementById(name);
    [this.pause, this.next, this.first, this.state, this.figure] = ["live-pause", "live-step", "live-first", "live-state", "round"].map(find);
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.paused = false;
    this.answer = null;
    this.drawn = 0;
    this.pause.addEventListener("click", () => this.set(!this.paused));
    this.next.addEventListener("click", () => this.step());
    this.first.addEventListener("click", () => { this.answer.rewind(); this.set(true); });
    new ResizeObserver(() => this.draw(true)).observe(this.figure.parentElement);
  }

  // Another answer: the one before is shown whole.
  attach(answer) {
    this.answer?.showAll();
    this.answer = answer;
    this.figure.hidden = true;
    this.say();
  }

  set(paused) {
    this.paused = paused;
    this.pause.textContent = paused ? "Run" : "Pause";
    if (!paused) this.answer?.showAll();
    this.say();
  }

  // One round more, or after the last one the first.
  step() {
    this.paused = true;
    this.pause.textContent = "Run";
    if (this.answer.over) this.answer.rewind();
    this.answer.showNext();
    this.say();
  }

  // Rounds have come, or are shown: say which one is.
  say() {
    const { answer, paused } = this;
    this.next.disabled = !answer?.rounds.length;
    this.first.disabled = !answer?.shown;
    this.state.setAttribute("aria-live", paused ? "polite" : "off");
    this.state.textContent = this.words();
    this.draw(paused || Boolean(answer?.over));
  }

  words() {
    const { answer, paused } = this;
    if (!answer?.rounds.length) return paused ? "Paused: the next answer waits at its first round." : "";
    const frame = answer.frame, of = `${answer.rounds.length}${answer.whole ? "" : " so far"}`;
    return frame ? `Round ${answer.shown} of ${of}: ${says(frame)}.` : `Before the first of ${of} rounds.`;
  }

  // The picture of the round that is shown. While the answer runs not every round is drawn, without motion none.
  draw(now) {
    const { answer, figure } = this, frame = answer?.frame;
    if (!frame) { figure.hidden = !answer?.rounds.length; figure.replaceChildren(); return; }
    if (!now && (this.calm.matches || performance.now() - this.drawn < OFTEN)) return;
    this.drawn = performance.now();
    figure.hidden = false;
    const caption = Object.assign(document.createElement("figcaption"), { className: "note", textContent: share(frame) });
    figure.replaceChildren(picture(frame, word(answer.before || " "), figure.clientWidth - 2), caption);
  }
}
