"""A replica's stream on its way to the client, and how it ends if the replica does.

Owns the last events of a stream whose replica has ended. Invariant: the client gets whole events only, and a stream
never ends without its last event: the replica's own, or an error object as OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specbranch.cluster.upstream import Upstream
from specbranch.serve.errors import SERVER, ApiError
from specbranch.serve.events import DONE, event

END_OF_EVENT = b"\n\n"
LOST = "The replica that wrote this answer has ended. Send the request again."
LOST_CODE = "replica_lost"


def lost() -> ApiError:
    """Build the error of an answer whose replica has ended."""
    return ApiError(500, LOST, SERVER, LOST_CODE)


class RelayedEvents:
    """The events of a replica's stream, for a client that takes them when it can."""

    def __init__(self, upstream: Upstream, path: str, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called if the replica ends before the stream does."""
        self._upstream, self._on_lost = upstream, on_lost
        self._ending = _TypedEnding() if path.startswith("/v1/responses") else _Ending(path)
        self._part = b""  # of an event that is not whole yet
        self.is_over = False
        self.on_news: Callable[[], None] | None = None
        upstream.on_news = self._tell

    def take(self) -> bytes:
        """Return all whole events that are there."""
        if self.is_over:
            return b""
        whole, end, self._part = (self._part + self._upstream.take()).rpartition(END_OF_EVENT)
        events = whole + end
        self._ending.see(events)
        if self._upstream.is_whole:
            self.is_over = True
        elif self._upstream.is_lost:
            self.is_over = True
            if not self._ending.is_seen:
                self._on_lost()
                return events + self._ending.made(lost())
        return events

    def _tell(self) -> None:
        if self.on_news is not None:
            self.on_news()


class _Ending:
    """The end of a stream of chunks."""

    def __init__(self, path: str) -> None:
        self._is_page = path.startswith("/v1/live")
        self.is_seen = False  # the replica wrote its last event

    def see(self, events: bytes) -> None:
        """Note events on their way."""
        self.is_seen = self.is_seen or events.endswith(DONE)

    def made(self, error: ApiError) -> bytes:
        """Return the last events."""
        body = {"error": str(error)} if self._is_page else error.body()
        return event(json.dumps(body)) + DONE


class _TypedEnding(_Ending):
    """The end of a stream of /v1/responses: numbered, and with the response as it began."""

    def __init__(self) -> None:
        super().__init__("")
        self._first = self._last = b""

    def see(self, events: bytes) -> None:
        """Keep the first event, which has the response, and the last one, which has the number."""
        if events:
            each = events.removesuffix(END_OF_EVENT).split(END_OF_EVENT)
            self._first, self._last = self._first or each[0], each[-1]
            self.is_seen = _kind(self._last) in ("response.completed", "response.incomplete", "response.failed")

    def made(self, error: ApiError) -> bytes:
        """Return the two events that end a response."""
        number, code = _data(self._last).get("sequence_number", -1) + 1, error.code
        failed = {**_data(self._first).get("response", {}), "status": "failed"}
        failed["error"] = {"code": code, "message": str(error)}
        first = {"sequence_number": number, "code": code, "message": str(error), "param": error.param}
        return _typed("error", first) + _typed("response.failed", {"sequence_number": number + 1, "response": failed})


def _kind(one: bytes) -> str:
    return one.partition(b"\n")[0].decode().removeprefix("event: ")


def _data(one: bytes) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(one.partition(b"data: ")[2] or b"{}")
    return data


def _typed(kind: str, body: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body}, ensure_ascii=False)}\n\n".encode()
