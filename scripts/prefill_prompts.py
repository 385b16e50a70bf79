"""The prompts that prefill is measured with: short ones, those of the shipped suites, and one of any length."""

from __future__ import annotations

from itertools import chain, cycle, islice
from typing import Any

from check_exact import PROMPTS

from specbranch.lab.suites.suite import ALL_SHIPPED, Prompt, Suite, conversation, load_suites


def short_suite() -> Suite:
    """Return prompts of about 42 tokens, template included."""
    prompts = tuple(Prompt(str(at), "short", (words,)) for at, words in enumerate(PROMPTS))
    return Suite("short", prompts, "scripts/check_exact.py")


def short_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Return so many short prompts as token ids, repeated if there are not as many."""
    known = [tokenizer.chat(conversation([words])) for words in PROMPTS]
    return list(islice(cycle(known), count))


def all_prompts(tokenizer: Any, longest: int) -> list[list[int]]:
    """Return the short prompts, then each turn of the shipped suites as a prompt; none longer than `longest` tokens."""
    turns = (turn for suite in load_suites([ALL_SHIPPED]) for prompt in suite.prompts for turn in prompt.turns)
    known = [tokenizer.chat(conversation([words])) for words in chain(PROMPTS, turns)]
    return [ids for ids in known if len(ids) <= longest]


def long_prompt(tokenizer: Any, length: int) -> list[int]:
    """Return a prompt of exactly `length` tokens: the texts of the shipped suites, one after the other."""
    turns = [turn for suite in load_suites([ALL_SHIPPED]) for prompt in suite.prompts for turn in prompt.turns]
    ids = tokenizer.encode("\n\n".join(turns))
    return list(islice(cycle(ids), length))
