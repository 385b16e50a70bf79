"""What an answer's text becomes in LLM: text, reasoning, and calls of tools.

Owns the parser of one answer. The formats are SpecBranch's (`specbranch.text.tools`), found by the chat template.
Invariant: any cutting of the text into chunks gives the same joined events.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llm
from llm.parts import StreamEvent

if TYPE_CHECKING:
    from specbranch.text.tokenizer import Tokenizer
    from specbranch.text.tools.events import Event
    from specbranch.text.tools.reading import ToolFormat
    from specbranch.text.tools.reasoning import ThinkMarkers


@dataclass(frozen=True, slots=True)
class Formats:
    """How the model of a conversation writes reasoning and calls of tools."""

    thinking: ThinkMarkers | None
    calls: ToolFormat | None  # None without tools

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: Sequence[llm.Tool]) -> Formats:
        """Find the formats that the chat template shows. Tools that the model would not read are refused."""
        from specbranch.text.tools.formats import format_of, thinking_of

        template = tokenizer.tool_template
        source = "" if template is None else template.source
        calls = format_of(source) if tools else None
        if tools and (template is None or not template.takes_tools or calls is None):
            raise llm.ModelError(
                "The model's chat template takes no tools, so the model would not read them. Leave the tools out, or "
                "choose a model that was trained to call tools, such as -o target Qwen/Qwen2.5-1.5B-Instruct."
            )
        return cls(thinking_of(source), calls)

    def markers(self) -> list[str]:
        """Return the markers that the parser has to see; some are special tokens, which are no text otherwise."""
        thinking = self.thinking
        return [
            *((thinking.opening, thinking.closing) if thinking else ()),
            *(self.calls.markers if self.calls else ()),
        ]

    def around_reasoning(self, prompt: str) -> tuple[str, ...]:
        """Return the markers behind which a schema begins; none if there is no reasoning, or the prompt closed it."""
        thinking = self.thinking
        if thinking is None or prompt.rstrip().endswith(thinking.closing):
            return ()
        return "" if thinking.are_open(prompt) else thinking.opening, thinking.closing


class Reading:
    """One answer, read as it comes."""

    def __init__(self, formats: Formats, prompt: str, tools: Sequence[llm.Tool]) -> None:
        from specbranch.text.tools.answer_parser import AnswerParser, CallParser
        from specbranch.text.tools.reasoning import ReasoningParser

        thinking, schemas = formats.thinking, {tool.name: tool.input_schema for tool in tools}
        self._parser = AnswerParser(
            ReasoningParser(thinking, thinking.are_open(prompt)) if thinking else None,
            CallParser(formats.calls, schemas) if formats.calls else None,
        )
        self._calls: list[_Call] = []

    def feed(self, text: str) -> Iterator[StreamEvent]:
        """Read more text; yield what it brought."""
        return self._events(self._parser.feed(text))

    def finish(self) -> Iterator[StreamEvent]:
        """Yield the rest, as the answer ends here."""
        return self._events(self._parser.finish())

    def tool_calls(self) -> list[llm.ToolCall]:
        """Return the calls of the whole answer. A call that was cut, or has no JSON object, is none."""
        whole = ((call, _object(call.arguments)) for call in self._calls if call.ended)
        return [llm.ToolCall(call.name, values, call.id) for call, values in whole if values is not None]

    def _events(self, found: Iterable[Event]) -> Iterator[StreamEvent]:
        from specbranch.text.tools.events import CallArguments, CallBegun, CallEnded, Said, Thought

        for event in found:
            match event:
                case Said(text):
                    yield StreamEvent("text", text)
                case Thought(text):
                    yield StreamEvent("reasoning", text)
                case CallBegun(_, name):
                    self._calls.append(_Call(name, f"call_{secrets.token_hex(12)}"))
                    yield StreamEvent("tool_call_name", name, tool_call_id=self._calls[-1].id)
                case CallArguments(index, text):
                    self._calls[index].arguments += text
                    yield StreamEvent("tool_call_args", text, tool_call_id=self._calls[index].id)
                case CallEnded(index):
                    self._calls[index].ended = True


@dataclass(slots=True)
class _Call:
    """A call as far as it was read."""

    name: str
    id: str
    arguments: str = ""
    ended: bool = False


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
