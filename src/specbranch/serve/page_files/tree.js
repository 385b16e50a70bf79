// A tree of drafted tokens on paper: which nodes are drawn, and where. Owns the layout; draws nothing by itself.
// A node is [text, token, parent, said in percent or null where it was looked up, frame, sent], as traces/frames.py
// writes it.

export const TEXT = 0, TOKEN = 1, PARENT = 2, SAID = 3, GIVEN = 4, SENT = 5;
const LOOKED_UP = 50; // percent that a token is taken to promise of which no draft said anything

// What tells a node from others, from frame to frame: its tokens from the committed text on.
export function lines(nodes) {
  const found = [];
  for (const node of nodes) {
    found.push((node[PARENT] < 0 ? "" : found[node[PARENT]] + " ") + node[TOKEN]);
  }
  return found;
}

export function reaches(nodes) {
  const found = [];
  for (const node of nodes) {
    found.push(((node[SAID] ?? LOOKED_UP) / 100) * (node[PARENT] < 0 ? 1 : found[node[PARENT]]));
  }
  return found;
}

// What a token looks like where it stands alone: spaces at its ends are not seen, others are named.
export function word(text) {
  const shown = text.trim();
  return shown || (text.includes("\n") ? "↵" : text ? "␣" : "⟨end⟩");
}

// Places for a tree's nodes: a Map from node to {x, y, wide, depth}. What is in `sure` goes on the middle lane.
// `wide(text)` measures; a node gets no place where there is none left; those `wanted` are placed before others.
export function layout(nodes, sure, room, wide, wanted = new Set()) {
  const reach = reaches(nodes);
  const below = nodes.map(() => []), tops = [];
  nodes.forEach((node, at) => (node[PARENT] < 0 ? tops : below[node[PARENT]]).push(at));
  const depth = nodes.reduce((all, node) => (all.push(node[PARENT] < 0 ? 0 : all[node[PARENT]] + 1), all), []);
  const first = (ones) => ones.reduce((best, at) => (best < 0 || rank(at) > rank(best) ? at : best), -1);
  const rank = (at) => (sure.has(at) ? 2 : 0) + reach[at];
  const line = (at) => { const all = [at]; for (let n; (n = first(below[all.at(-1)])) >= 0;) all.push(n); return all; };

  const order = [], lanes = new Map(), taken = new Map();
  const free = (lane, from, to) => (taken.get(lane) || []).every(([a, b]) => to < a - 1 || from > b + 1);
  const put = (ones, lane) => {
    taken.set(lane, [...(taken.get(lane) || []), [depth[ones[0]], depth[ones.at(-1)]]]);
    for (const at of ones) { lanes.set(at, lane); order.push(at); }
  };
  const main = first(tops);
  if (main < 0) return new Map();
  put(line(main), 0);
  // the others, the likeliest first, each on the lane nearest to where it parts; alternately above and below
  const rest = nodes.map((_, at) => at).filter((at) => !lanes.has(at)).sort((a, b) => wanted.has(b) - wanted.has(a) || reach[b] - reach[a]);
  let most = room.most - order.length, side = 1;
  for (const at of rest) {
    if (most <= 0) break;
    const from = nodes[at][PARENT] < 0 ? 0 : lanes.get(nodes[at][PARENT]);
    if (lanes.has(at) || from === undefined) continue;
    const ones = line(at).filter((one) => !lanes.has(one)).slice(0, room.long || 3);
    const lane = near(from, side, room.lanes).find((one) => free(one, depth[at], depth[ones.at(-1)]));
    if (lane === undefined) continue;
    put(ones, lane);
    most -= ones.length;
    side = -side;
  }
  return placed(nodes, order, lanes, depth, room, wide);
}

function near(lane, side, most) {
  const found = [];
  for (let by = 1; by <= 2 * most; by++) for (const s of [side, -side]) {
    if (Math.abs(lane + s * by) <= most) found.push(lane + s * by);
  }
  return found;
}

function placed(nodes, order, lanes, depth, room, wide) {
  const widths = [];
  for (const at of order) {
    const w = room.dots ? 8 : wide(word(nodes[at][TEXT]));
    widths[depth[at]] = Math.max(widths[depth[at]] || 0, w);
  }
  const starts = [];
  let x = room.left;
  const gap = room.dots ? Math.max((room.width - room.left) / (widths.length + 1) - 8, 10) : room.gap;
  for (let d = 0; d < widths.length; d++) { starts.push(x); x += widths[d] + gap; }
  const found = new Map();
  for (const at of order) {
    const w = room.dots ? 8 : wide(word(nodes[at][TEXT]));
    if (starts[depth[at]] + w <= room.width) {
      found.set(at, { x: starts[depth[at]], y: room.middle + lanes.get(at) * room.lane, wide: w, depth: depth[at] });
    }
  }
  return found;
}

// A curve from one place to another, leaving and arriving level.
export function curve(x0, y0, x1, y1) {
  const bend = Math.max((x1 - x0) * 0.55, 8);
  return `M${x0.toFixed(1)} ${y0.toFixed(1)}C${(x0 + bend).toFixed(1)} ${y0.toFixed(1)} ${(x1 - bend).toFixed(1)} ${y1.toFixed(1)} ${x1.toFixed(1)} ${y1.toFixed(1)}`;
}

const SVG = "http://www.w3.org/2000/svg";
export function shape(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

const ruler = document.createElement("canvas").getContext("2d");
export function measure(size) {
  const family = getComputedStyle(document.documentElement).getPropertyValue("--serif");
  const known = new Map();
  return (text) => {
    if (!known.has(text)) { ruler.font = `${size}px ${family}`; known.set(text, ruler.measureText(text).width + 2); }
    return known.get(text);
  };
}
