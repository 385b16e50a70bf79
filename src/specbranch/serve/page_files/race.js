// The race: the server decodes one prompt by four methods, several turns each; then each one's median turn runs on the
// page, side by side, by the times that were measured, or charged by a profile.

import { ask, clocks, NAMES, onReady, Refused } from "/page/live.js";
import { differences } from "/page/stage.js";

const LONGEST = 8; // seconds that the slowest takes on the page
const PLAIN = "autoregressive", OURS = "specbranch";

export function race() {
  const form = document.getElementById("race-form"), clock = document.getElementById("race-clock");
  const go = document.getElementById("race-go"), note = document.getElementById("race-note");
  const kind = document.getElementById("race-kind"), prompt = document.getElementById("race-prompt");
  const list = document.getElementById("tracks"), rough = document.getElementById("race-rough");
  let tracks = new Map(), running = null, shown = 0, examples = [];

  onReady((about) => {
    clock.replaceChildren(...clocks(about));
    examples = about.examples;
    kind.replaceChildren(...examples.map((one) => new Option(one.title, one.name)), new Option("a prompt of your own", ""));
    prompt.value ||= examples[0].prompt;
    tracks = lay(list, about.racers);
  });
  kind.addEventListener("change", () => {
    prompt.value = examples.find((one) => one.name === kind.value)?.prompt ?? "";
    if (!kind.value) prompt.focus();
  });
  prompt.addEventListener("input", () => { kind.value = examples.find((one) => one.prompt === prompt.value)?.name ?? ""; });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) { running.abort(); return; }
    running = new AbortController();
    go.textContent = "Stop";
    const turn = ++shown, why = examples.find((one) => one.name === kind.value)?.why ?? "";
    clear();
    note.textContent = "The methods take turns on the server …";
    try {
      tracks = lay(list, [...tracks.keys()].length ? [...tracks.keys()] : Object.keys(NAMES));
      for await (const told of ask("/v1/live/race", { prompt: prompt.value.trim() || "Hello", clock: clock.value }, running.signal)) {
        if (told.lane) tracks.get(told.lane)?.take(told);
        else rough.textContent = told.rough;
      }
      tracks.forEach((one) => one.settle());
      note.textContent = label(clock, Math.max(...[...tracks.values()].map((one) => one.turns.length)));
      if (turn === shown) await run([...tracks.values()], why, () => turn === shown);
      list.dataset.done = "yes";
    } catch (error) {
      note.textContent = error.name === "AbortError" ? "Stopped." : error instanceof Refused ? error.message : "The server went away.";
    }
    running = null;
    go.textContent = "Race";
  });
}

function clear() {
  for (const id of ["race-why", "race-rough"]) document.getElementById(id).textContent = "";
  document.getElementById("race-result").classList.remove("there");
}

function label(clock, turns) {
  const often = turns > 1 ? `the median of ${turns} turns after a warm-up` : "one turn after a warm-up";
  return clock.value === "wall"
    ? `By this machine's clock, ${often}, from each one's first token on; shown side by side. Other requests to this server slow a lane down.`
    : `Modelled, not measured: decisions of the real models, time charged by the profile “${clock.value}” (${clock.selectedOptions[0].text.replace("modelled: ", "")}), from each one's first token on.`;
}

function lay(list, names) {
  const made = new Map(names.map((name) => [name, new Track(name)]));
  list.replaceChildren(...[...made.values()].map((one) => one.box));
  delete list.dataset.done;
  return made;
}

// A method's turns; `settle` chooses the one in the middle.
class Track {
  constructor(name) {
    this.name = name;
    this.turns = []; // {words, times, forward}
    this.words = [];
    this.times = [];
    this.error = "";
    this.box = Object.assign(document.createElement("li"), { className: "track" });
    const put = (tag, kind) => { const one = Object.assign(document.createElement(tag), { className: kind }); this.box.append(one); return one; };
    put("h3", "").textContent = capital(NAMES[name] || name);
    this.bar = document.createElement("i");
    put("div", "bar").append(this.bar);
    this.gain = put("p", "gain");
    this.said = put("p", "said").appendChild(document.createElement("span"));
  }

