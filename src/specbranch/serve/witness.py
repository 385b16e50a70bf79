"""What the page shows of a request: its rounds as frames, its tokens, its result."""

from __future__ import annotations

from collections import deque
from typing import Any

from specbranch.answer import Chunk, Output
from specbranch.serve.frames import Film, Frame

LiveEvent = dict[str, Any]  # one event that the page reads


class Witness:
    """The rounds of a request as frames: the engine's thread notes rounds, the server's thread makes frames."""

    def __init__(self) -> None:
        self._rounds: deque[Any] = deque()
        self._film = Film()

    def note(self, *watched: Any) -> None:
        """Note a round."""
        self._rounds.append(watched)

    def take(self) -> list[Frame]:
        """Return the frames of all rounds since the last call."""
        noted = [self._rounds.popleft() for _ in range(len(self._rounds))]
        return [frame for watched in noted if (frame := self._film.see(*watched)) is not None]


def pieces(chunk: Chunk) -> list[list[str]]:
    """Return the tokens of a chunk as text, each with its origin; then text that earlier tokens held back."""
    rest = [[chunk.rest, chunk.output.pieces[-1].origin]] if chunk.output and chunk.rest else []
    return [[piece.text, piece.origin] for piece in chunk.pieces] + rest


def finished(output: Output | None) -> LiveEvent | None:
    """Return the statistics of a finished answer."""
    if output is None:
        return None
    if output.error is not None:
        return {"error": str(output.error)}
    names = ("tokens", "tokens_per_second", "tokens_per_forward", "target_forwards", "drafted", "accepted")
    return {
        "method": output.method,
        "finish_reason": output.finish_reason,
        "text": output.text,
        **{
            name: output.stats.get(name)
            for name in (*names, "branch_hits", "branch_hit_rate", "rollback", "ttft_seconds", "arms")
        },
    }
