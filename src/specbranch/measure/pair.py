"""Measuring what a pair costs on this hardware: a `CostProfile` of the real models, and how well it predicts.

Owns what is timed and how the figures are condensed: all probes take turns, the first turns are dropped, medians count.
A target forward is timed with the choice of its tokens, a draft step with that of its candidates, at temperature 0;
what is left of a round is the host's. Invariant: nothing is smoothed; the spread of the probes is told beside the
figures.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.costs import LearnedCosts
from specbranch.core.experience import Experience
from specbranch.core.loop import Executor, Loop
from specbranch.core.methods import find_method
from specbranch.core.orders import Context, Verify
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed, Trial
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.core.trace import Trace
from specbranch.distill.agreement import GREEDY
from specbranch.errors import BadParameter
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import Worker
from specbranch.measure.side_by_side import Companion, Slowing, measure_slowing
from specbranch.measure.workers import Workers, stored_in
from specbranch.progress import StepsDone, silent
from specbranch.provenance import Provenance
from specbranch.sim.profile import CostProfile, Points

MOST_ROWS = 32
SHORT, LONG, PROMPT = 64, 1024, 256  # tokens
WARM_UP = 2
HOST_METHODS = ("autoregressive", "speculative", "specbranch")
CHECKED = ("autoregressive", "speculative", "adaptive", "specbranch")
NEAR, FAR = "", " far"  # of a probe: after the short context, after the long one


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    repeats: int = 12  # at most
    least: int = 4  # repeats, however long they take
    seconds: float = 25.0  # after which the probes are repeated no more
    seldom: int = 4  # a prompt is read only every so many turns
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
    """A median of repeated timings, and half the range of their middle half as a share of it."""

    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds of the same requests on this machine's clock and on the profile's, the reading of prompts left out."""

    method: str
    measured: float
    modelled: float
    spread: float | None  # of the measured ones between repeats, as a share; nothing: measured once

    @property
    def off(self) -> float:
        """How far the model lies above what was measured, as a share of it."""
        return self.modelled / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Something to be timed again and again."""

    name: str
    rows: int
    run: Callable[[], float]
    is_long: bool = False


@dataclass(slots=True)
class HeldText:
    """A worker that reads a text when it is entered, to be fed from its end again and again."""

    worker: Worker
    seq: int
    text: Sequence[int]

    def __enter__(self) -> Self:
        self.worker.runner.open(self.seq, GREEDY)
        self.worker.runner.extend(self.seq, self.text)
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.runner.close(self.seq)

    def forward(self, rows: int) -> float:
        """Time a forward over a chain, and the choice of its tokens if this is a target."""
        return self._timed(tuple(range(ROOT, rows - 1)))

    def step(self, width: int) -> float:
        """Time a step of so many lanes, and the choice of their candidates."""
        return self._timed((ROOT,) * width)

    def _timed(self, parents: tuple[int, ...]) -> float:
        self.worker.runner.keep(self.seq, (), 0)
        tokens = tuple(self.text[: len(parents)])
        start = time.perf_counter()
        self._choose(Feed(self.seq, tokens, parents))
        return time.perf_counter() - start

    def _choose(self, feed: Feed) -> None:
        """Read nodes and choose a token after each, which also waits for a device that is still at work."""
        runner, nodes = self.worker.runner, range(len(feed.tokens))
        if isinstance(self.worker, Verifier):  # the first one ends the context, the others are judged
            order = Verify(Context(len(self.text) + 1, ()), feed.tokens[1:])
            runner.verify([feed], [Trial(self.seq, order, 0, tuple(nodes[1:]))])()
        else:
            runner.propose([feed], [Ask(self.seq, node) for node in nodes])


def measure(workers: Workers, effort: Effort | None = None, progress: StepsDone = silent) -> CostProfile:
    """Measure a pair."""
    effort = effort or Effort()
    short, long, prompt = _lengths(workers)
    steps = _Steps(progress, WARM_UP + effort.repeats, workers.executor, effort)
    contexts = {NEAR: short, FAR: long} if effort.far else {NEAR: short}
    with ExitStack() as open_ones:
        held = {
            (name, far): open_ones.enter_context(HeldText(worker, seq, _text(workers, length)))
            for name, worker in (("target", workers.verifier), ("draft", workers.drafter))
            for seq, (far, length) in enumerate(contexts.items(), 1)
        }
        figures = _take_turns(list(_probes(held, _text(workers, prompt), effort)), effort, steps)
        slowing = _slowing(workers, held["target", NEAR], effort, steps)
    host = measure_host(workers, effort.host_tokens, steps)
    return _profile(workers, figures, slowing, host, (short, long, prompt), effort)


def measure_host(workers: Workers, tokens: int, tick: Callable[[str], None] | None = None) -> float:
    """Decode, and return the seconds a round takes outside both models."""
    rest: list[float] = []
    executor = workers.real()
    try:
        for method in HOST_METHODS:
            rest += _rests(workers, executor, method, tokens)
            if tick:
                tick("host")
    finally:
        executor.close()
    return statistics.median(rest)


def check(
    profile: CostProfile, workers: Workers, effort: Effort | None = None, progress: StepsDone = silent
) -> list[Compared]:
    """Decode the same requests on this machine's clock and on the profile's; returns both times, by method."""
    effort = effort or Effort()
    prompts, total = workers.prompts(), len(CHECKED) * (effort.check_repeats + 1)
    real, modelled = workers.real(), workers.modelled(profile)
    times: dict[str, list[float]] = {method: [] for method in CHECKED}
    done, begun = 0, time.perf_counter()
    try:
        for turn in range(effort.check_repeats + 1):  # the modelled one first, which warms up
            if turn > 1 and time.perf_counter() - begun > effort.seconds:
                break
            for method in CHECKED:
                times[method].append(_all(workers, real if turn else modelled, method, prompts, effort.check_tokens))
                progress("Checking against the clock", done := done + 1, total)
    finally:
        real.close()
    return [_compared(method, measured, charged) for method, (charged, *measured) in times.items()]


def decode(
    executor: Executor, prompt: Sequence[int], config: SpeculativeConfig, tokens: int, eos: Sequence[int] = ()
) -> Session:
    """Decode one greedy request to its end."""
    costs, session = LearnedCosts(), _session(prompt, tokens, eos)
    loop = Loop(executor, costs=costs)
    loop.join(session, find_method(config.method or "autoregressive", True).start(session, config, Experience(costs)))
    try:
        while loop.live:
            loop.step()
    finally:
        loop.leave(session)
    if session.error is not None:
        raise session.error
    return session


def _compared(method: str, measured: list[float], charged: float) -> Compared:
    return Compared(method, statistics.median(measured), charged, _spread(measured) if len(measured) > 1 else None)


def _all(workers: Workers, executor: Executor, method: str, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    eos = workers.tokenizer.eos_ids
    config = SpeculativeConfig(method=method)
    return sum(decode(executor, prompt, config, tokens, eos).stats.decode_seconds for prompt in prompts)


def _session(prompt: Sequence[int], tokens: int, eos: Sequence[int] = ()) -> Session:
    request = Request(SamplingParams(max_tokens=tokens), 0, len(prompt), eos_ids=tuple(eos))
    return Session(0, prompt, request, len(prompt) + tokens)


def _rests(workers: Workers, executor: Executor, method: str, tokens: int) -> Iterator[float]:
    """Yield what each round took beyond its models."""
    watch, trace = _ModelClock(), Trace()
    costs, session = LearnedCosts(), _session(workers.prompts()[0], tokens)
    loop = Loop(executor, trace, costs)
    loop.join(session, find_method(method, True).start(session, SpeculativeConfig(method=method), Experience(costs)))
    with watch.on(workers.verifier), watch.on(workers.drafter):
        while loop.live:
            watch.seconds, seen, start = 0.0, len(trace.events), time.perf_counter()
            loop.step()
            took = time.perf_counter() - start
            drafting = [event.end - event.start for event in trace.events[seen:] if event.who == "draft"]
            apart = max(drafting, default=0.0) if workers.executor == "process" else 0.0
            if seen:  # the first round reads the prompt
                yield max(took - max(watch.seconds, apart), 0.0)


class _ModelClock:
    """Adds up the seconds spent in a worker's model."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def on(self, worker: Worker) -> Iterator[None]:
        """Put a timer before a worker's model, for a while."""
        runner: Any = worker.runner
        worker.runner = _Timer(runner, self)
        try:
            yield
        finally:
            worker.runner = runner

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Time a function, and what it returns if that is one: verdicts wait for the model."""

        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                found = function(*arguments)
            finally:
                self.seconds += time.perf_counter() - start
            return self.timed(found) if callable(found) else found

        return call


class _Timer:
    """Passes everything on, and times what the model does."""

    def __init__(self, runner: Any, watch: _ModelClock) -> None:
        self._runner, self._watch = runner, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runner, name)
        return self._watch.timed(found) if name in ("feed", "extend", "propose", "verify") else found


class _Steps:
    """Tells how far a measurement has come."""

    def __init__(self, progress: StepsDone, turns: int, executor: str, effort: Effort) -> None:
        self._progress, self._done = progress, 0
        self._total = turns + len(HOST_METHODS) + (effort.repeats + 1 if executor == "process" else 0)

    def __call__(self, what: str) -> None:
        self._done += 1
        self._progress(f"Measuring the {what}", self._done, self._total)


def _lengths(workers: Workers) -> tuple[int, int, int]:
    """The short and the long context and the prompt, as long as the models allow."""
    most = min(workers.verifier.runner.context_length, workers.drafter.runner.context_length) - MOST_ROWS
    if most < 16:
        raise BadParameter(
            f"The models hold {most + MOST_ROWS} tokens; a profile needs {MOST_ROWS + 16}. Raise --context-length."
        )
    long = min(LONG, most)
    return min(SHORT, long // 2), long, min(PROMPT, most)


def _text(workers: Workers, length: int) -> list[int]:
    """Some text of ours, as long as asked for."""
    words = [token for prompt in workers.prompts() for token in prompt]
    return (words * (length // len(words) + 1))[:length]


def _probes(held: Mapping[tuple[str, str], HeldText], prompt: Sequence[int], effort: Effort) -> Iterator[Probe]:
    for (name, far), one in held.items():
        if name == "target":
            yield from (Probe(name + far, rows, partial(one.forward, rows)) for rows in effort.rows)
        else:
            yield from (
                Probe(name + far, width, partial(one.step, width))
                for width in (effort.widths_far if far else effort.widths)
            )
        if not far and effort.far:
            yield Probe(f"{name} prompt", len(prompt), partial(_reading, one.worker, prompt), is_long=True)


def _reading(worker: Worker, prompt: Sequence[int]) -> float:
    """Time the reading of a prompt, up to its last row."""
    start = time.perf_counter()
    with HeldText(worker, 0, prompt[:-1]) as held:
        held.forward(1)
        return time.perf_counter() - start


def _take_turns(
    probes: Sequence[Probe], effort: Effort, tick: Callable[[str], None]
) -> dict[tuple[str, int], MedianTiming]:
    taken: dict[tuple[str, int], list[float]] = {(probe.name, probe.rows): [] for probe in probes}
    order, begun = random.Random(0), time.perf_counter()
    for turn in range(WARM_UP + effort.repeats):
        if turn >= WARM_UP + effort.least and time.perf_counter() - begun > effort.seconds:
            break
        for probe in order.sample(
            probes, len(probes)
        ):  # each time another order: what ran before leaves its mark on the caches
            if not probe.is_long or turn % effort.seldom == WARM_UP % effort.seldom or turn == 0:
                seconds = probe.run()
                if turn >= WARM_UP:
                    taken[probe.name, probe.rows].append(seconds)
        tick("models")
    return {key: MedianTiming(statistics.median(seconds), _spread(seconds)) for key, seconds in taken.items()}


def _spread(seconds: Sequence[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _slowing(workers: Workers, target: HeldText, effort: Effort, tick: Callable[[str], None]) -> Slowing | None:
    if workers.executor != "process":
        return None
    with Companion(workers.recipe, target.text) as companion:
        return measure_slowing(companion, lambda: target.forward(4), effort.repeats, lambda: tick("two side by side"))


def _profile(
    workers: Workers,
    figures: dict[tuple[str, int], MedianTiming],
    slowing: Slowing | None,
    host: float,
    lengths: tuple[int, int, int],
    effort: Effort,
) -> CostProfile:
    short, long, prompt = lengths
    made = Provenance.here(pairs={}, workload={}, settings={}, suites={})
    return CostProfile(
        target=_curve(figures, "target", prompt),
        draft=_curve(figures, "draft", prompt),
        slow_down=slowing.target if slowing else 0.0,
        draft_slow_down=slowing.draft if slowing else 0.0,
        host=host,
        pair=workers.pair,
        hardware=_hardware(workers, made),
        note=_note(workers, slowing),
        overlap=workers.executor == "process",
        context=short,
        target_per_context=_slopes(figures, "target", long - short, prompt),
        draft_per_context=_slopes(figures, "draft", long - short, prompt),
        target_identity=workers.target_identity,
        draft_identity=workers.draft_identity,
        provenance=_provenance(workers, made, figures, lengths, effort),
    )


def _curve(figures: dict[tuple[str, int], MedianTiming], name: str, prompt: int) -> Points:
    points = {rows: figure.seconds for (probe, rows), figure in figures.items() if probe == name}
    if prompt > max(points) and (f"{name} prompt", prompt) in figures:
        points[prompt] = figures[f"{name} prompt", prompt].seconds
    return tuple(sorted(points.items()))


def _slopes(figures: dict[tuple[str, int], MedianTiming], name: str, further: int, prompt: int) -> Points:
    """Seconds for each token of context, from the two that were measured; a prompt is read from the beginning, so
    none there."""
    far = {rows: figure.seconds for (probe, rows), figure in figures.items() if probe == name + FAR}
    slopes = {rows: max((seconds - figures[name, rows].seconds) / further, 0.0) for rows, seconds in far.items()}
    if slopes and prompt > max(slopes):
        slopes[prompt] = 0.0
    return tuple(sorted(slopes.items()))


def _hardware(workers: Workers, made: Provenance) -> str:
    device = getattr(workers.verifier.runner, "device", None)
    gpus = made.hardware.get("gpus")
    if gpus and getattr(device, "type", "") == "cuda":
        return str(gpus[device.index or 0]) if device is not None else str(gpus[0])
    name = made.hardware.get("processor") or made.hardware.get("machine", "a CPU")
    return f"{name}, {made.hardware.get('cores')} cores"


def _note(workers: Workers, slowing: Slowing | None) -> str:
    how = "Measured by `specbranch profile` at temperature 0, token choice included; "
    if slowing is None:
        return how + "draft and target take turns (serial executor), so nothing overlaps."
    return how + (
        "side by side in two processes with half of the threads each (process executor); slow-down with "
        f"{slowing.steps} draft steps "
        "beside a target forward over 4 tokens."
    )


def _provenance(
    workers: Workers,
    made: Provenance,
    figures: dict[tuple[str, int], MedianTiming],
    lengths: tuple[int, int, int],
    effort: Effort,
) -> dict[str, Any]:
    import torch

    spreads = {
        name: statistics.median(f.spread for (probe, _), f in figures.items() if probe == name)
        for name in ("target", "draft")
    }
    return {
        "made": made.made,
        "commit": made.commit,
        "python": made.python,
        "versions": dict(made.versions),
        "executor": workers.executor,
        "threads": torch.get_num_threads(),
        "dtype": str(getattr(workers.verifier.runner, "dtype", "")).removeprefix("torch."),
        "weights": stored_in(workers.verifier.runner),
        "draft_weights": stored_in(workers.drafter.runner),
        "repeats": effort.repeats,
        "contexts": list(lengths[:2]),
        "prompt": lengths[2],
        "spread": spreads,
    }
