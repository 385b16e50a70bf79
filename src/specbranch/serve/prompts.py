"""From a body to tokens and limits: conversations, texts, token ids.

Owns the checks of a prompt before the engine sees it. Invariant: content that is no text is refused with its name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from specbranch.config import SamplingParams
from specbranch.errors import BadParameter
from specbranch.grammar.compiler import COMPILE_SECONDS
from specbranch.serve.answering import Prepared
from specbranch.serve.errors import ApiError, too_long
from specbranch.serve.parameters import constraint_of, decoding_options, sampling
from specbranch.serve.protocol import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
)
from specbranch.serve.serving import Serving
from specbranch.serve.tools import AnswerFormats, ToolUse, begun_lead, tool_fields
from specbranch.text.continuation import begun_text

if TYPE_CHECKING:
    from specbranch.text.tokenizer import Tokenizer


Ending = Literal["new message", "continued", "nothing"]  # how a prompt ends: with the opening of a message, within one
RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "self",
)  # the server sets these


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    text: str
    ids: list[int]
    lead: str  # what a parser of the answer takes for the text before it
    begun: str = ""  # the text of the last message, if it is continued


def prepared(
    serving: Serving,
    asked: GenerationRequest,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    scored: int | None = None,
    use: ToolUse | None = None,
    prompt: str = "",
) -> Prepared:
    """Check a request and return it as the engine takes it. `max_tokens` 0 generates nothing. `use`: the tools of a
    conversation, `prompt`: its text, as a parser needs it."""
    _check_bias(serving, asked)
    constraint = use.constraint if use else constraint_of(asked)
    reasoning = use.reasoning(prompt) if use else ()
    params = sampling(asked, max(_longest(serving, max_tokens), 1), logprobs, constraint, reasoning)
    _compile(serving, params, use)
    shown = serving.engine.tokenizer.special_among(use.markers()) if use else frozenset[int]()
    return Prepared(
        prompts,
        params,
        replace(decoding_options(asked), prediction=predicted_ids(serving, asked), shown_tokens=shown),
        (asked.stream_options or StreamOptions()) if asked.stream else None,
        scored,
        generates=max_tokens != 0,
        reasoning=partial(use.reasoning_tokens, prompt) if use and use.formats.thinking else None,
        may_be_kept="store" not in asked.model_fields_set or asked.store in (None, True),
    )


def _compile(serving: Serving, params: SamplingParams, use: ToolUse | None) -> None:
    """Compile the grammar of a request here, where the event loop does not wait."""
    try:
        serving.engine.compile_grammar(params)
    except BadParameter as error:
        if use is None or not use.forces_calls:
            raise
        raise ApiError(400, unfollowed(serving, use, str(error)), param="tools") from None


def unfollowed(serving: Serving, use: ToolUse, reason: str) -> str:
    """Return why a grammar of tools cannot be followed, by the first function that is at fault."""
    until = time.monotonic() + COMPILE_SECONDS
    for tool in use.tools:
        name, schema = tool.function.name, tool.function.parameters
        if time.monotonic() > until:
            break
        try:
            serving.engine.compile_grammar(SamplingParams(json_schema=schema or {}))
        except BadParameter as error:
            return f"The parameters of the function {name!r}: {error}"
    return f"The tools of this request: {reason}"


def predicted_ids(serving: Serving, asked: GenerationRequest) -> list[int] | None:
    """Return the tokens of the text that a caller expects, if there is one."""
    if asked.prediction is None:
        return None
    name, content = "prediction", asked.prediction.content
    text = content if isinstance(content, str) else "".join(text_of(part, name, name) for part in content)
    ids, holds = encoded(serving, text, False, name), serving.engine.context_length
    if len(ids) > holds:
        raise too_long(holds, f"resulted in {len(ids)} tokens", name)
    return ids


def deadline(serving: Serving, asked: GenerationRequest) -> float:
    """Return the seconds in which a request has to be answered."""
    return min(asked.deadline or serving.settings.timeout, serving.settings.timeout)


def chat_prompt(
    serving: Serving,
    messages: Sequence[ChatMessage],
    variables: dict[str, Any] | None = None,
    ending: Ending = "new message",
    tools: list[dict[str, Any]] | None = None,
) -> ChatPrompt:
    """Return a conversation as text and tokens; refuse one that is too long, if possible before it is tokenised."""
    tokenizer, holds = serving.engine.tokenizer, serving.engine.context_length
    if len(messages) > holds:
        raise too_long(holds, f"are {len(messages)}, each of which takes more than one", "messages")
    said = conversation(messages, serving.formats)
    field, begun = begun_text(said) if ending == "continued" else ("", "")
    text = _rendered(tokenizer, said, variables, ending, tools)
    ids = encoded(serving, text, not tokenizer.has_chat_template, "messages")
    return ChatPrompt(text, ids, begun_lead(field, begun, serving.formats) or text, begun)


def ending_of(asked: ChatRequest | TokenizeRequest) -> Ending:
    """Return how the prompt of a conversation ends."""
    if not asked.continue_final_message:
        return "nothing" if asked.add_generation_prompt is False else "new message"
    if asked.add_generation_prompt:
        said = "continue_final_message and add_generation_prompt are both true, but an answer either continues the last"
        raise ApiError(400, f"{said} message or is a new one. Set one of them to false.", param="add_generation_prompt")
    return "continued"


def encoded(serving: Serving, text: str, add_special: bool, param: str) -> list[int]:
    """Return the tokens of a text; refuse it first if its characters prove that there are too many."""
    tokenizer, holds = serving.engine.tokenizer, serving.engine.context_length
    if len(text) >= holds and tokenizer.least_tokens(text) >= holds:
        raise too_long(holds, f"has {len(text)} characters, too many for so few tokens", param)
    return tokenizer.encode(text, add_special)


def check_length(serving: Serving, prompt: Sequence[int], param: str) -> None:
    """Refuse a prompt that leaves no token for an answer."""
    if len(prompt) >= (holds := serving.engine.context_length):
        raise too_long(holds, f"resulted in {len(prompt)} tokens", param)


def conversation(messages: Sequence[ChatMessage], formats: AnswerFormats) -> list[dict[str, Any]]:
    """Return a conversation as a chat template takes it. The role "developer" becomes "system"."""
    said = []
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        content = _content(message, f"{where} ({message.role})")
        said.append({"role": _role(message, where), "content": content, **tool_fields(message, formats, where)})
    return said


def _role(message: ChatMessage, where: str) -> str:
    if message.role == "function":
        raise ApiError(400, f"{where}.role is 'function', which was replaced by 'tool'. Use that.", param="messages")
    return "system" if message.role == "developer" else message.role


def _content(message: ChatMessage, where: str) -> str:
    content = message.refusal if message.content is None else message.content
    ended_inside = message.reasoning_content or message.reasoning  # an answer may end within its reasoning
    if content is None and not message.tool_calls and not ended_inside:
        raise ApiError(400, f"{where} has no content; expected a text.", param="messages")
    return content or "" if not isinstance(content, list) else "".join(text_of(part, where) for part in content)


def text_of(part: ContentPart, where: str, param: str = "messages") -> str:
    """Return the text of a part; refuse one that is no text. `where` and `param` name what holds it."""
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        said = f"{where} has a part of type {part.type!r:.60}: only text is read here, no images, audio or files."
        raise ApiError(400, said, code="unsupported_content", param=param)
    if text is None:
        raise ApiError(400, f"{where} has a part of type {part.type!r} without a text.", param=param)
    return text


def _rendered(
    tokenizer: Tokenizer,
    said: list[dict[str, Any]],
    variables: dict[str, Any] | None,
    ending: Ending,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Have the model's template write a conversation. Pass on what the template raises itself, but no other error."""
    given = variables or {}
    if reserved := [name for name in RESERVED if name in given]:
        said_of = f"chat_template_kwargs has {reserved[0]!r}, which the server sets itself. Leave it out."
        raise ApiError(400, said_of, param="chat_template_kwargs")
    try:
        return tokenizer.chat_text(said, ending == "new message", tools, given, ending == "continued")
    except BadParameter as error:
        if error.__cause__ is None or type(error.__cause__) is TemplateError:
            raise ApiError(400, str(error), param="messages") from None
        what = f"with chat_template_kwargs {', '.join(given)[:200]}" if given else "of these messages"
        said_of = f"The model's chat template cannot make a prompt {what}. Send others."
        raise ApiError(400, said_of, param="chat_template_kwargs" if given else "messages") from None


def _longest(serving: Serving, given: int | None) -> int:
    """Return the maximum number of tokens of an answer."""
    most = serving.settings.max_tokens
    if given is None:
        return most or serving.engine.context_length
    if most is not None and given > most:
        said = f"{given} tokens were asked for, but this server writes {most} at most."
        raise ApiError(400, f"{said} Ask for fewer.", param="max_tokens")
    return given


def _check_bias(serving: Serving, asked: GenerationRequest) -> None:
    for token in asked.logit_bias or ():
        if token >= serving.engine.vocabulary:
            said = f"logit_bias has token {token}, but ids go from 0 to {serving.engine.vocabulary - 1}."
            raise ApiError(400, said, param="logit_bias")
