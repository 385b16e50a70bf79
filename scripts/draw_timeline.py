"""Draw docs/timeline.svg: what draft and target do under serial speculative decoding, PEARL and SpecBranch, on the virtual clock.

Real decisions of toy models, time charged by a cost profile; run it again after a change to the methods.
"""

from __future__ import annotations

from pathlib import Path

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.core.trace import Event, Trace
from specbranch.exec.verifier import Verifier
from specbranch.sim.clock import MeteredDrafter, VirtualClock
from specbranch.sim.profile import CostProfile
from specbranch.sim.toys import ToyLaw, ToyRunner, ToySampler

PROFILE = CostProfile(target=((1, 8.0), (16, 8.0)), draft=((1, 1.0), (4, 1.0), (12, 1.8)))
TITLES = {"autoregressive": "Plain decoding", "speculative": "Serial speculative decoding", "pearl": "PEARL", "specbranch": "SpecBranch"}
SHADES = {"target": "#3b6ea5", "kept": "#2e8b57", "lost": "#c9665a"}
LEFT, TOP, ROW, SCALE, TOKENS = 210, 34, 74, 4.4, 24
STYLE = "font-family:sans-serif;font-size:13px"
SHEET = '<rect width="100%" height="100%" fill="white"/>'
SMALL = 'fill="#777" font-size="11"'


def record(method: str) -> tuple[Trace, int]:
    """Decode one request; returns its trace and the number of tokens."""
    draft = MeteredDrafter(ToyRunner(ToyLaw(drift=0.12)), ToySampler())
    loop = Loop(VirtualClock(Verifier(ToyRunner(ToyLaw()), ToySampler()), draft, PROFILE), Trace())
    prompt = [4, 0, 1]
    session = Session(0, prompt, Request(SamplingParams(max_tokens=TOKENS), 0, len(prompt)), 500)
    loop.join(session, METHODS[method].start(session, SpeculativeConfig(method=method, num_speculative_tokens=6)))
    while loop.live:
        loop.step()
    assert loop.trace
    return loop.trace, len(session.output)


def main() -> None:
    """Write the picture."""
    bodies = [lane(row, method) for row, method in enumerate(TITLES)]
    width = int(max(end for _, end in bodies) * SCALE) + LEFT + 30
    height = TOP + ROW * len(TITLES) + 34
    legend = _legend(height - 14)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{STYLE}">{SHEET}'
    title = f'<text x="12" y="20" font-weight="bold">The same {TOKENS} tokens, four ways (time runs to the right)</text>'
    Path("docs/timeline.svg").write_text("\n".join([head, title, *(body for body, _ in bodies), legend, "</svg>\n"]))


def lane(row: int, method: str) -> tuple[str, float]:
    """Draw one method: the target above, the draft below; returns the drawing and when it ends."""
    trace, _ = record(method)
    y = TOP + row * ROW
    end = max(event.end for event in trace.events)
    lines = [f'<text x="12" y="{y + 22}">{TITLES[method]}</text>', f'<text x="12" y="{y + 42}" {SMALL}>{end:.0f} time units</text>']
    lines += [_bar(event, y) for event in trace.events if event.end > event.start]
    return "\n".join(lines), end


def _bar(event: Event, y: int) -> str:
    x, wide = LEFT + event.start * SCALE, (event.end - event.start) * SCALE - 1
    if event.who == "target":
        text = "" if event.accepted is None else f"+{event.accepted + 1}"
        label = f'<text x="{x + wide / 2:.1f}" y="{y + 22}" fill="white" font-size="11" text-anchor="middle">{text}</text>'
        return f'<rect x="{x:.1f}" y="{y + 8}" width="{wide:.1f}" height="20" fill="{SHADES["target"]}"/>{label}'
    lanes = event.branches or (1,)
    high = 22 / len(lanes)
    kept = event.kept if event.kept is not None else (0 if event.pending == 0 and event.accepted is None and len(lanes) == 1 else None)
    return "".join(
        f'<rect x="{x:.1f}" y="{y + 31 + i * high:.1f}" width="{wide:.1f}" height="{max(high - 1, 1):.1f}" '
        f'fill="{SHADES["kept" if i == kept else "lost"]}"/>'
        for i in range(len(lanes))
    )


def _legend(y: int) -> str:
    entries = (("target", "target: one forward, +n tokens"), ("kept", "draft: branch kept"), ("lost", "draft: branch lost"))
    return "".join(
        f'<rect x="{LEFT + i * 230}" y="{y - 10}" width="12" height="12" fill="{SHADES[shade]}"/>'
        f'<text x="{LEFT + i * 230 + 18}" y="{y}" font-size="12">{text}</text>'
        for i, (shade, text) in enumerate(entries)
    )


if __name__ == "__main__":
    main()
