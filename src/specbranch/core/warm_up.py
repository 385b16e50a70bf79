"""Warm-up: the sizes of forwards that a model gets ready for before the first answer, and what it reports of that.

Owns the values that cross from the engine to a model, and back. Does not own which sizes a method needs
(`exec/forward_sizes.py`), or what getting ready means (`models/gpu/warm_up.py`). Invariant: a warm-up changes no
answer, only when kernels are compiled and CUDA graphs captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ForwardSizes:
    """How large a model's forwards can be, for one method and batch size."""

    method: str
    sessions: int  # in a batch, at most
    alone: int  # rows of a lone session in a forward, at most
    together: int  # rows of all sessions in a forward, at most
    candidates: bool = False  # a draft's forwards, which return several tokens for each row
    trees: bool = False  # the model extends trees by itself
    hidden: bool = False  # forwards return hidden states, for H-RAD


@dataclass(frozen=True, slots=True)
class StepTime:
    """A kind of step that was captured, and the seconds of one run without context."""

    kind: str
    rows: int  # those of prompts included
    seconds: float


@runtime_checkable
class WarmsUp(Protocol):
    """A Runner that compiles kernels or captures CUDA graphs for each size of forward."""

    late_captures: int  # captures and compilations in the middle of an answer

    def start_compiling(self, sizes: ForwardSizes, draft: object | None = None) -> None:
        """Start to compile what `warm_up` needs, while the caller goes on.

        `draft`: the model whose trees this one verifies, if there is one.
        """
        ...

    def stop_compiling(self) -> None:
        """Compile no more of what was started; after `warm_up` there is nothing to stop."""
        ...

    def warm_up(self, sizes: ForwardSizes) -> None:
        """Get ready for forwards of these sizes."""
        ...

    def warm_up_receiver(self, draft: object) -> None:
        """Get ready to verify trees where a draft on the same device has extended them."""
        ...

    def step_times(self) -> list[StepTime]:
        """Return the times of all kinds of steps that a warm-up has captured, the smallest first."""
        ...

    def save_kinds(self) -> None:
        """Save which kinds of steps were run, so that the next process captures them first."""
        ...


def warming(runners: Iterable[object]) -> list[WarmsUp]:
    """Return those of some runners that can be warmed up."""
    return [runner for runner in runners if isinstance(runner, WarmsUp)]


def late_captures(runners: Iterable[object]) -> int:
    """Return how often models captured or compiled something in the middle of an answer."""
    return sum(runner.late_captures for runner in warming(runners))


def count_late_from_now(runners: Iterable[object]) -> None:
    """Forget what models captured or compiled so far: only what comes after the load is late."""
    for runner in warming(runners):
        runner.late_captures = 0


def save_kinds(runners: Iterable[object]) -> None:
    """Save which kinds of steps models have run, so that the next process captures them first."""
    for runner in warming(runners):
        runner.save_kinds()


@contextmanager
def not_late(runners: Iterable[object]) -> Iterator[None]:
    """Within this context captures and compilations do not count as late."""
    before = [(runner, runner.late_captures) for runner in warming(runners)]
    try:
        yield
    finally:
        for runner, count in before:
            runner.late_captures = count


@contextmanager
def ended_compiling(runners: Iterable[object]) -> Iterator[None]:
    """No model compiles any longer than this context, even if it ends with an error."""
    try:
        yield
    finally:
        for runner in warming(runners):
            runner.stop_compiling()
