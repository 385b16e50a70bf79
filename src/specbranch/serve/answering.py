"""A request's way through the engine: admitted, submitted, answered whole or as a stream.

Owns the submissions of one request. It does not own what an answer looks like (its `Form` does), nor a stream's events
(`answer_events.py`). Invariant: however a request ends, its submissions are cancelled and it is counted out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from specbranch import __version__
from specbranch.answer import Output, Piece
from specbranch.async_engine import RequestOptions, Submission
from specbranch.config import SamplingParams
from specbranch.core.orders import TokenLogprobs
from specbranch.errors import DeadlinePassed
from specbranch.serve.answer_events import AnswerEvents, New
from specbranch.serve.events import GONE, ClientGone, PushedEvents, unless_gone
from specbranch.serve.limits import Admitted
from specbranch.serve.notes import RequestNote, note_of
from specbranch.serve.protocol import Reason, StreamOptions, Usage
from specbranch.serve.serving import Serving, serving_of
from specbranch.serve.usage import answer_metrics, usage

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
    reasoning: Callable[[Output], int] | None = None  # counts an answer's tokens of reasoning; None: there is none
    may_be_kept: bool = True  # by a server that keeps what it serves; False: the client has said no

    @property
    def choices(self) -> int:
        """The number of answers: n for each prompt."""
        return len(self.prompts) * self.params.n


class Form(Protocol):
    """What answers look like: each makes choices of its own kind, by their numbers."""

    name: str  # of what it makes
    prefix: str  # of their ids, such as "cmpl-"

    def opening(self, index: int, scores: PromptScores) -> BaseModel | None:
        """Return what a stream starts with, before any text; None for nothing."""
        ...

    def news(self, index: int, pieces: Sequence[Piece]) -> Sequence[New]:
        """Return new tokens as text, with their log-probabilities if they were requested; nothing if there is nothing
        to send."""
        ...

    def rest(self, index: int, text: str) -> Sequence[New]:
        """Return text that came without a new token."""
        ...

    def held_back(self, index: int) -> Sequence[New]:
        """Return what a parser has held back, as the answer is finished."""
        ...

    def part(self, index: int, new: New) -> BaseModel:
        """Return new text as a choice."""
        ...

    def end(self, index: int, reason: Reason) -> BaseModel:
        """Return the last choice of a stream."""
        ...

    def whole(self, index: int, output: Output | None, scores: PromptScores) -> BaseModel:
        """Return the whole answer as a choice. Without an output there is only the prompt."""
        ...

    def envelope(self, **values: Any) -> BaseModel:
        """Return the object that choices are sent in."""
        ...


Work = Callable[[], tuple[Prepared, Form]]  # turns a body into tokens, which takes long


async def respond(
    request: Request, samples: int, within: float, work: Work, events: type[AnswerEvents] = AnswerEvents
) -> Response:
    """Answer a request of `samples` samples within `within` seconds. It is counted before its prompt is tokenised.

    `events` makes the events of a stream.
    """
    serving, note = serving_of(request), note_of(request.scope)
    admitted = serving.limits.admit(note.key, samples)
    try:
        return await unless_gone(request.receive, _started(serving, note, admitted, within, work, events))
    except BaseException as error:
        admitted.leave()
        if isinstance(error, ClientGone):
            return Response(status_code=GONE)
        raise


async def _started(
    serving: Serving, note: RequestNote, admitted: Admitted, within: float, work: Work, events: type[AnswerEvents]
) -> Response:
    """Return the whole answer, or a stream once its first part is there."""
    try:
        async with asyncio.timeout(within):
            prepared, form = await serving.tokenizing.do(note.body_bytes, work)
    except TimeoutError:
        raise DeadlinePassed(f"The request was not finished within {within:g} s: it waited for others.") from None
    left = within - (time.monotonic() - admitted.since)
    answering = Answering(serving, prepared, form, note, admitted, max(left, LEAST_SECONDS))
    note.answering = answering
    serving.metrics.asked(prepared.params.n)
    try:
        answering.submit()
        if prepared.stream is not None:
            return PushedEvents(await events.begun(answering), answering.close)
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
    submitted: int = field(default_factory=time.time_ns)
    submissions: list[Submission] = field(default_factory=list)
    outputs: dict[int, Output] = field(default_factory=dict)
    said: int = 0  # tokens of a stream so far

    @property
    def id(self) -> str:
        """The request's id, of which the answer's is made."""
        return self.note.id

    @property
    def answer_id(self) -> str:
        """The id of the answer."""
        return self.form.prefix + self.note.id

    @property
    def created(self) -> int:
        """When it was made, in seconds."""
        return self.submitted // 10**9

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
        scores = await self.scores()
        for index, submission in enumerate(self.submissions):
            self.finish(index, await submission.output())
        choices = [self.form.whole(index, self.outputs.get(index), scores) for index in range(self.prepared.choices)]
        answer = self.envelope(choices, self.form.name, usage=self.usage(), metrics=answer_metrics(self.outputs))
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    def finish(self, index: int, output: Output) -> None:
        """Count a finished answer, and keep it if that is asked for; raise the error that ended it, if one did."""
        if output.error is not None:
            raise output.error
        self.outputs[index] = output
        self.serving.metrics.finished(output)
        if self.serving.keeper is not None and self.prepared.may_be_kept:
            self.serving.keeper.keep(output.prompt_token_ids, output.token_ids)

    async def scores(self) -> PromptScores:
        """Return the log-probabilities of the prompts, if they were requested."""
        asked, engine = self.prepared, self.serving.engine
        if asked.scored is None:
            return []
        options = RequestOptions(deadline=self.deadline)
        works = [engine.score(prompt, asked.scored, options) for prompt in asked.prompts]
        return list(await asyncio.gather(*works))

    def usage(self) -> Usage:
        """Return the token counts of the request."""
        asked = self.prepared
        predicted = asked.options.prediction is not None
        return usage(asked.prompts, self.outputs, asked.params.n, predicted, asked.reasoning)

    def envelope(self, choices: list[BaseModel], kind: str, **fields: Any) -> BaseModel:
        """Return choices as one object, in the form's envelope."""
        return self.form.envelope(
            id=self.answer_id,
            object=kind,
            created=self.created,
            model=self.serving.model,
            system_fingerprint=f"specbranch-{__version__}",
            choices=choices,
            **fields,
        )
