"""How well a draft agrees with a target: on the target's own text, how often its first choice (one of its first three) is the next token.

Owns the comparison and what follows from it for speculation. Works on any Runner and Sampler; needs nothing of the target but its text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specbranch.config import SamplingParams
from specbranch.core.request import Request, Spot
from specbranch.core.runner import Ask, Feed, Row, Runner, Sampler
from specbranch.core.slots import ROOT

LONGEST = 10  # draft lengths for which the accepted length is told
ROWS = 32  # tokens read in one forward
GREEDY = Request(SamplingParams(), seed=0, prompt_length=0)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target said to it, greedily."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of the answers' tokens, and for each draft length how many drafted tokens would have been accepted on average."""

    tokens: int
    top1: float
    top3: float
    expected_length: tuple[float, ...]  # for drafts of 1, 2, … LONGEST tokens


def compare(runner: Runner, sampler: Sampler, texts: Sequence[Text]) -> Agreement:
    """Let a draft read the texts, and compare its choices with what came next."""
    ranks = [list(_ranks(runner, sampler, text)) for text in texts if text.answer]
    every = [rank for line in ranks for rank in line]
    if not every:
        return Agreement(0, 0.0, 0.0, (0.0,) * LONGEST)
    lengths = tuple(_accepted(ranks, length) for length in range(1, LONGEST + 1))
    return Agreement(len(every), _share(every, 1), _share(every, 3), lengths)


def step_seconds(runner: Runner, prompt: Sequence[int], times: int = 20, sampler: Sampler | None = None) -> float:
    """Measure one forward over one token after a prompt, median; with a sampler, choosing the next one to propose is part of it."""
    runner.open(ROOT)
    try:
        runner.extend(ROOT, prompt)
        _timed_step(runner, prompt, sampler)  # the first one may have something to set up
        return statistics.median(_timed_step(runner, prompt, sampler) for _ in range(times))
    finally:
        runner.close(ROOT)


def _timed_step(runner: Runner, prompt: Sequence[int], sampler: Sampler | None) -> float:
    runner.keep(ROOT, (), 0)
    start = time.perf_counter()
    rows = runner.feed([Feed(ROOT, (prompt[0],), (ROOT,))])[0]
    if sampler:
        sampler.propose(rows, [Spot(GREEDY, len(prompt) + 1, tuple)], [Ask()])
    return time.perf_counter() - start


def _ranks(runner: Runner, sampler: Sampler, text: Text) -> Iterator[int]:
    """Yield, for each token of the answer, its rank among the draft's first three choices (0: none of them)."""
    ids = (*text.prompt, *text.answer)[: runner.context_length]
    first = len(text.prompt) - 1  # the row after this token predicts the answer's first
    if first >= len(ids) - 1 or max(ids) >= runner.vocabulary:
        return
    runner.open(ROOT)
    try:
        runner.extend(ROOT, ids[:first])
        for start in range(first, len(ids) - 1, ROWS):
            yield from _choices(sampler, _read(runner, ids[start : min(start + ROWS, len(ids) - 1)]), start, ids)
    finally:
        runner.close(ROOT)


def _read(runner: Runner, tokens: Sequence[int]) -> list[Row]:
    rows = runner.feed([Feed(ROOT, tuple(tokens), tuple(range(ROOT, len(tokens) - 1)))])[0]
    runner.keep(ROOT, range(len(tokens)), len(tokens))
    return rows


def _choices(sampler: Sampler, rows: Sequence[Row], start: int, ids: Sequence[int]) -> Iterator[int]:
    spots = [Spot(GREEDY, start + at + 1, tuple) for at in range(len(rows))]
    for spot, proposal in zip(spots, sampler.propose(rows, spots, [Ask(width=3)] * len(rows)), strict=True):
        token = ids[spot.position]
        yield proposal.tokens.index(token) + 1 if token in proposal.tokens else 0


def _share(ranks: Sequence[int], most: int) -> float:
    return sum(0 < rank <= most for rank in ranks) / len(ranks)


def _accepted(lines: Sequence[Sequence[int]], length: int) -> float:
    """Return the mean run of first choices, none longer than `length`, over the places that have LONGEST tokens before them."""
    runs = [_run(line[at : at + length]) for line in lines for at in range(max(len(line) - LONGEST + 1, 1))]
    return statistics.fmean(runs)


def _run(ranks: Sequence[int]) -> int:
    return next((at for at, rank in enumerate(ranks) if rank != 1), len(ranks))
