"""`chat`: a conversation continues after every question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from in_process import Command

from specbranch.answer import Chunk
from specbranch.cli.chat import Conversation

Messages = list[dict[str, str]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Messages]:
    """Collect the messages the model was given, turn by turn."""
    from specbranch.engine import LLM

    asked: list[Messages] = []
    answer = LLM.stream_chat

    def listening(self: LLM, messages: Messages, params: Any = None) -> Iterator[Chunk]:
        chunks = answer(self, messages, params)
        asked.append(messages)
        return chunks

    monkeypatch.setattr(LLM, "stream_chat", listening)
    return asked


def test_each_line_is_answered(models: list[str], command: Command, seen: list[Messages]) -> None:
    done = command("chat", *models, "--max-tokens", "8", stdin="Hello\nAnd now?\n")
    assert done.code == 0 and done.err.count("[specbranch]") == 2
    assert [message["role"] for message in seen[1]] == ["user", "assistant", "user"]


def test_a_full_context_leaves_out_the_oldest_turns_and_says_so(
    models: list[str], command: Command, seen: list[Messages]
) -> None:
    questions = [f"question {number} " + "and so on " * 3 for number in range(8)]
    options = ["--max-tokens", "4", "--system", "Be brief."]
    done = command("chat", *models, *options, stdin="\n".join(questions))
    assert done.code == 0 and done.err.count("[specbranch]") == 8
    assert "(the context of 256 tokens is full: the oldest" in done.err
    last = seen[-1]
    assert last[0] == {"role": "system", "content": "Be brief."}
    asked = [message["content"] for message in last if message["role"] == "user"]
    assert 1 < len(asked) < 8 and asked == questions[-len(asked) :]
    assert [message["role"] for message in last[1:3]] == ["user", "assistant"]


def test_a_question_too_long_gets_a_sentence_and_changes_nothing(
    models: list[str], command: Command, seen: list[Messages]
) -> None:
    done = command("chat", *models, "--max-tokens", "4", stdin="Hello\n" + "too long " * 200 + "\nAnd now?\n")
    assert done.code == 0 and done.err.count("[specbranch]") == 2
    assert "but the context holds 256" in done.err and "left out" not in done.err
    assert [message["content"] for message in seen[1]][::2] == ["Hello", "And now?"]


def test_an_answer_cut_short_is_forgotten(
    models: list[str], command: Command, seen: list[Messages], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbranch.cli import paint

    show, calls = paint.show, iter([True, False])

    def interrupted_once(chunks: Iterator[Chunk], colour: bool) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return show(chunks, colour)

    monkeypatch.setattr(paint, "show", interrupted_once)
    done = command("chat", *models, "--max-tokens", "4", stdin="Hello\nAnd now?\n")
    assert done.code == 0 and "(answer cut short)" in done.err
    assert [message["content"] for message in seen[1]] == ["And now?"]


def test_turns_left_out_stay_out() -> None:
    talk = Conversation("S")
    for number in range(3):
        talk.add(f"q{number}", f"a{number}", 0)
    messages, left_out = talk.asking("q3", lambda messages: len(messages) <= 4)
    assert [message["content"] for message in messages] == ["S", "q2", "a2", "q3"] and left_out == 2
    talk.add("q3", "a3", left_out)
    messages, _ = talk.asking("q4", lambda messages: True)
    assert [message["content"] for message in messages] == ["S", "q2", "a2", "q3", "a3", "q4"]
