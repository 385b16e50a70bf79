// The live chat: words coloured by origin, the rounds they came in, and the story of each.

import { codeOf } from "/page/code.js";
import { Follower } from "/page/follow.js";
import { Lanes } from "/page/lanes.js";
import { ask, begin, clocks, NAMES, onReady, Refused } from "/page/live.js";
import { totals } from "/page/round.js";
import { Steps } from "/page/steps.js";
import { hush, tell } from "/page/story.js";

const OFTEN = 40; // milliseconds between two pictures of a growing answer
const GAP = 24; // pixels between a word and the box that tells its story

export function chat() {
  const form = document.getElementById("ask"), question = document.getElementById("question");
  const talk = document.getElementById("talk"), send = document.getElementById("send");
  const lanes = new Lanes(document.getElementById("lanes"), document.getElementById("lanes-scroll"));
  const said = []; // messages so far
  const waiting = []; // questions that were entered while an answer was being written
  const follower = new Follower(document.getElementById("talk-end"), document.getElementById("dock"));
  const steps = new Steps();
  let running = null;

  const method = document.getElementById("chat-method"), clock = document.getElementById("chat-clock"), shape = document.getElementById("chat-form");
  onReady((about) => {
    method.replaceChildren(new Option(`the server's own method: ${NAMES[about.method] || about.method}`, ""), ...about.racers.map((name) => new Option(NAMES[name] || name, name)));
    clock.replaceChildren(...clocks(about));
    shape.replaceChildren(new Option("free text", ""), ...Object.entries(about.forms).map(([name, title]) => new Option(title, name)));
    document.getElementById("chat-form-label").hidden = !Object.keys(about.forms).length;
    offer(about, method, clock, (text) => enterAll(text));
  });

  shape.addEventListener("change", () => { document.getElementById("guided-legend").hidden = !shape.value; });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running && event.submitter) { running.abort(); return; } // the button, which says Stop
    const text = question.value.trim();
    if (running && !text) return;
    question.value = "";
    enterAll(text || question.placeholder);
  });

  async function enterAll(text) {
    document.getElementById("start").hidden = true;
    waiting.push(enter(talk, text));
    follower.start();
    if (!running) while (waiting.length) await answer(waiting.shift());
  }

  async function answer(asked) {
    running = new AbortController();
    send.textContent = "Stop";
    const user = { role: "user", content: asked.textContent };
    const made = new Answer(asked, lanes, follower, steps, clock.value !== "wall");
    steps.attach(made);
    try {
      for await (const told of ask("/v1/live/chat", { messages: [...said, user], method: method.value || null, clock: clock.value, form: shape.value || null }, running.signal)) made.take(told);
    } catch (error) {
      made.fail(error.name === "AbortError" ? "Stopped." : error instanceof Refused ? error.message : "The server went away.");
    }
    if (made.text) said.push(user, { role: "assistant", content: made.text }); // a stopped one as far as it came
    running = null;
    send.textContent = "Ask";
  }
}

// Where to begin: a prompt that pays on this server, or else a modelled clock, with the reason. Choices of the reader stay.
async function offer(about, method, clock, enterAll) {
  const box = document.getElementById("start"), why = document.getElementById("start-why"), button = document.getElementById("start-ask");
  const show = (start) => {
    const example = about.examples.find((one) => one.name === start.example);
    why.textContent = start.why;
    document.getElementById("start-prompt").textContent = example.prompt;
    button.onclick = () => { document.getElementById("talk").focus({ preventScroll: true }); enterAll(example.prompt); };
  };
  const before = [clock.value, method.value].join();
  show({ example: about.examples[0].name, why: "The server tries out what pays on it …" });
  box.hidden = document.getElementById("talk").childElementCount > 0;
  const start = await begin();
  if (!start) { show({ example: about.examples[0].name, why: about.examples[0].why }); return; }
  show(start);
  if ([clock.value, method.value].join() !== before || document.getElementById("talk").childElementCount) return;
  clock.value = start.clock;
  method.value = start.method ?? "";
}

