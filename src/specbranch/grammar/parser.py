"""A parser over tokens on llguidance, which computes the masks.

Owns the calls into that library. Does not own states and forks (`core/grammar.py`), or what is compiled
(`grammar/compiler.py`). Invariant: the mask depends on the tokens alone, not on what was consumed and rolled back
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NO_TOKEN_FITS = "NoExtensionBias"  # what the library says at a dead end


class GuidanceParser:
    """Parses one answer by a copy of a compiled grammar.

    Where the library gives up, because the grammar is too complex behind some tokens, nothing may follow them; other
    branches of the draft tree are not concerned.
    """

    def __init__(self, compiled: Any, end_tokens: Sequence[int], vocabulary: int) -> None:
        """`compiled`: a matcher (`llguidance.LLMatcher`) that has consumed nothing; `end_tokens`: those it knows."""
        self._compiled, self._end_tokens, self._vocabulary = compiled, tuple(end_tokens), vocabulary
        self._matcher = compiled.deep_copy()
        self._tokens: list[int] = []
        self._failed = False  # a matcher that has failed once stays so

    def consume(self, token: int) -> None:
        """Go on behind a token that the mask has."""
        self._tokens.append(token)
        self._failed = self._failed or not self._matcher.consume_token(token)

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        del self._tokens[len(self._tokens) - count :]
        if self._failed or not self._matcher.rollback(count):
            self._matcher = self._compiled.deep_copy()
            self._failed = bool(self._tokens) and not self._matcher.consume_tokens(self._tokens)

    def mask(self) -> bytes:
        """Return the packed bits of the tokens that may follow."""
        if self._failed:
            return b""
        found = bytearray(self._matcher.compute_bitmask())
        if self._has_failed():
            return b""
        for token in self._end_tokens:
            found[token // 8] &= ~(1 << token % 8) & 255
        return bytes(found)

    def allows(self, token: int) -> bool:
        """True if the mask has a token: of a forced text only its usual tokens, not any with the same bytes."""
        if self._failed or token in self._end_tokens or not 0 <= token < self._vocabulary:
            return False
        forced = self._matcher.compute_ff_tokens()
        found = forced[0] == token if forced else self._matcher.validate_tokens([token]) == 1
        return found and not self._has_failed()

    def forced(self) -> int | None:
        """Return the only token that the mask has; None: there are several."""
        forced = [] if self._failed else self._matcher.compute_ff_tokens()
        if not forced or forced[0] in self._end_tokens or self._has_failed():
            return None
        token: int = forced[0]
        return token

    def accepts(self) -> bool:
        """True if the answer may end here."""
        return not self._failed and bool(self._matcher.is_accepting())

    def _has_failed(self) -> bool:
        self._failed = self._failed or bool(self._matcher.is_error())
        return self._failed

    def failure(self) -> str:
        """Return why the library has given up here; empty if it has not."""
        self.mask()  # a matcher that was made anew has not computed it yet
        return complexity(self._matcher.get_error()) if self._failed else ""


def complexity(error: str) -> str:
    """Return what was too complex by an error of the library; empty for a dead end, of which it says so, too."""
    said = error.partition("\n")[0].strip().rstrip(".")
    return "" if said.startswith(NO_TOKEN_FITS) else said
