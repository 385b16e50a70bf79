"""The host time of a round: what it takes outside both models.

Owns the timer around a model during this measurement. A model that runs in parallel with this thread (the draft in its
own process, the target on a stream) hides host work. So only the time beyond it counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specbranch.config import ExecutorName
from specbranch.core.loop import Executor
from specbranch.core.runner import Verdicts
from specbranch.core.trace import Trace, Who
from specbranch.exec.worker import Worker
from specbranch.lab.measure.loaded_pair import LoadedPair
from specbranch.lab.measure.one_request import greedy_session, start

METHODS_TIMED = ("autoregressive", "speculative", "specbranch")
WORK = ("feed", "extend", "propose", "verify", "grow", "read_ahead")  # what a runner's model does
BY_ITSELF: dict[ExecutorName, Who] = {
    "process": "draft",
    "streams": "target",
}  # the model that runs in parallel with this thread


def measure_host(pair: LoadedPair, executor: Executor, tokens: int, tick: Callable[[str], None]) -> float:
    """Decode on the pair's executor, and return the seconds of a round outside both models."""
    rest: list[float] = []
    for method in METHODS_TIMED:
        rest += _rests(pair, executor, method, tokens)
        tick("host")
    return statistics.median(rest)


def _rests(pair: LoadedPair, executor: Executor, method: str, tokens: int) -> Iterator[float]:
    """Yield the seconds of each round beyond its models."""
    watch, trace, by_itself = ModelTimer(), Trace(), BY_ITSELF.get(pair.executor)
    loop = start(executor, greedy_session(pair.prompts()[0], tokens), method, trace)
    with watch.on(pair.verifier), watch.on(pair.drafter):
        while loop.live:
            watch.seconds, seen, started = 0.0, len(trace.events), time.perf_counter()
            loop.step()
            took = time.perf_counter() - started
            spans = [event.end - event.start for event in trace.events[seen:] if event.who == by_itself]
            if seen:  # the first round prefills
                yield max(took - max([watch.seconds, *spans]), 0.0)


class ModelTimer:
    """Adds up the seconds that this thread spends in models."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def on(self, worker: Worker) -> Iterator[None]:
        """Time a worker's model inside the block."""
        runner: Any = worker.runner
        worker.runner = _TimedRunner(runner, self)
        try:
            yield
        finally:
            worker.runner = runner

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Time a function; for verdicts, also the wait for them."""

        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                found = function(*arguments)
            finally:
                self.seconds += time.perf_counter() - started
            return Verdicts(self.timed(found), found.ready) if isinstance(found, Verdicts) else found

        return call


class _TimedRunner:
    """Forwards all calls and times the model's work."""

    def __init__(self, runner: Any, watch: ModelTimer) -> None:
        self._runner, self._watch = runner, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runner, name)
        return self._watch.timed(found) if name in WORK else found