// Show a question; it waits until it is asked.
function enter(talk, text) {
  const made = Object.assign(document.createElement("p"), { className: "asked-by waiting", textContent: text });
  talk.append(made);
  return made;
}

// One answer: its rounds as they come, how many are shown, their words, and which word is selected.
class Answer {
  constructor(asked, lanes, follower, steps, modelled) {
    Object.assign(this, { lanes, follower, steps, modelled });
    this.words = []; // {text, origin, span} of the rounds that are shown
    this.rounds = []; // {frame, pieces}; the last one may have no frame
    this.shown = 0;
    this.coming = { frames: [], pieces: [] }; // of a round that has not come whole
    this.done = null; // how it ended
    this.waits = 0; // the timer that will show what has come
    this.text = ""; // of all rounds
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

  get whole() { return this.done !== null; }
  get over() { return this.whole && this.shown === this.rounds.length; }
  get frames() { return this.rounds.slice(0, this.shown).map((one) => one.frame).filter(Boolean); }
  get frame() { return this.rounds.slice(0, this.shown).findLast((one) => one.frame)?.frame; }
  get before() { return this.words[this.words.length - (this.rounds[this.shown - 1]?.pieces.length ?? 0) - 1]?.text ?? ""; }

  take(told) {
    this.text += told.pieces.map(([text]) => text).join("");
    this.coming.frames.push(...told.frames);
    this.coming.pieces.push(...told.pieces);
    if (told.left_out) this.note(`The context is full: ${told.left_out} of the oldest messages ${told.left_out === 1 ? "was" : "were"} left out.`);
    this.gather(Boolean(told.done));
    if (told.done) { this.done = told.done; this.update(); } else if (!this.waits) { this.waits = setTimeout(() => this.update(), OFTEN); }
  }

  // Show what has come since the last time.
  update() {
    clearTimeout(this.waits);
    this.waits = 0;
    if (!this.steps.paused) this.showAll();
    this.steps.say();
    this.follower.step();
  }

  // Make rounds of what has come: a round is whole once its words are there. At the end everything is.
  gather(all) {
    const { frames, pieces } = this.coming;
    while (frames.length && (all || pieces.length >= frames[0].added)) {
      const frame = frames.shift();
      this.rounds.push({ frame, pieces: pieces.splice(0, frame.added) });
    }
    if (all && pieces.length) this.rounds.push({ frame: null, pieces: pieces.splice(0) });
  }

  showAll() { if (!this.over || !this.box.dataset.done) this.show(this.rounds.length); }

  showNext() { this.show(Math.min(this.shown + 1, this.rounds.length)); }

  show(count) {
    const more = this.rounds.slice(this.shown, count);
    this.shown = count;
    for (const { frame, pieces } of more) pieces.forEach(([text, origin], nth) => this.add(text, origin, frame?.guided[nth] ?? "free"));
    this.lanes.add(more.map((one) => one.frame).filter(Boolean));
    this.code();
    this.count(this.over ? this.done : null);
    if (this.over && !this.box.dataset.done) this.finish(this.done);
  }

  // Back to before the first round.
  rewind() {
    this.forget();
    this.words = [];
    this.shown = 0;
    this.box.replaceChildren();
    delete this.box.dataset.done;
    this.lanes.clear();
    this.count(null);
  }

  add(text, origin, guided) {
    const span = Object.assign(document.createElement("span"), { className: `tok ${origin} ${guided}` });
    const [, before, inked, behind] = text.trim() ? /^(\s*)([^]*?)(\s*)$/.exec(text) : ["", "", text, ""]; // spaces beside ink are not underlined
    span.append(before, Object.assign(document.createElement("b"), { textContent: inked }), behind);
    if (text) { // else it is half a character, or an end
      span.setAttribute("role", "button");
      if (!text.trim()) span.setAttribute("aria-label", text.includes("\n") ? "line break" : "space");
      span.tabIndex = this.words.some((one) => one.text) ? -1 : 0; // one stop for the whole answer; arrows go on from there
    }
    this.words.push({ text, origin, span, block: -1 });
    this.box.append(span);
  }

  // Code is monospaced. A later token may show that earlier ones were code: then they move into the block.
  code() {
    const parts = codeOf(this.words.map((one) => one.text));
    let home = this.box, moved = false, block = -1;
    this.words.forEach((one, n) => {
      const part = parts[n], now = part ? part.block : -1;
      one.span.classList.toggle("code", part !== null);
      one.span.classList.toggle("fence", part?.kind === "fence");
      if (now !== block) {
        block = now;
        home = block < 0 ? this.box : this.box.querySelector(`:scope > [data-block="${block}"]`) ?? this.box.appendChild(blockOf(block));
        if (moved && block >= 0) this.box.append(home);
      }
      moved ||= one.span.parentElement !== home;
      if (moved) home.append(one.span);
    });
    this.box.querySelectorAll(".block:empty").forEach((one) => one.remove());
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
    const below = document.getElementById("story").offsetHeight + document.getElementById("dock").offsetHeight;
    span.style.scrollMarginBottom = `${below + GAP}px`; // both lie above the page's foot
    span.scrollIntoView({ block: "nearest", behavior: "instant" });
    if (frame) this.lanes.mark(frame.number);
  }

  count(done) {
    const put = (name, text) => { document.querySelector(`[data-count="${name}"]`).textContent = text; };
    const { frames } = this, tokens = this.words.length, forwards = frames.filter((one) => one.target && one.added && one.number > 0);
    const added = forwards.reduce((sum, one) => sum + one.added, 0);
    const seconds = frames.length > 1 ? end(frames.at(-1)) - end(frames[0]) : 0;
    const speed = done?.tokens_per_second ?? (seconds > 0 ? (tokens - 1) / seconds : null);
    put("speed", speed ? speed.toFixed(1) : "–");
    put("per_forward", forwards.length ? (added / forwards.length).toFixed(2) : "–");
    put("drafted", tokens ? `${Math.round((100 * this.words.filter((one) => one.origin !== "target").length) / tokens)} %` : "–");
    put("hits", String(this.words.filter((one) => one.origin === "branch").length));
    const { checked, kept, rolled } = totals(this.frames);
    put("kept", String(kept));
    put("rolled", String(rolled));
    document.getElementById("rolled-share").textContent = checked ? `rolled back, ${Math.round((100 * rolled) / checked)} % of ${checked} checked` : "rolled back";
  }

  finish(done) {
    if (done.error) { this.note(done.error, "sum bad"); this.box.dataset.done = "error"; return; }
    const why = { stop: "it ended by itself", length: "it was cut at the limit" }[done.finish_reason] || done.finish_reason;
    this.note(`${done.tokens} tokens by ${done.method}; ${why}; first one after ${Math.round(done.ttft_seconds * 1000)} ms${this.modelled ? "; all times are modelled, not measured" : ""}`);
    const rate = (one) => Math.round(one).toLocaleString("en");
    const arms = Object.entries(done.arms || {}).filter(([, arm]) => arm.expected && arm.seen);
    if (arms.length) this.note(`tokens a second: ${arms.map(([name, arm]) => `${name}: ${rate(arm.expected)} expected, ${rate(arm.seen)} seen`).join("; ")}`);
    this.box.dataset.done = done.finish_reason;
  }

  fail(words) {
    this.gather(true);
    this.done = { error: words };
    this.showAll();
    this.update();
  }

  note(words, kind = "sum") {
    this.box.append(Object.assign(document.createElement("span"), { className: kind, textContent: words }));
  }
}

function blockOf(block) {
  const made = Object.assign(document.createElement("span"), { className: "block" });
  made.dataset.block = block;
  return made;
}

function end(frame) { return Math.max(...[frame.draft, frame.target].filter(Boolean).map((one) => one[1])); }
