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
from specbranch.serve.chat_parts import ParsedAnswer
from specbranch.serve.events import STREAMED
from specbranch.serve.parameters import constraint_of
from specbranch.serve.prompts import chat_prompt, check_length, deadline, ending_of, prepared
from specbranch.serve.protocol import AssistantMessage, ChatChoice, ChatLogprobs, ChatRequest, ChatResponse, Reason
from specbranch.serve.serving import Serving, serving_of
from specbranch.serve.spelling import Spelling
from specbranch.serve.tools import ToolUse, ToolWish

router = APIRouter(route_class=CheckedRoute)


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAMED)
async def chat(asked: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    serving = serving_of(request)
    serving.check_model(asked.model)
    return await respond(request, asked.n, deadline(serving, asked), partial(_work, serving, asked))


def _work(serving: Serving, asked: ChatRequest) -> tuple[Prepared, ChatForm]:
    """Turn a conversation into what the engine takes."""
    wish = ToolWish(asked.tools or (), asked.tool_choice, asked.parallel_tool_calls, constraint_of(asked))
    use = ToolUse.of(serving.formats, wish, serving.engine.tokenizer)
    prompt = chat_prompt(serving, asked.messages, asked.chat_template_kwargs, ending_of(asked), use.described)
    use.check_begun(prompt.begun)
    check_length(serving, prompt.ids, "messages")
    given = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    top = (asked.top_logprobs or 0) if asked.logprobs or asked.top_logprobs is not None else None
    work = prepared(serving, asked, [prompt.ids], given, top, use=use, prompt=prompt.lead)
    return work, ChatForm(serving.spelling, use, prompt.lead)


class ChatForm:
    """Writes whole messages, or the new text of a stream."""

    name = "chat.completion"
    prefix = "chatcmpl-"

    def __init__(self, spelling: Spelling, use: ToolUse, prompt: str) -> None:
        """`use`: the tools of the request. `prompt`: the conversation as text; it may end within reasoning."""
        self._spelling, self._use, self._prompt = spelling, use, prompt
        self._parsed: dict[int, ParsedAnswer] = {}  # by choice; none if answers are only text

    def opening(self, index: int, scores: PromptScores) -> ChatChoice:
        """Return the role of the speaker."""
        return _delta(index, AssistantMessage(role="assistant", content=""))

    def news(self, index: int, pieces: Sequence[Piece]) -> list[New]:
        """Return what is new, and the log-probabilities of new tokens."""
        text, logprobs = "".join([piece.text for piece in pieces]), self._logprobs(pieces)
        if not self._use.parses():
            return [New(text, logprobs)] if text or logprobs is not None else []
        news = self.rest(index, text)
        if logprobs is None:
            return news
        first = news[0] if news else New("")
        if first.choice is not None:
            return [New("", choice=first.choice.model_copy(update={"logprobs": logprobs})), *news[1:]]
        return [first._replace(logprobs=logprobs), *news[1:]]

    def rest(self, index: int, text: str) -> list[New]:
        """Return text that came without a new token, or what it brought."""
        return self._news(index, self._answer(index).feed(text)) if self._use.parses() else [New(text)]

    def held_back(self, index: int) -> list[New]:
        """Return what the parser has held back, as the answer is finished."""
        return self._news(index, self._answer(index).finish()) if self._use.parses() else []

    def part(self, index: int, new: New) -> ChatChoice:
        """Return new text."""
        return _delta(index, AssistantMessage(content=new.text), new.logprobs)

    def end(self, index: int, reason: Reason) -> ChatChoice:
        """Return the finish reason."""
        reason = self._reason(index, reason)
        return ChatChoice(index=index, delta=AssistantMessage(), logprobs=None, finish_reason=reason)

    def whole(self, index: int, output: Output | None, scores: PromptScores) -> ChatChoice:
        """Return the whole message."""
        assert output is not None
        if self._use.parses():
            message = self._answer(index).whole(output.text)
        else:
            message = AssistantMessage(role="assistant", content=output.text, refusal=None)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(output.pieces),
            finish_reason=self._reason(index, reason_of(output)),
        )

    def envelope(self, **values: Any) -> ChatResponse:
        """Return the object that choices are sent in."""
        return ChatResponse(**values)

    def _answer(self, index: int) -> ParsedAnswer:
        if index not in self._parsed:
            self._parsed[index] = ParsedAnswer.of(self._use, self._prompt)
        return self._parsed[index]

    def _reason(self, index: int, reason: Reason) -> Reason:
        """Return the finish reason: a finished answer with a call has one of its own."""
        calls = reason == "stop" and index in self._parsed and self._parsed[index].has_called
        return "tool_calls" if calls else reason

    def _news(self, index: int, deltas: Sequence[AssistantMessage]) -> list[New]:
        """Return deltas as news. Text is written into a template, so it is not made a choice here."""
        return [
            New("", choice=_delta(index, delta)) if delta.content is None else New(delta.content) for delta in deltas
        ]

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if not pieces or pieces[0].logprobs is None:
            return None
        scores = [self._spelling.chat(piece.token, piece.logprobs) for piece in pieces if piece.logprobs is not None]
        return ChatLogprobs(content=scores, refusal=None)


def _delta(index: int, said: AssistantMessage, logprobs: BaseModel | None = None) -> ChatChoice:
    return ChatChoice(index=index, delta=said, logprobs=cast("ChatLogprobs | None", logprobs), finish_reason=None)
