"""The output of /v1/responses: reasoning, messages and function calls as items, with the events that make them.

Owns the order of items and of their events. It does not own what is a call or reasoning (`chat_parts.py`), nor the
numbers of events (`responses.py`). Invariant: the items of a stream's events are those of the whole response.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from specbranch.serve.protocol import (
    AssistantMessage,
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
TextItem = OutputMessage | ReasoningItem
_TEXT: dict[type[TextItem], str] = {OutputMessage: "output_text", ReasoningItem: "reasoning_text"}  # in names of events
_FURTHER: dict[type[TextItem], dict[str, Any]] = {OutputMessage: {"logprobs": []}, ReasoningItem: {}}


class TypedEvent(NamedTuple):
    """An event without its number."""

    kind: str
    values: dict[str, Any]


class OutputItems:
    """The items of one response so far. Only the last one is open."""

    def __init__(self, number: str) -> None:
        """`number`: the response's own, from which the ids of items are made."""
        self.items: list[OutputItem] = []
        self._number = number
        self._is_open = False
        self._texts: list[str] = []  # of the open item

    def add(self, delta: AssistantMessage) -> list[TypedEvent]:
        """Add what is new; return its events."""
        if delta.content is not None:
            return self._add_text(OutputMessage, delta.content) if delta.content else []
        if delta.reasoning is not None:
            return self._add_text(ReasoningItem, delta.reasoning)
        return [event for call in delta.tool_calls or () for event in self._add_call(call.id, call.function)]

    def finish(self, status: ItemStatus) -> list[TypedEvent]:
        """End the last item; return its events. A response without any item gets an empty message."""
        events = [] if self.items else self._open(self._new(OutputMessage))
        return [*events, *self._close(status)]

    def _add_text(self, kind: type[TextItem], text: str) -> list[TypedEvent]:
        events: list[TypedEvent] = []
        if not self._is_open or not isinstance(self.items[-1], kind):
            events = [*self._close("completed"), *self._open(self._new(kind))]
        self._texts.append(text)
        return [*events, self._event(f"{_TEXT[kind]}.delta", content_index=0, delta=text, **_FURTHER[kind])]

    def _new(self, kind: type[TextItem]) -> TextItem:
        # all fields are set, as those that are not set are not sent
        if kind is ReasoningItem:
            return ReasoningItem(id=self._id("rs"), type="reasoning", status="in_progress", summary=[], content=[])
        return OutputMessage(id=self._id("msg"), type="message", status="in_progress", role="assistant", content=[])

    def _add_call(self, call_id: str | None, function: Any) -> list[TypedEvent]:
        events: list[TypedEvent] = []
        if call_id is not None:
            item = FunctionCallItem(
                id=self._id("fc"),
                type="function_call",
                status="in_progress",
                call_id=call_id,
                name=function.name,
                arguments="",
            )
            events = [*self._close("completed"), *self._open(item)]
        if function.arguments:
            self._texts.append(function.arguments)
            events.append(self._event("function_call_arguments.delta", delta=function.arguments))
        return events

    def _open(self, item: OutputItem) -> list[TypedEvent]:
        self.items.append(item)
        self._is_open, self._texts = True, []
        events = [TypedEvent("output_item.added", {"output_index": len(self.items) - 1, "item": item})]
        if not isinstance(item, FunctionCallItem):
            events.append(self._event("content_part.added", content_index=0, part=_part(item, "")))
        return events

    def _close(self, status: ItemStatus) -> list[TypedEvent]:
        if not self._is_open:
            return []
        item, text = self.items[-1], "".join(self._texts)
        if isinstance(item, FunctionCallItem):
            events = [self._event("function_call_arguments.done", name=item.name, arguments=text)]
            done: OutputItem = item.model_copy(update={"arguments": text, "status": status})
        else:
            kind, part = type(item), _part(item, text)
            events = [
                self._event(f"{_TEXT[kind]}.done", content_index=0, text=text, **_FURTHER[kind]),
                self._event("content_part.done", content_index=0, part=part),
            ]
            done = item.model_copy(update={"content": [part], "status": status})
        self.items[-1], self._is_open = done, False
        return [*events, TypedEvent("output_item.done", {"output_index": len(self.items) - 1, "item": done})]

    def _event(self, kind: str, /, **values: Any) -> TypedEvent:
        return TypedEvent(kind, {"item_id": self.items[-1].id, "output_index": len(self.items) - 1, **values})

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._number}{f'_{len(self.items)}' if self.items else ''}"


def items_of(number: str, deltas: Iterable[AssistantMessage], status: ItemStatus) -> list[OutputItem]:
    """Return the items of a whole answer."""
    found = OutputItems(number)
    for delta in deltas:
        found.add(delta)
    found.finish(status)
    return found.items


def _part(item: OutputItem, text: str) -> OutputText | ReasoningText:
    if isinstance(item, ReasoningItem):
        return ReasoningText(type="reasoning_text", text=text)
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])
