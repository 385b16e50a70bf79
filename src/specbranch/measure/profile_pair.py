"""Measuring what a pair costs on this hardware: a `CostProfile` of the real models.

Owns what is measured of a pair and how the figures become a profile: forwards and steps alone (`probes`), both models
at once (`overlap`), the rest of a round (`host_time`). Invariant: the spread of the probes is told beside the figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from specbranch.config import AT_ONCE
from specbranch.core.loop import Executor
from specbranch.errors import BadParameter
from specbranch.measure.host_time import METHODS_TIMED, measure_host
from specbranch.measure.loaded_pair import LoadedPair, precision, stored_in
from specbranch.measure.overlap import ROWS, SHARES, Slowing, TrialRounds, measure_slowing
from specbranch.measure.probes import (
    WARM_UP,
    Effort,
    Figures,
    HeldText,
    Probe,
    StepsDone,
    reading_seconds,
    silent,
    take_turns,
)
from specbranch.provenance import Provenance
from specbranch.sim.profile import CostProfile, Points

MOST_ROWS = 32
SHORT, LONG, PROMPT = 64, 1024, 256  # tokens
NEAR, FAR = "", " far"  # of a probe: after the short context, after the long one
NOTE = "Measured by `specbranch profile` at temperature 0, token choice included; "
BOTH = {
    "process": "side by side in two processes with half of the threads each (process executor); slow-down with",
    "streams": "side by side in one process, the target on its own stream (streams executor); slow-down with up to",
}


def measure(pair: LoadedPair, effort: Effort | None = None, progress: StepsDone = silent) -> CostProfile:
    """Measure a pair."""
    effort = effort or Effort()
    short, long, prompt = lengths = _lengths(pair)
    steps = _Steps(progress, pair.executor, effort)
    contexts = {NEAR: short, FAR: long} if effort.far else {NEAR: short}
    with ExitStack() as open_ones:
        held = {
            (name, far): open_ones.enter_context(HeldText(worker, seq, pair.text(length)))
            for name, worker in (("target", pair.verifier), ("draft", pair.drafter))
            for seq, (far, length) in enumerate(contexts.items(), 1)
        }
        figures = take_turns(list(_probes(held, pair.text(prompt), effort)), effort, steps)
    with closing(pair.real()) as executor:
        slowing = _slowing(pair, executor, pair.text(short), effort, steps)
        host = measure_host(pair, executor, effort.host_tokens, steps)
    made = Provenance.here(pairs={}, workload={}, settings={}, suites={})
    return CostProfile(
        target=_curve(figures, "target", prompt),
        draft=_curve(figures, "draft", prompt),
        slow_down=slowing.target if slowing else 0.0,
        draft_slow_down=slowing.draft if slowing else 0.0,
        host=host,
        pair=pair.name,
        hardware=_hardware(pair, made),
        note=_note(pair, slowing),
        overlap=slowing is not None,
        context=short,
        target_per_context=_slopes(figures, "target", long - short, prompt),
        draft_per_context=_slopes(figures, "draft", long - short, prompt),
        target_identity=pair.target_identity,
        draft_identity=pair.draft_identity,
        provenance=_provenance(pair, made, figures, lengths, effort),
    )


class _Steps:
    """Tells how far a measurement has come."""

    def __init__(self, progress: StepsDone, executor: str, effort: Effort) -> None:
        self._progress, self._done = progress, 0
        beside = effort.repeats + 1 if executor in AT_ONCE else 0
        self._total = WARM_UP + effort.repeats + len(METHODS_TIMED) + beside

    def __call__(self, what: str) -> None:
        self._done += 1
        self._progress(f"Measuring the {what}", self._done, self._total)


def _lengths(pair: LoadedPair) -> tuple[int, int, int]:
    """The short and the long context and the prompt, as long as the models allow."""
    most = min(pair.verifier.runner.context_length, pair.drafter.runner.context_length) - MOST_ROWS
    if most < 16:
        raise BadParameter(
            f"The models hold {most + MOST_ROWS} tokens; a profile needs {MOST_ROWS + 16}. Raise --context-length."
        )
    long = min(LONG, most)
    return min(SHORT, long // 2), long, min(PROMPT, most)


def _probes(held: Mapping[tuple[str, str], HeldText], prompt: Sequence[int], effort: Effort) -> Iterator[Probe]:
    for (name, far), one in held.items():
        if name == "target":
            yield from (Probe(name + far, rows, partial(one.forward, rows)) for rows in effort.rows)
        else:
            widths = effort.widths_far if far else effort.widths
            yield from (Probe(name + far, width, partial(one.step, width)) for width in widths)
        if not far and effort.far:
            yield Probe(f"{name} prompt", len(prompt), partial(reading_seconds, one.worker, prompt), is_long=True)


def _slowing(
    pair: LoadedPair, executor: Executor, text: Sequence[int], effort: Effort, steps: _Steps
) -> Slowing | None:
    """Measure what both cost each other where the executor has them work at once."""
    if pair.executor not in AT_ONCE:
        return None
    with TrialRounds(executor, text) as rounds:
        return measure_slowing(rounds, effort.repeats, lambda: steps("two side by side"), SHARES[pair.executor])


def _curve(figures: Figures, name: str, prompt: int) -> Points:
    points = {rows: figure.seconds for (probe, rows), figure in figures.items() if probe == name}
    if prompt > max(points) and (f"{name} prompt", prompt) in figures:
        points[prompt] = figures[f"{name} prompt", prompt].seconds
    return tuple(sorted(points.items()))


def _slopes(figures: Figures, name: str, further: int, prompt: int) -> Points:
    """Seconds for each token of context, from the two that were measured. None at a prompt: that begins the text."""
    far = {rows: figure.seconds for (probe, rows), figure in figures.items() if probe == name + FAR}
    slopes = {rows: max((seconds - figures[name, rows].seconds) / further, 0.0) for rows, seconds in far.items()}
    if slopes and prompt > max(slopes):
        slopes[prompt] = 0.0
    return tuple(sorted(slopes.items()))


def _hardware(pair: LoadedPair, made: Provenance) -> str:
    device = getattr(pair.verifier.runner, "device", None)
    gpus = made.hardware.get("gpus")
    if gpus and device is not None and device.type == "cuda":
        return str(gpus[device.index or 0])
    name = made.hardware.get("processor") or made.hardware.get("machine", "a CPU")
    return f"{name}, {made.hardware.get('cores')} cores"


def _note(pair: LoadedPair, slowing: Slowing | None) -> str:
    if slowing is None:
        return f"{NOTE}draft and target take turns (serial executor), so nothing overlaps."
    return f"{NOTE}{BOTH[pair.executor]} {slowing.steps} draft steps beside a target forward over {ROWS} tokens."


def _provenance(
    pair: LoadedPair, made: Provenance, figures: Figures, lengths: tuple[int, int, int], effort: Effort
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
        "executor": pair.executor,
        "threads": torch.get_num_threads(),
        "dtype": precision(pair.verifier.runner),
        "weights": stored_in(pair.verifier.runner),
        "draft_weights": stored_in(pair.drafter.runner),
        "repeats": effort.repeats,
        "contexts": list(lengths[:2]),
        "prompt": lengths[2],
        "spread": spreads,
    }
