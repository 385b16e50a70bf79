"""Suites are read from where they lie, refused with a sentence where they are wrong, and those that ship are our
own."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.errors import BadParameter
from specbranch.lab.suites import hub
from specbranch.lab.suites.suite import (
    DATA_VARIABLE,
    PUBLIC,
    SHIPPED,
    SUITES,
    load_suite,
    load_suites,
    prompt_set,
    read_suite,
)

GOOD = {"question_id": 1, "category": "chat", "turns": ["Hello", "And again"]}


@pytest.fixture(autouse=True)
def no_data_and_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", _unreachable)


def _unreachable(*_: object, **__: object) -> str:
    raise ConnectionError("no route")


def written(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n", encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("name", SHIPPED)
def test_a_dozen_prompts_of_each_kind_ship(name: str) -> None:
    suite = load_suite(name)
    assert (suite.name, suite.source, len(suite.prompts)) == (name, "shipped", 12)
    assert len({prompt.digest for prompt in suite.prompts}) == 12
    assert {len(prompt.turns) for prompt in suite.prompts} == {2 if name == "own-chat" else 1}


def test_articles_to_summarise_have_250_to_500_words() -> None:
    for prompt in load_suite("own-summary").prompts:
        article = prompt.turns[0].partition("\n\n")[2]
        assert 250 <= len(article.split()) <= 500, prompt.id


def test_own_stands_for_all_four_once_each_in_the_order_named() -> None:
    assert [suite.name for suite in load_suites(["own-math", "own"])] == [
        "own-math",
        "own-code",
        "own-chat",
        "own-summary",
    ]
    with pytest.raises(BadParameter, match="stands for several suites"):
        load_suite("own")


def test_a_limit_takes_the_first_of_each_suite() -> None:
    whole, cut = load_suites(["own"]), load_suites(["own"], limit=3)
    assert [suite.prompts[:3] for suite in whole] == [suite.prompts for suite in cut]
    assert load_suites(["own"], limit=99) == whole
    with pytest.raises(BadParameter, match="limit is 0"):
        load_suites(["own"], limit=0)


def test_a_file_of_the_format_is_read_whatever_else_it_holds(tmp_path: Path) -> None:
    file = written(
        tmp_path / "mine.jsonl",
        {**GOOD, "reference": ["x"]},
        "",
        {**GOOD, "question_id": "b", "turns": ["one\u2028line"]},
    )
    suite = load_suites(files=[file])[0]
    assert (suite.name, suite.source) == ("mine", str(file))
    assert [(prompt.id, prompt.turns) for prompt in suite.prompts] == [
        ("1", ("Hello", "And again")),
        ("b", ("one\u2028line",)),
    ]


@pytest.mark.parametrize("path", ["gsm8k.jsonl", "prompts/gsm8k.jsonl"])
def test_a_public_suite_is_found_in_the_folder_given_or_named_by_the_variable(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / path, GOOD)
    assert load_suite("gsm8k", tmp_path).source == str(file)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert load_suite("gsm8k").prompts[0].turns == ("Hello", "And again")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "line 2 is no JSON"),
        ('["a"]', "line 2 is a list"),
        ("{}", "line 2 lacks 'question_id' and 'category' and 'turns'"),
        ('{"question_id": 1, "turns": ["x"]}', "line 2 lacks 'category'"),
        ('{"question_id": 1, "category": "c", "turns": []}', "line 2: turns is an empty list"),
        ('{"question_id": 1, "category": "c", "turns": "x"}', "line 2: turns is a text"),
        ('{"question_id": 1, "category": "c", "turns": ["x", " "]}', "line 2: turn 2 is a blank text"),
        ('{"question_id": 1, "category": "c", "turns": ["x", 5]}', "line 2: turn 2 is the number 5"),
        ('{"question_id": null, "category": "c", "turns": ["x"]}', "line 2: question_id is null"),
        ('{"question_id": 1, "category": {"a": 1}, "turns": ["x"]}', "line 2: category is an object"),
        ('{"question_id": 0, "category": "c", "turns": ["x"]}', "'0' twice"),
    ],
)
def test_a_malformed_line_is_named_with_its_file_and_what_is_wrong(tmp_path: Path, line: str, said: str) -> None:
    file = written(tmp_path / "bad.jsonl", {**GOOD, "question_id": 0}, line)
    with pytest.raises(BadParameter) as caught:
        read_suite(file)
    assert said in str(caught.value) and str(file) in str(caught.value)


def test_an_empty_suite_and_a_missing_or_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="holds no prompt"):
        read_suite(written(tmp_path / "empty.jsonl", "", "  "))
    with pytest.raises(BadParameter, match=r"nowhere\.jsonl cannot be read"):
        read_suite(tmp_path / "nowhere.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadParameter, match="cannot be read"):
        read_suite(tmp_path / "binary.jsonl")
    with pytest.raises(BadParameter, match="No suite was named"):
        load_suites()


def test_an_unknown_suite_gets_the_nearest_name_and_all_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BadParameter) as caught:
        load_suite("gsmk8")
    said = str(caught.value)
    assert "Did you mean 'gsm8k'?" in said
    assert all(word in said for word in (*SUITES, "--data", DATA_VARIABLE, "Hub", "--prompts"))


def test_a_public_suite_that_is_not_there_says_where_it_was_looked_for_and_what_always_works(tmp_path: Path) -> None:
    with pytest.raises(BadParameter) as caught:
        load_suite("cnn_dm", tmp_path)
    said = str(caught.value)
    assert (
        str(tmp_path / "prompts" / "cnn_dm.jsonl") in said
        and "--data" in said
        and DATA_VARIABLE in said
        and "'own'" in said
    )
    assert "Hub" not in said  # a folder given by hand is the only one searched


def test_two_suites_of_one_name_are_refused(tmp_path: Path) -> None:
    files = [written(tmp_path / folder / "same.jsonl", GOOD) for folder in ("a", "b")]
    with pytest.raises(BadParameter, match="Two suites are called 'same'"):
        load_suites(files=files)


def test_a_hub_that_cannot_be_reached_is_said_so_beside_the_other_ways() -> None:
    with pytest.raises(BadParameter) as caught:
        load_suite("mt_bench")
    assert "could not be reached (ConnectionError)" in str(caught.value) and "'own'" in str(caught.value)


def test_jsonl_from_the_hub_reads_as_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(dataset: str, file: str, repo_type: str) -> str:
        asked.append((dataset, file, repo_type))
        return str(
            written(tmp_path / "question.jsonl", {"question_id": 81, "category": "writing", "prompt": ["a", "b"]})
        )

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    suite = load_suite("mt_bench")
    assert [(prompt.id, prompt.turns) for prompt in suite.prompts] == [("mt_bench/81", ("a", "b"))]
    assert asked == [("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", "dataset")] and "Hub" in suite.source


@pytest.mark.parametrize(
    ("name", "record", "turns"),
    [
        ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f():"}, ("def f():",)),
        ("gsm8k", {"question": "How many?"}, ("How many?",)),
        ("cnn_dm", {"article": "It rained."}, ("Summarize: It rained.",)),
    ],
)
def test_parquet_from_the_hub_reads_as_prompts(
    name: str, record: dict[str, str], turns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: "file.parquet")
    monkeypatch.setattr(hub, "_parquet", lambda path, where: iter([record]))
    assert load_suite(name).prompts[0].turns == turns


def test_a_file_of_the_hub_in_another_form_or_without_a_reader_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_, **__: str(written(tmp_path / "q.jsonl", {"other": 1}))
    )
    with pytest.raises(BadParameter, match="another form than expected"):
        load_suite("mt_bench")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: "file.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(BadParameter, match="pip install pyarrow"):
        load_suite("gsm8k")


def test_every_public_suite_has_an_address_on_the_hub() -> None:
    assert hub.SOURCES.keys() == PUBLIC.keys()


@given(st.lists(st.tuples(st.text("ab=\0", max_size=3), st.text("ab=\0", max_size=3)), unique=True))
def test_the_name_of_a_set_of_prompts_does_not_depend_on_their_order(prompts: list[tuple[str, str]]) -> None:
    assert prompt_set(prompts) == prompt_set(reversed(prompts))
    assert not prompts or prompt_set(prompts) != prompt_set(prompts[1:])


def check_material() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "check_material", Path(__file__).parents[3] / "scripts" / "check_material.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DATA = os.environ.get(DATA_VARIABLE)


@pytest.mark.skipif(not DATA, reason="the public suites are not at hand")
def test_no_shipped_prompt_shares_thirteen_words_in_a_row_with_a_public_one() -> None:
    check, folder = check_material(), Path(DATA or "")
    public = [turn for name in PUBLIC for prompt in load_suite(name, folder).prompts for turn in prompt.turns]
    own = {
        f"{prompt.id} {at}": turn
        for suite in load_suites(["own", "exam"])
        for prompt in suite.prompts
        for at, turn in enumerate(prompt.turns)
    }
    stretches = {stretch: name for name, turn in own.items() for stretch in check.cut(check.words(turn))}
    planted = next(turn for turn in own.values() if len(turn.split()) > 20)
    assert check.search(stretches, public)[0] == {}
    assert check.search(stretches, [*public, f"Please answer: {planted}"])[0]
