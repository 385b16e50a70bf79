"""Text before prompts: as much as asked for, never more, and the question stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specbranch.lab.suites.filler import with_filler
from specbranch.lab.suites.suite import Prompt, Suite

SUITE = Suite(
    "talk", (Prompt("1", "", ("What is a heron?",)), Prompt("2", "", ("Tell me of reeds.", "And of mud?"))), "a test"
)
ANSWER = 20


def words(text: str) -> int:
    return len(text.split())


def all_words(turns: Sequence[str]) -> int:
    return sum(map(words, turns))


@pytest.mark.parametrize("length", [150, 1000, 20_000])
def test_prompt_and_answers_fill_the_context_and_end_with_the_question(length: int) -> None:
    suite = with_filler(SUITE, length, ANSWER, words, all_words)
    assert suite.name == f"talk@{length}" and [prompt.id for prompt in suite.prompts] == ["1", "2"]
    for before, prompt in zip(SUITE.prompts, suite.prompts, strict=True):
        assert prompt.turns[0].endswith(before.turns[0]) and prompt.turns[1:] == before.turns[1:]
        assert length - 60 < all_words(prompt.turns) + ANSWER * len(prompt.turns) <= length
    assert suite == with_filler(SUITE, length, ANSWER, words, all_words)
    assert len({prompt.digest for prompt in (*suite.prompts, *SUITE.prompts)}) == 4


def test_what_is_as_long_by_itself_stays_as_it_is() -> None:
    assert with_filler(SUITE, 30, ANSWER, words, all_words).prompts == SUITE.prompts
