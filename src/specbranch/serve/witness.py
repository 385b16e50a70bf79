"""What the page is shown of a request: its rounds as frames, its words, what it did in the end."""

from __future__ import annotations

from collections import deque
from typing import Any

from specbranch.answer import Chunk, Output
from specbranch.serve.frames import Film, Frame

LiveEvent = dict[str, Any]  # one event that the page reads


class Witness:
    """The rounds of a request as frames: noted in the engine's thread, made and taken in the server's."""

    def __init__(self) -> None:
        self._rounds: deque[Any] = deque()
        self._film = Film()

    def note(self, *told: Any) -> None:
        """Note a round."""
        self._rounds.append(told)

    def take(self) -> list[Frame]:
        """Return the frames of all rounds since the last call."""
        noted = [self._rounds.popleft() for _ in range(len(self._rounds))]
        return [frame for told in noted if (frame := self._film.see(*told)) is not None]


def pieces(chunk: Chunk) -> list[list[str]]:
    """The words of a chunk, each with its origin."""
    return [[piece.text, piece.origin] for piece in chunk.pieces]


def finished(output: Output | None) -> LiveEvent | None:
    """What a finished answer did."""
    if output is None:
        return None
    if output.error is not None:
        return {"error": str(output.error)}
    names = ("tokens", "tokens_per_second", "tokens_per_forward", "target_forwards", "drafted", "accepted")
    return {
        "method": output.method,
        "finish_reason": output.finish_reason,
        "text": output.text,
        **{name: output.stats.get(name) for name in (*names, "branch_hits", "branch_hit_rate", "ttft_seconds")},
    }
