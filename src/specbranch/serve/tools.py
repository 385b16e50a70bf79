"""Tools of a request: what the template is given, which parser reads the answer, what the answer has to follow.

Owns the formats of the served model, the checks of `tools` and `tool_choice`, and the parser of each answer. The
formats themselves are in `text/tools/`. Invariant: a request whose tools would not be honoured is refused with a
sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specbranch.config import schema_text
from specbranch.errors import BadParameter
from specbranch.serve.call_grammar import GRAMMARS, CallGrammar, Function, json_rule
from specbranch.serve.errors import ApiError
from specbranch.serve.protocol import ChatMessage, EarlierCall, NamedTool, Tool
from specbranch.serve.settings import ServerSettings
from specbranch.text.continuation import REASONING_FIELD
from specbranch.text.tools.answer_parser import AnswerParser, CallParser
from specbranch.text.tools.formats import (
    EXACT_FORMATS,
    FORMAT_ALIASES,
    FORMATS,
    NO_REASONING,
    REASONING,
    format_of,
    thinking_of,
)
from specbranch.text.tools.reading import ToolFormat
from specbranch.text.tools.reasoning import ReasoningParser, ThinkMarkers, reasoning_length

if TYPE_CHECKING:
    from specbranch.answer import Output
    from specbranch.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """How the served model writes tool calls and reasoning."""

    takes_tools: bool  # the chat template reads them
    calls: ToolFormat | None
    thinking: ThinkMarkers | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: ServerSettings) -> AnswerFormats:
        """Take the formats that are named, or those that the chat template shows."""
        template, call_name, thinking_name = (
            tokenizer.tool_template,
            settings.tool_call_parser,
            settings.reasoning_parser,
        )
        source = "" if template is None else template.source
        calls = format_of(source) if call_name is None else FORMATS[FORMAT_ALIASES.get(call_name, call_name)]
        thinking = thinking_of(source) if thinking_name is None else REASONING.get(thinking_name)
        return cls(
            template is not None and template.takes_tools, calls, None if thinking_name == NO_REASONING else thinking
        )


@dataclass(frozen=True, slots=True)
class ToolWish:
    """What a request says of tools, whatever endpoint it came to."""

    tools: Sequence[Tool]
    choice: Literal["none", "auto", "required"] | NamedTool | None
    several: bool  # calls in one answer
    answer: Mapping[str, Any]  # what an answer without calls has to follow, by its name in `SamplingParams`

    @property
    def names(self) -> list[str]:
        """The functions."""
        return [tool.function.name for tool in self.tools]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request."""

    formats: AnswerFormats
    tools: tuple[Tool, ...]  # that the model may call
    parallel: bool  # several calls in one answer
    constraint: Mapping[str, Any]  # what the answer has to follow, by its name in `SamplingParams`
    forces_calls: bool  # that is a grammar of calls

    @classmethod
    def of(cls, formats: AnswerFormats, wish: ToolWish, tokenizer: Tokenizer) -> ToolUse:
        """Check the tools of a request. With the choice "none" the model is told of none."""
        check_choice(wish)
        if wish.tools:
            check_formats(formats, "tools")
        if not wish.tools or wish.choice == "none":
            return cls(formats, (), wish.several, wish.answer, forces_calls=False)
        calls = constraint_of_tools(formats, wish, tokenizer)
        return cls(formats, tuple(wish.tools), wish.several, calls or wish.answer, bool(calls))

    @property
    def described(self) -> list[dict[str, Any]] | None:
        """The tools as a chat template takes them."""
        return described(self.tools)

    def markers(self) -> list[str]:
        """Return the markers that the parser has to see; some are special tokens, which are no text otherwise."""
        thinking, calls = self.formats.thinking, self.formats.calls if self.tools else None
        return [*((thinking.opening, thinking.closing) if thinking else ()), *(calls.markers if calls else ())]

    def parses(self) -> bool:
        """Return True if an answer is more than text."""
        return bool(self.tools) or self.formats.thinking is not None

    def reasoning(self, prompt: str) -> tuple[str, ...]:
        """Return the markers of reasoning behind which a grammar begins; none if the prompt has closed it."""
        thinking = self.formats.thinking
        if thinking is None or prompt.rstrip().endswith(thinking.closing):
            return ()
        return "" if thinking.are_open(prompt) else thinking.opening, thinking.closing

    def check_begun(self, begun: str) -> None:
        """Refuse to continue a message that ends within a call: the parser of the answer would see half of it."""
        parser = self.parser("")
        parser.feed(begun)
        if parser.is_within_call:
            said = (
                "continue_final_message is true, but the last message ends within a tool call, which is not continued."
            )
            raise ApiError(400, f"{said} End it before the call.", param="continue_final_message")

    def reasoning_tokens(self, prompt: str, output: Output) -> int:
        """Return how many tokens of an answer are reasoning."""
        thinking = self.formats.thinking
        if thinking is None:
            return 0
        return reasoning_length((piece.text for piece in output.pieces), thinking, thinking.are_open(prompt))

    def parser(self, prompt: str) -> AnswerParser:
        """Return a parser for one answer to a prompt."""
        thinking, calls = self.formats.thinking, self.formats.calls if self.tools else None
        if calls is not None and self.forces_calls:
            calls = EXACT_FORMATS.get(calls.name, calls)
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self.tools}
        return AnswerParser(
            ReasoningParser(thinking, thinking.are_open(prompt)) if thinking else None,
            CallParser(calls, schemas) if calls else None,
        )


