"""Repeated timings of single model steps: what is timed, how often, and what counts.

Owns the probes. At temperature 0, a target forward includes sampling its tokens, and a draft step includes choosing its
candidates. Invariants: all probes take turns, the first turns are dropped, and medians count without smoothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from specbranch.core.orders import Context, Verify
from specbranch.core.runner import Ask, Feed, Trial
from specbranch.core.slots import ROOT
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import Worker
from specbranch.training.distill.agreement import GREEDY

WARM_UP_RUNS = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    repeats: int = 12  # at most
    least: int = 4  # repeats, however long they take
    seconds: float = 25.0  # after which the probes are repeated no more
    seldom: int = 4  # turns between two prefills
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    widths_far: tuple[int, ...] = (1, 4, 8)
    far: bool = True  # also at a long context, and the reading of a prompt
    host_tokens: int = 24
    check_tokens: int = 24
    check_repeats: int = 2


QUICK = Effort(repeats=8, least=4, seconds=6.0, rows=(1, 2, 4, 8), widths=(1, 2, 4, 8), far=False, host_tokens=12)


@dataclass(frozen=True, slots=True)
class MedianTiming:
    """A median of repeated timings, and half of their interquartile range relative to it."""

    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A step to time repeatedly."""

    name: str
    rows: int
    run: Callable[[], float]
    is_long: bool = False


Figures = dict[tuple[str, int], MedianTiming]  # by a probe's name and rows


@dataclass(slots=True)
class HeldText:
    """A worker with a prefilled text, to be fed from its end repeatedly."""

    worker: Worker
    seq: int
    text: Sequence[int]

    def __enter__(self) -> Self:
        self.worker.runner.open(self.seq, GREEDY)
        self.worker.runner.extend(self.seq, self.text)
        self.worker.runner.flush()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.runner.close(self.seq)

    def forward(self, rows: int) -> float:
        """Time a forward over a chain; for a target, with the choice of its tokens."""
        return self._timed(tuple(range(ROOT, rows - 1)))

    def step(self, width: int) -> float:
        """Time a step with this many lanes, and the choice of their candidates."""
        return self._timed((ROOT,) * width)

    def _timed(self, parents: tuple[int, ...]) -> float:
        self.worker.runner.keep(self.seq, (), 0)
        tokens = tuple(self.text[: len(parents)])
        start = time.perf_counter()
        self._choose(Feed(self.seq, tokens, parents))
        return time.perf_counter() - start

    def _choose(self, feed: Feed) -> None:
        """Feed nodes and choose a token after each, which also waits for the device."""
        runner, nodes = self.worker.runner, range(len(feed.tokens))
        if isinstance(self.worker, Verifier):  # the first one ends the context, the others are judged
            order = Verify(Context(len(self.text) + 1, ()), feed.tokens[1:])
            runner.verify([feed], [Trial(self.seq, order, 0, tuple(nodes[1:]))])()
        else:
            runner.propose([feed], [Ask(self.seq, node) for node in nodes])


def reading_seconds(worker: Worker, prompt: Sequence[int]) -> float:
    """Time the prefill of a prompt, up to its last row."""
    start = time.perf_counter()
    with HeldText(worker, 0, prompt[:-1]) as held:
        held.forward(1)
        return time.perf_counter() - start


def take_turns(probes: Sequence[Probe], effort: Effort, tick: Callable[[str], None]) -> Figures:
    """Run all probes turn by turn, each turn in another order, because earlier probes change the state of the
    caches."""
    taken: dict[tuple[str, int], list[float]] = {(probe.name, probe.rows): [] for probe in probes}
    order, started = random.Random(0), time.perf_counter()
    for turn in range(WARM_UP_RUNS + effort.repeats):
        if turn >= WARM_UP_RUNS + effort.least and time.perf_counter() - started > effort.seconds:
            break
        reads = turn % effort.seldom == WARM_UP_RUNS % effort.seldom or turn == 0
        for probe in order.sample(probes, len(probes)):
            if reads or not probe.is_long:
                seconds = probe.run()
                if turn >= WARM_UP_RUNS:
                    taken[probe.name, probe.rows].append(seconds)
        tick("models")
    return {key: MedianTiming(statistics.median(seconds), spread_of(seconds)) for key, seconds in taken.items()}


def spread_of(seconds: Sequence[float]) -> float:
    """Return half of the interquartile range relative to the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle
