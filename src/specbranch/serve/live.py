"""The page's requests to the models: a chat that shows its rounds, and a race (`race.py`) of one prompt by several
methods.

Owns the routes under `/v1/live/`. They serve the page of the same version and are no part of the API. Answers are
server-sent events, read by `fetch` so that a key can go with the request. Invariant: a client that leaves cancels its
request.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from specbranch.answer import Chunk
from specbranch.clock.shipped import WALL
from specbranch.config import SamplingParams
from specbranch.errors import BadParameter, SpecBranchError
from specbranch.extras import LLGUIDANCE
from specbranch.serve.bodies import CheckedRoute
from specbranch.serve.errors import too_many
from specbranch.serve.events import DONE, EventStream, event
from specbranch.serve.examples import ANSWER_FORMS, EXAMPLES
from specbranch.serve.frames import Frame
from specbranch.serve.limits import Admitted
from specbranch.serve.notes import note_of
from specbranch.serve.race import RACE_SECONDS, RACERS, by_turns
from specbranch.serve.serving import Serving
from specbranch.serve.start import Trial
from specbranch.serve.witness import LiveEvent, Witness, finished, pieces
from specbranch.submission import RequestOptions

if TYPE_CHECKING:
    from specbranch.async_engine import Submission
    from specbranch.engine import LLM, LLMView

CLOCKS = {  # cost profiles that the page offers besides real time
    "c10": "two devices, target = 10 draft steps",
    "h200-68m-7b": "one H200, costs of 68M and 7B",
}
MOST_PAGE_TOKENS = 512  # of an answer on the page
MOST_RACED = 128
MOST_TEXT = 16_000  # characters of a message
SHOWN_NODES = 48  # of a tree: more are not seen
TURN = 2  # messages: a question and its answer
Role = Literal["system", "user", "assistant"]


class LiveMessage(BaseModel):
    """One message of a conversation on the page."""

    model_config = ConfigDict(extra="forbid")
    role: Role
    content: str = Field(max_length=MOST_TEXT)


class LiveChat(BaseModel):
    """A conversation to be answered, with the frames of its rounds."""

    model_config = ConfigDict(extra="forbid")
    messages: list[LiveMessage] = Field(min_length=1, max_length=200, fail_fast=True)
    max_tokens: int = Field(256, ge=1, le=MOST_PAGE_TOKENS)
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    method: str | None = Field(None, max_length=40)  # None: the server's own
    clock: str = Field(WALL, max_length=40)
    form: str | None = Field(None, max_length=40)  # of the answer; None: free text

    def params(self, most: int | None) -> SamplingParams:
        """Return how the answer is sampled; `most`: the server's own limit of tokens."""
        tokens = self.max_tokens if most is None else min(self.max_tokens, most)
        free = SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=tokens)
        if self.form is None:
            return free
        if self.form not in ANSWER_FORMS:
            raise BadParameter(f"form is {self.form!r:.60}; expected one of {', '.join(ANSWER_FORMS)}, or none.")
        return replace(
            free, json_schema=ANSWER_FORMS[self.form].schema, logprobs=1
        )  # the likeliest token shows what is masked


class LiveRace(BaseModel):
    """A prompt to be answered by each of the racers."""

    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(min_length=1, max_length=MOST_TEXT)
    clock: str = Field(WALL, max_length=40)
    max_tokens: int = Field(80, ge=2, le=MOST_RACED)


