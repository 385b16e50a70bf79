// The live chat: words coloured by origin, the rounds they came in, and the story of each.

import { ask, clocks, NAMES, onReady, Refused } from "/page/live.js";
import { Lanes } from "/page/lanes.js";
import { hush, tell } from "/page/story.js";

export function chat() {
  const form = document.getElementById("ask"), question = document.getElementById("question");
  const talk = document.getElementById("talk"), send = document.getElementById("send");
  const lanes = new Lanes(document.getElementById("lanes"), document.getElementById("lanes-scroll"));
  const said = []; // messages so far
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
    if (running) { running.abort(); return; }
    const text = question.value.trim() || question.placeholder;
    question.value = "";
    running = new AbortController();
    send.textContent = "Stop";
    const answer = new Answer(talk, lanes, text, clock.value !== "wall");
    try {
      for await (const told of ask("/v1/live/chat", { messages: [...said, { role: "user", content: text }], method: method.value || null, clock: clock.value }, running.signal)) answer.take(told);
      said.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    } catch (error) {
      answer.fail(error.name === "AbortError" ? "Stopped." : error instanceof Refused ? error.message : "The server went away.");
    }
    running = null;
    send.textContent = "Ask";
  });
}

// One answer: its words, its rounds, which word is selected.
class Answer {
  constructor(talk, lanes, question, modelled) {
    this.lanes = lanes;
    this.modelled = modelled;
    this.words = []; // {text, origin, span}
    this.frames = [];
    this.text = "";
    const asked = Object.assign(document.createElement("p"), { className: "asked-by", textContent: question });
    this.box = Object.assign(document.createElement("div"), { className: "answer" });
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", "Answer; arrow keys go from word to word");
    talk.append(asked, this.box);
    lanes.clear();
    this.forget();
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
    this.words.forEach((one, n) => { if (one.text) one.span.tabIndex = n === at ? 0 : -1; });
    const { span } = this.words[at];
    span.classList.add("chosen");
    span.setAttribute("aria-pressed", "true");
    span.focus({ preventScroll: false });
    const frame = tell(this.words, this.frames, at);
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
    this.box.dataset.done = done.finish_reason;
  }

  fail(words) {
    this.note(words, "sum bad");
    this.box.dataset.done = "error";
  }

  note(words, kind = "sum") {
    this.box.append(Object.assign(document.createElement("span"), { className: kind, textContent: words }));
  }
}

function end(frame) { return Math.max(...[frame.draft, frame.target].filter(Boolean).map((one) => one[1])); }