  take(told) {
    if (told.error || told.done?.error) { this.error = told.error || told.done.error; this.gain.textContent = "–"; this.said.textContent = this.error; return; }
    if (!told.steps) { // a turn starts
      this.gain.textContent = told.turn ? `turn ${told.turn} …` : "warms up …";
      if (told.turn) this.turns.push({ words: [], times: [], forward: null });
      return;
    }
    const turn = this.turns.at(-1);
    for (const [text] of told.pieces) turn.words.push(text);
    for (const [at, added] of told.steps) for (let n = 0; n < added; n++) turn.times.push(at);
    turn.forward = told.done?.tokens_per_forward ?? turn.forward;
  }

  settle() {
    const whole = this.turns.filter((one) => one.times.length).sort((a, b) => a.times.at(-1) - b.times.at(-1));
    Object.assign(this, whole[whole.length >> 1]);
  }

  get seconds() { return this.times.at(-1) || 0; }

  draw(t, whole, plain) {
    const there = this.times.filter((at) => at <= t).length, over = t >= this.seconds;
    this.bar.style.transform = `scaleX(${Math.min(t, this.seconds) / whole})`;
    this.said.textContent = this.words.slice(0, there).join("");
    const took = seconds(Math.min(t, this.seconds));
    this.gain.textContent = over && plain && this.seconds ? `${took} · ${(plain / this.seconds).toFixed(2)} ×` : took;
  }
}

function capital(text) { return text[0].toUpperCase() + text.slice(1); }

function seconds(s) { return s >= 1 ? `${s.toFixed(2)} s` : `${Math.round(s * 1000)} ms`; }

// All side by side, then the result.
async function run(tracks, why, still) {
  const able = tracks.filter((one) => !one.error && one.times.length > 1);
  if (!able.length) return;
  const whole = Math.max(...able.map((one) => one.seconds)), plain = able.find((one) => one.name === PLAIN)?.seconds;
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) {
    const begun = performance.now(), lasts = Math.min(LONGEST, Math.max(whole, 3));
    await new Promise((done) => requestAnimationFrame(function tick() {
      const u = (performance.now() - begun) / 1000 / lasts;
      if (u >= 1 || !still()) { done(); return; }
      able.forEach((one) => one.draw(u * whole, whole, plain));
      requestAnimationFrame(tick);
    }));
  }
  if (!still()) return;
  able.forEach((one) => one.draw(whole, whole, plain));
  conclude(able, plain, why);
}

function conclude(able, plain, why) {
  const best = able.reduce((a, b) => (b.seconds < a.seconds ? b : a));
  able.forEach((one) => one.box.classList.toggle("winner", one === best));
  const texts = able.flatMap((one) => one.turns.map((turn) => turn.words.join("")));
  const unlike = texts.reduce((sum, one) => sum + differences(texts[0], one), 0);
  const strong = (text, kind = "") => Object.assign(document.createElement("strong"), { textContent: text, className: kind });
  const won = best.name === PLAIN ? ["Plain decoding was the fastest here, "] : [strong(`${((plain || best.seconds) / best.seconds).toFixed(1)} ×`), ` by ${NAMES[best.name] || best.name}, `];
  const result = document.getElementById("race-result"), ours = able.find((one) => one.name === OURS);
  result.replaceChildren(...won, strong(String(unlike), "zero"), ` character${unlike === 1 ? "" : "s"} different among ${texts.length} texts`);
  result.classList.add("there");
  const forward = ours?.forward ? `A forward of the target brought SpecBranch ${ours.forward.toFixed(1)} tokens, plain decoding 1. ` : "";
  document.getElementById("race-why").textContent = `${forward}${why}`;
}
