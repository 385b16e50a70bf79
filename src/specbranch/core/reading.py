"""What a draft with another vocabulary has read of a text, and the protocol that translates between two vocabularies.

Owns the values that cross from `text/` to `models/`; no behaviour. Invariant: all but the open end of a reading is
settled: further text never changes these ids, so the draft may commit them to its KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Reading(NamedTuple):
    """A text in the draft's ids, behind those that its KV cache has committed."""

    ids: tuple[int, ...] = ()
    settled: int = 0  # how many of these further text cannot change
    open: bytes = b""  # the text of the others, which is tokenised anew with the text that follows
    fresh: bool = False  # no text yet, at most special tokens

    def behind(self, count: int) -> Reading:
        """Return the same reading once `count` of the settled ids are committed."""
        return Reading(self.ids[count:], self.settled - count, self.open, self.fresh)


NOTHING_READ = Reading()


class Translates(Protocol):
    """Translates between the ids of a target and those of a draft."""

    @property
    def vocabulary(self) -> int:
        """How many ids the target has."""
        ...

    @property
    def start(self) -> Reading:
        """What the draft has read before the first token."""
        ...

    @property
    def first_ids(self) -> Sequence[int]:
        """The target's first token for each draft id; −1: the target cannot say it."""
        ...

    def read(self, reading: Reading, token: int) -> Reading:
        """Return what the draft has read behind one more token of the target."""
        ...

    def same(self, token: int) -> int | None:
        """Return the draft's id of the same string; None: it has none."""
        ...

    def first_of(self, ids: Sequence[int]) -> tuple[int, bool] | None:
        """Return the target's first token of the text of draft ids, and True if it is all of that text.

        None: the target cannot say it.
        """
        ...

    def longer(self, draft_id: int) -> Sequence[int]:
        """Return the draft ids whose strings begin with that of `draft_id` and go on."""
        ...

    def first_after(self, longer: int, draft_id: int) -> int | None:
        """Return the target's first token of what `longer` has beyond `draft_id`; None: the target cannot say it."""
        ...
