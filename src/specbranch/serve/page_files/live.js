// The way to the server: questions by fetch, answers as server-sent events, a key where one is wanted. Owns the key,
// which is kept in memory alone.

let key = "";
const listeners = [];

export function onReady(listener) { listeners.push(listener); }

export class Refused extends Error {}

function headers() {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// What methods are called on this page, and the clocks to choose from.
export const NAMES = { autoregressive: "plain decoding", speculative: "serial speculation", pearl: "PEARL", specbranch: "SpecBranch" };
export function clocks(about) {
  return [new Option("this machine's clock", "wall"), ...Object.entries(about.clocks).map(([name, is]) => new Option(`modelled: ${is}`, name))];
}

// Ask who is there; if a key is wanted, ask for it.
export async function connect() {
  const status = document.getElementById("server"), form = document.getElementById("key-form");
  form.addEventListener("submit", (event) => { event.preventDefault(); key = document.getElementById("key").value.trim(); greet(); });
  async function greet() {
    wantKey(form, false);
    try {
      const answer = await fetch("/v1/live", { headers: headers() });
      if (unknown(answer)) { status.textContent = key ? "That key is not known here." : "A key is wanted."; wantKey(form, true); return; }
      if (!answer.ok) throw new Refused(await reason(answer));
      const about = await answer.json();
      status.textContent = `${about.model} · ${about.method}`;
      form.hidden = true;
      listeners.forEach((listener) => listener(about));
    } catch (error) {
      status.textContent = error instanceof Refused ? error.message : "The server does not answer.";
      document.getElementById("key-said").textContent = status.textContent; // the status is far above the field
    }
  }
  await greet();
}

// Ask where the live part begins; null: the server does not say.
export async function begin() {
  try {
    const answer = await fetch("/v1/live/start", { headers: headers() });
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

function unknown(answer) { return answer.status === 401 || answer.status === 403; }

// Say beside the field that a key is wanted, and that the one which was given is not the right one; or say nothing yet.
function wantKey(form, wanted) {
  const field = document.getElementById("key"), wrong = wanted && key !== "";
  if (wanted) form.hidden = false;
  field.setAttribute("aria-invalid", String(wrong));
  const said = document.getElementById("key-said");
  said.textContent = wrong ? "That key is not known here." : "";
  if (wrong) said.scrollIntoView({ block: "nearest" });
}

// Send a question; yields events until the answer is whole. Aborting `signal` takes the request along.
export async function* ask(path, body, signal) {
  const answer = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (unknown(answer)) wantKey(document.getElementById("key-form"), true);
  if (!answer.ok) throw new Refused(await reason(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error && !told.lane) throw new Refused(told.error);
      yield told;
    }
  }
}

async function reason(answer) {
  try {
    const told = await answer.json();
    const said = told.error?.message ?? told.detail ?? told.message;
    return typeof said === "string" ? said : `The server refused this (${answer.status}).`;
  } catch {
    return `The server refused this (${answer.status}).`;
  }
}
