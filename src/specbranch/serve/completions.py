"""/v1/completions: continues a text, or token ids.

Owns what the answer to a prompt looks like, its echo and their log-probabilities included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from specbranch.answer import Output, Piece
from specbranch.serve.answer_events import New, reason_of
from specbranch.serve.answering import Prepared, PromptScores, respond
from specbranch.serve.bodies import CheckedRoute
from specbranch.serve.errors import ApiError
from specbranch.serve.events import STREAMED
from specbranch.serve.prompts import check_length, deadline, encoded, prepared
from specbranch.serve.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Reason,
)
from specbranch.serve.serving import Serving, serving_of
from specbranch.text.detokenizer import Detokenizer

router = APIRouter(route_class=CheckedRoute)


@router.post("/v1/completions", response_model=CompletionResponse, responses=STREAMED)
async def completions(asked: CompletionRequest, request: Request) -> Response:
    """Continue a text."""
    serving = serving_of(request)
    serving.check_model(asked.model)
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError(400, "max_tokens is 0, so there is nothing to answer; that is for echo.", param="max_tokens")
    work = partial(_work, serving, asked)
    return await respond(request, _samples(asked), deadline(serving, asked), work)


@dataclass(frozen=True, slots=True)
class Echoed:
    """A prompt, as tokens and as text."""

    ids: list[int]
    text: str


def _prompts(asked: CompletionRequest) -> Sequence[str | list[int]]:
    """Return the prompts of a request as a list, also a single one."""
    given = asked.prompt
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    return cast("list[str | list[int]]", several)


def _samples(asked: CompletionRequest) -> int:
    """Return how many samples the engine has to run, the scoring of prompts included."""
    each = (asked.n if asked.max_tokens else 0) + (asked.echo and asked.logprobs is not None)
    return each * len(_prompts(asked))


def _work(serving: Serving, asked: CompletionRequest) -> tuple[Prepared, CompletionForm]:
    """Turn prompts into what the engine takes."""
    prompts = [_prompt(serving, one, asked) for one in _prompts(asked)]
    scored, ids = asked.logprobs if asked.echo else None, [prompt.ids for prompt in prompts]
    work = prepared(serving, asked, ids, asked.max_tokens, asked.logprobs, scored)
    return work, CompletionForm(serving, prompts if asked.echo else [], asked.n)


def _prompt(serving: Serving, given: str | list[int], asked: CompletionRequest) -> Echoed:
    if isinstance(given, str):
        ids = encoded(serving, given, asked.add_special_tokens, "prompt")
        check_length(serving, ids, "prompt")
        return Echoed(ids, given)
    check_length(serving, given, "prompt")
    if (largest := max(given)) >= (size := serving.engine.vocabulary):
        raise ApiError(400, f"The prompt has token {largest}, but ids go from 0 to {size - 1}.", param="prompt")
    return Echoed(given, serving.engine.tokenizer.decode(given, skip_special=False) if asked.echo else "")


class CompletionForm:
    """Writes whole texts, or the new text of a stream."""

    name = "text_completion"
    prefix = "cmpl-"

    def __init__(self, serving: Serving, echoed: Sequence[Echoed], n: int) -> None:
        """`echoed`: the prompts, if the answer repeats them. `n`: answers of each prompt."""
        self._spelling, self._tokenizer = serving.spelling, serving.engine.tokenizer
        self._echoed, self._n = echoed, n
        self._characters: dict[int, int] = {}  # characters so far

    def opening(self, index: int, scores: PromptScores) -> CompletionChoice | None:
        """Return the prompt, if the answer repeats it."""
        if not self._echoed:
            return None
        at = index // self._n
        prompt = self._echoed[at]
        self._characters[index] = len(prompt.text)
        logprobs = self._of_prompt(prompt, scores[at]) if scores else None
        return CompletionChoice(index=index, text=prompt.text, logprobs=logprobs, finish_reason=None)

    def news(self, index: int, pieces: Sequence[Piece]) -> list[New]:
        """Return the text of new tokens, and their log-probabilities."""
        texts = [piece.text for piece in pieces]
        text, start = "".join(texts), self._characters.get(index, 0)
        self._characters[index] = start + len(text)
        logprobs = None
        if pieces and pieces[0].logprobs is not None:
            tokens, scores = [piece.token for piece in pieces], [piece.logprobs for piece in pieces]
            logprobs = self._spelling.completion(tokens, scores, texts, start)
        return [New(text, logprobs)] if text or logprobs is not None else []

    def rest(self, index: int, text: str) -> list[New]:
        """Return text that came without a new token."""
        return [New(text)]

    def held_back(self, index: int) -> list[New]:
        """Return nothing: texts are not parsed."""
        return []

    def part(self, index: int, new: New) -> CompletionChoice:
        """Return new text."""
        logprobs = cast("CompletionLogprobs | None", new.logprobs)
        return CompletionChoice(index=index, text=new.text, logprobs=logprobs, finish_reason=None)

    def end(self, index: int, reason: Reason) -> CompletionChoice:
        """Return the finish reason."""
        return CompletionChoice(index=index, text="", logprobs=None, finish_reason=reason)

    def whole(self, index: int, output: Output | None, scores: PromptScores) -> CompletionChoice:
        """Return the whole text."""
        opening = self.opening(index, scores)  # first: it says where the answer starts
        news = self.news(index, output.pieces) if output else []
        parts = [opening, *(self.part(index, new) for new in news)]
        there = [part for part in parts if part is not None]
        logprobs = [part.logprobs for part in there if part.logprobs is not None]
        reason: Reason = reason_of(output) if output else "length"
        text = "".join(part.text for part in there)
        return CompletionChoice(index=index, text=text, logprobs=_joined(logprobs), finish_reason=reason)

    def envelope(self, **values: Any) -> CompletionResponse:
        """Return the object that choices are sent in."""
        return CompletionResponse(**values)

    def _of_prompt(self, prompt: Echoed, score: Any) -> CompletionLogprobs:
        """Return the log-probabilities of a prompt's tokens; the first has none."""
        reader = Detokenizer(self._tokenizer, skip_special=False)
        texts = [reader.feed((token,)) for token in prompt.ids]
        added = max(sum(map(len, texts)) + len(reader.finish()) - len(prompt.text), 0)  # as a BOS is
        found = self._spelling.completion(prompt.ids, [None, *score], texts, -added)
        return found.model_copy(update={"text_offset": [max(at, 0) for at in found.text_offset]})


def _joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    if not parts:
        return None
    names = CompletionLogprobs.model_fields
    return CompletionLogprobs(**{name: [one for part in parts for one in getattr(part, name)] for name in names})
