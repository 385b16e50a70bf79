"""Labelled rounds: where rounds of speculative decoding start in a target's text, and how many draft tokens each would
accept.

Owns the walk and the labels. A greedy text and the draft's first choices along it contain every round of a fixed-length
method. From a token of the target, the draft is correct for a run of tokens; the next round starts after the first
wrong one. So rounds are derived from a text at once instead of being decoded. Drafts have full length, so only the end
of the text cuts a run short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from specbranch.core.forecast import ALL, NONE, SOME

UNKNOWN_LABEL = -1  # label of a draft that reaches beyond the text


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a round: the number of an answer token that the target chose."""

    at: int
    taken: int  # tokens of the draft behind it that are right, one after the other, as far as looked at
    left: int  # tokens of the answer behind it
    before: int  # tokens taken in the round before; UNKNOWN_LABEL: there was none


def walk(agreed: Sequence[bool], length: int, longest: int) -> Iterator[Start]:
    """Walk through an answer by rounds of `length` draft tokens; `agreed[i]` says that the draft's first choice is
    token i. Runs are counted up to `longest`."""
    at, before = 0, UNKNOWN_LABEL
    while at < len(agreed) - 1:
        run = _run(agreed, at + 1, longest)
        yield Start(at, run, len(agreed) - 1 - at, before)
        before = min(run, length)
        at += before + 1


def _run(agreed: Sequence[bool], first: int, most: int) -> int:
    end = min(first + most, len(agreed))
    return next((at for at in range(first, end) if not agreed[at]), end) - first


@dataclass(frozen=True, slots=True)
class LabelledRounds:
    """Rounds of many texts in sequence; they are the first dimension of every tensor."""

    features: Tensor  # [rounds, width]
    taken: Tensor  # int64, see Start
    left: Tensor
    before: Tensor
    confidence: Tensor  # float32 [rounds, longest], the draft's at each token up to the first wrong one; 0 beyond
    entropy: Tensor  # the same, of the bound by entropy
    text: Tensor  # int64, which text
    task: Tensor  # int64, of which kind the text is

    def __len__(self) -> int:
        return self.taken.numel()

    @property
    def longest(self) -> int:
        """The maximum counted length of a run."""
        return self.confidence.shape[1]

    def where(self, chosen: Tensor) -> Self:
        """Return some of the rounds."""
        return type(self)(*(getattr(self, one.name)[chosen] for one in fields(self)))

    def to(self, device: torch.device) -> Self:
        """Copy everything to a device."""
        return type(self)(*(getattr(self, one.name).to(device) for one in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate several, in order."""
        return cls(*(torch.cat([getattr(part, one.name) for part in parts]) for one in fields(cls)))

    def labels(self) -> Tensor:
        """Return the class of each round for each draft length [rounds, longest]; UNKNOWN_LABEL where the text ends too
        early."""
        lengths = torch.arange(1, self.longest + 1, device=self.taken.device)
        taken, left = self.taken[:, None], self.left[:, None]
        found = torch.where(taken >= lengths, ALL, torch.where(taken == 0, NONE, SOME))
        undecided = (taken >= left) & (lengths > left)  # right up to the text's end
        return found.masked_fill(undecided, UNKNOWN_LABEL)


def outcomes(rounds: LabelledRounds) -> tuple[Tensor, Tensor]:
    """Return which positions of a draft are verified, and where the token is accepted, each [rounds, longest]."""
    position = torch.arange(rounds.longest, device=rounds.taken.device)
    true = position < rounds.taken[:, None]
    seen = (position <= rounds.taken[:, None]) & (position < rounds.left[:, None])
    return seen, true
