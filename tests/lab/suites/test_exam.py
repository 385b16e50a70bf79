"""The exam for planners: twenty prompts of each of four kinds, in no other suite and in no default.

No test decodes these prompts with a model.
"""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest

from specbranch.errors import BadParameter
from specbranch.lab.bench.presets import PRESETS
from specbranch.lab.bench.tuning import tuning_suites
from specbranch.lab.measure.loaded_pair import PROBED_SUITES
from specbranch.lab.suites.suite import ALL_EXAM, EXAM, PROMPTS_FOLDER, SHIPPED, load_suite, load_suites

WORDS = {"exam-grounded": (120, 400), "exam-edits": (60, 300)}  # of a given text


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (PROMPTS_FOLDER / f"{name}.jsonl").read_text("utf-8").split("\n") if line]


@pytest.mark.parametrize("name", EXAM)
def test_twenty_prompts_of_each_kind_ship_and_load_by_name(name: str) -> None:
    suite = load_suite(name)
    kind = name.removeprefix("exam-")
    assert (suite.name, suite.source) == (name, "shipped")
    assert [prompt.id for prompt in suite.prompts] == [f"{name}/{number}" for number in range(1, 21)]
    assert {(prompt.category, len(prompt.turns)) for prompt in suite.prompts} == {(kind, 1)}


def test_exam_stands_for_all_four_and_own_for_none_of_them() -> None:
    assert [suite.name for suite in load_suites(["exam"])] == list(EXAM)
    assert [suite.name for suite in load_suites(["exam-edits,own", "exam"])] == [
        "exam-edits",
        *SHIPPED,
        *(name for name in EXAM if name != "exam-edits"),
    ]
    with pytest.raises(BadParameter, match="stands for several suites: exam-questions"):
        load_suite("exam")


def test_no_prompt_of_the_exam_is_contained_in_another_prompt() -> None:
    turns = {
        f"{prompt.id} {at}": " ".join(turn.split())
        for suite in load_suites(["exam", "own"])
        for prompt in suite.prompts
        for at, turn in enumerate(prompt.turns)
    }
    assert [(one, other) for one, other in permutations(turns, 2) if turns[one] in turns[other]] == []


@pytest.mark.parametrize("name", WORDS)
def test_a_prompt_about_a_text_contains_it_and_asks_something(name: str) -> None:
    fewest, most = WORDS[name]
    for record in records(name):
        text, turn = record["text"], record["turns"][0]
        assert turn.count(text) == 1 and turn.replace(text, "").strip(), record["question_id"]
        assert fewest <= len(text.split()) <= most, record["question_id"]


def test_given_texts_differ() -> None:
    texts = [record["text"] for name in WORDS for record in records(name)]
    assert len(set(texts)) == 40


def test_no_preset_no_tuning_and_no_probe_uses_the_exam() -> None:
    exam = {ALL_EXAM, *EXAM}
    used = {name for preset in PRESETS.values() for name in preset.get("suites", ())}
    used |= {suite.name for suite in tuning_suites()} | set(PROBED_SUITES)
    assert "own" in used and not used & exam
