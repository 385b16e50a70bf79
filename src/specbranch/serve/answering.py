"""A request's way through the engine: admitted, submitted, answered whole or as a stream.

Owns the submissions of one request. It does not own what an answer looks like: its `Form` does. Invariant: however a
request ends, its submissions are cancelled and it is counted out. A stream has the text of the whole answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from specbranch import __version__
from specbranch.answer import Chunk, Output, Piece
from specbranch.async_engine import RequestOptions, Submission
from specbranch.config import SamplingParams
from specbranch.core.orders import TokenLogprobs
from specbranch.errors import DeadlinePassed, SpecBranchError
from specbranch.serve.errors import of_engine
from specbranch.serve.events import DONE, GONE, ClientGone, EventStream, event, unless_gone
from specbranch.serve.limits import Admitted
from specbranch.serve.notes import RequestNote, note_of
from specbranch.serve.protocol import Envelope, Reason, StreamOptions, Usage
from specbranch.serve.serving import Serving, serving_of
from specbranch.serve.usage import answer_metrics, usage, usage_so_far

log = logging.getLogger("specbranch.serve")
LEAST_SECONDS = 1e-3  # the least deadline: a request that is late already gets its error from the engine
PromptScores = list[tuple[TokenLogprobs, ...]]  # of each prompt


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in the form that the engine takes."""

    prompts: list[list[int]]
    params: SamplingParams
    options: RequestOptions
    stream: StreamOptions | None = None  # None: it is answered as a whole
    scored: int | None = None  # top tokens to report at each position of the prompts; None: no scores of prompts
    generates: bool = True  # False: only the prompts are scored

    @property
    def choices(self) -> int:
        """The number of answers: n for each prompt."""
        return len(self.prompts) * self.params.n


class Form(Protocol):
    """What answers look like: each makes choices of its own kind, by their numbers."""

    name: str  # of what it makes
    prefix: str  # of their ids

    def opening(self, index: int, scores: PromptScores) -> BaseModel | None:
        """Return what a stream starts with, before any text; None for nothing."""
        ...

    def part(self, index: int, pieces: Sequence[Piece]) -> BaseModel | None:
        """Return new text as a choice; None if there is nothing to send."""
        ...

    def end(self, index: int, reason: Reason) -> BaseModel:
        """Return the last choice of a stream."""
        ...

    def whole(self, index: int, output: Output | None, scores: PromptScores) -> BaseModel:
        """Return the whole answer as a choice. Without an output there is only the prompt."""
        ...

    def envelope(self, **values: Any) -> Envelope:
        """Return the object that choices are sent in."""
        ...


Work = Callable[[], tuple[Prepared, Form]]  # turns a body into tokens, which takes long


async def respond(request: Request, samples: int, within: float, work: Work) -> Response:
    """Answer a request of `samples` samples within `within` seconds. It is counted before its prompt is tokenised."""
    serving, note = serving_of(request), note_of(request.scope)
    admitted = serving.limits.admit(note.key, samples)
    try:
        return await unless_gone(request.receive, _started(serving, note, admitted, within, work))
    except BaseException as error:
        admitted.leave()
        if isinstance(error, ClientGone):
            return Response(status_code=GONE)
        raise


async def _started(serving: Serving, note: RequestNote, admitted: Admitted, within: float, work: Work) -> Response:
    """Return the whole answer, or a stream once its first part is there."""
    try:
        async with asyncio.timeout(within):
            prepared, form = await serving.tokenizing.do(note.body_bytes, work)
    except TimeoutError:
        raise DeadlinePassed(f"The request was not finished within {within:g} s: it waited for others.") from None
    left = within - (time.monotonic() - admitted.since)
    answering = Answering(serving, prepared, form, note, admitted, max(left, LEAST_SECONDS))
    serving.metrics.asked(prepared.params.n)
    try:
        answering.submit()
        if prepared.stream is not None:
            return EventStream(answering.events(*await answering.begin()), answering.close)
        response = await answering.whole()
    except BaseException:
        answering.close()
        raise
    answering.close()
    return response


