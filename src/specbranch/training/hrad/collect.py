"""Collection of labelled rounds: the target's hidden states over its own text, and the draft's proposals along it.

Owns the forwards for this. It works on any Runner with accessible hidden states, and needs texts that the target wrote
greedily.
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
    """The draft's proposals along an answer, except its first token: whether its first choice is correct, and its
    confidence."""

    agreed: list[bool]
    confidence: list[float]
    entropy: list[float]


class Collector:
    """A target and a draft that process the same texts."""

    def __init__(self, target: Runner, draft: Runner, *, layers: int, longest: int, rows: int, seed: int = 0) -> None:
        """`rows` is the number of tokens per forward, at most what a KV cache's tail holds."""
        self.target, self.draft = reached(target), draft
        self.layers, self.longest, self.rows = layers, longest, rows
        self._lengths = torch.Generator().manual_seed(seed)

    def fits(self, text: AnsweredPrompt) -> bool:
        """True if both models can process a text, and it contains a round."""
        most, known = (
            min(getattr(one, name) for one in (self.target, self.draft)) for name in ("context_length", "vocabulary")
        )
        ids = (*text.prompt, *text.answer)
        return len(text.answer) > 1 and len(ids) <= most and max(ids) < known

    def shown(self, text: AnsweredPrompt) -> Tensor:
        """Run the target over a text; return the hidden states that led to each answer token [tokens,
        layers·hidden]."""
        return states_along(self.target, text.prompt, text.answer, self.layers, self.rows)

    @torch.inference_mode()
    def rounds(self, text: AnsweredPrompt, number: int, shown: Tensor | None = None) -> LabelledRounds:
        """Derive the rounds of a text for one random draft length, because the starts of rounds depend on it.
        `shown` passes known hidden states."""
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
        """Run the draft over some tokens; return its proposals after each, with both measures of confidence."""
        nodes = range(len(feed.tokens))
        top = self.draft.propose([feed], [Ask(ROOT, node) for node in nodes])
        return list(
            zip(top, self.draft.propose([], [Ask(ROOT, node, measure="entropy") for node in nodes]), strict=True)
        )

    def _features(self, text: AnsweredPrompt, starts: Sequence[Start], shown: Tensor) -> Tensor:
        """Return the network's inputs at each start: the hidden states that led to its token."""
        at = [start.at for start in starts]
        found = features(shown[at], [text.answer[n] for n in at], self.target)
        return found.clamp(-MOST_FLOAT16, MOST_FLOAT16).to(torch.float16)


@torch.inference_mode()
def states_along(target: Transparent, prompt: Sequence[int], answer: Sequence[int], layers: int, most: int) -> Tensor:
    """Run a target over a text, `most` tokens at a time; return the hidden states that led to each answer token."""
    behind = (prompt[-1], *answer[:-1])
    return torch.cat(list(read(target, prompt[:-1], behind, lambda feed: target.show([feed], layers), most)))


def _upto(values: Sequence[float], start: Start, longest: int) -> list[float]:
    """Return the values after a start up to the first wrong token, padded with 0."""
    end = min(start.at + 1 + min(start.taken + 1, longest), len(values))
    found = list(values[start.at + 1 : end])
    return found + [0.0] * (longest - len(found))
