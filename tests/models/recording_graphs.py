"""A GPU's runner on a CPU whose steps count as captured: a graph is the forward itself, and captures are recorded."""

from __future__ import annotations

import torch

from specbranch.models.forward.decoder import Decoder
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.gpu.step import Captured, GpuStep, Graphs, Ran, StepKind


class DirectStep(Captured):
    """A captured step that runs its forward anew."""

    def __init__(self, graphs: Graphs, kind: StepKind, layers: int, count: int) -> None:
        super().__init__(None, Ran(torch.empty(0), None, None))
        self._graphs, self._kind, self._layers, self._count = graphs, kind, layers, count

    def run(self) -> Ran:
        with torch.inference_mode():
            ran = self._graphs._forward(*self._kind)
        return Ran(ran.logits, ran.states if self._layers else None, ran.results if self._count else None)

    def less(self, layers: int, count: int) -> Captured:
        return DirectStep(self._graphs, self._kind, layers, count)


class RecordingGraphs(Graphs):
    """Graphs that run directly; `full_after`: so many captures fit into memory."""

    full_after: int | None = None

    def __init__(self, step: GpuStep, most_pages: int) -> None:
        super().__init__(step, most_pages)
        self.captures = True
        self.captured: list[StepKind] = []

    def _captured(self, kind: StepKind) -> Captured:
        if self.full_after is not None and len(self.captured) >= self.full_after:
            raise torch.OutOfMemoryError("no memory for another graph")
        self.captured.append(kind)
        return DirectStep(self, kind, *kind[1:3])

    def _timed(self, kind: StepKind, captured: Captured) -> float:
        return 0.001 * kind[0].rows


class RecordingRunner(GpuRunner):
    """The runner under test, with such graphs."""

    graphs: RecordingGraphs

    def _make_graphs(self, step: GpuStep, most_pages: int) -> Graphs:
        return RecordingGraphs(step, most_pages)


def recording(decoder: Decoder, context_length: int, *more: object) -> RecordingRunner:
    """Make the runner of a decoder, as `native_runner` does on a GPU."""
    return RecordingRunner(decoder, context_length)
