"""Protocols between the decoding methods and the models: a Runner (model and cache), a Sampler (rows to tokens), a Law (a row of p).

Owns no behaviour. Invariant: rows stay where they were made; only token ids, confidences and a few probabilities come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from specbranch.config import HeadKind
from specbranch.core.orders import Measure, Signal, Sparse, TokenLogprobs
from specbranch.core.request import Spot
from specbranch.core.slots import Slots

Row = Any  # one row of logits, in whatever form its Runner and Sampler agree on
ENTROPY_WEIGHT = 0.2  # AdaEDL's γ in the bound 1 − sqrt(γ·H)
MOST_ENTRIES = 64  # of a proposal law: any q is exact, and few entries are cheap to send


class Feed(NamedTuple):
    """New nodes for one sequence, each with its parent (see Slots.grow)."""

    seq: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


class Runner(Protocol):
    """One model and its cache for several sequences; it knows nothing of speculation."""

    @property
    def vocabulary(self) -> int:
        """How many token ids the model scores."""
        ...

    @property
    def context_length(self) -> int:
        """How many tokens one sequence may hold."""
        ...

    def open(self, seq: int) -> None:
        """Make room for a new, empty sequence."""
        ...

    def slots(self, seq: int) -> Slots:
        """The sequence's places, to be read; only this Runner changes them."""
        ...

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Append tokens to the committed prefix, in chunks, without making rows. The tail must be empty."""
        ...

    def feed(self, work: Sequence[Feed]) -> list[list[Row]]:
        """Score new nodes of several sequences in one forward; one row a node, valid until its node is dropped."""
        ...

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail, the first `commit` of them, a line, as prefix; drop the rest (see Slots.keep)."""
        ...

    def rewind(self, seq: int, length: int) -> None:
        """Forget the tail, and the prefix beyond its first `length` tokens."""
        ...

    def close(self, seq: int) -> None:
        """Forget the sequence and free its places."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """How a draft row is to be turned into proposals."""

    width: int = 1
    heads: HeadKind = "sampled"  # ratio: is the first proposal drawn from q, or are all the top ones? (match: the same)
    measure: Measure = "top"


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates for one position, best first, with the draft's confidence there and, if the first was drawn, its law.

    `odds` tells how likely each candidate is beside the best one, by the draft's own scores; nothing: it was not said.
    """

    tokens: tuple[int, ...]
    confidence: float
    q: Sparse | None = None
    odds: tuple[float, ...] = ()


class Law(Protocol):
    """The target's shaped distribution at one row."""

    def prob(self, token: int) -> float:
        """Return p(token)."""
        ...

    def draw(self, u: float) -> int:
        """Draw by inversion with one uniform variate."""
        ...

    def residual(self, q: Sparse) -> Law:
        """Return norm((p − q)+); where nothing remains, p itself (only rounding leads there)."""
        ...


class Forecaster(Protocol):
    """Foretells from a target's row what becomes of the next draft."""

    def attend(self, wanted: bool) -> None:
        """Have the rows of the next forward carry what it reads, or spare them that."""
        ...

    def signal(self, row: Row, token: int) -> Signal | None:
        """What becomes of a draft behind `token`, which came of this row; nothing if that cannot be told."""
        ...


class Sampler(Protocol):
    """Turns rows into tokens; temperature, filters, penalties and noise live here, the same for target and draft."""

    def pick(self, rows: Sequence[Row], spots: Sequence[Spot]) -> list[int]:
        """Return the model's own token at each row: argmax(log p + noise), ties to the lowest id."""
        ...

    def propose(self, rows: Sequence[Row], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Return candidates for each row."""
        ...

    def law(self, row: Row, spot: Spot) -> Law:
        """Return the shaped distribution at a row."""
        ...

    def margin(self, row: Row, spot: Spot, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second`, noise and shaping included."""
        ...

    def logprobs(self, row: Row, token: int, top: int) -> TokenLogprobs:
        """Return the log-probability of `token` and of the `top` most likely, before any shaping."""
        ...
