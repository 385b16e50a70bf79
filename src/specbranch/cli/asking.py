"""Parts that commands with a prompt share: options, standard input, the chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specbranch.cli.options import DRAFT, PAIR, SAMPLING, SPECULATION, TARGET
from specbranch.cli.sections import F, options_of
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.engine import LLM

ANSWERING = (*PAIR, *TARGET, *DRAFT, *SPECULATION, *SAMPLING)  # which models, how they decode, how they sample


def chat_option(section: str) -> Callable[[F], F]:
    """Return the option that wraps a prompt in the chat template, under the heading of its command."""
    about = "Wrap the prompt in the model's chat template, as a user message."
    return options_of(section)("--chat", "as_chat", is_flag=True, help=about)


def encoded(llm: LLM, asked: str, as_chat: bool) -> list[int]:
    """Return a prompt's tokens, inside the model's chat template if that is wanted."""
    return llm.tokenizer.chat([{"role": "user", "content": asked}]) if as_chat else llm.tokenizer.encode(asked)


def from_standard_input(read: Callable[[], str]) -> str:
    """Return what is read from standard input, which has to be text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise BadParameter(f"Standard input is no text: {error}. Expected UTF-8.") from error
