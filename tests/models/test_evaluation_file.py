"""evaluation.json comes back as it was written, is no part of a draft's identity, and is refused if it cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbranch.core.draft_evaluation import DraftEvaluation, JudgedPosition, evaluate
from specbranch.errors import BadParameter, ModelError
from specbranch.models.drafts.draft_name import KEY
from specbranch.models.drafts.evaluation_file import check_folder, read_evaluation, write_evaluation
from specbranch.models.files.identity import model_identity
from specbranch.pairs import PAIRS, draft_folder

SOME = evaluate([JudgedPosition((0.7, 0.2), 0), JudgedPosition((0.6, 0.3), 1), JudgedPosition((0.4,), None)], "a text")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A folder that says it is a draft; nothing else of it is read here."""
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({KEY: {"target": "a"}}))
    return folder


def test_it_comes_back_as_it_was_written(draft: Path) -> None:
    assert read_evaluation(str(draft)) is None
    assert write_evaluation(draft, SOME) == draft / "evaluation.json"
    assert read_evaluation(str(draft)) == SOME
    values = json.loads((draft / "evaluation.json").read_text())
    assert (values["positions"], values["hits"], values["covered"], values["text"]) == (3, 1, 2, "a text")


def test_only_a_drafts_folder_has_one(draft: Path, tmp_path: Path) -> None:
    write_evaluation(draft, SOME)
    (draft / "config.json").write_text("{}")
    assert read_evaluation(str(draft)) is None and read_evaluation("some/hub-id") is None
    for name in (str(draft), str(tmp_path / "gone"), "some/hub-id"):
        with pytest.raises(BadParameter, match="no folder of a draft"):
            check_folder(name)


def set_to(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {**values, **changes}


def first_of(name: str, number: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {**values, name: [number, *values[name][1:]]}


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no object": (lambda values: [1], "holds no JSON object"),
    "another format": (set_to(format=2), "another version"),
    "no format": (set_to(format=None), "another version"),
    "other classes": (set_to(edges=[0.5]), "another version"),
    "too few classes": (set_to(first_met=[3]), "first_met; expected a list of 17 whole numbers"),
    "no list": (set_to(other_met="many"), "other_met; expected a list"),
    "absent": (set_to(other_right=None), "other_right; expected a list of 17"),
    "below zero": (first_of("other_met", -1), "other_met; expected"),
    "half a candidate": (first_of("other_met", 0.5), "other_met; expected"),
    "true": (first_of("other_met", True), "other_met; expected"),
    "without end": (first_of("other_met", 1 << 60), "other_met; expected"),
    "more right than met": (first_of("first_right", 1), "no number above that of first_met"),
    "another sum": (set_to(hits=3), "hits; expected 1, the sum of its classes"),
    "no sum": (set_to(covered=None), "covered; expected"),
    "nothing compared": (set_to(first_met=[0] * 17, first_right=[0] * 17), "has 0 positions"),
    "two right at a position": (
        lambda values: {**values, "other_met": [9] * 17, "other_right": [9] * 17},
        "and 154 at which a candidate",
    ),
    "a text that is none": (set_to(text=7), "text; expected a string"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_is_refused_with_a_sentence(draft: Path, damage: str) -> None:
    path, (change, words) = write_evaluation(draft, SOME), DAMAGE[damage]
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ModelError, match=words) as caught:
        read_evaluation(str(draft))
    assert "evaluation.json" in str(caught.value)


def test_a_cut_file_is_refused_with_a_sentence(draft: Path) -> None:
    path = write_evaluation(draft, SOME)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ModelError, match=r"evaluation\.json is damaged"):
        read_evaluation(str(draft))


def test_a_folder_that_cannot_be_written_is_a_sentence(draft: Path) -> None:
    (draft / "evaluation.json").mkdir()
    with pytest.raises(BadParameter, match="cannot be written"):
        write_evaluation(draft, SOME)


def test_an_evaluation_is_no_part_of_the_drafts_identity(draft: Path) -> None:
    before = model_identity(str(draft))
    write_evaluation(draft, SOME)
    assert model_identity(str(draft)) == before


@pytest.mark.parametrize("name", PAIRS)
def test_every_pairs_draft_carries_one_of_some_thousand_positions(name: str) -> None:
    found = read_evaluation(str(draft_folder(name)))
    assert isinstance(found, DraftEvaluation) and found.positions > 2000
    assert 0.3 < found.hits / found.positions < found.covered / found.positions < 1.0


def test_a_distilled_draft_carries_one_of_its_held_out_text(tiny_draft: Path, tmp_path: Path) -> None:
    found = read_evaluation(str(tiny_draft))
    assert found is not None and found.positions > 0 and found.text.startswith("held-out")
    copied = shutil.copytree(tiny_draft, tmp_path / "copy", ignore=shutil.ignore_patterns("training"))
    assert check_folder(str(copied)) == copied and read_evaluation(str(copied)) == found
