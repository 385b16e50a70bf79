"""From a body to tokens and limits: conversations, texts, token ids.

Owns what is checked of a prompt before the engine sees it. Invariant: what is no text is refused by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbranch.serve.answering import Prepared
from specbranch.serve.errors import ApiError
from specbranch.serve.parameters import sampling, speculation
from specbranch.serve.protocol import ChatMessage, ContentPart, GenerationRequest, StreamOptions
from specbranch.serve.serving import Serving


def prepared(
    serving: Serving,
    asked: GenerationRequest,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    scored: int | None = None,
) -> Prepared:
    """Check what is asked, and put it as the engine takes it; `max_tokens` 0 writes nothing."""
    for prompt in prompts:
        _check_length(serving, prompt)
    _check_bias(serving, asked)
    settings = serving.settings
    return Prepared(
        prompts,
        sampling(asked, max(_longest(serving, max_tokens), 1), logprobs),
        speculation(asked),
        min(asked.deadline or settings.timeout, settings.timeout),
        (asked.stream_options or StreamOptions()) if asked.stream else None,
        scored,
        generates=max_tokens != 0,
    )


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return a conversation as a chat template takes it; a developer's word is the system's."""
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: ChatMessage) -> str:
    if message.role in ("tool", "function"):
        raise ApiError(400, f"A message's role is {message.role!r}: tools come later.", param="messages")
    return "system" if message.role == "developer" else message.role


def _content(message: ChatMessage) -> str:
    content = message.refusal if message.content is None else message.content
    if content is None:
        raise ApiError(400, f"A message of the {message.role} has no content; expected a text.", param="messages")
    return content if isinstance(content, str) else "".join(_text(part) for part in content)


def _text(part: ContentPart) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        said = f"A message has a part of type {part.type!r:.60}: only text is read here, no images, audio or files."
        raise ApiError(400, said, code="unsupported_content", param="messages")
    if text is None:
        raise ApiError(400, f"A message has a part of type {part.type!r} without a text.", param="messages")
    return text


def _longest(serving: Serving, given: int | None) -> int:
    """Return how many tokens an answer may have."""
    most = serving.settings.max_tokens
    if given is None:
        return most or serving.engine.context_length
    if most is not None and given > most:
        said = f"{given} tokens were asked for, but this server writes {most} at most."
        raise ApiError(400, f"{said} Ask for fewer.", param="max_tokens")
    return given


def _check_length(serving: Serving, prompt: Sequence[int]) -> None:
    if len(prompt) >= (holds := serving.engine.context_length):
        said = f"The prompt has {len(prompt)} tokens, but the context holds {holds}, one of which is for the answer."
        raise ApiError(400, f"{said} Shorten it.", code="context_length_exceeded", param="prompt")


def _check_bias(serving: Serving, asked: GenerationRequest) -> None:
    for token in asked.logit_bias or ():
        if token >= serving.engine.vocabulary:
            said = f"logit_bias has token {token}, but ids go from 0 to {serving.engine.vocabulary - 1}."
            raise ApiError(400, said, param="logit_bias")
