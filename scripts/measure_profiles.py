"""Measure the shipped H200 profiles on a GPU: Llama shapes with random weights, bfloat16, CUDA graphs, 1k of context.

For each pair: a target forward by its rows, a draft step by its width, then both at once on two streams: what a draft step adds to the
target, and what the target adds to a draft step. Writes one profile a pair into --out and prints a table; last line: JSON. Weights are
random, so the numbers are times and nothing else; memory is all that a shape needs of a real model.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS = (1, 4, 8, 16, 32)
WIDTHS = (1, 4, 8, 16)
BESIDE = 8  # rows that the target verifies while the draft is at work
TIMES = 30

Replay = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int

    @property
    def head(self) -> int:
        """Numbers of one head."""
        return self.hidden // self.heads


SHAPES = {
    "68m": Shape(768, 2, 12, 12, 3072, 32000),
    "1b": Shape(2048, 16, 32, 8, 8192, 128256),
    "1.3b": Shape(2048, 24, 16, 16, 5504, 32256),
    "7b": Shape(4096, 32, 32, 32, 11008, 32000),
    "8b": Shape(4096, 32, 32, 8, 14336, 128256),
    "13b": Shape(5120, 40, 40, 40, 13824, 32000),
    "33b": Shape(7168, 62, 56, 8, 19200, 32256),
}
PAIRS = {"h200-68m-7b": ("68m", "7b"), "h200-68m-13b": ("68m", "13b"), "h200-1b-8b": ("1b", "8b"), "h200-1.3b-33b": ("1.3b", "33b")}


class Model:
    """Weights and cache of a shape; `step(rows)` returns a captured forward over so many rows, with the choice of a token for each."""

    def __init__(self, shape: Shape, context: int) -> None:
        self.shape, self.context = shape, context
        made = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16).mul_(0.02)  # noqa: E731
        keys = shape.key_heads * shape.head
        self.embedding = made(shape.vocabulary, shape.hidden)
        self.top = made(shape.vocabulary, shape.hidden)
        self.layers = [
            (
                made(shape.hidden + 2 * keys, shape.hidden),
                made(shape.hidden, shape.hidden),
                made(2 * shape.inner, shape.hidden),
                made(shape.hidden, shape.inner),
                made(1, shape.key_heads, context + 64, shape.head),
                made(1, shape.key_heads, context + 64, shape.head),
            )
            for _ in range(shape.layers)
        ]

    def step(self, rows: int) -> Replay:
        """Capture a forward over `rows` tokens behind the context."""
        tokens = torch.randint(0, self.shape.vocabulary, (rows,), device="cuda")
        place = torch.arange(self.context, self.context + rows, device="cuda")
        mask = torch.arange(self.context + 64, device="cuda")[None, :] <= place[:, None]

        def once() -> None:
            tokens.copy_(self._forward(tokens, place, mask))  # the next step reads what this one chose

        return captured(once)

    def _forward(self, tokens: Tensor, place: Tensor, mask: Tensor) -> Tensor:
        shape, hidden = self.shape, self.embedding[tokens]
        turn = torch.outer(place.float(), 10000.0 ** (-torch.arange(0, shape.head, 2, device="cuda") / shape.head))
        cos, sin = turn.cos().bfloat16().repeat(1, 2)[:, None], turn.sin().bfloat16().repeat(1, 2)[:, None]
        for weights in self.layers:
            hidden = layer(shape, hidden, place, mask, cos, sin, *weights)
        return chosen(hidden, self.top)


def layer(
    shape: Shape,
    hidden: Tensor,
    place: Tensor,
    mask: Tensor,
    cos: Tensor,
    sin: Tensor,
    qkv: Tensor,
    out: Tensor,
    gate_up: Tensor,
    down: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """One layer over the rows."""
    rows = hidden.shape[0]
    split = (normed(hidden) @ qkv.T).split([shape.hidden, *[shape.key_heads * shape.head] * 2], -1)
    q, k, v = (x.view(rows, -1, shape.head) for x in split)
    keys[0].index_copy_(1, place, turned(k, cos, sin).transpose(0, 1))
    values[0].index_copy_(1, place, v.transpose(0, 1))
    grouped = turned(q, cos, sin).transpose(0, 1)[None]
    seen = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, mask, enable_gqa=shape.heads != shape.key_heads)
    hidden = hidden + seen[0].transpose(0, 1).reshape(rows, -1) @ out.T
    gate, up = (normed(hidden) @ gate_up.T).chunk(2, -1)
    return hidden + (torch.nn.functional.silu(gate) * up) @ down.T


def chosen(hidden: Tensor, top: Tensor) -> Tensor:
    """The likeliest token of each row."""
    return (normed(hidden) @ top.T).argmax(-1)


def normed(hidden: Tensor) -> Tensor:
    """The root mean square norm."""
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by place."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def captured(work: Replay) -> Replay:
    """Compile, then capture."""
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
    draft, target = (Model(SHAPES[shape], context) for shape in PAIRS[name])
    forward = {rows: target.step(rows) for rows in ROWS}
    step = {rows: draft.step(rows) for rows in WIDTHS}
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
