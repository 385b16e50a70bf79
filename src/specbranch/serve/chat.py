"""/v1/chat/completions: continues a conversation.

Owns what the answer to a conversation looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from specbranch.answer import Output, Piece
from specbranch.serve.answer_events import New, reason_of
from specbranch.serve.answering import Prepared, PromptScores, respond
from specbranch.serve.bodies import CheckedRoute
from specbranch.serve.events import STREAMED
from specbranch.serve.prompts import chat_ids, check_length, deadline, prepared
from specbranch.serve.protocol import AssistantMessage, ChatChoice, ChatLogprobs, ChatRequest, ChatResponse, Reason
from specbranch.serve.serving import Serving, serving_of
from specbranch.serve.spelling import Spelling

router = APIRouter(route_class=CheckedRoute)


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAMED)
async def chat(asked: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    serving = serving_of(request)
    serving.check_model(asked.model)
    return await respond(request, asked.n, deadline(serving, asked), partial(_work, serving, asked))


def _work(serving: Serving, asked: ChatRequest) -> tuple[Prepared, ChatForm]:
    """Turn a conversation into what the engine takes."""
    ids = chat_ids(serving, asked.messages, asked.chat_template_kwargs)
    check_length(serving, ids, "messages")
    given = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    top = (asked.top_logprobs or 0) if asked.logprobs or asked.top_logprobs is not None else None
    return prepared(serving, asked, [ids], given, top), ChatForm(serving.spelling)


class ChatForm:
    """Writes whole messages, or the new text of a stream."""

    name = "chat.completion"
    prefix = "chatcmpl"

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def opening(self, index: int, scores: PromptScores) -> ChatChoice:
        """Return the role of the speaker."""
        return _delta(index, AssistantMessage(role="assistant", content=""))

    def news(self, index: int, pieces: Sequence[Piece]) -> New | None:
        """Return the text of new tokens, and their log-probabilities."""
        text, logprobs = "".join([piece.text for piece in pieces]), self._logprobs(pieces)
        return New(text, logprobs) if text or logprobs is not None else None

    def part(self, index: int, new: New) -> ChatChoice:
        """Return new text."""
        return _delta(index, AssistantMessage(content=new.text), new.logprobs)

    def end(self, index: int, reason: Reason) -> ChatChoice:
        """Return the finish reason."""
        return ChatChoice(index=index, delta=AssistantMessage(), logprobs=None, finish_reason=reason)

    def whole(self, index: int, output: Output | None, scores: PromptScores) -> ChatChoice:
        """Return the whole message."""
        assert output is not None
        return ChatChoice(
            index=index,
            message=AssistantMessage(role="assistant", content=output.text, refusal=None),
            logprobs=self._logprobs(output.pieces),
            finish_reason=reason_of(output),
        )

    def envelope(self, **values: Any) -> ChatResponse:
        """Return the object that choices are sent in."""
        return ChatResponse(**values)

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if not pieces or pieces[0].logprobs is None:
            return None
        scores = [self._spelling.chat(piece.token, piece.logprobs) for piece in pieces if piece.logprobs is not None]
        return ChatLogprobs(content=scores, refusal=None)


def _delta(index: int, said: AssistantMessage, logprobs: BaseModel | None = None) -> ChatChoice:
    return ChatChoice(index=index, delta=said, logprobs=cast("ChatLogprobs | None", logprobs), finish_reason=None)
