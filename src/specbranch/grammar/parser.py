"""A parser over tokens on llguidance, which computes the masks.

Owns the calls into that library. Does not own states and forks (`core/grammar.py`), or what is compiled
(`grammar/compiler.py`). Invariant: the mask depends on the tokens alone, not on what was consumed and rolled back
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbranch.errors import BadParameter


class GuidanceParser:
    """Parses one answer by a copy of a compiled grammar."""

    def __init__(self, compiled: Any, end_tokens: Sequence[int]) -> None:
        """`compiled`: a matcher (`llguidance.LLMatcher`) that has consumed nothing; `end_tokens`: those it knows."""
        self._compiled, self._end_tokens = compiled, tuple(end_tokens)
        self._matcher = compiled.deep_copy()
        self._tokens: list[int] = []

    def consume(self, token: int) -> None:
        """Go on behind a token that the mask has."""
        if not self._matcher.consume_token(token):
            reason = self._matcher.get_error().partition("\n")[0]
            self._restart()
            raise BadParameter(f"The grammar cannot be followed behind this answer ({reason}). Make it simpler.")
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        del self._tokens[len(self._tokens) - count :]
        if not self._matcher.rollback(count):
            self._restart()

    def mask(self) -> bytes:
        """Return the packed bits of the tokens that may follow; none where the grammar is too complex to say."""
        found = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            self._restart()
            return bytes(len(found))
        for token in self._end_tokens:
            found[token // 8] &= ~(1 << token % 8) & 255
        return bytes(found)

    def accepts(self) -> bool:
        """True if the answer may end here."""
        return bool(self._matcher.is_accepting())

    def _restart(self) -> None:
        """Make the matcher anew: once it has failed, it stays so."""
        self._matcher = self._compiled.deep_copy()
        self._matcher.consume_tokens(self._tokens)
