// The story of a word: who proposed it, with what confidence, when it was judged, and what lost against it.

import { kept, picture } from "/page/round.js";
import { GIVEN, PARENT, SAID, TEXT, word } from "/page/tree.js";

const MOST = 4; // rivals that are named
const GUIDED = {
  forced: "Forced: the grammar left no other token here.",
  masked: "Masked: the target found another token likelier, which the grammar forbids here.",
};

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
  if (GUIDED[frame.guided[nth]]) box.append(line(GUIDED[frame.guided[nth]]));
  const last = at - nth > 0 ? words[at - nth - 1].text : "";
  if (frame.nodes.length) box.append(picture(frame, word(last || " "), box.clientWidth - 40, node, new Set(rivals)));
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
  const guesses = `${frame.checked} guess${frame.checked === 1 ? "" : "es"}`;
  const checked = frame.checked ? ` The target checked ${guesses} in that forward: it kept ${kept(frame)} and rolled back ${frame.rolled_back}.` : "";
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
