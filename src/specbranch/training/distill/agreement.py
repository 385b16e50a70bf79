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
from functools import partial
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
class JudgedText:
    """A draft's candidates along an answer, judged by the answer's tokens.

    A draft that reads its target's features was given them at the first position of each `stretch` alone, and drafted
    the others from its own states. What other drafts say does not depend on that: each position begins a draft.
    """

    positions: tuple[JudgedPosition, ...]
    stretch: int | None = None

    def drafts(self) -> Iterator[tuple[JudgedPosition, ...]]:
        """Yield the positions of each draft of at most LONGEST tokens."""
        starts = max(len(self.positions) - LONGEST + 1, 1)
        for at in range(0, starts, self.stretch or 1):
            yield self.positions[at : at + LONGEST]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of the answers' tokens, and for each draft length the mean number of accepted tokens."""

    tokens: int
    top1: float
    top3: float
    expected_length: tuple[float, ...]  # for drafts of 1, 2, … LONGEST tokens
    evaluation: DraftEvaluation = NOT_EVALUATED  # the counts that a planner starts from
    # share of first choices that are right behind 0, 1, … right ones; as far as drafts came
    by_depth: tuple[float, ...] = ()

    @property
    def tokens_a_forward(self) -> tuple[float, ...]:
        """The tokens that a forward of the target brings with a chain of 1, 2, … LONGEST tokens."""
        return tuple(1 + length for length in self.expected_length)

    def speed(self, length: int, step: float) -> float:
        """Return the expected speed with chains of a length, relative to plain decoding; `step`: what a draft step
        costs, as a share of a target's forward. Verifying the chain is taken to cost as much as one token."""
        return self.tokens_a_forward[length - 1] / (1 + length * step)


def compare(
    runner: Runner, texts: Iterable[AnsweredPrompt], about: str = "", target: Runner | None = None
) -> Agreement:
    """Run a draft over the texts, and compare its choices with the next tokens; `about` names the texts.

    `target`: the runner whose features the draft reads; None: it reads none.
    """
    return agreement_of([judged_text(runner, text, target) for text in texts if text.answer], about)


def judged_text(runner: Runner, text: AnsweredPrompt, target: Runner | None = None) -> JudgedText:
    """Run a draft over one text; see `compare`."""
    if target is None:
        return JudgedText(tuple(_judged(runner, text, read)))
    return JudgedText(tuple(_judged(runner, text, partial(read_beside, target))), LONGEST)


def agreement_of(judged: Sequence[JudgedText], about: str = "") -> Agreement:
    """Sum up what was judged."""
    every = [position for text in judged for position in text.positions]
    if not every:
        return Agreement(0, 0.0, 0.0, (0.0,) * LONGEST)
    runs = [(_run(draft), len(draft)) for text in judged for draft in text.drafts() if draft]
    lengths = tuple(statistics.fmean(min(run, length) for run, _ in runs) for length in range(1, LONGEST + 1))
    return Agreement(
        len(every), _share(every, 1), _share(every, 3), lengths, evaluate(every, about), tuple(_shares_by_depth(runs))
    )


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


def read_beside(
    target: Runner,
    runner: Runner,
    before: Sequence[int],
    tokens: Sequence[int],
    look: Callable[[Feed], Seen],
    most: int = LONGEST,
) -> Iterator[Seen]:
    """Do as `read` with a draft that reads its target's features: those before each `most` tokens are there, and the
    tokens are nodes that the target has not computed."""
    both = target, runner
    for one in both:
        one.open(ROOT, GREEDY)
    try:
        for one in both:
            one.extend(ROOT, before)
        for start in range(0, len(tokens), most):
            part = tuple(tokens[start : start + most])
            yield look(Feed(ROOT, part, tuple(range(ROOT, len(part) - 1))))
            runner.keep(ROOT, (), 0)
            for one in both:
                one.extend(ROOT, part)
    finally:
        for one in both:
            one.close(ROOT)


def _timed_step(runner: Runner, prompt: Sequence[int]) -> float:
    runner.keep(ROOT, (), 0)
    start = time.perf_counter()
    runner.propose([Feed(ROOT, (prompt[0],), (ROOT,))], [Ask(ROOT, 0)])
    return time.perf_counter() - start


def _judged(
    runner: Runner, text: AnsweredPrompt, read_on: Callable[..., Iterator[list[Proposal]]]
) -> Iterator[JudgedPosition]:
    """Yield the draft's first SURE candidates for each answer token, with the rank of that token."""
    ids = (*text.prompt, *text.answer)[: runner.context_length]
    first = len(text.prompt) - 1  # what is proposed after this token is compared with the answer's first
    if first >= len(ids) - 1 or max(ids) >= runner.vocabulary:
        return

    def choices(feed: Feed) -> list[Proposal]:
        return runner.propose([feed], [Ask(ROOT, node, SURE) for node in range(len(feed.tokens))])

    made = chain.from_iterable(read_on(runner, ids[:first], ids[first:-1], choices))
    for proposal, token in zip(made, ids[first + 1 :], strict=True):
        rank = proposal.tokens.index(token) if token in proposal.tokens else None
        yield JudgedPosition(proposal.said, rank)


def _share(positions: Sequence[JudgedPosition], most: int) -> float:
    return sum(one.rank is not None and one.rank < most for one in positions) / len(positions)


def _run(draft: Sequence[JudgedPosition]) -> int:
    """Return how many first choices are right before the first wrong one."""
    return next((at for at, position in enumerate(draft) if position.rank != 0), len(draft))


def _shares_by_depth(runs: Sequence[tuple[int, int]]) -> Iterator[float]:
    """Yield for each depth the share of right first choices, of drafts whose choices before were right."""
    for depth in range(LONGEST):
        reached = [run for run, length in runs if run >= depth and length > depth]
        if not reached:
            return
        yield sum(run > depth for run in reached) / len(reached)
