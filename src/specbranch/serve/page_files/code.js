// Code in an answer: which parts of a text are a fenced block, a fence, or inline code. Owns the little of Markdown that
// this takes. It only finds places; the text itself goes to the page as text, never as markup.

const FENCE = /^ {0,3}(`{3,}|~{3,})[^`\n]*$/;

// The parts, in order: {from, to, kind: "fence" | "block" | "inline", block: its number, or -1}. A block that is not
// closed yet reaches to the end.
export function codeIn(text) {
  const parts = [];
  let at = 0, open = "", block = -1;
  for (const line of text.split(/(?<=\n)/)) {
    const bare = line.replace(/\s+$/, ""), fence = FENCE.exec(bare)?.[1], to = at + line.length;
    const closes = open && fence && fence[0] === open[0] && fence.length >= open.length && bare.trim() === fence;
    if (closes || (!open && fence)) {
      if (!open) block++;
      parts.push({ from: at, to, kind: "fence", block });
      open = closes ? "" : fence;
    } else if (open) {
      parts.push({ from: at, to, kind: "block", block });
    } else {
      parts.push(...inlineIn(line, at));
    }
    at = to;
  }
  return parts;
}

// Inline code of a line: from a run of backticks to the next run that is as long. Linear in the line's length.
function inlineIn(line, at) {
  const runs = [...line.matchAll(/`+/g)].map((one) => ({ from: one.index, to: one.index + one[0].length }));
  const later = new Map(); // by length: the numbers of the runs, the last first
  for (let n = runs.length - 1; n >= 0; n--) {
    const long = runs[n].to - runs[n].from;
    if (!later.has(long)) later.set(long, []);
    later.get(long).push(n);
  }
  const parts = [];
  for (let n = 0; n < runs.length; n++) {
    const same = later.get(runs[n].to - runs[n].from);
    while (same.length && same.at(-1) <= n) same.pop();
    if (!same.length) continue;
    parts.push({ from: at + runs[n].from, to: at + runs[same.at(-1)].to, kind: "inline", block: -1 });
    n = same.at(-1);
  }
  return parts;
}

// The part in which each token starts, token by token; null where it is in none.
export function codeOf(texts) {
  const parts = codeIn(texts.join(""));
  let at = 0, next = 0;
  return texts.map((text) => {
    const ink = at + (text.length - text.trimStart().length) * (text.trim() ? 1 : 0); // a space before code is none of it
    at += text.length;
    while (next < parts.length && parts[next].to <= ink) next++;
    return next < parts.length && parts[next].from <= ink && text ? parts[next] : null;
  });
}
