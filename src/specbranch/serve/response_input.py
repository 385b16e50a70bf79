"""The input of /v1/responses as a conversation: messages, function calls, their outputs, reasoning.

Owns which items belong to one turn of the assistant. Invariant: the output of a response, sent back as input, becomes
the message that /v1/chat/completions has for the same answer. An item that is not read is refused by its type.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.serve.errors import ApiError
from specbranch.serve.parameters import constraint_of
from specbranch.serve.prompts import text_of
from specbranch.serve.protocol import (
    CalledFunction,
    ChatMessage,
    ChosenFunction,
    ContentPart,
    EarlierCall,
    FunctionTool,
    NamedFunction,
    NamedTool,
    ResponseItem,
    ResponsesRequest,
    Tool,
)
from specbranch.serve.tools import ToolWish

TEXT_FORMATS = '{"type": "json_schema", "name": …, "schema": …}, {"type": "json_object"} or {"type": "text"}'
WHY_NOT = {"item_reference": "no response is stored here, so an item has to be sent itself"}  # by type


def messages_of(asked: ResponsesRequest) -> list[ChatMessage]:
    """Return instructions and input as one conversation."""
    said = [ChatMessage(role="developer", content=asked.instructions)] if asked.instructions else []
    if isinstance(asked.input, str):
        return [*said, ChatMessage(role="user", content=asked.input)]
    turns = _Turns()
    for at, item in enumerate(asked.input):
        turns.add(item, f"input[{at}]")
    return [*said, *turns.messages]


class _Turns:
    """Messages so far. Reasoning, text and calls of the assistant that follow one another are one message."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._is_open = False  # the last message is a turn of the assistant, to which more may belong

    def add(self, item: ResponseItem, where: str) -> None:
        """Add an item."""
        match item.type:
            case "message":
                self._add_message(item, where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                if item.output is None:
                    raise ApiError(400, f"{where} has no output.", param="input")
                content = item.output if isinstance(item.output, str) else _joined(item.output, where)
                call_id = _required(item.call_id, where, "call_id")
                self._append(ChatMessage(role="tool", content=content, tool_call_id=call_id))
            case "reasoning":
                thought = "".join(part.text or "" for part in _parts(item.content) or item.summary or ())
                if thought:
                    self._append(ChatMessage(role="assistant", reasoning_content=thought), opens=True)
            case other:
                why = WHY_NOT.get(other, "messages, function_call, function_call_output and reasoning are read here")
                said = f"{where} is of type {other!r:.60}: {why}."
                raise ApiError(400, said, code="unsupported_content", param="input")

    def _add_message(self, item: ResponseItem, where: str) -> None:
        if item.role is None:
            raise ApiError(400, f"{where} has no role; expected system, developer, user or assistant.", param="input")
        where = f"{where} ({item.role})"
        if item.content is None:
            raise ApiError(400, f"{where} has no content; expected a text.", param="input")
        text = item.content if isinstance(item.content, str) else _joined(item.content, where)
        last = self.messages[-1] if self._is_open else None
        if item.role == "assistant" and last is not None and last.content is None and not last.tool_calls:
            last.content = text
        else:
            self._append(ChatMessage(role=item.role, content=text), opens=item.role == "assistant")

    def _add_call(self, item: ResponseItem, where: str) -> None:
        name = _required(item.name, where, "name")
        call_id = _required(item.call_id, where, "call_id")
        call = EarlierCall(id=call_id, function=CalledFunction(name=name, arguments=item.arguments or "{}"))
        if not self._is_open:
            self._append(ChatMessage(role="assistant"), opens=True)
        turn = self.messages[-1]
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def _append(self, message: ChatMessage, opens: bool = False) -> None:
        self.messages.append(message)
        self._is_open = opens


def wish_of(asked: ResponsesRequest) -> ToolWish:
    """Return what a request says of tools."""
    tools = [Tool(function=FunctionTool(**one.model_dump(exclude={"type"}))) for one in asked.tools or ()]
    given = asked.tool_choice
    choice = NamedTool(function=ChosenFunction(name=given.name)) if isinstance(given, NamedFunction) else given
    return ToolWish(tools, choice, asked.parallel_tool_calls, constraint_of(with_format(asked)))


def with_format(asked: ResponsesRequest) -> ResponsesRequest:
    """Return a request whose `text.format` is under the name that chats have for it."""
    given = asked.text.format if asked.text is not None else None
    if given is None:
        return asked
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema") or (kind == "json_schema" and given.get("schema") is None):
        raise ApiError(400, f"text.format is {given!r:.80}; expected {TEXT_FORMATS}.", param="text")
    if asked.response_format is not None:
        raise ApiError(400, "text.format and response_format are both given. Give one.", param="text")
    return asked.model_copy(update={"response_format": given})


def _parts(content: str | Sequence[ContentPart] | None) -> list[ContentPart]:
    if isinstance(content, str):
        return [ContentPart(type="reasoning_text", text=content)]
    return list(content or ())


def _joined(parts: Sequence[ContentPart], where: str) -> str:
    return "".join(text_of(part, where, "input") for part in parts)


def _required(value: str | None, where: str, name: str) -> str:
    if value is None:
        raise ApiError(400, f"{where} has no {name}.", param="input")
    return value
