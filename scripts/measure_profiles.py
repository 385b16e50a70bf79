"""Measure profiles like the shipped ones on a GPU: Llama shapes with random weights, bfloat16, CUDA graphs, 1k of context.

For each pair: a target forward by its rows, a draft step by its width, then both at once on two streams: what a draft step adds to the
target, and what the target adds to a draft step. Writes one profile a pair into --out and prints a table; last line: JSON. Weights are
random, so the numbers are times and nothing else; memory is all that a shape needs of a real model.
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

from specbranch.models.batch import Rows
from specbranch.models.gpu.layout import pack, views
from specbranch.models.gpu.step import GpuStep

ROWS = (1, 4, 8, 16, 32)
WIDTHS = (1, 4, 8, 16)
BESIDE = 8  # rows that the target verifies while the draft is at work
TIMES = 30

Replay = Callable[[], Any]


PAIRS = {"h200-68m-7b": ("68m", "7b"), "h200-68m-13b": ("68m", "13b"), "h200-1b-8b": ("1b", "8b"), "h200-1.3b-33b": ("1.3b", "33b")}


class Model:
    """A shape at work; `step` returns a captured forward over some rows, with the choice of a token for each."""

    def __init__(self, name: str, context: int) -> None:
        self.shaped = Shaped(name, torch.device("cuda"), context, sequences=len(ROWS) + len(WIDTHS))
        self._step = GpuStep(self.shaped.decoder, self.shaped.memory)

    def step(self, rows: list[Rows]) -> Replay:
        """Capture a forward."""
        packed, bucket = pack(rows, self.shaped.spare)
        step = views(torch.from_numpy(packed).cuda(), bucket)

        def once() -> None:
            step.tokens.copy_(self._step.forward(step)[0].argmax(-1))  # the next step reads what this one chose

        return captured(once)


def captured(work: Replay) -> Replay:
    """Warm up, then capture."""
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    return graph.replay


def alone(replay: Replay) -> float:
    """Seconds of one replay, several in a row, nothing beside."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for number in range(TIMES + 5):
        start.record()
        for _ in range(4):
            replay()
        end.record()
        end.synchronize()
        times += [start.elapsed_time(end) / 4e3] if number >= 5 else []
    return statistics.median(times)


def together(target: Replay, draft: Replay, steps: int, streams: tuple[torch.cuda.Stream, torch.cuda.Stream]) -> tuple[float, float]:
    """Seconds of a target forward and of all draft steps beside it, both from the common start."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    spans = []
    for number in range(TIMES + 5):
        torch.cuda.synchronize()
        for stream, replay, times, (start, end) in zip(streams, (target, draft), (1, steps), (events[:2], events[2:]), strict=True):
            with torch.cuda.stream(stream):
                start.record()
                for _ in range(times):
                    replay()
                end.record()
        torch.cuda.synchronize()
        spans += [(events[0].elapsed_time(events[1]) / 1e3, events[2].elapsed_time(events[3]) / 1e3)] if number >= 5 else []
    return statistics.median(a for a, _ in spans), statistics.median(b for _, b in spans)


def measured(name: str, context: int) -> dict[str, Any]:
    """Measure one pair."""
    draft, target = (Model(shape, context) for shape in PAIRS[name])
    forward = {rows: target.step(target.shaped.rows(rows)) for rows in ROWS}
    step = {width: draft.step(draft.shaped.lanes(width)) for width in WIDTHS}
    target_seconds = {rows: alone(replay) for rows, replay in forward.items()}
    draft_seconds = {rows: alone(replay) for rows, replay in step.items()}
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    fit = max(int(target_seconds[BESIDE] / draft_seconds[1]), 1)
    counts = sorted({max(fit // 4, 1), max(fit // 2, 1), max(3 * fit // 4, 1), fit})
    beside = [(n, width, *together(forward[BESIDE], step[width], n, streams)) for width in (1, 4) for n in counts]
    lone = together(forward[BESIDE], step[1], 0, streams)[0]
    return {"name": name, "target": target_seconds, "draft": draft_seconds, "lone": lone, "beside": beside}


def profile_of(found: dict[str, Any], context: int) -> dict[str, Any]:
    """The profile of one pair: slow-downs by the slope of time over steps, as a middle of all counts and widths."""
    adds = [(seconds - found["lone"]) / n for n, _, seconds, _ in found["beside"]]
    slower = [busy / n - found["draft"][width] for n, width, _, busy in found["beside"]]
    small, large = PAIRS[found["name"]]
    return {
        "pair": f"Llama shapes of {small.upper()} (draft) and {large.upper()} (target)",
        "hardware": "one H200",
        "note": (
            f"Measured by scripts/measure_profiles.py: random weights, bfloat16, torch {torch.__version__} and CUDA graphs, "
            f"{context} tokens of context; both at once on two streams, {BESIDE} rows verified. No time outside the models."
        ),
        "target": sorted(found["target"].items()),
        "draft": sorted(found["draft"].items()),
        "slow_down": max(statistics.median(adds), 0.0),
        "draft_slow_down": max(statistics.median(slower), 0.0),
        "host": 0.0,
    }


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
        for n, width, seconds, busy in found["beside"]:
            target = f"target {found['lone'] * 1e3:.2f} -> {seconds * 1e3:.2f} ms"
            print(f"  {n:3} steps of width {width} beside: {target}, a step {busy / n * 1e3:.3f} ms")
        print(f"  slow_down {profile['slow_down'] * 1e3:.4f} ms, draft_slow_down {profile['draft_slow_down'] * 1e3:.4f} ms", flush=True)
        torch.cuda.empty_cache()
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
