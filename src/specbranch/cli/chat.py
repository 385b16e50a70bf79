"""`specbranch chat`: a conversation on the terminal.

Owns the part of the conversation that the model still sees. Invariant: a refused or interrupted question leaves it
unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.asking import ANSWERING, from_standard_input
from specbranch.cli.options import TABLES, load_llm, sampling_params, text, with_options
from specbranch.cli.paint import answered, wants_colour
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.config import SamplingParams
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.engine import LLM

Turn = dict[str, str]
_option = options_of("Conversation")


class Conversation:
    """The conversation so far: an optional system message, then questions with their answers."""

    def __init__(self, system: str | None) -> None:
        self._opening = [_message("system", system)] if system else []
        self._turns: list[tuple[Turn, Turn]] = []

    def asking(self, question: str, fits: Callable[[list[Turn]], bool]) -> tuple[list[Turn], int]:
        """Return the messages that end with a question, and the number of oldest turns left out so that they fit."""
        for left_out in range(len(self._turns) + 1):
            said = [message for turn in self._turns[left_out:] for message in turn]
            messages = [*self._opening, *said, _message("user", question)]
            if fits(messages):
                break
        return messages, left_out

    def add(self, question: str, answer: str, left_out: int) -> None:
        """Add an answer; the turns left out for it are dropped."""
        self._turns = [*self._turns[left_out:], (_message("user", question), _message("assistant", answer))]


@click.command(cls=SectionedCommand, tables=TABLES)
@_option("--system", type=text, metavar="TEXT", help="System message at the start of the conversation.")
@_option("--colour/--no-colour", default=None, help="Colour tokens by origin [on a terminal].")
@with_options(ANSWERING)
def chat(system: str | None, colour: bool | None, **given: Any) -> None:
    """Talk with the model. An empty line or Ctrl-D ends the conversation; Ctrl-C ends an answer.

    When the context is full, the oldest turns are dropped; the --system message stays.
    """
    params, conversation = sampling_params(given), Conversation(system)
    with load_llm({**given, "max_batch": 1}) as llm:
        while (question := _ask()) is not None:
            try:
                _turn(llm, conversation, question, params, wants_colour(colour))
            except KeyboardInterrupt:
                click.echo("\n(answer cut short)", err=True)
            except BadParameter as error:
                click.echo(f"Error: {error}", err=True)


def _turn(llm: LLM, conversation: Conversation, question: str, params: SamplingParams, colour: bool) -> None:
    messages, left_out = conversation.asking(question, _fits(llm, params))
    chunks = llm.stream_chat(messages, params)
    if left_out:
        turns = "turn is" if left_out == 1 else f"{left_out} turns are"
        click.echo(f"(the context of {llm.context_length} tokens is full: the oldest {turns} left out)", err=True)
    conversation.add(question, answered(chunks, colour).text, left_out)


def _fits(llm: LLM, params: SamplingParams) -> Callable[[list[Turn]], bool]:
    """Return a check that messages leave space for an answer: max_tokens, but at most a quarter of the context."""
    room = min(params.max_tokens, max(llm.context_length // 4, 1))
    return lambda messages: len(llm.tokenizer.chat(messages)) + room <= llm.context_length


def _message(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _ask() -> str | None:
    """Read the next question; None at the end of the conversation."""
    try:
        line = from_standard_input(lambda: input("> " if sys.stdin.isatty() else ""))
    except EOFError:
        return None
    return line if line.strip() else None
