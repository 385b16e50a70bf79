"""Filler text before a prompt: a context of a given length in which the question stays the same.

Owns the filler: the articles of a shipped suite, sentence by sentence, repeated if they run out. Invariant: the same
suite, length and tokenizer give the same prompts, under a name that contains the length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle

from specbranch.lab.suites.suite import Prompt, Suite, load_suite

FILLER_BEFORE = (
    "These are notes that were taken earlier. They have nothing to do with the task, which follows behind them.\n\n"
)
FILLER_BEHIND = "\n\nThe notes end here. The task:\n\n"
Count = Callable[[str], int]  # how many tokens a text has
CountTurns = Callable[[Sequence[str]], int]  # how many a conversation has, its answers left out


def with_filler(suite: Suite, length: int, answer: int, count: Count, count_turns: CountTurns) -> Suite:
    """Return the suite with filler before each prompt, so that prompt and answers (`answer` tokens per turn) have about
    `length` tokens.

    A prompt that is longer by itself stays unchanged. A shorter one never exceeds `length`.
    """
    room = (length - answer * len(prompt.turns) - count_turns(prompt.turns) for prompt in suite.prompts)
    prompts = tuple(_filled(prompt, left, count) for prompt, left in zip(suite.prompts, room, strict=True))
    return replace(suite, name=f"{suite.name}@{length}", prompts=prompts)


def _filled(prompt: Prompt, room: int, count: Count) -> Prompt:
    first, *others = prompt.turns
    room -= count(FILLER_BEFORE) + count(FILLER_BEHIND)
    taken: list[str] = []
    for sentence in cycle(_sentences()):
        room -= count(sentence)
        if room < 0:
            break
        taken.append(sentence)
    if not taken:
        return prompt
    return replace(prompt, turns=(FILLER_BEFORE + "".join(taken).strip() + FILLER_BEHIND + first, *others))


@cache
def _sentences() -> tuple[str, ...]:
    """Return the articles' sentences, each with the space or line break after it."""
    articles = (prompt.turns[0].partition("\n\n")[2] for prompt in load_suite("own-summary").prompts)
    return tuple(
        part for article in articles for part in re.findall(r".+?(?:[.!?][\"”]?\s+|$)", article + "\n\n", re.DOTALL)
    )
