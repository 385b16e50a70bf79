"""The parts of a chat's answer: text, reasoning and tool calls as the API has them, streamed or whole.

Owns the ids of calls and the form of their deltas. It does not own what is a call (`text/tools/`). Invariant: the
deltas of a stream, joined, are the whole message.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable

from specbranch.serve.protocol import AssistantMessage, CallText, ToolCall
from specbranch.serve.tools import ToolUse
from specbranch.text.tools.answer_parser import AnswerParser
from specbranch.text.tools.events import CallArguments, CallBegun, Event, Said, Thought, joined

_SHORT = 9  # letters and digits of an id, as templates of Mistral demand them


class ParsedAnswer:
    """One answer, read by a parser."""

    def __init__(self, parser: AnswerParser, parallel: bool, short_ids: bool) -> None:
        """`parallel`: calls behind the first are sent, too. `short_ids`: the ids of calls have nine characters."""
        self._parser, self._parallel, self._short_ids = parser, parallel, short_ids
        self._is_over = False  # a call came that is not sent
        self.has_called = False

    @classmethod
    def of(cls, use: ToolUse, prompt: str) -> ParsedAnswer:
        """Return the parts of an answer to a prompt, with the tools of its request."""
        calls = use.formats.calls
        return cls(use.parser(prompt), use.parallel, calls is not None and calls.short_ids)

    def feed(self, text: str) -> list[AssistantMessage]:
        """Read more text; return the deltas that it brought."""
        return self._deltas(self._parser.feed(text))

    def finish(self) -> list[AssistantMessage]:
        """Return the last deltas, as the answer ends here."""
        return self._deltas(self._parser.finish())

    def whole(self, text: str) -> AssistantMessage:
        """Return the whole message."""
        deltas = [*self.feed(text), *self.finish()]
        said = "".join(delta.content or "" for delta in deltas)
        thought = "".join(delta.reasoning or "" for delta in deltas)
        calls = _whole_calls(call for delta in deltas for call in delta.tool_calls or ())
        message = AssistantMessage(role="assistant", content=said if said or not calls else None, refusal=None)
        if thought:
            message.reasoning_content = message.reasoning = thought
        if calls:
            message.tool_calls = calls
        return message

    def _deltas(self, events: Iterable[Event]) -> list[AssistantMessage]:
        return [delta for event in joined(events) if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> AssistantMessage | None:
        match event:
            case Said(text):
                return None if self._is_over else AssistantMessage(content=text)
            case Thought(text):
                return AssistantMessage(reasoning_content=text, reasoning=text)
            case CallBegun(index) if not self._is_sent(index):
                self._is_over = True  # what stands around calls that are not sent goes with them
            case CallBegun(index, name):
                self.has_called = True
                function = CallText(name=name, arguments="")
                return AssistantMessage(
                    tool_calls=[ToolCall(index=index, id=self._new_id(), type="function", function=function)]
                )
            case CallArguments(index, text) if self._is_sent(index):
                return AssistantMessage(tool_calls=[ToolCall(index=index, function=CallText(arguments=text))])
        return None

    def _is_sent(self, index: int) -> bool:
        return self._parallel or index == 0

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_SHORT))
        return f"call_{secrets.token_hex(12)}"


def _whole_calls(parts: Iterable[ToolCall]) -> list[ToolCall]:
    """Join the deltas of each call."""
    names: list[ToolCall] = []
    arguments: list[list[str]] = []
    for part in parts:
        if part.id is not None:
            names.append(part)
            arguments.append([])
        arguments[-1].append(part.function.arguments)
    return [
        ToolCall(id=call.id, type="function", function=CallText(name=call.function.name, arguments="".join(texts)))
        for call, texts in zip(names, arguments, strict=True)
    ]
