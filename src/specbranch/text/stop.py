"""Stop strings: checks the text as tokens are appended, and holds back text that may be the beginning of one.

Owns the text of one answer. Invariant: the answer ends at the first token after which its text contains a stop string.
It is cut before the earliest one. Text that was returned is never withdrawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.text.detokenizer import Detokenizer


class StopStrings:
    """Ends a text where one of `stops` is completed, from the `min_tokens`-th token on."""

    def __init__(self, stops: Sequence[str], detokenizer: Detokenizer, min_tokens: int = 0) -> None:
        self._stops = tuple(stops)
        self._detokenizer = detokenizer
        self._min_tokens = min_tokens
        self._tokens = 0
        self._settled: list[str] = []  # may be returned
        self._taken = 0  # entries of it that were
        self._held = ""  # final text that may be the beginning of a stop string
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._searched = 0  # characters that the detokenizer holds back and that were searched without success
        self.matched: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        """True if a stop string was completed."""
        return self.matched is not None

    @property
    def text(self) -> str:
        """The text so far, cut before the stop string; a character still unfinished is not in it before `finish`."""
        return "".join(self._settled) + self._held

    def append(self, token: int) -> bool:
        """Append a token. Return True if it completes a stop string, and from then on."""
        if self.stopped:
            return True
        self._tokens += 1
        self._read(self._detokenizer.feed((token,)))
        return self.stopped

    def read(self, token: int) -> str:
        """Append a token; return the text that became final."""
        if not self._stops:  # then no text is held back here
            new = self._detokenizer.feed_one(token)
            self._settled.append(new)
            self._taken += 1
            return new
        self.append(token)
        return self.take()

    def take(self) -> str:
        """Return the text that became final since the last call."""
        new = "".join(self._settled[self._taken :])
        self._taken = len(self._settled)
        return new

    def finish(self) -> str:
        """End the text; return what was not taken before."""
        if not self.stopped:
            self._read(self._detokenizer.finish())
        self._settle(self._held, "")
        return self.take()

    def _read(self, new: str) -> None:
        fresh = self._held + new
        if new:
            self._searched = 0
        if self._stops and self._tokens >= self._min_tokens and (found := self._found(fresh)) is not None:
            at, self.matched = found
            self._settle((fresh + self._detokenizer.pending())[:at], "")
            return
        keep = self._beginning(fresh)
        self._settle(fresh[: len(fresh) - keep], fresh[len(fresh) - keep :])

    def _settle(self, text: str, held: str) -> None:
        if text:
            self._settled.append(text)
        self._held = held

    def _found(self, fresh: str) -> tuple[int, str] | None:
        """Search for a stop string in the final text and the text that the detokenizer holds back.

        A single byte token may complete one there. What was searched before is not searched again.
        """
        start = max(self._searched - self._longest + 1, 0)
        pending = self._detokenizer.pending(start)
        self._searched = max(self._searched, start + len(pending))
        if not start:
            return self._first(fresh + pending)
        found = self._first(pending)
        return None if found is None else (len(fresh) + start + found[0], found[1])

    def _first(self, text: str) -> tuple[int, str] | None:
        """Return the start of the earliest stop string, and which it is."""
        return min(((text.find(stop), stop) for stop in self._stops if stop in text), default=None)

    def _beginning(self, text: str) -> int:
        """Return how many characters at the end of `text` are the beginning of a stop string."""
        longest = min(len(text), self._longest - 1)
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
