"""The messages between an executor and a draft worker in another process: token ids, confidences, a few probabilities.

Owns the classes; `exec/wire.py` writes and reads them by their type hints. Invariant: messages hold small values only,
never logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specbranch.core.draft_evaluation import DraftEvaluation
from specbranch.core.orders import Branch, Drafted, DraftOrder, Effort
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
    effort: Effort


@dataclass(frozen=True, slots=True)
class Served:
    """First message of a draft worker that serves on a network: its draft, and the digest of its vocabulary."""

    name: str
    identity: str  # a digest of the model's files
    device: str
    fingerprint: str  # of the vocabulary: equal where all ids mean the same
    vocabulary: int  # it drafts ids below this one


@dataclass(frozen=True, slots=True)
class TellTokens:
    """The target's vocabulary has another digest; it wants to compare the tokens."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The draft's vocabulary: its size, and the token of each id."""

    size: int
    tokens: dict[int, str]


@dataclass(frozen=True, slots=True)
class TellEvaluation:
    """The target wants to know how often a target chose the draft's candidates."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The draft's evaluation, without positions if there is none; `edges` are the borders between its classes."""

    evaluation: DraftEvaluation
    edges: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """A target wants drafts, of ids below `vocabulary`; the worker answers Ready, or Broken."""

    vocabulary: int


WireMessage = (
    Hello
    | Open
    | Leave
    | Work
    | TargetDone
    | Enough
    | Ready
    | Broken
    | HeadsDrawn
    | StaleHolding
    | RoundDrafted
    | Served
    | TellTokens
    | Tokens
    | TellEvaluation
    | Evaluated
    | Join
)
