// The live chat: words coloured by origin, the rounds they came in, and the story of each.

import { ask, clocks, NAMES, onReady, Refused } from "/page/live.js";
import { Follower } from "/page/follow.js";
import { Lanes } from "/page/lanes.js";
import { hush, tell } from "/page/story.js";

const GAP = 24; // pixels between a word and the box that tells its story

export function chat() {
  const form = document.getElementById("ask"), question = document.getElementById("question");
  const talk = document.getElementById("talk"), send = document.getElementById("send");
  const lanes = new Lanes(document.getElementById("lanes"), document.getElementById("lanes-scroll"));
  const said = []; // messages so far
  const waiting = []; // questions that were entered while an answer was being written
  const follower = new Follower(form);
  let running = null;

  const method = document.getElementById("chat-method"), clock = document.getElementById("chat-clock");
  onReady((about) => {
    method.replaceChildren(new Option(`the server's own method: ${NAMES[about.method] || about.method}`, ""), ...about.racers.map((name) => new Option(NAMES[name] || name, name)));
    clock.replaceChildren(...clocks(about));
  });

  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running && event.submitter) { running.abort(); return; } // the button, which says Stop
    const text = question.value.trim();
    if (running && !text) return;
    question.value = "";
    waiting.push(enter(talk, text || question.placeholder));
    follower.start();
    if (!running) while (waiting.length) await answer(waiting.shift());
  });

  async function answer(asked) {
    running = new AbortController();
    send.textContent = "Stop";
    const user = { role: "user", content: asked.textContent };
    const made = new Answer(asked, lanes, follower, clock.value !== "wall");
    try {
      for await (const told of ask("/v1/live/chat", { messages: [...said, user], method: method.value || null, clock: clock.value }, running.signal)) made.take(told);
    } catch (error) {
      made.fail(error.name === "AbortError" ? "Stopped." : error instanceof Refused ? error.message : "The server went away.");
    }
    if (made.text) said.push(user, { role: "assistant", content: made.text }); // a stopped one as far as it came
    running = null;
    send.textContent = "Ask";
  }
}

// Show a question; it waits until it is asked.
function enter(talk, text) {
  const made = Object.assign(document.createElement("p"), { className: "asked-by waiting", textContent: text });
  talk.append(made);
  return made;
}

