"""Collecting labelled rounds: the target reads what it wrote and shows its hidden states, the draft reads it and says
what it would draft.

Owns the reading. Works on any Runner whose hidden states can be reached; needs texts that the target wrote greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from specbranch.core.runner import Ask, Feed, Proposal, Runner
from specbranch.core.slots import ROOT
from specbranch.hrad.forecaster import Transparent, features, reached
from specbranch.training.distill.agreement import AnsweredPrompt, read
from specbranch.training.hrad.rounds import LabelledRounds, Start, walk

MOST_FLOAT16 = 6e4  # what a float16 holds: beyond it, and beyond FARTHEST deviations, a number says nothing more


@dataclass(frozen=True, slots=True)
class Said:
    """What a draft says all along an answer, but for its first token: is the next one its first choice, and how sure
    is it?"""

    agreed: list[bool]
    confidence: list[float]
    entropy: list[float]


class Collector:
    """A target and a draft that read texts together."""

    def __init__(self, target: Runner, draft: Runner, *, layers: int, longest: int, rows: int, seed: int = 0) -> None:
        """`rows`: tokens read in one forward, no more than a cache's tail holds."""
        self.target, self.draft = reached(target), draft
        self.layers, self.longest, self.rows = layers, longest, rows
        self._lengths = torch.Generator().manual_seed(seed)

    def fits(self, text: AnsweredPrompt) -> bool:
        """Whether both models can read a text, and there is a round in it."""
        most, known = (
            min(getattr(one, name) for one in (self.target, self.draft)) for name in ("context_length", "vocabulary")
        )
        ids = (*text.prompt, *text.answer)
        return len(text.answer) > 1 and len(ids) <= most and max(ids) < known

    def shown(self, text: AnsweredPrompt) -> Tensor:
        """Have the target read a text; returns the hidden states that led to each token of the answer [tokens,
        layers·hidden]."""
        return states_along(self.target, text.prompt, text.answer, self.layers, self.rows)

    @torch.inference_mode()
    def rounds(self, text: AnsweredPrompt, number: int, shown: Tensor | None = None) -> LabelledRounds:
        """Read off the rounds of a text, for one draft length that is drawn for it: what a round begins behind depends
        on the length.

        `shown` is what the target showed of it, if that was asked before.
        """
        length = int(torch.randint(1, self.longest + 1, (1,), generator=self._lengths))
        said = self._said(text)
        starts = list(walk(said.agreed, length, self.longest))
        taken, left, before = torch.tensor([(start.taken, start.left, start.before) for start in starts]).T
        confidence, entropy = (
            torch.tensor([_upto(values, start, self.longest) for start in starts])
            for values in (said.confidence, said.entropy)
        )
        same = torch.full_like(taken, number), torch.full_like(taken, text.task)
        shown = self.shown(text) if shown is None else shown
        return LabelledRounds(self._features(text, starts, shown), taken, left, before, confidence, entropy, *same)

    def _said(self, text: AnsweredPrompt) -> Said:
        said = list(chain.from_iterable(read(self.draft, text.prompt, text.answer[:-1], self._proposals, self.rows)))
        agreed = [top.tokens[0] == token for (top, _), token in zip(said, text.answer[1:], strict=True)]
        # the first token is the target's own
        return Said(
            [True, *agreed],
            [1.0, *(top.confidence for top, _ in said)],
            [1.0, *(bound.confidence for _, bound in said)],
        )

    def _proposals(self, feed: Feed) -> list[tuple[Proposal, Proposal]]:
        """Have the draft read some tokens; returns what it proposes after each, by both measures of its confidence."""
        nodes = range(len(feed.tokens))
        top = self.draft.propose([feed], [Ask(ROOT, node) for node in nodes])
        return list(
            zip(top, self.draft.propose([], [Ask(ROOT, node, measure="entropy") for node in nodes]), strict=True)
        )

    def _features(self, text: AnsweredPrompt, starts: Sequence[Start], shown: Tensor) -> Tensor:
        """What the network reads at each start: what led to its token."""
        at = [start.at for start in starts]
        found = features(shown[at], [text.answer[n] for n in at], self.target)
        return found.clamp(-MOST_FLOAT16, MOST_FLOAT16).to(torch.float16)


@torch.inference_mode()
def states_along(target: Transparent, prompt: Sequence[int], answer: Sequence[int], layers: int, most: int) -> Tensor:
    """Have a target read a text, `most` tokens at a time; returns the hidden states that led to each token of the
    answer."""
    behind = (prompt[-1], *answer[:-1])
    return torch.cat(list(read(target, prompt[:-1], behind, lambda feed: target.show([feed], layers), most)))


def _upto(values: Sequence[float], start: Start, longest: int) -> list[float]:
    """What was said from behind a start up to the first wrong token, filled up with 0."""
    end = min(start.at + 1 + min(start.taken + 1, longest), len(values))
    found = list(values[start.at + 1 : end])
    return found + [0.0] * (longest - len(found))
