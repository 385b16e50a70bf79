"""Reasoning at the start of an answer: <think> … </think>, also where the prompt has opened it already.

Owns this format. Invariant: all that is no reasoning is passed on unchanged, except for spaces at the boundary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from specbranch.text.tools.events import Thought
from specbranch.text.tools.reading import find_marker, starts_with


@dataclass(frozen=True, slots=True)
class ThinkMarkers:
    """What stands around reasoning."""

    opening: str
    closing: str

    def are_open(self, prompt: str) -> bool:
        """Return True if a prompt ends within reasoning."""
        return re.search(re.escape(self.opening) + r"\s*\Z", prompt) is not None


THINK = ThinkMarkers("<think>", "</think>")
BRACKETS = ThinkMarkers("[THINK]", "[/THINK]")  # of Mistral


class ReasoningParser:
    """Takes reasoning out of a text. It may come in several parts, one behind the other."""

    def __init__(self, markers: ThinkMarkers, is_open: bool) -> None:
        """`is_open`: the prompt ends within reasoning."""
        self._markers, self._phase = markers, self._inside if is_open else self._before
        self._held = ""
        self._trims = is_open  # spaces at the boundary are dropped
        self.thoughts: list[Thought] = []

    def feed(self, text: str) -> str:
        """Read more text; return what is no reasoning."""
        if self._phase == self._behind:
            return text
        self._held += text
        while True:
            before = self._phase, self._held
            passed = self._phase()
            if passed is not None:
                return passed
            if before == (self._phase, self._held):
                return ""

    @property
    def is_over(self) -> bool:
        """True if no more reasoning can follow."""
        return self._phase == self._behind

    def finish(self) -> str:
        """Return the rest that is no reasoning."""
        held, self._held = self._held, ""
        if self._phase == self._inside:
            self._think(held)
            return ""
        return held.lstrip() if self._trims else held

    def take(self) -> list[Thought]:
        """Return the reasoning since the last call of this."""
        taken, self.thoughts = self.thoughts, []
        return taken

    def _before(self) -> str | None:
        """Look for the opening marker at the start of the text."""
        found = self._held.lstrip()
        marker = starts_with(found, (self._markers.opening,))
        if marker == "":
            return None
        if marker is None:
            self._phase = self._behind
            passed, self._held = found if self._trims else self._held, ""
            return passed
        self._held, self._phase, self._trims = found.removeprefix(marker), self._inside, True
        return None

    def _inside(self) -> str | None:
        found = find_marker(self._held, (self._markers.closing,))
        thought = self._held[: found.at]
        if found.marker is None:
            thought = thought.rstrip()
            self._think(thought)
            self._held = self._held[len(thought) :]
            return None
        self._think(thought.rstrip())
        self._held = self._held[found.at + len(found.marker) :]
        self._phase = self._before
        self._trims = True
        return None

    def _behind(self) -> str | None:
        return None

    def _think(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
        if text:
            self._trims = False
            self.thoughts.append(Thought(text))


def reasoning_length(texts: Iterable[str], markers: ThinkMarkers, is_open: bool) -> int:
    """Return how many of an answer's tokens are reasoning, with its markers; `texts`: what each token says."""
    parser, count = ReasoningParser(markers, is_open), 0
    for text in texts:
        parser.feed(text)
        if parser.is_over:
            break
        count += 1
    parser.finish()
    return count if parser.thoughts else 0
