"""The search of training text for benchmark prompts finds what is there, in other clothes too, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from specbranch.lab.suites.suite import load_suites
from specbranch.training.distill.given_data import data_questions
from specbranch.training.distill.opening_words import all_words

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_material.py"
PROMPT = "A heron stands in the reeds at dawn and waits for seven small fish to come near its feet before it strikes."


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_material", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(check: ModuleType, text: str, prompt: str = PROMPT) -> list[str]:
    stretches = dict.fromkeys(check.cut(check.words(prompt)), "prompt")
    return list(check.search(stretches, ["Nothing of it.", text])[0])


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        (f"Question: {PROMPT}", True),
        (f"SO: {PROMPT.upper().replace(' ', '  -- ')}", True),
        ("heron stands in the reeds, at dawn, and waits for seven small", False),  # 12 words
        ("heron stands in the reeds, at dawn, and waits for seven small fish", True),  # 13
        ("a heron stands in the reeds at dusk and waits for seven small fish to come", False),
    ],
)
def test_thirteen_words_in_a_row_are_needed_whatever_they_wear(check: ModuleType, text: str, is_found: bool) -> None:
    assert bool(found(check, text)) is is_found


def test_a_short_prompt_is_found_as_a_whole_and_a_very_short_one_is_not_looked_for(check: ModuleType) -> None:
    assert found(check, "he asked: how many legs do nine spiders have? and left", "How many legs do nine spiders have")
    assert not found(check, "how many legs do nine ants have", "How many legs do nine spiders have")
    assert not found(check, "say hello to me", "Say hello")


def test_every_turn_of_a_prompt_is_looked_for(check: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "suite.jsonl"
    file.write_text(json.dumps({"turns": ["one", "two"]}) + "\n" + json.dumps({"turns": ["three"]}) + "\n")
    assert list(check.prompts(file)) == ["one", "two", "three"]


def our_words() -> list[str]:
    return [*all_words(), *(question for seed in range(3) for question in data_questions(300, seed))]


def test_no_prompt_of_the_exam_is_in_the_words_that_a_target_is_given(check: ModuleType) -> None:
    """A long stretch of a prompt would be found in any of them; its first words may be anybody's."""
    prompts = [turn for suite in load_suites(["exam", "own"]) for prompt in suite.prompts for turn in prompt.turns]
    stretches = {stretch: prompt for prompt in prompts for stretch in check.cut(check.words(prompt))}
    assert check.search(stretches, our_words()) == ({}, len(our_words()))
    planted = [*our_words(), f"Translate into German: {prompts[0]}"]
    assert list(check.search(stretches, planted)[0]) == [prompts[0]]


def test_the_exam_is_always_looked_for_beside_the_given_files(check: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "suite.jsonl"
    file.write_text(json.dumps({"turns": ["one two three four five six seven"]}) + "\n")
    wanted = check.wanted([file])
    assert wanted["suite.jsonl:1"] == ("one", "two", "three", "four", "five", "six", "seven")
    assert sum(name.startswith("exam-") for name in wanted) == 80
