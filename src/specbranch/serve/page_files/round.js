// One round: what became of its tokens, the sentence and the labels that say it, and its picture. Owns the words "kept",
// "rolled back" and "target adds"; a token is rolled back if the target checked it and did not keep it.

import { PARENT, SENT, TEXT, curve, layout, measure, shape, word } from "/page/tree.js";

const LANE = 22, LABELS = 24; // pixels: between two lanes, for the row of labels
const MORE = 34; // pixels for how many kept tokens there is no place for

// What became of a node: kept, gone (rolled back), own (the target's own token, which a branch had foreseen), or "".
export function fate(frame, node) {
  if (frame.path.slice(0, frame.added).includes(node)) return "kept";
  if (frame.hit === node) return "own";
  return frame.rolled_back && frame.nodes[node][SENT] ? "gone" : "";
}

// How many checked tokens came into the answer, which may end among them.
export function kept(frame) { return Math.min(frame.path.length, frame.added); }

// A device that makes several rounds by itself reports what they added, not what they checked.
function unseen(frame) { return !frame.checked && frame.added > 1; }

function ends(frame) { return frame.added <= frame.path.length; }

// What came of all rounds so far.
export function totals(frames) {
  const sum = (of) => frames.reduce((all, one) => all + of(one), 0);
  return { checked: sum((one) => one.checked), kept: sum(kept), rolled: sum((one) => one.rolled_back) };
}

export function rolledBack({ checked, rolled }) {
  return checked ? `${rolled} of ${checked} checked (${Math.round((100 * rolled) / checked)} %)` : "0";
}

export function labels(frame) {
  if (frame.token === null) return [["the draft guesses, the target waits", ""]];
  if (unseen(frame)) return [[`added: ${frame.added}`, ""]];
  const own = ends(frame) ? [["the answer ends", ""]] : [[`target adds: ${word(frame.text)}`, "own"]];
  return frame.checked ? [[`kept: ${kept(frame)}`, "kept"], [`rolled back: ${frame.rolled_back}`, "gone"], ...own] : own;
}

// A round that is over, as a sentence.
export function says(frame) {
  if (frame.token === null) return "the draft guessed ahead while the target waited";
  const own = `“${word(frame.text)}”`;
  if (unseen(frame)) return `the target added ${frame.added} tokens; what it checked was not recorded`;
  if (!frame.checked) return ends(frame) ? "the answer ended" : `the target said ${own} by itself`;
  const guesses = `${frame.checked} guess${frame.checked === 1 ? "" : "es"}`;
  return `the target checked ${guesses}: kept ${kept(frame)}, rolled back ${frame.rolled_back}, ${ends(frame) ? "and the answer ended" : `added ${own}`}`;
}

// Its share of a forward that served several requests; "" if it was alone, or if nothing is known.
export function share({ batch }) {
  return batch && batch.requests > 1 ? `In this forward: 1 of ${batch.requests} requests, ${batch.own_rows} of ${batch.rows} rows.` : "";
}

// A row of labels, as one line of text.
export function labelled(text, parts) {
  const now = parts.map(([said, kind]) => `${kind}/${said}`).join("|");
  if (text.dataset.said === now) return;
  text.dataset.said = now;
  text.replaceChildren(...parts.map(([said, kind], nth) => shape("tspan", { class: kind, ...(nth ? { dx: 18 } : {}) }, said)));
}

// The tree of a round behind `root`, with its labels. `node` is underlined, its `rivals` are placed before others.
export function picture(frame, root, width, node = null, rivals = new Set()) {
  const wide = measure(14), left = wide(root) + 26, sure = new Set([...frame.path, ...(frame.hit === null ? [] : [frame.hit])]);
  const first = new Set([...rivals, ...frame.nodes.keys()].filter((at) => rivals.has(at) || frame.nodes[at][SENT]));
  const places = layout(frame.nodes, sure, { left, width: width - MORE, middle: 0, lane: LANE, gap: 24, lanes: 4, most: 32, long: 4 }, wide, first);
  const ys = [0, ...[...places.values()].map((one) => one.y)], top = Math.min(...ys) - 14 - LABELS, high = Math.max(...ys) - top + 14;
  const made = shape("svg", { class: "twigs", viewBox: `0 ${top} ${width} ${high}`, height: high, role: "img", "aria-label": `Round ${frame.number}: ${says(frame)}` });
  const row = shape("text", { x: 0, y: top + 10, class: "say" });
  labelled(row, labels(frame));
  made.append(row, shape("text", { x: 0, y: 0, class: "root" }, root));
  for (const [at, place] of places) {
    const parent = frame.nodes[at][PARENT], from = parent < 0 ? { x: -3, y: 0, wide: wide(root) } : places.get(parent);
    const kind = fate(frame, at);
    if (from) made.append(shape("path", { d: curve(from.x + from.wide + 3, from.y, place.x - 5, place.y), class: kind }));
    made.append(shape("text", { x: place.x, y: place.y, class: kind, ...(at === node ? { "text-decoration": "underline" } : {}) }, word(frame.nodes[at][TEXT])));
  }
  const seen = frame.path.slice(0, frame.added).filter((at) => places.has(at)), more = kept(frame) - seen.length, last = places.get(seen.at(-1));
  if (more > 0 && last) made.append(shape("text", { x: last.x + last.wide + 6, y: last.y, class: "kept" }, `… +${more}`));
  if (!places.size && frame.token !== null) made.append(shape("path", { d: curve(wide(root) + 3, 0, left - 5, 0), class: "own" }), shape("text", { x: left, y: 0, class: "own" }, word(frame.text)));
  return made;
}
