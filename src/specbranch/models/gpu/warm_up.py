"""Warm-up of a model on a GPU: which kinds of steps it can meet, and the code that runs outside their graphs.

Owns the list of kinds for some sizes of forwards, and its order. Does not own captures and times (`step.py`).
Invariants: buckets come from `layout.bucket_of`, so the list follows the packing of steps. After a warm-up no ordinary
round captures a graph or compiles a kernel.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

from specbranch.config import SamplingParams
from specbranch.core.grammar import Guide, Mask
from specbranch.core.orders import Context, Verify
from specbranch.core.pages import Pool
from specbranch.core.request import Request
from specbranch.core.runner import NO_MASKS, Ask, DecodesBatches, Feed, Runner, Trial
from specbranch.core.slots import ROOT
from specbranch.core.warm_up import ForwardSizes, StepTime
from specbranch.errors import SpecBranchError
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.layout import (
    CHUNK_STEP_ROWS,
    MOST_STEP_ROWS,
    MOST_TOTAL_ROWS,
    Bucket,
    bucket_of,
    chunk_step_rows,
    power_of_four,
)
from specbranch.models.gpu.step import Graphs, StepKind, described, serves
from specbranch.models.gpu.tree_layout import ENTRIES, LANES
from specbranch.models.gpu.trees import growing_bucket
from specbranch.models.runners.native import NativeRunner

log = logging.getLogger("specbranch")

WARM_UP_SEQUENCE = -2  # of the calls outside graphs; no session has this number, nor `rehearsal.NUMBER`
WARM_UP_PROMPTS = (256, 40, 1)  # tokens; behind the last one tokens are decoded
# the code outside graphs: filters, penalties and log-probabilities, rejection sampling, masks
OUTSIDE_GRAPHS = (
    Request(SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, presence_penalty=0.1, logprobs=1), 0, 2),
    Request(SamplingParams(temperature=0.9), 0, 2, rule="ratio"),
    Request(SamplingParams(temperature=0.9, regex="a"), 0, 2),
)
WARM_UP_MASK = Mask.of((0,))  # what the last of these allows


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a model's steps cannot exceed: the smallest bucket, sampled rows, and whether they take rows of prompts."""

    least: Bucket
    rows: int
    chunks: bool


def kinds_of(sizes: ForwardSizes, limits: StepLimits, layers: int = 0) -> list[StepKind]:
    """Return the kinds of steps that forwards of some sizes can have, the smallest first.

    `layers`: how many layers' hidden states they return. A kind that another one serves is left out.
    """
    count = ENTRIES if sizes.candidates else 1
    plain = [(bucket, layers, count, False) for bucket in buckets_of(sizes, limits)]
    growing = [(bucket, 0, ENTRIES, True) for bucket in growing_buckets(limits)] if sizes.trees else []
    prefill = [(bucket, 0, 1, False) for bucket in prefill_buckets(sizes, limits)]
    return sorted((*plain, *growing, *prefill), key=lambda kind: (kind[0].total, kind))


def buckets_of(sizes: ForwardSizes, limits: StepLimits) -> set[Bucket]:
    """Return the buckets of a lone session's steps, and of the steps of several sessions."""
    alone, together = (min(rows, limits.rows) for rows in (sizes.alone, sizes.together))
    shapes = {(rows, 1) for rows in _row_counts(alone)}
    # between two sizes of buckets, the first count of rows and the last have the fewest groups and the most
    shapes |= {(rows, several) for rows in _row_counts(together) for several in range(2, min(sizes.sessions, rows) + 1)}
    return {bucket_of(_some_rows(rows, several), limits.least) for rows, several in shapes}


