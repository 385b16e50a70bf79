"""Measure one step of each draft against one of the target on a GPU, each captured in a CUDA graph with its greedy choice, batch 1.

The bar for the default draft is a fifth of the target's step. On a CPU (`--device cpu`) steps are timed without a graph: that shows the
script at work, and nothing about a GPU. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from specbranch import LLM
from specbranch.core.slots import ROOT, Slots
from specbranch.models.native import NativeRunner
from specbranch.models.steps import rows_of_nodes
from specbranch.pairs import PAIRS

Step = Callable[[], Any]


def main() -> None:
    """Measure and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--context", type=int, default=512, help="tokens before the step")
    options.add_argument("--times", type=int, default=200, help="steps in a measurement")
    given = options.parse_args()
    if given.device != "cpu":
        torch.cuda.set_device(torch.device(given.device).index or 0)  # whose streams, graphs and name are meant from here on
    rows = [_measured(pair, given) for pair in PAIRS]
    print(f"{'pair':16} {'target ms':>9} {'draft ms':>9} {'target / draft':>14}")
    for row in rows:
        print("{pair:16} {target_ms:9.3f} {draft_ms:9.3f} {ratio:14.2f}".format(**row))
    print(json.dumps({"device": _name(given.device), "context": given.context, "graphs": given.device != "cpu", "rows": rows}))


def _measured(pair: str, given: argparse.Namespace) -> dict[str, Any]:
    with LLM(pair=pair, device=given.device) as llm:
        assert llm.drafter is not None
        runners: tuple[Any, Any] = llm.target_runner, llm.drafter.runner
        steps = [_captured(_step(runner, given.context), given.device) for runner in runners]
        rounds = [[_milliseconds(step, given) for step in steps] for _ in range(5)]  # by turns
    target, draft = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {"pair": pair, "target_ms": target, "draft_ms": draft, "ratio": target / draft, "rounds": rounds}


def _step(runner: NativeRunner, context: int) -> Step:
    """A forward over one token behind so many others, and the choice of the next."""
    cache, slots = runner._new_cache(context + runner.tail), Slots(context + runner.tail, runner.tail)
    slots.extend([0] * context)
    planned = runner._planner.step([rows_of_nodes(cache, slots, slots.grow([1], [ROOT]))], compiled=runner._fused is not None)

    @torch.inference_mode()
    def step() -> Any:
        if runner._fused:
            return runner._fused.logits(planned).argmax(-1)
        return runner.decoder.logits(runner.decoder.forward(planned)).argmax(-1)

    return step


def _captured(step: Step, device: str) -> Step:
    if device == "cpu":
        return step
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # sets up what a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _milliseconds(step: Step, given: argparse.Namespace) -> float:
    step()
    _wait(given.device)
    start = time.perf_counter()
    for _ in range(given.times):
        step()
    _wait(given.device)
    return (time.perf_counter() - start) * 1000 / given.times


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