class Live:
    """Answers the page's requests with an engine."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._races = False  # True during a race: one at a time, so that it has the machine to itself
        self.trial = Trial(serving.engine)
        self._modelled: dict[str, LLMView] = {}  # by clock; a planner learns from race to race, in the engine's thread
        self._modelled_draft: object = None  # the draft's worker that these views have

    def about(self) -> LiveEvent:
        """Return the choices that the page offers."""
        return {
            "model": self._serving.model,
            "method": self._serving.engine.method,
            "racers": RACERS,
            "clocks": CLOCKS,
            "examples": [asdict(one) for one in EXAMPLES],
            "forms": {name: one.title for name, one in ANSWER_FORMS.items()} if LLGUIDANCE.is_installed else {},
        }

    def chat(self, asked: LiveChat, fitting: tuple[list[int], int], admitted: Admitted) -> EventStream:
        """Answer a conversation as events: tokens with their origins, and the rounds they came in."""
        params = asked.params(self._serving.settings.max_tokens)
        prompt, left_out = fitting
        seen = Witness()
        chunks, cancel = self._decoding(asked.method, prompt, params, asked.clock, seen)

        async def events() -> AsyncGenerator[LiveEvent, None]:
            if left_out:
                yield {"pieces": [], "frames": [], "done": None, "left_out": left_out}
            async with aclosing(chunks):
                async for chunk in chunks:
                    self._count(chunk, asked.clock)
                    yield self._chunk(chunk, seen.take())

        def close() -> None:  # called even if the client never took the first event
            cancel()
            admitted.leave()

        return EventStream(_written(events()), close)

    def race(self, asked: LiveRace, admitted: Admitted) -> EventStream:
        """Answer a prompt with every method in turn."""
        prompt = self._serving.engine.tokenizer.chat([{"role": "user", "content": asked.prompt}])
        params = SamplingParams(max_tokens=self._tokens(asked.max_tokens))
        self._races = True

        def decode(method: str, seen: Witness) -> tuple[AsyncGenerator[Chunk, None], Callable[[], None]]:
            return self._decoding(method, prompt, params, asked.clock, seen)

        def close() -> None:
            self._races = False
            admitted.leave()

        return EventStream(_written(by_turns(decode, asked.clock == WALL)), close)

    def check_race(self, asked: LiveRace) -> None:
        """Refuse a race by an unknown clock, and a second one."""
        _check_clock(asked.clock)
        if self._races:
            raise too_many("Another race is being run. Try again when it is over.", RACE_SECONDS, "race_under_way")

    def _decoding(
        self, method: str | None, prompt: list[int], params: SamplingParams, clock: str, seen: Witness
    ) -> tuple[AsyncGenerator[Chunk, None], Callable[[], None]]:
        """Decode with a method; return the chunks and a function that cancels them.

        By real time it is a request like any other, and mistakes in it are raised here. With a modelled clock it runs
        between the rounds of others.
        """
        if clock != WALL:
            _check_clock(clock)
            made = partial(self._modelled_by, clock, method, prompt, params, seen)
            return self._serving.engine.aside(made), lambda: None  # it starts when the caller takes the first chunk
        late = self._serving.settings.timeout
        options = RequestOptions(method=method, deadline=late, on_round=seen.note)
        submission = self._serving.engine.submit(prompt, params, options, streams=True)
        return _chunks(submission), submission.cancel

    def _modelled_by(
        self, clock: str, method: str | None, prompt: list[int], params: SamplingParams, seen: Witness, llm: LLM
    ) -> Iterator[Chunk]:
        if self._modelled_draft is not llm.drafter:  # it was exchanged
            self._modelled, self._modelled_draft = {}, llm.drafter
        if clock not in self._modelled:
            self._modelled[clock] = llm.modelled(clock)
        timed = self._modelled[clock]
        return (timed.using(method) if method else timed).stream(prompt, params, seen.note)

    def fitting(self, asked: LiveChat) -> tuple[list[int], int]:
        """Return a conversation as token ids, and how many of its oldest messages were left out.

        Messages are left out until the answer has room for all its tokens, but for at most a quarter of the context.
        The grammar of the answer is compiled, too. This takes long, so call it in a thread.
        """
        self._serving.engine.compile_grammar(asked.params(None))
        engine, messages = self._serving.engine, [one.model_dump() for one in asked.messages]
        most = engine.context_length - min(self._tokens(asked.max_tokens), engine.context_length // 4)
        prompts: dict[int, list[int]] = {}

        def fits(left_out: int) -> bool:
            text = engine.tokenizer.chat_text(messages[left_out:])
            if engine.tokenizer.least_tokens(text) > most and left_out + TURN < len(messages):
                return False
            prompts[left_out] = engine.tokenizer.encode(text, not engine.tokenizer.has_chat_template)
            return len(prompts[left_out]) <= most

        choices = range(0, len(messages), TURN)
        left_out = choices[min(bisect_left(choices, True, key=fits), len(choices) - 1)]
        if left_out not in prompts:
            fits(left_out)
        return prompts[left_out], left_out

    def _count(self, chunk: Chunk, clock: str) -> None:
        """Count a finished answer in the metrics, unless its time is modelled."""
        if clock == WALL and chunk.output is not None and chunk.output.error is None:
            self._serving.metrics.asked(1)
            self._serving.metrics.finished(chunk.output)

    def _chunk(self, chunk: Chunk, frames: list[Frame]) -> LiveEvent:
        return {
            "pieces": pieces(chunk),
            "frames": [frame.trimmed(SHOWN_NODES).to_dict(self._serving.spelling.text) for frame in frames],
            "done": finished(chunk.output),
        }

    def _tokens(self, asked: int) -> int:
        most = self._serving.settings.max_tokens
        return asked if most is None else min(asked, most)


def routes(serving: Serving) -> APIRouter:
    """Return the routes of the page's requests."""
    router = APIRouter(prefix="/v1/live", include_in_schema=False, route_class=CheckedRoute)
    live = Live(serving)

    def admitted(request: Request) -> Admitted:
        return serving.limits.admit(note_of(request.scope).key, 1)

    @router.get("")
    async def about() -> JSONResponse:
        return JSONResponse(live.about())

    @router.get("/start")
    async def start(request: Request) -> JSONResponse:
        one = admitted(request)
        try:
            return JSONResponse(asdict(await live.trial.start()))
        finally:
            one.leave()

    @router.post("/chat")
    async def chat(request: Request, asked: LiveChat) -> EventStream:
        one, size = admitted(request), note_of(request.scope).body_bytes
        try:
            fitting = await serving.tokenizing.do(size, partial(live.fitting, asked))
        except BaseException:
            one.leave()
            raise
        return _counted(one, partial(live.chat, asked, fitting))

    @router.post("/race")
    async def race(request: Request, asked: LiveRace) -> EventStream:
        live.check_race(asked)
        return _counted(admitted(request), partial(live.race, asked))

    return router


def _counted(admitted: Admitted, begin: Callable[[Admitted], EventStream]) -> EventStream:
    """Start an admitted request. If that fails, count it out."""
    try:
        return begin(admitted)
    except BaseException:
        admitted.leave()
        raise


def _check_clock(name: str) -> None:
    if name not in (WALL, *CLOCKS):
        raise BadParameter(f"clock is {name!r:.60}; expected one of {', '.join((WALL, *CLOCKS))}.")


async def _chunks(submission: Submission) -> AsyncGenerator[Chunk, None]:
    async for chunk in submission:
        yield chunk


async def _written(events: AsyncGenerator[LiveEvent, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for one in events:
                yield event(json.dumps(one, ensure_ascii=False, separators=(",", ":")))
        except SpecBranchError as error:
            yield event(json.dumps({"error": str(error)}))
    yield DONE
