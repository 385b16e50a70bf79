"""The timeline of one answer at the bench, as a picture: what both models did, when, on the clock that results are
measured by.

Owns the files `timeline-PAIR-METHOD.svg` and, for ui.perfetto.dev, `.json`. Invariant: drawn last, as a trace that is
kept costs time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specbranch.core.trace import Trace
from specbranch.files import write_whole
from specbranch.lab.bench.lab import Lab
from specbranch.lab.bench.methods import Setting
from specbranch.lab.recheck.repeat import repeat
from specbranch.lab.replay.record import Record
from specbranch.lab.traces.rounds import Times, read_rounds, times
from specbranch.lab.traces.timeline_svg import draw_svg, subtitle

TOKENS = 48  # so much of an answer is drawn
STEM = "timeline-"


def draw_timeline(lab: Lab, setting: Setting, record: Record, folder: Path) -> Times:
    """Answer a record's prompt once more, draw it, and return where its time went."""
    task = record.task
    params = replace(task.params, max_tokens=min(task.params.max_tokens, TOKENS))
    trace = lab.llm.core.loop.trace = Trace()
    output = repeat(lab.llm.using(speculative=setting.config), task.prompt, params, task.seed)
    rounds = read_rounds(trace.events, len(output.token_ids), [piece.origin for piece in output.pieces])
    spent = times(rounds)
    draft = spent.together + spent.draft_alone
    inside = f"; {spent.together / draft:.0%} of the draft's work inside the target's" if draft else ""
    head = f"{lab.pair}, {setting.method}"
    stem = folder / f"{STEM}{lab.pair}-{setting.method.replace(':', '-')}"
    write_whole(
        stem.with_name(f"{stem.name}.svg"),
        draw_svg(rounds, head, subtitle(rounds, len(output.token_ids), False) + inside),
    )
    trace.write_chrome(stem.with_name(f"{stem.name}.json"))
    return spent


def pictures(folder: Path) -> dict[str, str]:
    """Return the pictures of a folder by their names, those of earlier commands included."""
    return {
        file.stem.removeprefix(STEM): file.read_text(encoding="utf-8") for file in sorted(folder.glob(f"{STEM}*.svg"))
    }