def prefill_buckets(sizes: ForwardSizes, limits: StepLimits) -> set[Bucket]:
    """Return the buckets of steps with rows of prompts; those of a target have sampled rows of other sessions, too."""
    if not limits.chunks:
        return set()
    # a lone session samples one row behind its own prompt
    sampled = 0 if sizes.candidates else 1 if sizes.sessions == 1 else min(sizes.together, limits.rows)
    padded = [rows for rows in CHUNK_STEP_ROWS if rows <= chunk_step_rows(sampled)]
    totals = [1 << power for power in range(MOST_TOTAL_ROWS.bit_length())]
    return {
        bucket_of(_some_rows(rows, 1), limits.least, total - rows)
        for rows in padded
        for total in totals
        if total > rows
    }


def growing_buckets(limits: StepLimits) -> set[Bucket]:
    """Return the buckets of steps at whose end a tree grows: those of its text, and its own."""
    return {*received_buckets(limits), growing_bucket(limits.least)}


def received_buckets(limits: StepLimits) -> set[Bucket]:
    """Return the buckets of steps of one sequence with as many rows as a step of a tree, or fewer."""
    return {bucket_of(_some_rows(min(rows, limits.rows), 1), limits.least) for rows in _row_counts(LANES)}


def needed(kinds: Sequence[StepKind]) -> list[StepKind]:
    """Leave out kinds that another one serves."""
    unique = list(dict.fromkeys(kinds))
    return [kind for kind in unique if not any(other != kind and serves(other, kind) for other in unique)]


def step_times(graphs: Graphs) -> list[StepTime]:
    """Return the times of all kinds that a warm-up has captured, the smallest first."""
    ordered = sorted(graphs.seconds.items(), key=lambda timed: (timed[0][0].total, timed[0]))
    return [StepTime(described(kind), kind[0].total, seconds) for kind, seconds in ordered]


class ForwardTable:
    """Seconds of a step by its rows, those of prompts included; of kinds with as many rows the slowest counts."""

    def __init__(self, graphs: Graphs) -> None:
        found: dict[int, float] = {}
        for (bucket, _, _, grows), seconds in graphs.seconds.items():
            if not grows:
                found[bucket.total] = max(found.get(bucket.total, 0.0), seconds)
        self._rows = sorted(found)
        # a step with more rows takes no less time: what looks so is noise
        self._seconds = list(accumulate([found[rows] for rows in self._rows], max))

    def seconds(self, rows: int) -> float | None:
        """Return the seconds of a forward, in several steps if it exceeds the largest one; None: nothing was timed."""
        if not self._rows:
            return None
        whole, rest = divmod(rows, self._rows[-1])
        last = self._seconds[bisect_left(self._rows, rest)] if rest else 0.0
        return whole * self._seconds[-1] + last


def run_outside_graphs(runner: NativeRunner) -> None:
    """Run once what no graph contains: prefill, filters and penalties, both rules, moves of KV slots.

    If there is no memory for that, it is left out: the first request that needs it takes a little longer.
    """
    for request in OUTSIDE_GRAPHS:
        with _without_prefix_cache(runner), suppress(SpecBranchError, torch.OutOfMemoryError):
            run_request(runner, request)


