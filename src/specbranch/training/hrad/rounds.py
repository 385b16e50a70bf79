"""Labelled rounds: where rounds of speculative decoding begin in a target's text, and how much of a draft would have
been taken at each.

Owns the walk and the labels. A greedy text and a draft's first choices along it hold every round a fixed-length method
would make: from a token of the target's the draft is right for a run of tokens, and the next round begins behind the
first wrong one. So rounds are read off a text at once instead of being decoded one by one; nothing is trimmed or
stopped, so a run is cut short only by the text's own end.
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
    """Where a round begins: at the token of an answer with this number, which the target chose."""

    at: int
    taken: int  # tokens of the draft behind it that are right, one after the other, as far as looked at
    left: int  # tokens of the answer behind it
    before: int  # tokens taken in the round before; UNKNOWN_LABEL: there was none


def walk(agreed: Sequence[bool], length: int, longest: int) -> Iterator[Start]:
    """Walk through an answer by rounds of `length` drafted tokens; `agreed[i]`: the draft's first choice is its token
    i. Runs are told up to `longest`."""
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
    """Rounds of many texts, one after the other; the first dimension of everything is theirs."""

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
        """How far runs were looked at."""
        return self.confidence.shape[1]

    def where(self, chosen: Tensor) -> Self:
        """Return some of the rounds."""
        return type(self)(*(getattr(self, one.name)[chosen] for one in fields(self)))

    def to(self, device: torch.device) -> Self:
        """Bring everything to a device."""
        return type(self)(*(getattr(self, one.name).to(device) for one in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Put several together, in order."""
        return cls(*(torch.cat([getattr(part, one.name) for part in parts]) for one in fields(cls)))

    def labels(self) -> Tensor:
        """The class of each round for each draft length [rounds, longest]; UNKNOWN_LABEL where the text ends before
        that is decided."""
        lengths = torch.arange(1, self.longest + 1, device=self.taken.device)
        taken, left = self.taken[:, None], self.left[:, None]
        found = torch.where(taken >= lengths, ALL, torch.where(taken == 0, NONE, SOME))
        undecided = (taken >= left) & (lengths > left)  # right up to the text's end
        return found.masked_fill(undecided, UNKNOWN_LABEL)


def outcomes(rounds: LabelledRounds) -> tuple[Tensor, Tensor]:
    """Which places of a draft are judged at all, and where the token was taken, each [rounds, longest]."""
    place = torch.arange(rounds.longest, device=rounds.taken.device)
    true = place < rounds.taken[:, None]
    seen = (place <= rounds.taken[:, None]) & (place < rounds.left[:, None])
    return seen, true
