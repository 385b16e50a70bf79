"""The steps of a drafting: a generator that says what it computes next, and never calls the model's forward itself.

Owns the values between a drafting and whoever takes its steps: `Drafter.draft` for one, `draft_batch` for several at
once. Invariant: between two steps nothing of a drafting is on its way, so it may end there, and others may join.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from specbranch.core.orders import Prefill
from specbranch.core.runner import Ask, Done, Feed
from specbranch.exec.worker import never


class Forward(NamedTuple):
    """Nodes to compute, and what to ask about them; the answer is a list of proposals.

    Without either: prefill that was put off is computed.
    """

    work: Sequence[Feed] = ()
    asks: Sequence[Ask] = ()

    @property
    def rows(self) -> int:
        """How many nodes it computes."""
        return sum([len(feed.tokens) for feed in self.work])


class Chunk(NamedTuple):
    """A part of a text to prefill; the answer is the number of tokens that the worker holds then."""

    session: int
    order: Prefill


Value = TypeVar("Value")
Drafting = Generator[Forward | Chunk, Any, Value]


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends lanes, and who else wants the model. Each is asked between two steps."""

    done: Done = never  # the target is done: lanes that draft only until then end
    enough: Done = never  # the target wants the answer: all lanes end
    shared: Done = never  # other targets are connected: long texts are prefilled in chunks
    crowded: Done = never  # other targets wait for a step: the model takes no several steps by itself


ALONE = Ends()
