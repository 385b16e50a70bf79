"""/v1/responses: OpenAI's Responses API, without stored state.

Owns its answer and its typed events. It does not own what its input means (`response_input.py`), the items of its
output (`response_items.py`), or the way of a request (`answering.py`).
Invariant: the tokens are those that /v1/chat/completions has for the same conversation; nothing of a request is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from specbranch.answer import Output, Piece
from specbranch.serve.answer_events import AnswerEvents, New, reason_of
from specbranch.serve.answering import Prepared, PromptScores, respond
from specbranch.serve.bodies import CheckedRoute
from specbranch.serve.chat_parts import ParsedAnswer
from specbranch.serve.errors import ApiError
from specbranch.serve.events import STREAMED
from specbranch.serve.prompts import chat_prompt, check_length, deadline, prepared
from specbranch.serve.protocol import (
    AssistantMessage,
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    Reason,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    StreamOptions,
    Usage,
)
from specbranch.serve.response_input import messages_of, wish_of
from specbranch.serve.response_items import OutputItems, TypedEvent, items_of
from specbranch.serve.serving import Serving, serving_of
from specbranch.serve.tools import ToolUse
from specbranch.serve.usage import answer_metrics

if TYPE_CHECKING:
    from specbranch.serve.answering import Answering

router = APIRouter(route_class=CheckedRoute)
Status = Literal["in_progress", "completed", "incomplete", "failed"]
PLAIN_TEXT = {"format": {"type": "text"}}


@router.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)
async def responses(asked: ResponsesRequest, request: Request) -> Response:
    """Answer a text or a conversation."""
    serving = serving_of(request)
    serving.check_model(asked.model)
    if asked.store:
        said = "'store' true is not supported: no response is stored here. Leave it out, or send false."
        raise ApiError(400, said, code="unsupported_parameter", param="store")
    work = partial(_work, serving, asked)
    return await respond(request, 1, deadline(serving, asked), work, ResponseEvents)


def _work(serving: Serving, asked: ResponsesRequest) -> tuple[Prepared, ResponseForm]:
    """Turn the input into what the engine takes."""
    use = ToolUse.of(serving.formats, wish_of(asked), serving.engine.tokenizer)
    try:
        prompt = chat_prompt(serving, messages_of(asked), asked.chat_template_kwargs, tools=use.described)
    except ApiError as error:  # of the conversation, which this endpoint calls its input
        error.param = "input" if error.param == "messages" else error.param
        raise
    check_length(serving, prompt.ids, "input")
    work = prepared(serving, asked, [prompt.ids], asked.max_output_tokens, None, use=use, prompt=prompt.text)
    return work, ResponseForm(asked, ParsedAnswer.of(use, prompt.text))


class WholeAnswer(BaseModel):
    """The parts of an answer, and how it ended."""

    deltas: list[AssistantMessage]
    status: Literal["completed", "incomplete"]


class ResponseForm:
    """Writes a response, whole or as it is in one moment of a stream."""

    name = "response"
    prefix = "resp_"

    def __init__(self, asked: ResponsesRequest, answer: ParsedAnswer) -> None:
        self._asked, self._answer = asked, answer

    def opening(self, index: int, scores: PromptScores) -> None:
        """Return nothing: `ResponseEvents` opens a stream."""
        return

    def news(self, index: int, pieces: Sequence[Piece]) -> list[New]:
        """Return what new tokens bring."""
        return self.rest(index, "".join([piece.text for piece in pieces]))

    def rest(self, index: int, text: str) -> list[New]:
        """Return what text brings that came without a new token."""
        return [New("", choice=delta) for delta in self._answer.feed(text)]

    def held_back(self, index: int) -> list[New]:
        """Return what the parser has held back, as the answer is finished."""
        return [New("", choice=delta) for delta in self._answer.finish()]

    def part(self, index: int, new: New) -> AssistantMessage:
        """Return new text."""
        return AssistantMessage(content=new.text)

    def end(self, index: int, reason: Reason) -> AssistantMessage:
        """Return nothing further: `ResponseEvents` knows by the output how it ends."""
        return AssistantMessage()

    def whole(self, index: int, output: Output | None, scores: PromptScores) -> WholeAnswer:
        """Return the whole answer; `envelope` makes its items."""
        assert output is not None
        deltas = [*self._answer.feed(output.text), *self._answer.finish()]
        return WholeAnswer.model_construct(deltas=deltas, status=status_of(output))

    def envelope(self, **values: Any) -> ResponseObject:
        """Return the response with its items, from what other endpoints send as choices."""
        (said,) = cast("list[WholeAnswer]", values["choices"])
        number = values["id"].removeprefix(self.prefix)
        return self.response(
            values["id"],
            values["created"],
            values["model"],
            items_of(number, said.deltas, said.status),
            said.status,
            usage=usage_of(values["usage"]),
            metrics=values["metrics"],
        )

    def response(
        self,
        name: str,
        created: int,
        model: str,
        output: Sequence[OutputItem],
        status: Status,
        **ended: Any,
    ) -> ResponseObject:
        """Return the response in one of its states; `ended`: what is known at its end."""
        asked = self._asked
        choice = asked.tool_choice or "auto"
        made = ResponseObject(
            id=name,
            created_at=created,
            status=status,
            model=model,
            output=list(output),
            parallel_tool_calls=asked.parallel_tool_calls,
            text=asked.text.model_dump(exclude_none=True) if asked.text and asked.text.format else PLAIN_TEXT,
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in asked.tools or ()],
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata if isinstance(asked.metadata, dict) else {},
            temperature=asked.temperature,
            top_p=asked.top_p,
            user=asked.user if isinstance(asked.user, str) else None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            **ended,
        )
        # all fields are sent, defaults and nulls included
        return ResponseObject.model_construct(set(ResponseObject.model_fields), **dict(made))


class ResponseEvents(AnswerEvents):
    """The typed events of one response, numbered."""

    _done = b""

    def __init__(self, answering: Answering, scores: PromptScores) -> None:
        super().__init__(answering, scores)
        self._options = StreamOptions()  # usage is in the last event, whatever is asked for
        self._number, self._items = 0, OutputItems(answering.id)
        started = self._response("in_progress", [])
        self._waiting += [self._typed("created", response=started), self._typed("in_progress", response=started)]

    def _part(self, index: int, new: New) -> bytes:
        """Return what is new as events."""
        return self._written(self._items.add(cast("AssistantMessage", new.choice or self._form.part(index, new))))

    def _event(self, choice: BaseModel) -> bytes:
        """Return the events of the end; the base class asks for them once, with the output known."""
        answering = self._answering
        status = status_of(answering.outputs[0])
        last = self._written(self._items.finish(status))
        usage, metrics = usage_of(answering.usage()), answer_metrics(answering.outputs)
        whole = self._response(status, self._items.items, usage=usage, metrics=metrics)
        return last + self._typed(status, response=whole)

    def _failure(self, error: ApiError) -> bytes:
        """Return an error as the two events that end a response."""
        code, said = error.noted(self._answering.note)["error"]["code"] or error.kind, str(error)
        failed = self._response("failed", [], error=ResponseFailure(code=code, message=said))
        first = self._named("error", code=code, message=said, param=error.param)
        return first + self._typed("failed", response=failed)

    def _response(self, status: Status, output: Sequence[OutputItem], **ended: Any) -> ResponseObject:
        answering, form = self._answering, cast("ResponseForm", self._form)
        return form.response(answering.answer_id, answering.created, answering.serving.model, output, status, **ended)

    def _written(self, events: Sequence[TypedEvent]) -> bytes:
        return b"".join([self._typed(event.kind, **event.values) for event in events])

    def _typed(self, kind: str, **values: Any) -> bytes:
        """Return an event of the response."""
        return self._named(f"response.{kind}", **values)

    def _named(self, kind: str, **values: Any) -> bytes:
        """Return an event with its type and its number."""
        body = {"type": kind, "sequence_number": self._number}
        self._number += 1
        for name, value in values.items():
            body[name] = value.model_dump() if isinstance(value, BaseModel) else value
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def status_of(output: Output) -> Literal["completed", "incomplete"]:
    """Return how an answer without an error ended."""
    return "completed" if reason_of(output) == "stop" else "incomplete"


def usage_of(usage: Usage) -> ResponseUsage:
    """Return the token counts under the names of this endpoint."""
    details = usage.prompt_tokens_details
    counted = usage.completion_tokens_details.model_dump(exclude_none=True) if usage.completion_tokens_details else {}
    cached = details.cached_tokens if details else 0
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(**{"reasoning_tokens": 0, **counted}),
        total_tokens=usage.total_tokens,
    )
