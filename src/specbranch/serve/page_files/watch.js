// The first screen: the recording plays by itself, and obeys its buttons, a slider and the reader's wish for less motion.
// It stands still for a moment at each verdict.

import { Stage, differences } from "/page/stage.js";

const HOLD = 0.9; // seconds at a verdict

export async function watch() {
  const told = await (await fetch("/page/recording.json")).json();
  const stage = new Stage(told, document.getElementById("stage"));
  const play = document.getElementById("play"), again = document.getElementById("again");
  const step = document.getElementById("step"), stepped = document.getElementById("stepped");
  const moment = document.getElementById("moment"), sooner = document.getElementById("sooner");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let playing = false, last = 0, held = 0;

  label(told, stage);
  sooner.replaceChildren(...result(told));

  function show(t) {
    stage.draw(t);
    report();
  }
  function report() {
    moment.value = Math.round((stage.now / stage.end) * 1000);
    moment.setAttribute("aria-valuetext", `${Math.round(stage.now * 1000)} ms`);
    sooner.classList.toggle("there", calm.matches || (stage.now >= told.ours.seconds && stage.judged < 0));
  }
  function set(on) {
    if (on && stage.now >= stage.end) show(0);
    playing = on;
    held = 0;
    play.textContent = on ? "Pause" : "Play";
    stepped.textContent = "";
    if (on) { last = performance.now(); requestAnimationFrame(tick); }
  }
  function tick(time) {
    if (!playing) return;
    const passed = Math.min(Math.max(time - last, 0), 100) / 1000; // a page that was out of sight goes on where it was
    last = time;
    held -= passed;
    if (held <= 0) go(stage.now + passed / stage.slow);
    if (stage.now >= stage.end) set(false); else requestAnimationFrame(tick);
  }
  function go(t) {
    const verdict = stage.verdictIn(stage.now, t);
    if (verdict < 0) { show(t); return; }
    held = HOLD;
    stage.judge(verdict);
    report();
  }
  play.addEventListener("click", () => set(!playing));
  step.addEventListener("click", () => { set(false); stage.step(); report(); stepped.textContent = stage.state.textContent || "the end"; });
  again.addEventListener("click", () => { show(0); set(true); });
  moment.addEventListener("input", () => { set(false); show((moment.value / 1000) * stage.end); });
  new ResizeObserver(() => stage.resize()).observe(document.getElementById("stage"));

  if (calm.matches) { stage.judge(telling(stage)); report(); set(false); } else { show(0); set(true); }
  document.documentElement.dataset.watch = "ready";
}

// The round that tells most: the first one in which the target checks while the draft branches on.
function telling(stage) { return Math.max(stage.frames.findIndex((one) => one.draft && one.target && one.from > 0), 0); }

function result(told) {
  const strong = (text, kind) => Object.assign(document.createElement("strong"), { textContent: text, className: kind || "" });
  const texts = [told.plain, told.ours].map((one) => one.pieces.map(([text]) => text).join(""));
  const count = differences(...texts);
  const times = told.plain.seconds / told.ours.seconds;
  return [strong(`${times.toFixed(1)} ×`), " sooner, ", strong(String(count), "zero"), ` character${count === 1 ? "" : "s"} different`];
}

function label(told, stage) {
  document.getElementById("asked").textContent = told.question;
  document.getElementById("badge").textContent = told.modelled ? "recorded, time modelled" : "recorded";
  const clock = told.modelled
    ? `Time is modelled, not measured (${told.clock_is})`
    : `Time was measured (${told.clock_is})`;
  document.getElementById("recorded").textContent =
    `Recorded on ${told.recorded}, not live: ${told.target} and its default draft, one chosen sentence; every token, branch and ` +
    `verdict is real. ${clock}, and shown ${Math.round(stage.slow)} × slower than that, with a stop at each verdict. Averages are in the project's benchmarks.`;
}
