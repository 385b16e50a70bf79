"""A conversation that goes on within its last message: the template's text up to the end of that message.

Owns where the template's text is cut. Invariant: the text is the one that transformers has for
`continue_final_message`, and it ends with the last message as it was given, but for spaces at its ends. Where the
template writes something else, the conversation is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specbranch.errors import BadParameter

REASONING_FIELD = "reasoning_content"


def open_text(messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
    """Return a conversation up to the end of its last message; `render` writes one as a whole."""
    field, begun = begun_text(messages)
    mark = f"CONTINUES-HERE-{secrets.token_hex(8)}"  # in no message, as nobody knows it
    # the space behind the mark tells if the template trims messages
    whole = render([*messages[:-1], {**messages[-1], field: f"{begun}{mark} "}])
    at = whole.rfind(mark)
    text = whole[: max(at, 0)]
    if not whole[at + len(mark) :].startswith(" "):
        text = text.rstrip()
    if at < 0 or not text.rstrip().endswith(begun.strip()):
        raise BadParameter(
            f"continue_final_message is true, but the model's chat template changes the {field} of the last message, "
            "so it cannot be continued. Send it as the template writes it, or ask for a new message."
        )
    return text


def begun_text(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return which field of the last message goes on, and its text. A message of reasoning alone ends within that."""
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        got = f"is of the role {last['role']!r:.40}" if "role" in last else "is missing"
        raise BadParameter(f"continue_final_message is true, but the last message {got}; expected one of assistant.")
    if last.get("tool_calls"):
        raise BadParameter("continue_final_message is true, but the last message has tool_calls, behind which it ends.")
    field = "content" if last.get("content") or not last.get(REASONING_FIELD) else REASONING_FIELD
    text = last.get(field)
    if not isinstance(text, str):
        raise BadParameter(
            f"continue_final_message is true, but {field} of the last message is {text!r:.40}; expected a text."
        )
    return field, text