def begun_lead(field: str, begun: str, formats: AnswerFormats) -> str | None:
    """Return what a parser takes for the text before an answer that continues a message: a marker that says if the
    message has ended within its reasoning. None: nothing was written, so the prompt itself says so."""
    thinking = formats.thinking
    if thinking is None or not begun.strip():
        return None
    is_open = field == REASONING_FIELD or begun.rfind(thinking.opening) > begun.rfind(thinking.closing)
    return thinking.opening if is_open else thinking.closing


def constraint_of_tools(formats: AnswerFormats, wish: ToolWish, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what the answer has to follow for its tools, by its name in `SamplingParams`; nothing if it is free.

    With `required` the answer is calls of any functions, with a named function one call of it. Otherwise calls of
    strict functions in text follow their schemas. With a `response_format` the answer is calls, or what that describes.
    """
    choice = wish.choice
    if isinstance(choice, NamedTool):
        named = [tool for tool in wish.tools if tool.function.name == choice.function.name]
        return {"grammar": _grammar(formats, named, tokenizer).forced(several=False)}
    grammar = _grammar(formats, wish.tools, tokenizer)
    if choice == "required":
        return {"grammar": grammar.forced(wish.several)}
    if wish.answer:
        return {"grammar": grammar.or_answer(wish.several, _answer_rule(wish.answer))}
    if any(tool.function.strict for tool in wish.tools):
        return {"grammar": grammar.in_text(wish.several)}
    return {}


def _grammar(formats: AnswerFormats, tools: Sequence[Tool], tokenizer: Tokenizer) -> CallGrammar:
    assert formats.calls is not None, "checked before"
    given = (tool.function for tool in tools)
    functions = [Function(one.name, one.parameters, one.strict) for one in given]
    return GRAMMARS[formats.calls.name](functions, tokenizer.added_id)


def _answer_rule(constraint: Mapping[str, Any]) -> str:
    """Return what an answer without calls has to follow, as a rule of Lark."""
    if "json_schema" not in constraint:
        (name,) = constraint
        said = f"tools and {name} are both given: an answer is a call, or follows a JSON schema, but nothing else."
        raise BadParameter(f"{said} Use response_format, or leave one of them out.")
    return json_rule(json.loads(schema_text(constraint["json_schema"]) or "{}"))


def check_choice(wish: ToolWish) -> None:
    """Refuse a choice that the tools do not have, and tools of the same name."""
    names, choice = wish.names, wish.choice
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ApiError(400, f"tools has two functions {twice!r}. Give each a name of its own.", param="tools")
    if not names and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice asks for a call, but there are no tools. Send tools.", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        said = f"tool_choice is {choice.function.name!r:.100}, which is none of the tools: {', '.join(names)[:300]}."
        raise ApiError(400, said, param="tool_choice")


def check_formats(formats: AnswerFormats, param: str) -> None:
    """Refuse tools that the model would not read, or whose calls could not be read."""
    _check_template(formats, param, param)
    if formats.calls is None:
        said = "The model's chat template does not show how it writes tool calls."
        raise ApiError(400, f"{said} Start the server with --tool-call-parser ({', '.join(FORMATS)}).", param=param)


def _check_template(formats: AnswerFormats, what: str, param: str) -> None:
    if not formats.takes_tools:
        said = "The model's chat template takes no tools, so the model would not hear of them."
        raise ApiError(400, f"{said} Leave {what} out, or serve another model.", param=param)


def described(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as a chat template takes them."""
    found = []
    for tool in tools or ():
        given = {"name": tool.function.name, "description": tool.function.description}
        values = {**given, "parameters": tool.function.parameters}
        found.append({"type": "function", "function": {name: one for name, one in values.items() if one is not None}})
    return found or None


def tool_fields(message: ChatMessage, formats: AnswerFormats, where: str) -> dict[str, Any]:
    """Return the fields of a message that concern tools and reasoning, as a chat template takes them."""
    found: dict[str, Any] = {}
    if message.tool_calls or message.role == "tool":
        _check_template(formats, f"{where} ({message.role})", "messages")
    if message.tool_calls:
        if message.role != "assistant":
            raise ApiError(400, f"{where}.tool_calls: only an assistant calls tools.", param="messages")
        found["tool_calls"] = [_earlier(call) for call in message.tool_calls]
    if message.role == "tool":
        found |= {"tool_call_id": message.tool_call_id, "name": message.name}
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought is not None and message.role == "assistant":
        found["reasoning_content"] = thought
    return {name: value for name, value in found.items() if value is not None}


def _earlier(call: EarlierCall) -> dict[str, Any]:
    """Return an earlier call. Templates expect its arguments as an object; what is no JSON stays a text."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            found = None
        arguments = found if isinstance(found, dict) else arguments
    named = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return named if call.id is None else {"id": call.id, **named}