// One answer: its words, its rounds, which word is selected.
class Answer {
  constructor(asked, lanes, follower, modelled) {
    this.lanes = lanes;
    this.follower = follower;
    this.modelled = modelled;
    this.words = []; // {text, origin, span}
    this.frames = [];
    this.text = "";
    asked.classList.remove("waiting");
    this.box = Object.assign(document.createElement("div"), { className: "answer" });
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", "Answer; arrow keys go from word to word");
    asked.after(this.box);
    lanes.clear();
    this.forget();
    follower.step();
    this.box.addEventListener("click", (event) => { const at = this.at(event.target); if (at >= 0) this.choose(at); });
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  at(target) { const span = target.closest(".tok"); return this.words.findIndex((one) => one.span === span); }

  take(told) {
    for (const [text, origin] of told.pieces) this.add(text, origin);
    this.frames.push(...told.frames);
    this.lanes.add(told.frames);
    if (told.left_out) this.note(`The context is full: ${told.left_out} of the oldest messages ${told.left_out === 1 ? "was" : "were"} left out.`);
    this.count(told.done);
    if (told.done) this.finish(told.done);
    this.follower.step();
  }

  add(text, origin) {
    const span = Object.assign(document.createElement("span"), { className: `tok ${origin}` });
    const [, before, inked, behind] = text.trim() ? /^(\s*)([^]*?)(\s*)$/.exec(text) : ["", "", text, ""]; // spaces beside ink are not underlined
    span.append(before, Object.assign(document.createElement("b"), { textContent: inked }), behind);
    if (text) { // else it is half a character, or an end
      span.setAttribute("role", "button");
      if (!text.trim()) span.setAttribute("aria-label", text.includes("\n") ? "line break" : "space");
      span.tabIndex = this.words.some((one) => one.text) ? -1 : 0; // one stop for the whole answer; arrows go on from there
    }
    this.words.push({ text, origin, span });
    this.text += text;
    this.box.append(span);
  }

  key(event) {
    if (event.key === "Escape") { this.forget(); return; }
    const seen = this.words.map((one, at) => at).filter((at) => this.words[at].text), nth = seen.indexOf(this.at(event.target));
    const to = { ArrowRight: nth + 1, ArrowLeft: nth - 1, Home: 0, End: seen.length - 1, Enter: nth, " ": nth }[event.key];
    if (nth < 0 || to === undefined) return;
    event.preventDefault();
    this.choose(seen[Math.min(Math.max(to, 0), seen.length - 1)]);
  }

  // Nothing is selected any more.
  forget() {
    document.querySelectorAll(".tok.chosen").forEach((one) => { one.classList.remove("chosen"); one.removeAttribute("aria-pressed"); });
    hush();
  }

  choose(at) {
    this.forget();
    this.follower.stop(); // who reads about a word is not to be scrolled away from it
    this.words.forEach((one, n) => { if (one.text) one.span.tabIndex = n === at ? 0 : -1; });
    const { span } = this.words[at];
    span.classList.add("chosen");
    span.setAttribute("aria-pressed", "true");
    span.focus({ preventScroll: true });
    const frame = tell(this.words, this.frames, at);
    span.style.scrollMarginBottom = `${document.getElementById("story").offsetHeight + GAP}px`; // the box lies above the page's foot
    span.scrollIntoView({ block: "nearest", behavior: "instant" });
    if (frame) this.lanes.mark(frame.number);
  }

  count(done) {
    const put = (name, text) => { document.querySelector(`[data-count="${name}"]`).textContent = text; };
    const tokens = this.words.length, forwards = this.frames.filter((one) => one.target && one.added && one.number > 0);
    const added = forwards.reduce((sum, one) => sum + one.added, 0);
    const seconds = this.frames.length > 1 ? end(this.frames.at(-1)) - end(this.frames[0]) : 0;
    const speed = done?.tokens_per_second ?? (seconds > 0 ? (tokens - 1) / seconds : null);
    put("speed", speed ? speed.toFixed(1) : "–");
    put("per_forward", forwards.length ? (added / forwards.length).toFixed(2) : "–");
    put("drafted", tokens ? `${Math.round((100 * this.words.filter((one) => one.origin !== "target").length) / tokens)} %` : "–");
    put("hits", String(this.words.filter((one) => one.origin === "branch").length));
  }

  finish(done) {
    if (done.error) { this.fail(done.error); return; }
    const why = { stop: "it ended by itself", length: "it was cut at the limit" }[done.finish_reason] || done.finish_reason;
    this.note(`${done.tokens} tokens by ${done.method}; ${why}; first one after ${Math.round(done.ttft_seconds * 1000)} ms${this.modelled ? "; all times are modelled, not measured" : ""}`);
    const rate = (one) => Math.round(one).toLocaleString("en");
    const arms = Object.entries(done.arms || {}).filter(([, arm]) => arm.expected && arm.seen);
    if (arms.length) this.note(`tokens a second: ${arms.map(([name, arm]) => `${name}: ${rate(arm.expected)} expected, ${rate(arm.seen)} seen`).join("; ")}`);
    this.box.dataset.done = done.finish_reason;
  }

  fail(words) {
    this.note(words, "sum bad");
    this.box.dataset.done = "error";
    this.follower.step();
  }

  note(words, kind = "sum") {
    this.box.append(Object.assign(document.createElement("span"), { className: kind, textContent: words }));
  }
}

function end(frame) { return Math.max(...[frame.draft, frame.target].filter(Boolean).map((one) => one[1])); }