def run_request(runner: Runner, request: Request) -> None:
    """Prefill prompts of some lengths, propose, verify and move; nothing is left of that."""
    for length in WARM_UP_PROMPTS:
        with _opened(runner, request):
            runner.extend(WARM_UP_SEQUENCE, (0,) * min(length, runner.context_length // 2))
            runner.flush()
            if length == WARM_UP_PROMPTS[-1]:
                _decode_plainly(runner, {WARM_UP_SEQUENCE: WARM_UP_MASK} if request.is_constrained else NO_MASKS)
                _decode(runner, request)


def _decode_plainly(runner: Runner, masks: Mapping[int, Guide]) -> None:
    seq = WARM_UP_SEQUENCE
    text = (*runner.slots(seq).prefix, 0)
    if isinstance(runner, DecodesBatches) and runner.decodes(seq, len(text)):
        step = runner.decode({seq: text}, {seq}, masks=masks)
        if step is not None:
            step.sampled()


def _decode(runner: Runner, request: Request) -> None:
    seq, logprobs = WARM_UP_SEQUENCE, request.params.logprobs
    mask = WARM_UP_MASK if request.is_constrained else None
    runner.propose([Feed(seq, (0,), (ROOT,))], [Ask(seq, 0, width=4, allowed=mask)])
    on = Context(0, tuple(runner.slots(seq).prefix))
    runner.verify([], [Trial(seq, Verify(on), 0, (), logprobs=logprobs, allowed=(mask,))])()
    siblings = Trial(seq, Verify(on, (0, 0), (ROOT, ROOT)), 0, (1, 2), logprobs=logprobs, allowed=(mask, mask, mask))
    runner.verify([Feed(seq, (0, 0), (0, 0))], [siblings])()
    runner.keep(seq, (0, 2), 2)  # node 2 moves to the place of node 1
    runner.feed([Feed(seq, (0,), (ROOT,))])


@contextmanager
def _without_prefix_cache(runner: NativeRunner) -> Iterator[None]:
    """Within this context no prompt is kept for later ones."""
    kept, runner.prefix_cache = runner.prefix_cache, False
    try:
        yield
    finally:
        runner.prefix_cache = kept


@contextmanager
def _opened(runner: Runner, request: Request) -> Iterator[None]:
    runner.open(WARM_UP_SEQUENCE, request)
    try:
        yield
    finally:
        runner.close(WARM_UP_SEQUENCE)


def _row_counts(most: int) -> list[int]:
    """Return the smallest and the largest number of rows of each size of bucket, up to that of `most` rows."""
    sizes = sorted({power_of_four(rows) for rows in range(1, most + 1)})
    return sorted({1, *chain.from_iterable((before + 1, min(size, most)) for before, size in pairwise((0, *sizes)))})


def _some_rows(rows: int, sequences: int) -> list[Rows]:
    """Return rows of several sequences; only their numbers have a meaning."""
    table = Table(Pool(0))
    counts = (rows - sequences + 1, *(1,) * (sequences - 1))
    return [Rows(table, (0,) * count, 0, 0, ()) for count in counts]


class KernelWatch:
    """Counts kernels that Triton compiles outside a capture, for the model that was loaded last."""

    def __init__(self) -> None:
        self._graphs: weakref.ref[Graphs] | None = None
        self._hooked = False

    def count_for(self, graphs: Graphs) -> None:
        """Count them as late captures of these graphs from now on."""
        self._graphs = weakref.ref(graphs)
        if not self._hooked and graphs.captures:
            self._hooked = _hook_triton(self._compiled)

    def _compiled(self, **about: Any) -> None:
        graphs = None if self._graphs is None else self._graphs()
        # a manual warm-up is what `compiling.py` does
        if graphs is not None and not graphs.capturing and not about.get("is_manual_warmup"):
            graphs.late += 1
            log.info("Triton compiled a kernel outside a warm-up: %s.", about.get("repr", ""))


KERNEL_WATCH = KernelWatch()


def _hook_triton(hook: Any) -> bool:
    """Have Triton call a function after each compilation; False if it has no such hook."""
    try:
        from triton import knobs
    except ImportError:
        return False
    before = getattr(knobs.runtime, "jit_post_compile_hook", None)

    def compiled(*given: Any, **about: Any) -> Any:
        hook(**about)
        return before(*given, **about) if before is not None else None

    knobs.runtime.jit_post_compile_hook = compiled
    return True


def limits_of(graphs: Graphs) -> StepLimits:
    """Return the limits of a model's steps."""
    step = graphs.step
    return StepLimits(step.least, min(step.most_rows, MOST_STEP_ROWS), step.takes_chunks)


def kinds_in_order(
    sizes: ForwardSizes, limits: StepLimits, layers: int, met_before: Sequence[StepKind]
) -> Iterator[StepKind]:
    """Yield the kinds to capture: first those that earlier processes met, then all others."""
    yield from needed([*met_before, *kinds_of(sizes, limits, layers)])
