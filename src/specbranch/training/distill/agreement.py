"""The agreement of a draft with a target: how often the target's next token is the draft's first choice, or among its
first three, and the counts for a planner.

Owns the comparison, the forwards it needs, and the acceptance lengths that follow from it. It works on any Runner, and
needs only the target's text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from specbranch.config import SamplingParams
from specbranch.core.draft_evaluation import NOT_EVALUATED, DraftEvaluation, JudgedPosition, evaluate
from specbranch.core.learning import SURE
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed, Proposal, ReadsFeatures, Runner
from specbranch.core.slots import ROOT

LONGEST = 10  # the largest draft length with an acceptance length
AGREEMENT_ROWS = 32  # tokens read in one forward
GREEDY = Request(SamplingParams(), seed=0, prompt_length=0)

Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt and the target's greedy answer; `task` is the number of its kind."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    task: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of the answers' tokens, and for each draft length the mean number of accepted tokens."""

    tokens: int
    top1: float
    top3: float
    expected_length: tuple[float, ...]  # for drafts of 1, 2, … LONGEST tokens
    evaluation: DraftEvaluation = NOT_EVALUATED  # the counts that a planner starts from


def compare(runner: Runner, texts: Iterable[AnsweredPrompt], about: str = "") -> Agreement:
    """Run a draft over the texts, and compare its choices with the next tokens; `about` names the texts."""
    judged = [list(_judged(runner, text)) for text in texts if text.answer]
    ranks = [[position.rank for position in text] for text in judged]
    every = [rank for text in ranks for rank in text]
    if not every:
        return Agreement(0, 0.0, 0.0, (0.0,) * LONGEST)
    lengths = tuple(_accepted(ranks, length) for length in range(1, LONGEST + 1))
    evaluation = evaluate(chain.from_iterable(judged), about)
    return Agreement(len(every), _share(every, 1), _share(every, 3), lengths, evaluation)


def step_seconds(runner: Runner, prompt: Sequence[int], times: int = 20) -> float:
    """Return the median time of one forward over one token after a prompt, with the choice of the next token."""
    with _opened(runner, prompt):
        runner.extend(ROOT, prompt)
        _timed_step(runner, prompt)  # the first one may have something to set up
        return statistics.median(_timed_step(runner, prompt) for _ in range(times))


def read(
    runner: Runner,
    before: Sequence[int],
    tokens: Sequence[int],
    look: Callable[[Feed], Seen],
    most: int = AGREEMENT_ROWS,
) -> Iterator[Seen]:
    """Process tokens after others with `look`, `most` at a time, and yield its results. It uses one sequence and
    closes it."""
    with _opened(runner, (*before, *tokens)):
        runner.extend(ROOT, before)
        for start in range(0, len(tokens), most):
            part = tuple(tokens[start : start + most])
            yield look(Feed(ROOT, part, tuple(range(ROOT, len(part) - 1))))
            runner.keep(ROOT, range(len(part)), len(part))


@contextmanager
def _opened(runner: Runner, text: Sequence[int]) -> Iterator[None]:
    """Open a sequence within this context; the target of a draft that reads features reads the text, too."""
    with runner.target_reads(ROOT, text) if isinstance(runner, ReadsFeatures) else nullcontext():
        runner.open(ROOT, GREEDY)
        try:
            yield
        finally:
            runner.close(ROOT)


def _timed_step(runner: Runner, prompt: Sequence[int]) -> float:
    runner.keep(ROOT, (), 0)
    start = time.perf_counter()
    runner.propose([Feed(ROOT, (prompt[0],), (ROOT,))], [Ask(ROOT, 0)])
    return time.perf_counter() - start


def _judged(runner: Runner, text: AnsweredPrompt) -> Iterator[JudgedPosition]:
    """Yield the draft's first SURE candidates for each answer token, with the rank of that token."""
    ids = (*text.prompt, *text.answer)[: runner.context_length]
    first = len(text.prompt) - 1  # what is proposed after this token is compared with the answer's first
    if first >= len(ids) - 1 or max(ids) >= runner.vocabulary:
        return

    def choices(feed: Feed) -> list[Proposal]:
        return runner.propose([feed], [Ask(ROOT, node, SURE) for node in range(len(feed.tokens))])

    made = chain.from_iterable(read(runner, ids[:first], ids[first:-1], choices))
    for proposal, token in zip(made, ids[first + 1 :], strict=True):
        rank = proposal.tokens.index(token) if token in proposal.tokens else None
        yield JudgedPosition(proposal.said, rank)


def _share(ranks: Sequence[int | None], most: int) -> float:
    return sum(rank is not None and rank < most for rank in ranks) / len(ranks)


def _accepted(texts: Sequence[Sequence[int | None]], length: int) -> float:
    """Return the mean run of first choices, at most `length`, over the positions with LONGEST tokens before them."""
    runs = [_run(text[at : at + length]) for text in texts for at in range(max(len(text) - LONGEST + 1, 1))]
    return statistics.fmean(runs)


def _run(ranks: Sequence[int | None]) -> int:
    return next((at for at, rank in enumerate(ranks) if rank != 0), len(ranks))
