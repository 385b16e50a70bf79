"""A conversation of LLM as SpecBranch takes it: messages and tools as chat templates expect them.

Owns the translation. Invariant: nothing that a message holds is dropped in silence, except earlier reasoning that a
template does not ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import llm
from llm.parts import Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart


def as_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as mappings with a role and a content; each tool's result is a message of its own."""
    return [said for message in messages for said in _said(message)]


def as_tools(tools: Iterable[llm.Tool]) -> list[dict[str, Any]]:
    """Return tools as chat templates take them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in tools
    ]


def _said(message: Message) -> list[dict[str, Any]]:
    results = [part for part in message.parts if isinstance(part, ToolResultPart)]
    if results:
        return [_result(part) for part in results]
    said: dict[str, Any] = {"role": message.role, "content": ""}
    for part in message.parts:
        match part:
            case TextPart(text):
                said["content"] += text
            case ReasoningPart(text):
                said["reasoning_content"] = said.get("reasoning_content", "") + text
            case ToolCallPart():
                said.setdefault("tool_calls", []).append(_call(part))
            case _:
                raise llm.ModelError(
                    f"A message of role {message.role!r} holds a {type(part).__name__}, but SpecBranch reads text "
                    "alone. Leave attachments out."
                )
    return [said]


def _call(part: ToolCallPart) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": part.name, "arguments": part.arguments}}
    return {"id": part.tool_call_id, **named} if part.tool_call_id else named


def _result(part: ToolResultPart) -> dict[str, Any]:
    said = {"role": "tool", "name": part.name, "content": part.output}
    return {**said, "tool_call_id": part.tool_call_id} if part.tool_call_id else said
