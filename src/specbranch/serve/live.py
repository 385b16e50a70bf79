"""What the page asks of the models: a chat whose rounds can be seen, and a race of one prompt by several methods.

Owns the routes under `/v1/live/`, which serve the page of the same version and are no part of the API. Answers are
server-sent events, read by `fetch` so that a key can go with the request. Invariant: whoever goes away takes the request
along.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from specbranch.answer import Chunk, Output
from specbranch.config import SamplingParams
from specbranch.errors import BadParameter, SpecBranchError
from specbranch.sim.shipped import load_profile
from specbranch.traces.frames import Film, Frame

if TYPE_CHECKING:
    from specbranch.async_engine import AsyncLLM
    from specbranch.engine import LLM
    from specbranch.serve.settings import ServerSettings

WALL = "wall"
CLOCKS = ("c10", "h200-68m-7b")  # profiles that the page offers beside the machine's own clock
RACERS = ("autoregressive", "speculative", "pearl", "specbranch")
MOST_TOKENS = 512  # of an answer on the page
MOST_RACED = 128
MOST_TEXT = 16_000  # characters of a message
NODES = 48  # of a tree: more are not seen
Told = dict[str, Any]  # one event
Role = Literal["system", "user", "assistant"]


class LiveMessage(BaseModel):
    """One message of a conversation on the page."""

    model_config = ConfigDict(extra="forbid")
    role: Role
    content: str = Field(max_length=MOST_TEXT)


class LiveChat(BaseModel):
    """A question to be answered with everything that happened meanwhile."""

    model_config = ConfigDict(extra="forbid")
    messages: list[LiveMessage] = Field(min_length=1, max_length=200)
    max_tokens: int = Field(256, ge=1, le=MOST_TOKENS)
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    method: str | None = Field(None, max_length=40)


class LiveRace(BaseModel):
    """A prompt to be answered by each of the racers."""

    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(min_length=1, max_length=MOST_TEXT)
    clock: str = Field(WALL, max_length=40)
    max_tokens: int = Field(64, ge=2, le=MOST_RACED)


class Seen:
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


class Live:
    """What the page asks, answered by an engine."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self._racing = asyncio.Lock()  # a race has the machine to itself, as far as the page goes
        self._modelled: dict[str, LLM] = {}  # by clock; a planner learns from race to race, in the engine's thread

    def about(self) -> Told:
        """What there is to be asked."""
        clocks = {name: (profile := load_profile(name)).hardware + ": " + profile.pair for name in CLOCKS}
        return {
            "model": self._settings.model_name or self._engine.target,
            "method": self._engine.method,
            "racers": RACERS,
            "clocks": clocks,
            "max_tokens": self._tokens(MOST_TOKENS),
        }

    def chat(self, asked: LiveChat) -> AsyncIterator[Told]:
        """Answer a conversation: pieces of text with their origins, and the rounds they came in. A mistake of the
        request is raised here."""
        seen, conversation = Seen(), [{"role": one.role, "content": one.content} for one in asked.messages]
        params = SamplingParams(
            temperature=asked.temperature, seed=asked.seed, max_tokens=self._tokens(asked.max_tokens)
        )
        submission = self._engine.submit(
            conversation,
            params,
            method=asked.method,
            deadline=self._settings.timeout,
            streams=True,
            on_round=seen.note,
        )

        async def told() -> AsyncIterator[Told]:
            try:
                async for chunk in submission:
                    yield self._chunk(chunk, seen.take())
            finally:
                submission.cancel()

        return told()

    async def race(self, asked: LiveRace) -> AsyncIterator[Told]:
        """Answer a prompt by one method after the other; times are seconds since its first token."""
        async with self._racing:
            prompt = self._engine.tokenizer.chat([{"role": "user", "content": asked.prompt}])
            params = SamplingParams(max_tokens=self._tokens(asked.max_tokens))
            for name in RACERS:
                yield {"lane": name}
                seen = Seen()
                chunks = self._racer(name, prompt, params, asked.clock, seen)
                async for told in self._lane(chunks, seen):
                    yield {"lane": name, **told}

    def check(self, asked: LiveRace) -> None:
        """Refuse a race that cannot be run."""
        if asked.clock not in (WALL, *CLOCKS):
            raise BadParameter(f"clock is {asked.clock!r:.60}; expected one of {', '.join((WALL, *CLOCKS))}.")
        if self._racing.locked():
            raise BadParameter("Another race is being run. Try again when it is over.")

    async def _racer(
        self, name: str, prompt: list[int], params: SamplingParams, clock: str, seen: Seen
    ) -> AsyncIterator[Chunk]:
        if clock == WALL:
            submission = self._engine.submit(
                prompt,
                params,
                method=name,
                deadline=self._settings.timeout,
                streams=True,
                on_round=seen.note,
            )
            try:
                async for chunk in submission:
                    yield chunk
            finally:
                submission.cancel()
        else:
            made = self._engine.aside(partial(self._on_clock, name, prompt, params, clock, seen))
            try:
                async for chunk in made:
                    yield chunk
            finally:
                await made.aclose()

    def _on_clock(
        self, name: str, prompt: list[int], params: SamplingParams, clock: str, seen: Seen, llm: LLM
    ) -> Iterator[Chunk]:
        """Decode on a modelled clock, in the engine's thread."""
        if clock not in self._modelled:
            self._modelled[clock] = llm.modelled(clock)
        return self._modelled[clock].using(name).stream(prompt, params, seen.note)

    async def _lane(self, chunks: AsyncIterator[Chunk], seen: Seen) -> AsyncIterator[Told]:
        """The events of one racer; what it cannot do is an event, too."""
        first: float | None = None
        try:
            async for chunk in chunks:
                frames = [frame for frame in seen.take() if frame.added]
                if frames and first is None:
                    first = frames[0].end
                steps = [[round(frame.end - (first or 0.0), 6), frame.added] for frame in frames]
                yield {"steps": steps, "pieces": _pieces(chunk), "done": _done(chunk.output)}
        except SpecBranchError as error:
            yield {"error": str(error)}

    def _chunk(self, chunk: Chunk, frames: list[Frame]) -> Told:
        spell = self._spell
        return {
            "pieces": _pieces(chunk),
            "frames": [frame.trimmed(NODES).to_dict(spell) for frame in frames],
            "done": _done(chunk.output),
        }

    def _spell(self, token: int) -> str:
        return self._engine.tokenizer.decode([token])

    def _tokens(self, asked: int) -> int:
        most = self._settings.max_tokens
        return asked if most is None else min(asked, most)


def routes(engine: AsyncLLM, settings: ServerSettings) -> APIRouter:
    """The routes of the page's questions."""
    router, live = APIRouter(prefix="/v1/live", include_in_schema=False), Live(engine, settings)

    @router.get("")
    async def about() -> JSONResponse:
        return JSONResponse(live.about())

    @router.post("/chat")
    async def chat(asked: LiveChat) -> StreamingResponse:
        return _events(live.chat(asked))

    @router.post("/race")
    async def race(asked: LiveRace) -> StreamingResponse:
        live.check(asked)
        return _events(live.race(asked))

    return router


def _events(told: AsyncIterator[Told]) -> StreamingResponse:
    return StreamingResponse(
        _written(told), media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
    )


async def _written(told: AsyncIterator[Told]) -> AsyncIterator[str]:
    try:
        async for event in told:
            yield _event(event)
    except SpecBranchError as error:
        yield _event({"error": str(error)})
    yield "data: [DONE]\n\n"


def _event(told: Told) -> str:
    return f"data: {json.dumps(told, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _pieces(chunk: Chunk) -> list[list[str]]:
    return [[piece.text, piece.origin] for piece in chunk.pieces]


def _done(output: Output | None) -> Told | None:
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