@dataclass(slots=True)
class Answering:
    """One running request."""

    serving: Serving
    prepared: Prepared
    form: Form
    note: RequestNote
    admitted: Admitted
    deadline: float  # seconds from now
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))
    submissions: list[Submission] = field(default_factory=list)
    outputs: dict[int, Output] = field(default_factory=dict)
    said: int = 0  # tokens so far
    heard: dict[int, float] = field(default_factory=dict)  # the time of each answer's latest chunk

    def submit(self) -> None:
        """Send everything to the engine."""
        asked = self.prepared
        for prompt in asked.prompts if asked.generates else ():
            options, streams = replace(asked.options, deadline=self.deadline), asked.stream is not None
            self.submissions += self.serving.engine.submit_each(prompt, asked.params, options, streams=streams)

    def close(self) -> None:
        """Cancel what still runs, count the request out, and note facts for the log."""
        for submission in self.submissions:
            submission.cancel()
        self.admitted.leave()
        facts = self.note.facts
        facts["prompt_tokens"] = sum(map(len, self.prepared.prompts))
        facts["completion_tokens"] = max(self.said, sum(len(one.token_ids) for one in self.outputs.values()))
        facts["finish_reasons"] = sorted({str(one.finish_reason) for one in self.outputs.values()})
        if self.prepared.stream:
            facts["streamed"] = True
        if self.serving.settings.log_text:
            facts["prompts"] = [self.serving.engine.tokenizer.decode(one, False) for one in self.prepared.prompts]
            facts["answers"] = [one.text for one in self.outputs.values()]

    async def whole(self) -> Response:
        """Return the whole answer."""
        scores = await self._scores()
        for index, submission in enumerate(self.submissions):
            self._note(index, await submission.output())
        choices = [self.form.whole(index, self.outputs.get(index), scores) for index in range(self.prepared.choices)]
        answer = self._envelope(choices, self.form.name, usage=self._usage(), metrics=answer_metrics(self.outputs))
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    async def begin(self) -> tuple[PromptScores, list[tuple[int, Chunk]], AsyncIterator[tuple[int, Chunk]]]:
        """Wait for the first chunk. Until then, an error still becomes an HTTP status."""
        scores, chunks = await self._scores(), merged(self.submissions)
        first = [await anext(chunks)] if self.submissions else []
        for _, chunk in first:
            if chunk.output is not None and chunk.output.error is not None and not chunk.pieces:
                raise chunk.output.error
        return scores, first, chunks

    async def events(
        self, scores: PromptScores, first: list[tuple[int, Chunk]], rest: AsyncIterator[tuple[int, Chunk]]
    ) -> AsyncGenerator[bytes, None]:
        """Yield all events of a stream."""
        for index in range(self.prepared.choices):
            if (opening := self.form.opening(index, scores)) is not None:
                yield self._event(opening)
        try:
            async for index, chunk in _chained(first, rest):
                for choice in self._choices(index, chunk):
                    yield self._event(choice)
            for index in range(0 if self.submissions else self.prepared.choices):
                yield self._event(self.form.end(index, "length"))
            if self.prepared.stream and self.prepared.stream.include_usage:
                yield event(self._last())
        except Exception as error:  # too late for a status: it is sent already
            if not isinstance(error, SpecBranchError):
                log.error("A stream failed by a mistake of the program.", exc_info=error)
            yield event(json.dumps(of_engine(error).body()))
        yield DONE

    def _choices(self, index: int, chunk: Chunk) -> list[BaseModel]:
        """Return a chunk of the engine as choices for the client."""
        self.said += len(chunk.pieces)
        now = time.monotonic()
        if index in self.heard:
            self.serving.metrics.chunk(now - self.heard[index])
        self.heard[index] = now
        part = self.form.part(index, chunk.pieces) if chunk.pieces else None
        choices = [] if part is None else [part]
        if chunk.output is None:
            return choices
        self._note(index, chunk.output)
        return [*choices, self.form.end(index, reason_of(chunk.output))]

    def _note(self, index: int, output: Output) -> None:
        if output.error is not None:
            raise output.error
        self.outputs[index] = output
        self.serving.metrics.finished(output)

    async def _scores(self) -> PromptScores:
        """Return the log-probabilities of the prompts, if they were requested."""
        asked, engine = self.prepared, self.serving.engine
        if asked.scored is None:
            return []
        options = RequestOptions(deadline=self.deadline)
        works = [engine.score(prompt, asked.scored, options) for prompt in asked.prompts]
        return list(await asyncio.gather(*works))

    def _event(self, choice: BaseModel) -> bytes:
        options = self.prepared.stream or StreamOptions()
        fields: dict[str, Any] = {}
        if options.continuous_usage_stats:
            fields["usage"] = usage_so_far(self.prepared.prompts, self.said)
        elif options.include_usage:
            fields["usage"] = None
        return event(self._envelope([choice], f"{self.form.name}.chunk", **fields).model_dump_json(exclude_unset=True))

    def _last(self) -> str:
        """Return the event with usage and metrics."""
        fields = {"usage": self._usage(), "metrics": answer_metrics(self.outputs)}
        return self._envelope([], f"{self.form.name}.chunk", **fields).model_dump_json(exclude_unset=True)

    def _usage(self) -> Usage:
        return usage(self.prepared.prompts, self.outputs, self.prepared.params.n)

    def _envelope(self, choices: list[BaseModel], kind: str, **fields: Any) -> Envelope:
        return self.form.envelope(
            id=f"{self.form.prefix}-{self.id}",
            object=kind,
            created=self.created,
            model=self.serving.model,
            system_fingerprint=f"specbranch-{__version__}",
            choices=choices,
            **fields,
        )


def reason_of(output: Output) -> Reason:
    """Return the finish reason of an answer without an error."""
    return "stop" if output.finish_reason == "stop" else "length"


async def merged(submissions: Sequence[Submission]) -> AsyncIterator[tuple[int, Chunk]]:
    """Yield the chunks of several submissions as they come, each with the number of its submission."""
    if len(submissions) == 1:
        async for chunk in submissions[0]:
            yield 0, chunk
        return
    streams = [aiter(submission) for submission in submissions]
    waited = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waited:
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, new = waited.pop(task), task.result()
                if new is not None:
                    waited[asyncio.ensure_future(_next(streams[index]))] = index
                    yield index, new
    finally:
        for task in waited:
            task.cancel()


async def _next(stream: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(stream, None)


async def _chained(
    first: list[tuple[int, Chunk]], rest: AsyncIterator[tuple[int, Chunk]]
) -> AsyncIterator[tuple[int, Chunk]]:
    for one in first:
        yield one
    if first:
        async for one in rest:
            yield one
