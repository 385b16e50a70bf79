"""The messages between an executor and a draft worker in another process: token ids, confidences, a few probabilities.

Owns the classes; `exec/wire.py` writes and reads them by their type hints. Invariant: messages hold small values only,
never logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specbranch.core.orders import Branch, Drafted, DraftOrder, Span
from specbranch.core.request import Request


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a child makes its worker: the name of a function, "module:name", and its arguments, in plain JSON values."""

    function: str
    given: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()  # the child imports these first: they register what the function looks up


@dataclass(frozen=True, slots=True)
class Hello:
    """First message to a child: where to import from, and how to make its worker."""

    path: tuple[str, ...]
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Open:
    """A session begins."""

    session: int
    request: Request


@dataclass(frozen=True, slots=True)
class Leave:
    """A session ends."""

    session: int


@dataclass(frozen=True, slots=True)
class Work:
    """Draft for these sessions. `ticket` numbers the rounds."""

    ticket: int
    orders: dict[int, DraftOrder]


@dataclass(frozen=True, slots=True)
class TargetDone:
    """The target has finished the round; lanes that draft only until then end."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Enough:
    """The round waits no longer: all lanes end after the present step, and the child answers with what it has."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The child's model is loaded."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The child could not make its worker, or failed while drafting; a sentence says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class HeadsDrawn:
    """The sessions' first heads; sent early, because the target judges a sampled head with its own row."""

    ticket: int
    heads: dict[int, Branch]


@dataclass(frozen=True, slots=True)
class StaleHolding:
    """The child holds less of these sessions than their orders presume, and has drafted nothing; send them whole."""

    ticket: int
    sessions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundDrafted:
    """All that was drafted in a round."""

    ticket: int
    made: dict[int, Drafted]
    span: Span


WireMessage = (
    Hello | Open | Leave | Work | TargetDone | Enough | Ready | Broken | HeadsDrawn | StaleHolding | RoundDrafted
)
