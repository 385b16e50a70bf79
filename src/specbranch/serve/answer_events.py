"""The events of a streamed answer: made when the client can take them, of all tokens that are there then.

Owns the text of events and who of several samples has news. It does not own the request (`answering.py`) or how events
are written (`events.py`). Invariant: a stream has the text of the whole answer, however its tokens fall into events.

An event with new text differs from the last one in that text alone. So the JSON around it is written once for each
choice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from functools import partial
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import BaseModel

from specbranch.answer import Chunk, Output
from specbranch.errors import SpecBranchError
from specbranch.serve.errors import ApiError, of_engine
from specbranch.serve.events import DONE, event
from specbranch.serve.protocol import Reason, StreamOptions
from specbranch.serve.usage import answer_metrics, usage_so_far

if TYPE_CHECKING:
    from specbranch.serve.answering import Answering, PromptScores

log = logging.getLogger("specbranch.serve")
_TEXT = "specbranch-new-text"  # stands for an event's text in a template
_NO_LOGPROBS = b'"logprobs":null'


class New(NamedTuple):
    """What is new of one choice."""

    text: str
    logprobs: BaseModel | None = None
    choice: BaseModel | None = None  # set for what is no text, such as a tool call: this is sent instead


class AnswerEvents:
    """The events of one request, with one or more choices."""

    _done = DONE  # behind the last event

    def __init__(self, answering: Answering, scores: PromptScores) -> None:
        """Start with the openings of all choices. Without submissions, that and the ends are all."""
        self._answering, self._form = answering, answering.form
        self._options = answering.prepared.stream or StreamOptions()
        self._templates: dict[int, tuple[bytes, bytes]] = {}  # by choice: the JSON before and after its new text
        self._running = set(range(len(answering.submissions)))  # choices that are not finished
        self._news: list[int] = []  # of them: those that have something to take
        self.on_news: Callable[[], None] | None = None  # called when there is something to take
        self._heard: dict[int, float] = {}  # the time of each choice's latest chunk
        self._waiting: list[bytes] = []  # events that were not taken yet
        self._ended = False  # the last event was made
        for index in range(answering.prepared.choices):
            if (opening := self._form.opening(index, scores)) is not None:
                self._waiting.append(self._event(opening))
        if not self._running:
            self._waiting += [
                self._event(self._form.end(index, "length")) for index in range(answering.prepared.choices)
            ]

    @classmethod
    async def begun(cls, answering: Answering) -> Self:
        """Wait for the first chunk. Until then, an error is raised: it still becomes an HTTP status."""
        made, news = cls(answering, await answering.scores()), asyncio.Event()
        made.on_news = news.set
        for index, submission in enumerate(answering.submissions):
            submission.subscribe(partial(made._hear, index))
        first: Chunk | None = None
        while made._running and first is None:
            if not made._news:
                news.clear()
                await news.wait()
            index = made._news.pop(0)
            first = answering.submissions[index].take()
        if first is not None:
            if first.output is not None and first.output.error is not None and not first.pieces:
                raise first.output.error
            made._guard(partial(made._add, index, first))
        return made

    @property
    def is_over(self) -> bool:
        """True if the last event was taken."""
        return self._ended and not self._waiting

    def take(self) -> bytes:
        """Return all events that are there."""
        if not self._ended:
            self._guard(self._add_news)
        taken, self._waiting = b"".join(self._waiting), []
        return taken

    def _hear(self, index: int) -> None:
        self._news.append(index)
        if self.on_news is not None:
            self.on_news()

    def _guard(self, add: Callable[[], None]) -> None:
        """Add events. An error becomes the last one: it is too late for a status, which is sent already."""
        try:
            add()
            if self._running:
                return
            if self._options.include_usage:
                self._waiting.append(event(self._last()))
        except Exception as error:
            if not isinstance(error, SpecBranchError):
                facts = {"request_id": self._answering.id}
                log.error("A stream failed by a mistake of the program.", exc_info=error, extra={"facts": facts})
            self._waiting.append(self._failure(of_engine(error)))
        self._waiting.append(self._done)
        self._ended = True

    def _failure(self, error: ApiError) -> bytes:
        """Return an error as an event."""
        return event(json.dumps(error.noted(self._answering.note)))

    def _add_news(self) -> None:
        news, self._news = self._news, []
        for index in news:
            if (chunk := self._answering.submissions[index].take()) is not None:
                self._add(index, chunk)

    def _add(self, index: int, chunk: Chunk) -> None:
        """Add the events of new tokens, and of a choice's end."""
        self._answering.said += len(chunk.pieces)
        now = time.monotonic()
        if index in self._heard:
            self._answering.serving.metrics.chunk(now - self._heard[index])
        self._heard[index] = now
        if chunk.pieces:
            self._waiting += [self._part(index, new) for new in self._form.news(index, chunk.pieces)]
        if chunk.rest:
            self._waiting += [self._part(index, new) for new in self._form.rest(index, chunk.rest)]
        if chunk.output is not None:
            self._answering.finish(index, chunk.output)
            self._running.discard(index)
            self._waiting += [self._part(index, new) for new in self._form.held_back(index)]
            self._waiting.append(self._event(self._form.end(index, reason_of(chunk.output))))

    def _part(self, index: int, new: New) -> bytes:
        """Return what is new as an event."""
        if new.choice is not None:
            return self._event(new.choice)
        if self._options.continuous_usage_stats:  # then each event has other numbers
            return self._event(self._form.part(index, new))
        if index not in self._templates:
            whole = self._event(self._form.part(index, New(_TEXT)))
            before, _, after = whole.rpartition(encode_basestring(_TEXT).encode())
            self._templates[index] = before, after
        before, after = self._templates[index]
        if new.logprobs is not None:
            after = after.replace(
                _NO_LOGPROBS, b'"logprobs":' + new.logprobs.model_dump_json(exclude_unset=True).encode(), 1
            )
        return before + encode_basestring(new.text).encode() + after

    def _event(self, choice: BaseModel) -> bytes:
        fields: dict[str, Any] = {}
        if self._options.continuous_usage_stats:
            fields["usage"] = usage_so_far(self._answering.prepared.prompts, self._answering.said)
        elif self._options.include_usage:
            fields["usage"] = None
        return event(self._dumped([choice], **fields))

    def _last(self) -> str:
        """Return the event with usage and metrics."""
        answering = self._answering
        return self._dumped([], usage=answering.usage(), metrics=answer_metrics(answering.outputs))

    def _dumped(self, choices: list[BaseModel], **fields: Any) -> str:
        kind = f"{self._form.name}.chunk"
        return self._answering.envelope(choices, kind, **fields).model_dump_json(exclude_unset=True)


def reason_of(output: Output) -> Reason:
    """Return the finish reason of an answer without an error."""
    return "stop" if output.finish_reason == "stop" else "length"
