"""The measurement of a pair's costs on this hardware: a `CostProfile` of the real models.

Owns what is measured and how the figures become a profile. Forwards and steps alone are timed in `probes`, both models
at once in `overlap`, the rest of a round in `host_time`. Invariant: the profile contains the spread of the probes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from specbranch.clock.profile import CostProfile, Points
from specbranch.config import OVERLAPPING
from specbranch.core.loop import Executor
from specbranch.errors import BadParameter
from specbranch.lab.measure.host_time import METHODS_TIMED, measure_host
from specbranch.lab.measure.loaded_pair import LoadedPair, cached_in, precision, stored_in
from specbranch.lab.measure.overlap import OVERLAP_ROWS, OVERLAP_SHARES, Slowing, TrialRounds, measure_slowing
from specbranch.lab.measure.probes import WARM_UP_RUNS, Effort, Figures, HeldText, Probe, reading_seconds, take_turns
from specbranch.progress import StepsDone, silent
from specbranch.provenance import Provenance

PROBED_ROWS = 32
SHORT_CONTEXT, LONG_CONTEXT, PROBE_PROMPT = 64, 1024, 256  # tokens
NEAR_SUFFIX, FAR_SUFFIX = "", " far"  # of a probe: after the short context, after the long one
NOTE = "Measured by `specbranch profile` at temperature 0, token choice included; "
BOTH = {
    "process": "side by side in two processes with half of the threads each (process executor); slow-down with",
    "streams": "side by side in one process, the target on its own stream (streams executor); slow-down with up to",
}


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """The measurements of a pair: single steps, both models at once, the rest of a round; and the context lengths."""

    figures: Figures
    slowing: Slowing | None
    host: float
    lengths: tuple[int, int, int]  # the short context, the long one, the prompt

    def curve(self, name: str) -> Points:
        """Return seconds by rows; the prefill is the last point."""
        prompt, figures = self.lengths[2], self.figures
        points = {rows: figure.seconds for (probe, rows), figure in figures.items() if probe == name}
        if prompt > max(points) and (f"{name} prompt", prompt) in figures:
            points[prompt] = figures[f"{name} prompt", prompt].seconds
        return tuple(sorted(points.items()))

    def slopes(self, name: str) -> Points:
        """Return seconds per further token of context, from the two measured lengths; 0 for a prefill, which starts
        the text."""
        (short, long, prompt), figures = self.lengths, self.figures
        far = {rows: figure.seconds for (probe, rows), figure in figures.items() if probe == name + FAR_SUFFIX}
        added = {rows: max(seconds - figures[name, rows].seconds, 0.0) for rows, seconds in far.items()}
        slopes = {rows: seconds / (long - short) for rows, seconds in added.items()}
        if slopes and prompt > max(slopes):
            slopes[prompt] = 0.0
        return tuple(sorted(slopes.items()))

    def spread(self, name: str) -> float:
        """Return the median spread of a model's probes."""
        return statistics.median(figure.spread for (probe, _), figure in self.figures.items() if probe == name)


def measure(pair: LoadedPair, effort: Effort | None = None, progress: StepsDone = silent) -> CostProfile:
    """Measure a pair."""
    effort = effort or Effort()
    lengths, steps = _lengths(pair), _Steps(progress, pair.executor, effort)
    figures = _figures(pair, lengths, effort, steps)
    with closing(pair.real()) as executor:
        slowing = _slowing(pair, executor, pair.text(lengths[0]), effort, steps)
        host = measure_host(pair, executor, effort.host_tokens, steps)
    return _profile(pair, MeasuredPair(figures, slowing, host, lengths), effort)


class _Steps:
    """Reports the progress of a measurement."""

    def __init__(self, progress: StepsDone, executor: str, effort: Effort) -> None:
        self._progress, self._done = progress, 0
        overlap_rounds = effort.repeats + 1 if executor in OVERLAPPING else 0
        self._total = WARM_UP_RUNS + effort.repeats + len(METHODS_TIMED) + overlap_rounds

    def __call__(self, what: str) -> None:
        self._done += 1
        self._progress(f"Measuring the {what}", self._done, self._total)


def _lengths(pair: LoadedPair) -> tuple[int, int, int]:
    """Return the short and long contexts and the prompt length that the models allow."""
    most = min(pair.verifier.runner.context_length, pair.drafter.runner.context_length) - PROBED_ROWS
    if most < 16:
        raise BadParameter(
            f"The models hold {most + PROBED_ROWS} tokens; a profile needs {PROBED_ROWS + 16}. Raise --context-length."
        )
    long = min(LONG_CONTEXT, most)
    return min(SHORT_CONTEXT, long // 2), long, min(PROBE_PROMPT, most)


def _figures(pair: LoadedPair, lengths: tuple[int, int, int], effort: Effort, steps: _Steps) -> Figures:
    """Time forwards and steps of both models, each alone."""
    short, long, prompt = lengths
    contexts = {NEAR_SUFFIX: short, FAR_SUFFIX: long} if effort.far else {NEAR_SUFFIX: short}
    with ExitStack() as open_ones:
        held = {
            (name, far): open_ones.enter_context(HeldText(worker, seq, pair.text(length)))
            for name, worker in (("target", pair.verifier), ("draft", pair.drafter))
            for seq, (far, length) in enumerate(contexts.items(), 1)
        }
        return take_turns(list(_probes(held, pair.text(prompt), effort)), effort, steps)


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
    """Measure the mutual slow-down if the executor runs both at once."""
    if pair.executor not in OVERLAPPING:
        return None
    with TrialRounds(executor, text) as rounds:
        return measure_slowing(rounds, effort.repeats, lambda: steps("two side by side"), OVERLAP_SHARES[pair.executor])


def _profile(pair: LoadedPair, found: MeasuredPair, effort: Effort) -> CostProfile:
    made, slowing = Provenance.here(pairs={}, workload={}, settings={}, suites={}), found.slowing
    return CostProfile(
        target=found.curve("target"),
        draft=found.curve("draft"),
        slow_down=slowing.target if slowing else 0.0,
        draft_slow_down=slowing.draft if slowing else 0.0,
        host=found.host,
        pair=pair.name,
        hardware=_hardware(pair, made),
        note=_note(pair, slowing),
        overlap=slowing is not None,
        context=found.lengths[0],
        target_per_context=found.slopes("target"),
        draft_per_context=found.slopes("draft"),
        target_identity=pair.target_identity,
        draft_identity=pair.draft_identity,
        provenance=_provenance(pair, made, found, effort),
    )


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
    return (
        f"{NOTE}{BOTH[pair.executor]} {slowing.steps} draft steps beside a target forward over {OVERLAP_ROWS} tokens."
    )


def _provenance(pair: LoadedPair, made: Provenance, found: MeasuredPair, effort: Effort) -> dict[str, Any]:
    import torch

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
        "cache_dtype": cached_in(pair.verifier.runner),
        "repeats": effort.repeats,
        "contexts": list(found.lengths[:2]),
        "prompt": found.lengths[2],
        "spread": {name: found.spread(name) for name in ("target", "draft")},
    }
