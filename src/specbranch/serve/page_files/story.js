// The story of a word: who proposed it, with what confidence, when it was judged, and what lost against it.

import { GIVEN, PARENT, SAID, SENT, TEXT, curve, layout, measure, shape, word } from "/page/tree.js";

const MOST = 4; // rivals that are named

// Tell about the word at a place; returns the frame it came in.
export function tell(words, frames, at) {
  const found = frameOf(frames, at);
  const box = document.getElementById("story");
  if (!found) { box.replaceChildren(line("Nothing was recorded of this word.")); return null; }
  const { frame, nth } = found, { origin, text } = words[at];
  const node = nth < frame.path.length ? frame.path[nth] : origin === "branch" ? frame.hit : null;
  const parent = nth === 0 ? -1 : frame.path[nth - 1];
  const rivals = frame.nodes.map((one, n) => n)
    .filter((n) => frame.nodes[n][PARENT] === parent && n !== node)
    .sort((a, b) => frame.nodes[b][SAID] - frame.nodes[a][SAID]);
  const title = document.createElement("h3");
  title.append(quoted(text), ` ${headline(origin)}`);
  box.classList.add("told");
  box.replaceChildren(title, line(...proposal(frame, node, origin)), line(...lost(frame, rivals)));
  const last = at - nth > 0 ? words[at - nth - 1].text : "";
  if (frame.nodes.length) box.append(twigs(frame, word(last || " "), node, new Set(rivals), box.clientWidth - 40));
  return frame;
}

// Say nothing of any word.
export function hush() {
  const box = document.getElementById("story");
  box.classList.remove("told");
  box.replaceChildren(Object.assign(line("Select a word of the answer: who proposed it, and what lost."), { className: "note" }));
}

function frameOf(frames, at) {
  let place = 0;
  for (const frame of frames) {
    if (at < place + frame.added) return { frame, nth: at - place };
    place += frame.added;
  }
  return null;
}

function headline(origin) {
  return { target: "is the target's own word.", draft: "was drafted, and the target confirmed it.", branch: "is the target's own word, and a branch had foreseen it." }[origin];
}

function proposal(frame, node, origin) {
  const sent = frame.nodes.filter((one) => one[SENT]).length;
  const checked = sent ? ` The target judged ${sent} drafted token${sent === 1 ? "" : "s"} in that forward and took ${frame.path.length}.` : "";
  if (node === null && origin === "branch") {
    return [`It had been looked up in the text so far, and needed no check: the target said it in round ${frame.number}.${checked}`];
  }
  if (node === null || node === undefined) {
    return [frame.number === 0 ? "It is the first word, said when the prompt was read." : `Nobody had proposed it: the target said it in round ${frame.number}.${checked}`];
  }
  const one = frame.nodes[node];
  const who = one[SAID] >= 0 && one[SAID] !== null ? `The draft gave it ${percent(one[SAID])}` : "It was looked up in the text so far, where the same words stood before it,";
  const when = one[GIVEN] < frame.number ? `in round ${one[GIVEN]}; it was settled in round ${frame.number}` : `while the target was at work in round ${frame.number}`;
  return [`${who} ${when}.${checked}`];
}

function lost(frame, rivals) {
  if (!rivals.length) return ["Nothing else stood in its place."];
  const named = rivals.slice(0, MOST).flatMap((n, nth) => {
    const one = frame.nodes[n];
    return [nth ? ", " : "", quoted(one[TEXT]), one[SAID] === null ? " (looked up)" : ` ${percent(one[SAID])}`];
  });
  const more = rivals.length > MOST ? `, and ${rivals.length - MOST} more` : "";
  return ["Lost against it: ", ...named, `${more}.`];
}

function percent(said) { return said < 1 ? "below 1 %" : `${said} %`; }

function quoted(text) {
  const made = document.createElement("q");
  made.textContent = word(text);
  return made;
}

function line(...parts) {
  const made = document.createElement("p");
  made.append(...parts);
  return made;
}

// The tree of the round, with the word's way through it.
function twigs(frame, root, node, rivals, width) {
  const wide = measure(14), lane = 22, taken = new Set([...frame.path, ...(frame.hit === null ? [] : [frame.hit])]);
  const left = wide(root) + 26;
  const places = layout(frame.nodes, taken, { left, width, middle: 0, lane, gap: 24, lanes: 4, most: 32, long: 4 }, wide, rivals);
  const ys = [0, ...[...places.values()].map((one) => one.y)];
  const top = Math.min(...ys) - 14, high = Math.max(...ys) - top + 14;
  const made = shape("svg", { class: "twigs", viewBox: `0 ${top} ${width} ${high}`, height: high, role: "img", "aria-label": `Round ${frame.number}: ${frame.nodes.length} drafted tokens shown, ${taken.size} came into the answer` });
  made.append(shape("text", { x: 0, y: 0, class: "root" }, root));
  for (const [n, place] of places) {
    const parent = frame.nodes[n][PARENT], from = parent < 0 ? { x: -3, y: 0, wide: wide(root) } : places.get(parent);
    const kind = taken.has(n) ? "kept" : "";
    if (from) made.append(shape("path", { d: curve(from.x + from.wide + 3, from.y, place.x - 5, place.y), class: kind }));
    made.append(shape("text", { x: place.x, y: place.y, class: kind || (frame.nodes[n][SENT] ? "sent" : ""), ...(n === node ? { "text-decoration": "underline" } : {}) }, word(frame.nodes[n][TEXT])));
  }
  return made;
}
