// The race: the server decodes one prompt by four methods, one after the other; then all run side by side on the page, by
// the times that were measured, or charged by a profile.

import { ask, clocks, NAMES, onReady, Refused } from "/page/live.js";
import { differences } from "/page/stage.js";

const LONGEST = 8; // seconds that the slowest takes on the page

export function race() {
  const form = document.getElementById("race-form"), clock = document.getElementById("race-clock");
  const go = document.getElementById("race-go"), note = document.getElementById("race-note");
  const result = document.getElementById("race-result"), list = document.getElementById("tracks");
  let tracks = new Map(), running = null, shown = 0;

  onReady((about) => {
    clock.replaceChildren(...clocks(about));
    tracks = lay(list, about.racers);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) { running.abort(); return; }
    running = new AbortController();
    go.textContent = "Stop";
    const turn = ++shown;
    result.classList.remove("there");
    note.textContent = "The server runs one method after the other …";
    try {
      const prompt = document.getElementById("race-prompt").value.trim() || "Hello";
      tracks = lay(list, [...tracks.keys()].length ? [...tracks.keys()] : Object.keys(NAMES));
      for await (const told of ask("/v1/live/race", { prompt, clock: clock.value }, running.signal)) tracks.get(told.lane)?.take(told);
      note.textContent = label(clock);
      if (turn === shown) await run([...tracks.values()], result, () => turn === shown);
      list.dataset.done = "yes";
    } catch (error) {
      note.textContent = error.name === "AbortError" ? "Stopped." : error instanceof Refused ? error.message : "The server went away.";
    }
    running = null;
    go.textContent = "Race";
  });
}

function label(clock) {
  return clock.value === "wall"
    ? "By this machine's clock, one method after the other, from each one's first token on; shown side by side. Other requests to this server slow a lane down. Where draft and target share a processor they take turns, and drafting has little to win."
    : `Modelled, not measured: decisions of the real models, time charged by the profile “${clock.value}” (${clock.selectedOptions[0].text.replace("modelled: ", "")}), from each one's first token on.`;
}

function lay(list, names) {
  const made = new Map(names.map((name) => [name, new Track(name)]));
  list.replaceChildren(...[...made.values()].map((one) => one.box));
  delete list.dataset.done;
  return made;
}

class Track {
  constructor(name) {
    this.name = name;
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
    for (const [text] of told.pieces || []) this.words.push(text);
    for (const [at, added] of told.steps || []) for (let n = 0; n < added; n++) this.times.push(at);
    this.gain.textContent = this.words.length ? `${this.words.length} tokens …` : "starts …";
  }

  get text() { return this.words.join(""); }
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
async function run(tracks, result, still) {
  const able = tracks.filter((one) => !one.error && one.times.length > 1);
  if (!able.length) return;
  const whole = Math.max(...able.map((one) => one.seconds)), plain = able.find((one) => one.name === "autoregressive")?.seconds;
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
  const best = able.reduce((a, b) => (b.seconds < a.seconds ? b : a));
  able.forEach((one) => one.box.classList.toggle("winner", one === best));
  const unlike = able.reduce((sum, one) => sum + differences(able[0].text, one.text), 0);
  const strong = (text, kind = "") => Object.assign(document.createElement("strong"), { textContent: text, className: kind });
  const won = best.name === "autoregressive" ? ["Plain decoding was the fastest here, "] : [strong(`${((plain || best.seconds) / best.seconds).toFixed(1)} ×`), ` by ${NAMES[best.name] || best.name}, `];
  result.replaceChildren(...won, strong(String(unlike), "zero"), ` character${unlike === 1 ? "" : "s"} different among ${able.length} texts`);
  result.classList.add("there");
}
