"""Collecting labelled rounds: the target reads what it wrote and shows its hidden states, the draft reads it and says what it would draft.

Owns the reading. Works on any Runner whose hidden states can be reached; needs texts that the target wrote greedily.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Feed, Row, Runner, Sampler
from specbranch.core.slots import ROOT
from specbranch.distill.agreement import GREEDY
from specbranch.hrad.forecast import features, tap
from specbranch.hrad.rounds import Rounds, Start, walk

MOST = 6e4  # what a float16 holds: beyond it, and beyond FARTHEST deviations, a number says nothing more


@dataclass(frozen=True, slots=True)
class Text:
    """What a target wrote greedily behind a prompt, and of which kind that was."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    task: int = 0


@dataclass(frozen=True, slots=True)
class Said:
    """What a draft says all along an answer, but for its first token: is the next one its first choice, and how sure is it?"""

    agreed: list[bool]
    confidence: list[float]
    entropy: list[float]


class Collector:
    """A target and a draft that read texts together."""

    def __init__(self, target: Runner, draft: Runner, sampler: Sampler, *, layers: int, longest: int, rows: int, seed: int = 0) -> None:
        """`rows`: tokens read in one forward, no more than a cache's tail holds."""
        self.target, self.draft, self.sampler = target, draft, sampler
        self.layers, self.longest, self.rows = layers, longest, rows
        self._tapped = tap(target, layers)
        self._lengths = torch.Generator().manual_seed(seed)

    def fits(self, text: Text) -> bool:
        """Whether both models can read a text, and there is a round in it."""
        most, known = (min(getattr(one, name) for one in (self.target, self.draft)) for name in ("context_length", "vocabulary"))
        ids = (*text.prompt, *text.answer)
        return len(text.answer) > 1 and len(ids) <= most and max(ids) < known

    @torch.inference_mode()
    def shown(self, text: Text) -> list[Row]:
        """Have the target read a text; returns the row that led to each token of the answer, with hidden states."""
        return list(read(self.target, text.prompt[:-1], (text.prompt[-1], *text.answer[:-1]), self.rows))

    @torch.inference_mode()
    def rounds(self, text: Text, number: int, shown: Sequence[Row] | None = None) -> Rounds:
        """Read off the rounds of a text, for one draft length that is drawn for it: what a round begins behind depends on the length.

        `shown` is what the target showed of it, if that was asked before.
        """
        length = int(torch.randint(1, self.longest + 1, (1,), generator=self._lengths))
        said = self._said(text)
        starts = list(walk(said.agreed, length, self.longest))
        taken, left, before = torch.tensor([(start.taken, start.left, start.before) for start in starts]).T
        confidence, entropy = (
            torch.tensor([_upto(values, start, self.longest) for start in starts]) for values in (said.confidence, said.entropy)
        )
        same = torch.full_like(taken, number), torch.full_like(taken, text.task)
        return Rounds(self._features(text, starts, shown or self.shown(text)), taken, left, before, confidence, entropy, *same)

    def _said(self, text: Text) -> Said:
        rows = list(read(self.draft, text.prompt, text.answer[:-1], self.rows))
        spots = [Spot(GREEDY, len(text.prompt) + at + 1, tuple) for at in range(len(rows))]
        top, entropy = (self.sampler.propose(rows, spots, [ask] * len(rows)) for ask in (Ask(), Ask(measure="entropy")))
        agreed = [one.tokens[0] == token for one, token in zip(top, text.answer[1:], strict=True)]
        # the first token is the target's own
        return Said([True, *agreed], [1.0, *(one.confidence for one in top)], [1.0, *(one.confidence for one in entropy)])

    def _features(self, text: Text, starts: Sequence[Start], rows: Sequence[Row]) -> Tensor:
        """What the network reads at each start: at the row before its token, which led to it."""
        at = [start.at for start in starts]
        return features([rows[n] for n in at], [text.answer[n] for n in at], self._tapped).clamp(-MOST, MOST).to(torch.float16)


def read(runner: Runner, before: Sequence[int], tokens: Sequence[int], most: int) -> Iterator[Row]:
    """Yield the row after each of some tokens, read behind others; one sequence of the runner is used, and closed."""
    runner.open(ROOT)
    try:
        runner.extend(ROOT, before)
        for start in range(0, len(tokens), most):
            part = tuple(tokens[start : start + most])
            yield from runner.feed([Feed(ROOT, part, tuple(range(ROOT, len(part) - 1)))])[0]
            runner.keep(ROOT, range(len(part)), len(part))
    finally:
        runner.close(ROOT)


def _upto(values: Sequence[float], start: Start, longest: int) -> list[float]:
    """What was said from behind a start up to the first wrong token, filled up with 0."""
    end = min(start.at + 1 + min(start.taken + 1, longest), len(values))
    found = list(values[start.at + 1 : end])
    return found + [0.0] * (longest - len(found))
