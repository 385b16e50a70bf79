"""Prompt lookup: propose what followed the latest earlier occurrence of the text's last n-gram. No draft model.

Owns an index over one growing token list. Invariant: the index never holds the n-gram that ends the list, so every
match is a real earlier occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Protocol

from specbranch.core.trees import MATCHES

LONGEST_MATCH = MATCHES[-1]  # tokens of a match that are counted: the longest class begins here


class Lookup(Protocol):
    """Proposes tokens without a draft."""

    def find(self, length: int, behind: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
        """Return the length of a match, and at most `length` tokens that may follow; see `Ngrams.find`."""
        ...


class Ngrams:
    """Maps each n-gram of the list to the position behind its latest occurrence."""

    def __init__(self, tokens: Sequence[int], longest: int, shortest: int = 1) -> None:
        self._tokens = tokens
        self._sizes = range(longest, shortest - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def propose(self, length: int) -> tuple[int, ...]:
        """Return `length` tokens that followed the longest known suffix; empty if none is known."""
        return self.find(length)[1]

    def find(self, length: int, behind: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
        """Find the latest earlier occurrence of the longest known suffix.

        Returns the length of the match in tokens, and the `length` tokens that followed it; (0, ()) if there is none.
        If the list ends sooner, the tokens repeat in a cycle: text that repeats itself does so for long. `behind`:
        tokens that are about to be appended to the list.
        """
        first = max(min(self._seen + 1, len(self._tokens)) - self._sizes.start, 0)
        lately = (*self._tokens[first:], *behind)
        self._index(lately, first)
        for size in self._sizes:
            start = self._next.get(lately[-size:])
            if start is not None:
                known = (*self._tokens[start : start + length], *behind[max(start - len(self._tokens), 0) :])
                found = islice(cycle(known), length) if len(known) < length else known[:length]
                return self._matched(start, size, behind), tuple(found)
        return 0, ()

    def _matched(self, start: int, size: int, behind: tuple[int, ...]) -> int:
        """Return how many tokens before `start` equal those at the end; the first `size` are known to."""
        end = len(self._tokens) + len(behind)
        longest = min(LONGEST_MATCH, start)
        while size < longest and self._token(start - size - 1, behind) == self._token(end - size - 1, behind):
            size += 1
        return size

    def _token(self, at: int, behind: tuple[int, ...]) -> int:
        return self._tokens[at] if at < len(self._tokens) else behind[at - len(self._tokens)]

    def _index(self, lately: tuple[int, ...], first: int) -> None:
        """Index the new tokens of the list, and those about to be appended; `lately` has all tokens from `first` on."""
        length = first + len(lately)
        for end in range(self._seen + 1, length):
            for size in self._sizes:
                if size <= end:
                    self._next[lately[end - size - first : end - first]] = end
        self._seen = max(self._seen, length - 1)
