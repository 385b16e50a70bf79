"""The warm-up of one runner: its kinds of steps are compiled, captured and timed, and saved for the next process.

Owns for which sizes of forwards the runner is ready, and the times of its steps. Does not own the list of kinds
(`warm_up.py`), or compiling and capturing (`step.py`). Invariant: a warm-up changes no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from specbranch.core.warm_up import ForwardSizes, StepTime
from specbranch.models.gpu.kinds_file import KindsFile
from specbranch.models.gpu.layout import MOST_STEP_ROWS, chunk_step_rows
from specbranch.models.gpu.own_stream import DeviceStream
from specbranch.models.gpu.step import Graphs, StepKind
from specbranch.models.gpu.warm_up import ForwardTable, kinds_in_order, limits_of, step_times


class WarmUpHost(Protocol):
    """The runner, as far as its warm-up needs it."""

    @property
    def probe_layers(self) -> int:
        """How many layers' hidden states a verification may return."""
        ...

    def warm_up_kernels(self) -> None:
        """Run kernels that run outside graphs once."""
        ...

    def launch_receiver(self, draft: object | None) -> None:
        """Launch the kernels that bring a draft's tree to a step."""
        ...

    def run_outside_graphs(self) -> None:
        """Answer some requests that need code outside graphs."""
        ...


class StepWarmUp:
    """Gets a runner ready."""

    def __init__(self, graphs: Graphs, stream: DeviceStream, about: Mapping[str, Any], host: WarmUpHost) -> None:
        """`about`: what decides, beside the sizes, which steps a model has and how they are compiled."""
        self._graphs, self._stream, self._about, self._host = graphs, stream, about, host
        self._kinds: dict[ForwardSizes, KindsFile] = {}  # of the sizes that it is warmed up for
        self._compiling: dict[ForwardSizes, tuple[KindsFile, list[StepKind]]] = {}  # being compiled for
        self._times = ForwardTable(graphs)

    def warm_up(self, sizes: ForwardSizes) -> None:
        """Capture and time the kinds of steps that forwards of these sizes can have; on a CPU there are none."""
        if not self._graphs.captures or sizes in self._kinds:
            return
        self.start_compiling(sizes)
        file, kinds = self._compiling.pop(sizes)
        with self._not_late(), self._graphs.warming_up():
            with self._stream.in_turn():
                self._graphs.capture(kinds)
                self._host.warm_up_kernels()
            self._host.run_outside_graphs()
        self._kinds[sizes], self._times = file, ForwardTable(self._graphs)

    def start_compiling(self, sizes: ForwardSizes, draft: object | None = None) -> None:
        """Start to compile the kernels that `warm_up` needs, in threads, so that two models' compile together.

        `draft`: the model whose trees this one verifies, for the kernels that bring them to a step.
        """
        if not self._graphs.captures or sizes in self._kinds or sizes in self._compiling:
            return
        host, layers = self._host, self._host.probe_layers if sizes.hidden else 0
        file = KindsFile({**self._about, "method": sizes.method, "sessions": sizes.sessions})
        kinds = list(kinds_in_order(sizes, limits_of(self._graphs), layers, file.read()))
        with self._not_late(), self._stream.in_turn():
            self._graphs.compile(kinds, (host.warm_up_kernels, partial(host.launch_receiver, draft)))
        self._compiling[sizes] = file, kinds

    @contextmanager
    def _not_late(self) -> Iterator[None]:
        """Within this context captures and compilations do not count as late."""
        before = self._graphs.late
        try:
            yield
        finally:
            self._graphs.late = before

    def stop_compiling(self) -> None:
        """Compile no more: a process that ends would wait for its threads."""
        self._graphs.stop_compiling()
        self._compiling.clear()

    def step_times(self) -> list[StepTime]:
        """Return the times of all kinds of steps that a warm-up has captured, the smallest first."""
        return step_times(self._graphs)

    def forward_seconds(self, rows: int, prompt_tokens: int = 0) -> float | None:
        """Return the seconds of a forward of this many decode rows and prompt tokens without context; None: it was
        not timed."""
        if prompt_tokens and rows <= MOST_STEP_ROWS:  # the decode rows beside prompt tokens are padded first
            rows = chunk_step_rows(rows)
        return self._times.seconds(rows + prompt_tokens)

    def save_kinds(self) -> None:
        """Save which kinds of steps were run, so that the next process captures them first."""
        for file in self._kinds.values():
            file.add(self._graphs.met)
