"""/v1/responses: OpenAI's Responses API, without stored state.

Owns what its input means, its answer and its typed events. It does not own the way of a request (`answering.py`).
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
from specbranch.serve.errors import ApiError
from specbranch.serve.events import STREAMED
from specbranch.serve.prompts import chat_prompt, check_length, deadline, prepared, text_of
from specbranch.serve.protocol import (
    ChatMessage,
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    Reason,
    ResponseFailure,
    ResponseItem,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    StreamOptions,
    Usage,
)
from specbranch.serve.serving import Serving, serving_of
from specbranch.serve.usage import answer_metrics

if TYPE_CHECKING:
    from specbranch.serve.answering import Answering

router = APIRouter(route_class=CheckedRoute)
Status = Literal["in_progress", "completed", "incomplete", "failed"]
TOOLS_LATER = "tools come later"
WHY_NOT = {  # items that are not read, by their type
    "function_call": TOOLS_LATER,
    "function_call_output": TOOLS_LATER,
    "item_reference": "no response is stored here, so an item has to be sent itself",
    "reasoning": "reasoning is not read; leave it out",
}


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
    try:
        ids = chat_prompt(serving, messages_of(asked), asked.chat_template_kwargs).ids
    except ApiError as error:  # of the conversation, which this endpoint calls its input
        error.param = "input" if error.param == "messages" else error.param
        raise
    check_length(serving, ids, "input")
    return prepared(serving, asked, [ids], asked.max_output_tokens, None), ResponseForm(asked)


def messages_of(asked: ResponsesRequest) -> list[ChatMessage]:
    """Return instructions and input as one conversation."""
    said = [ChatMessage(role="developer", content=asked.instructions)] if asked.instructions else []
    if isinstance(asked.input, str):
        return [*said, ChatMessage(role="user", content=asked.input)]
    return [*said, *(_message(item, f"input[{at}]") for at, item in enumerate(asked.input))]


def _message(item: ResponseItem, where: str) -> ChatMessage:
    if item.type != "message":
        why = WHY_NOT.get(item.type, "only messages are read here")
        raise ApiError(400, f"{where} is of type {item.type!r:.60}: {why}.", code="unsupported_content", param="input")
    if item.role is None:
        raise ApiError(400, f"{where} has no role; expected system, developer, user or assistant.", param="input")
    if item.content is None:
        raise ApiError(400, f"{where} ({item.role}) has no content; expected a text.", param="input")
    where = f"{where} ({item.role})"
    content = item.content
    text = content if isinstance(content, str) else "".join(text_of(part, where, "input") for part in content)
    return ChatMessage(role=item.role, content=text)


class ResponseForm:
    """Writes a response, whole or as it is in one moment of a stream."""

    name = "response"
    prefix = "resp"

    def __init__(self, asked: ResponsesRequest) -> None:
        self._asked = asked

    def opening(self, index: int, scores: PromptScores) -> None:
        """Return nothing: `ResponseEvents` opens a stream."""
        return

    def news(self, index: int, pieces: Sequence[Piece]) -> list[New]:
        """Return the text of new tokens."""
        return self.rest(index, "".join([piece.text for piece in pieces]))

    def rest(self, index: int, text: str) -> list[New]:
        """Return text that came without a new token."""
        return [New(text)] if text else []

    def held_back(self, index: int) -> list[New]:
        """Return nothing: no parser reads the text."""
        return []

    def part(self, index: int, new: New) -> OutputText:
        """Return new text."""
        return output_text(new.text)

    def end(self, index: int, reason: Reason) -> OutputText:
        """Return no further text: `ResponseEvents` knows by the output how it ends."""
        return output_text("")

    def whole(self, index: int, output: Output | None, scores: PromptScores) -> OutputMessage:
        """Return the whole message; `envelope` sets its id."""
        assert output is not None
        return message("", output.text, status_of(output))

    def envelope(self, **values: Any) -> ResponseObject:
        """Return the response with its message, from what other endpoints send as choices."""
        said = cast("list[OutputMessage]", values["choices"])
        _, _, number = values["id"].partition("-")
        return self.response(
            f"{self.prefix}_{number}",
            values["created"],
            values["model"],
            [one.model_copy(update={"id": f"msg_{number}"}) for one in said],
            said[0].status,
            usage=usage_of(values["usage"]),
            metrics=values["metrics"],
        )

    def response(
        self,
        name: str,
        created: int,
        model: str,
        output: list[OutputMessage],
        status: Status,
        **ended: Any,
    ) -> ResponseObject:
        """Return the response in one of its states; `ended`: what is known at its end."""
        asked = self._asked
        made = ResponseObject(
            id=name,
            created_at=created,
            status=status,
            model=model,
            output=output,
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
        self._number, self._texts = 0, list[str]()
        self._item = f"msg_{answering.id}"
        started = self._response("in_progress", [])
        self._waiting += [
            self._typed("response.created", response=started),
            self._typed("response.in_progress", response=started),
            self._typed("response.output_item.added", output_index=0, item=message(self._item, None, "in_progress")),
            self._of_part("response.content_part.added", part=output_text("")),
        ]

    def _part(self, index: int, new: New) -> bytes:
        """Return new text as an event."""
        self._texts.append(new.text)
        return self._of_part("response.output_text.delta", delta=new.text, logprobs=[])

    def _event(self, choice: BaseModel) -> bytes:
        """Return the events of the end; the base class asks for them once, with the output known."""
        answering, text = self._answering, "".join(self._texts)
        status = status_of(answering.outputs[0])
        said, metrics = message(self._item, text, status), answer_metrics(answering.outputs)
        whole = self._response(status, [said], usage=usage_of(answering.usage()), metrics=metrics)
        return b"".join(
            (
                self._of_part("response.output_text.done", text=text, logprobs=[]),
                self._of_part("response.content_part.done", part=output_text(text)),
                self._typed("response.output_item.done", output_index=0, item=said),
                self._typed(f"response.{status}", response=whole),
            )
        )

    def _failure(self, error: ApiError) -> bytes:
        """Return an error as the two events that end a response."""
        code, said = error.code or error.kind, str(error)
        failed = self._response("failed", [], error=ResponseFailure(code=code, message=said))
        first = self._typed("error", code=code, message=said, param=error.param)
        return first + self._typed("response.failed", response=failed)

    def _response(self, status: Status, output: list[OutputMessage], **ended: Any) -> ResponseObject:
        answering, form = self._answering, cast("ResponseForm", self._form)
        name = f"{form.prefix}_{answering.id}"
        return form.response(name, answering.created, answering.serving.model, output, status, **ended)

    def _of_part(self, kind: str, **values: Any) -> bytes:
        """Return an event of the text of the message."""
        return self._typed(kind, item_id=self._item, output_index=0, content_index=0, **values)

    def _typed(self, kind: str, **values: Any) -> bytes:
        """Return an event with its type and its number."""
        body = {"type": kind, "sequence_number": self._number}
        self._number += 1
        for name, value in values.items():
            body[name] = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def status_of(output: Output) -> Literal["completed", "incomplete"]:
    """Return how an answer without an error ended."""
    return "completed" if reason_of(output) == "stop" else "incomplete"


def message(name: str, text: str | None, status: Literal["in_progress", "completed", "incomplete"]) -> OutputMessage:
    """Return the model's message; None: it has no text yet."""
    content = [] if text is None else [output_text(text)]
    return OutputMessage(id=name, type="message", status=status, role="assistant", content=content)


def output_text(text: str) -> OutputText:
    """Return the text of a message."""
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])


def usage_of(usage: Usage) -> ResponseUsage:
    """Return the token counts under the names of this endpoint."""
    details, predicted = usage.prompt_tokens_details, usage.completion_tokens_details
    cached = details.cached_tokens if details else 0
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0, **(predicted.model_dump() if predicted else {})),
        total_tokens=usage.total_tokens,
    )
