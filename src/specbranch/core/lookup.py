"""Prompt lookup: propose what followed the last occurrence of the current n-gram in the text itself. No draft model.

Owns an index over one growing token list. Invariant: the index never holds the n-gram that ends the list, so a find is
always a real earlier occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence


class Ngrams:
    """For each n-gram of the list, where the text after its latest occurrence starts."""

    def __init__(self, tokens: Sequence[int], longest: int, shortest: int = 1) -> None:
        self._tokens = tokens
        self._sizes = range(longest, shortest - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def propose(self, length: int) -> tuple[int, ...]:
        """Return up to `length` tokens that followed the longest known suffix; empty if none is known."""
        return self.find(length)[1]

    def find(self, length: int) -> tuple[int, tuple[int, ...]]:
        """Return how long the longest known suffix is, and up to `length` tokens that followed it."""
        self._index()
        for size in self._sizes:
            start = self._next.get(tuple(self._tokens[-size:]))
            if start is not None:
                return size, tuple(self._tokens[start : start + length])
        return 0, ()

    def _index(self) -> None:
        for end in range(self._seen + 1, len(self._tokens)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(self._tokens[end - size : end])] = end
        self._seen = max(self._seen, len(self._tokens) - 1)
