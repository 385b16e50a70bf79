"""Measure profiles like the shipped ones on a GPU: Llama shapes, random weights, bfloat16, CUDA graphs, 1k of context.

For each pair the script times a target forward by its rows and a draft step by its width. Then it runs both at once on
two streams, to see how much each slows the other. It does not measure what
the engine adds to the kernels: the constants below come from rounds of `bench run --preset gpu-core`. It writes one
profile a pair into --out and prints a table; last line: JSON. Weights are random, so the numbers are times and nothing
else.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shapes import Shaped

from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.kernel_step import step_of
from specbranch.models.gpu.layout import MOST_STEP_ROWS, pack
from specbranch.models.gpu.step import Graphs

ROWS = (1, 4, 16, 32, 64, 128, 256, 512)  # the sizes that steps are padded to
WIDTHS = (1, 4, 16, 32)
TOGETHER = 64  # rows of one sequence at most; more are several sequences
BESIDE = 16  # rows that the target verifies while the draft is at work
LONG = 8000  # tokens of context with which a step is timed once more
TIMES, WARM_UP = 30, 5

Replay = Callable[[], Any]
Event = torch.cuda.Event
PAIRS = {
    "h200-68m-7b": ("68m", "7b"),
    "h200-68m-13b": ("68m", "13b"),
    "h200-1b-8b": ("1b", "8b"),
    "h200-1.3b-33b": ("1.3b", "33b"),
}


HOST, ASKING, HEARING = 0.06e-3, 0.60e-3, 0.22e-3  # seconds of the host: see `CostProfile`
# By draft: seconds before its first step, and of a step beyond its kernels.
GROWING = {"68m": (0.52e-3, 0.045e-3), "1b": (0.40e-3, 0.026e-3), "1.3b": (0.40e-3, 0.026e-3)}


class Model:
    """A shape at work; `step` returns a captured forward over some rows, with the choice of a token for each."""

    def __init__(self, name: str, context: int, sequences: int = 1) -> None:
        self.shaped = Shaped(name, torch.device("cuda"), context, sequences)
        step = step_of(self.shaped.decoder, self.shaped.memory)
        self._graphs = Graphs(step, self.shaped.pool.pages, chooser=Chooser(step.picks, self.shaped.arch.vocabulary))

    def forward(self, count: int) -> Replay:
        """Return a target's forward: a chain of rows, or chains of 16 of several sequences."""
        rows = self.shaped.rows(count) if count <= TOGETHER else self.shaped.rows(16, sequences=count // 16)
        return self._step(rows)

    def draft(self, width: int) -> Replay:
        """Return a draft's step: rows side by side, with the best entries of each."""
        return self._step(self.shaped.lanes(width), entries=8)

    def _step(self, rows: list[Rows], entries: int = 1) -> Replay:
        packed, bucket = pack(rows, self.shaped.spare, least=self._graphs.step.least)
        for part in rows:
            part.table.shrink(0)  # others may write there: these are times and nothing else
        held = torch.from_numpy(packed).cuda()

        def replay() -> None:
            self._graphs.input[: len(held)].copy_(held)
            self._graphs.run_brought(bucket, count=entries)

        replay()
        torch.cuda.synchronize()
        return replay


def timed(replay: Replay, times: int, stream: torch.cuda.Stream | None = None) -> tuple[Event, Event]:
    """Launch some replays on a stream; returns the events before and after them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start.record()
        for _ in range(times):
            replay()
        end.record()
    return start, end


def seconds(events: tuple[Event, Event]) -> float:
    """Seconds between two events; waits for the later one."""
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3


def alone(replay: Replay) -> float:
    """Seconds of one replay, several in a row, nothing beside."""
    times = [seconds(timed(replay, 4)) / 4 for _ in range(WARM_UP + TIMES)]
    return statistics.median(times[WARM_UP:])


def together(
    target: Replay, draft: Replay, steps: int, streams: tuple[torch.cuda.Stream, torch.cuda.Stream]
) -> tuple[float, float]:
    """Seconds of a target forward and of all draft steps beside it, both from the common start."""
    spans = []
    for _ in range(WARM_UP + TIMES):
        torch.cuda.synchronize()
        both = timed(target, 1, streams[0]), timed(draft, steps, streams[1])
        spans.append((seconds(both[0]), seconds(both[1])))
    forward, drafting = zip(*spans[WARM_UP:], strict=True)
    return statistics.median(forward), statistics.median(drafting)


def measured(name: str, context: int) -> dict[str, Any]:
    """Measure one pair."""
    long = [Model(shape, LONG) for shape in PAIRS[name]]
    far = {"draft": {1: alone(long[0].draft(1))}, "target": {rows: alone(long[1].forward(rows)) for rows in (1, 16)}}
    del long
    torch.cuda.empty_cache()
    draft, target = (Model(shape, context, MOST_STEP_ROWS // 16) for shape in PAIRS[name])
    forward, step = {rows: target.forward(rows) for rows in ROWS}, {width: draft.draft(width) for width in WIDTHS}
    target_seconds = {rows: alone(replay) for rows, replay in forward.items()}
    draft_seconds = {rows: alone(replay) for rows, replay in step.items()}
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    fit = max(int(target_seconds[BESIDE] / draft_seconds[1]), 1)
    counts = sorted({max(fit // 4, 1), max(fit // 2, 1), max(3 * fit // 4, 1), fit})
    beside = [(n, width, *together(forward[BESIDE], step[width], n, streams)) for width in (1, 16) for n in counts]
    lone = together(forward[BESIDE], step[1], 0, streams)[0]
    return {"name": name, "target": target_seconds, "draft": draft_seconds, "lone": lone, "beside": beside, "far": far}


def profile_of(found: dict[str, Any], context: int) -> dict[str, Any]:
    """The profile of one pair: slow-downs by the slope of time over steps, as a middle of all counts and widths."""
    adds = [(forward - found["lone"]) / n for n, _, forward, _ in found["beside"]]
    slower = [busy / n - found["draft"][width] for n, width, _, busy in found["beside"]]
    small, large = PAIRS[found["name"]]
    setup, beyond = GROWING[small]
    return {
        "pair": f"Llama shapes of {small.upper()} (draft) and {large.upper()} (target)",
        "hardware": "one H200",
        "note": (
            "Measured by scripts/measure_profiles.py: random weights, bfloat16, kernels under CUDA graphs, "
            f"torch {torch.__version__}, {context} tokens of context; both at once on two streams, "
            f"{BESIDE} rows verified. From rounds of the engine on the same device: what a draft takes before its "
            f"first step, and {beyond * 1e3:.3f} ms a step beyond its kernels; the host's part of a round, by "
            "how it is begun."
        ),
        "context": context,
        "target": padded(found["target"]),
        "draft": padded({width: seconds + beyond for width, seconds in found["draft"].items()}),
        "target_per_context": per_context(found, "target", context),
        "draft_per_context": per_context(found, "draft", context),
        "slow_down": max(statistics.median(adds), 0.0),
        "draft_slow_down": max(statistics.median(slower), 0.0),
        "draft_setup": setup,
        "host": HOST,
        "asking": ASKING,
        "hearing": HEARING,
    }


def padded(times: dict[int, float]) -> list[tuple[int, float]]:
    """Times by rows: what lies between two sizes costs what the larger one does."""
    sizes = sorted(times)
    lows = [1, *(size + 1 for size in sizes[:-1])]
    return [(rows, times[size]) for low, size in zip(lows, sizes, strict=True) for rows in dict.fromkeys((low, size))]


def per_context(found: dict[str, Any], which: str, context: int) -> list[tuple[int, float]]:
    """What each further token of context adds, by rows."""
    far = found["far"][which].items()
    return [(rows, max(taken - found[which][rows], 0.0) / (LONG - context)) for rows, taken in far]


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", default=",".join(PAIRS))
    options.add_argument("--context", type=int, default=1024)
    options.add_argument("--out", type=Path, default=Path("measured-profiles"))
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in given.pairs.split(","):
        found = measured(name, given.context)
        profile = profile_of(found, given.context)
        (given.out / f"{name}.json").write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")
        lines.append({**found, "profile": profile})
        print(name, "target", {n: f"{s * 1e3:.2f}" for n, s in found["target"].items()}, flush=True)
        print(name, "draft", {n: f"{s * 1e3:.3f}" for n, s in found["draft"].items()}, flush=True)
        for n, width, forward, busy in found["beside"]:
            target = f"target {found['lone'] * 1e3:.2f} -> {forward * 1e3:.2f} ms"
            print(f"  {n:3} steps of width {width} beside: {target}, a step {busy / n * 1e3:.3f} ms")
        added = (f"{name} {profile[name] * 1e3:.4f} ms" for name in ("slow_down", "draft_slow_down"))
        print(f"  {', '.join(added)}", flush=True)
        torch.cuda.empty_cache()
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
