"""`specbranch tune`, and that what it writes is taken by `generate`, by `chat` and by an LLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import Command

from specbranch import LLM, SpeculativeConfig
from specbranch.clock.profile import CostProfile
from specbranch.lab.bench.tuning import Tuner
from specbranch.lab.replay.record import Record
from specbranch.lab.suites.suite import PROMPTS_FOLDER

pytestmark = pytest.mark.usefixtures("tiny")
SMALL = ("--device", "cpu", "--context-length", "128", "--max-tokens", "12")
SOME = ("--methods", "speculative,specbranch", "--trials", "6", "--max-tokens", "24")


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """A question that is quickly answered: two prompts, a folder of its own."""
    lines = [
        {"question_id": at, "category": "x", "turns": [words]}
        for at, words in enumerate(("A branch is a guess", "Smile"))
    ]
    prompts = tmp_path / "few.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        "tune",
        "--prompts",
        str(prompts),
        "--records",
        str(tmp_path / "lab"),
        "--out",
        str(tmp_path / "tuned.json"),
    ]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def profile(folder: Path, draft: float, **more: Any) -> str:
    """A profile in which a draft step costs some share of a target forward."""
    path = folder / "made.json"
    CostProfile(target=((1, 1.0), (32, 1.1)), draft=((1, draft),), **more).save(path)
    return str(path)


def test_what_is_written_is_what_generate_chat_and_llm_use(command: Command, asked: list[str], tmp_path: Path) -> None:
    done = command(*asked, "--profile", profile(tmp_path, 0.01), *SOME)
    assert done.code == 0 and "× plain" in done.out and "Best: " in done.out, done.err
    file = tmp_path / "tuned.json"
    written = json.loads(file.read_text())
    assert written["tuned_for"]["weights"] == "float32" and "weights float32" in done.out
    tuned = written.pop("tuned_for")
    assert written["method"] in ("speculative", "specbranch") and tuned["speedup"] > 1 and tuned["pair"] == "tiny"
    assert tuned["prompts"] == {"few": 2} and tuned["complete"] is True

    (answer,) = command("generate", "A branch", "--config", str(file), *SMALL, "--json").answers()
    assert answer["method"] == written["method"]
    assert f"[{written['method']}]" in command("chat", "--config", str(file), *SMALL, stdin="Hello\n").err
    assert SpeculativeConfig.from_file(file) == SpeculativeConfig.from_dict(written)
    with LLM(speculative=json.loads(file.read_text()), device="cpu") as llm:
        assert llm.config == SpeculativeConfig.from_dict(written)


@pytest.mark.slow
def test_another_policy_is_reported_and_written(command: Command, asked: list[str], tmp_path: Path) -> None:
    done = command(*asked, "--profile", profile(tmp_path, 0.01), "--methods", "specbranch:confidence", *SOME[2:])
    assert done.code == 0 and "Best: specbranch:confidence, predicted" in done.out
    written = SpeculativeConfig.from_file(tmp_path / "tuned.json")
    assert (written.method, written.policy) == ("specbranch", "confidence")
    (answer,) = command("generate", "A branch", "--config", str(tmp_path / "tuned.json"), *SMALL, "--json").answers()
    assert answer["method"] == "specbranch"


def test_options_beside_a_config_win(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"method": "pearl", "num_speculative_tokens": 3}))
    (answer,) = command(
        "generate", "A branch", "--config", str(file), "--method", "speculative", *SMALL, "--json"
    ).answers()
    assert answer["method"] == "speculative"


@pytest.mark.slow
def test_the_table_and_the_json_tell_the_same(command: Command, asked: list[str], tmp_path: Path) -> None:
    options = ("--profile", profile(tmp_path, 0.01), *SOME)
    table = command(*asked, *options).out
    printed = json.loads(command(*asked, *options, "--json").out)
    assert [row["method"] for row in printed["methods"]] == ["autoregressive", "speculative", "specbranch"]
    assert (
        printed["methods"][0]["speedup"] == 1.0
        and 1 < len(printed["methods"][1]["tried"]) <= printed["methods"][1]["looked_at"] <= 12
    )
    best = max(printed["methods"], key=lambda row: row["speedup"])
    assert printed["best"]["method"] == best["method"] and printed["best"]["tuned_for"]["speedup"] == best["speedup"]
    for row in printed["methods"]:
        assert f"{row['speedup']:.2f}×" in next(line for line in table.split("\n") if line.startswith(row["method"]))


@pytest.mark.slow
def test_where_nothing_pays_plain_decoding_is_written(command: Command, asked: list[str], tmp_path: Path) -> None:
    # specbranch has the text itself to draw on
    methods = (
        "--methods",
        "speculative,tree,specbranch:confidence",
        *SOME[2:],
    )
    done = command(*asked, "--profile", profile(tmp_path, 5.0, overlap=False), *methods)
    assert done.code == 0 and "Nothing tried is faster than plain decoding" in done.out
    assert json.loads((tmp_path / "tuned.json").read_text())["method"] == "autoregressive"
    (answer,) = command("generate", "A branch", "--config", str(tmp_path / "tuned.json"), *SMALL, "--json").answers()
    assert answer["method"] == "autoregressive"


@pytest.mark.slow
def test_without_a_profile_this_machine_is_measured(command: Command, asked: list[str], tmp_path: Path) -> None:
    done = command(*asked, "--methods", "speculative", "--max-tokens", "16", "--json")
    assert done.code == 0, done.err
    tuned = json.loads(done.out)["best"]["tuned_for"]
    assert tuned["profile"] == "this machine" and tuned["overlap"] is False and tuned["hardware"]


@pytest.mark.slow
def test_ctrl_c_keeps_the_best_so_far_and_says_so(
    command: Command, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = Tuner._seconds

    def soon(self: Tuner, config: SpeculativeConfig, records: list[Record]) -> float:
        if len(self.tried.get("speculative", ())) == 2:
            raise KeyboardInterrupt
        return seconds(self, config, records)

    monkeypatch.setattr(Tuner, "_seconds", soon)
    done = command(*asked, "--profile", profile(tmp_path, 0.01), *SOME)
    assert done.code == 130 and "Interrupted: this is the best of what was tried" in done.out
    written = json.loads((tmp_path / "tuned.json").read_text())
    assert (
        written["method"] == "speculative"
        and written["num_speculative_tokens"] <= 2
        and written["tuned_for"]["complete"] is False
    )


def test_ctrl_c_before_anything_was_found_writes_nothing(
    command: Command, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(self: Tuner, config: SpeculativeConfig, records: list[Record]) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tuner, "_seconds", at_once)
    done = command(*asked, "--profile", "c10", *SOME)
    assert done.code == 130 and not (tmp_path / "tuned.json").exists()


def test_a_config_of_another_pair_is_used_with_one_line_of_warning(
    command: Command, tmp_path: Path, pair: tuple[str, str]
) -> None:
    file = tmp_path / "tuned.json"
    tuned = {"pair": "another", "target_identity": "0", "draft_identity": "1"}
    file.write_text(json.dumps({"method": "pearl", "num_speculative_tokens": 3, "tuned_for": tuned}))
    done = command("generate", "A branch", "--config", str(file), *SMALL, "--json")
    assert done.answers()[0]["method"] == "pearl"
    assert done.err.count("\n") == 1 and "tuned for another pair (another)" in done.err


@pytest.mark.slow
def test_a_config_for_models_side_by_side_says_so_where_they_take_turns(
    command: Command, asked: list[str], tmp_path: Path
) -> None:
    assert command(*asked, "--profile", profile(tmp_path, 0.01), *SOME).code == 0
    assert "here they take turns" in command("generate", "A", "--config", str(tmp_path / "tuned.json"), *SMALL).err
    beside = command("trace", "A", "--config", str(tmp_path / "tuned.json"), "--clock", "c10", *SMALL)
    assert beside.code == 0 and "take turns" not in beside.err


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ('{"method": "pearl", "max_branch": 3}', "Did you mean 'max_branches'"),
        ('{"tuned_four": {}}', "Unknown speculative setting 'tuned_four'"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ("[1]", "no JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_a_bad_config_is_refused_before_a_model_is_loaded(
    text: str, printed: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.engine.LLM", None)
    (tmp_path / "bad.json").write_text(text)
    done = command("generate", "A branch", "--config", str(tmp_path / "bad.json"))
    assert done.code == 2 and printed in done.err


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--methods", "specbranh"], "Did you mean 'specbranch'"),
        (["--methods", "hf-generate"], "Unknown method to tune"),
        (["--profile", "c11"], "Did you mean 'c1"),
        (["--suites", "gsm9k"], "Did you mean 'gsm8k'"),
        (["--pair", "tinny"], "Did you mean 'tiny'"),
        (["--pair", "tiny", "--draft", "other"], "together with draft"),
        (["--out", "no/such/folder/tuned.json"], "no folder"),
        (["--out", "."], "is a folder"),
    ],
)
def test_mistakes_are_reported_before_anything_is_fetched_or_loaded(
    options: list[str], printed: str, command: Command, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.lab.bench.recorded_pair.RecordedPair.__init__", None)
    monkeypatch.setattr("specbranch.cli.progress.pulled", None)
    done = command(*asked, "--profile", "c10", *options)
    assert done.code == 2 and printed in done.err, done.err


def test_a_target_alone_needs_a_profile_and_methods_without_a_draft(
    command: Command, asked: list[str], pair: tuple[str, str], tmp_path: Path
) -> None:
    alone = [*asked, "--target", pair[0]]
    assert "Name a --profile" in command(*alone).err
    assert "needs a draft model" in command(*alone, "--profile", "c10", "--methods", "pearl").err
    done = command(*alone, "--profile", "c10", "--trials", "4", "--max-tokens", "16", "--json")
    assert [row["method"] for row in json.loads(done.out)["methods"]] == ["autoregressive", "lookup"]


@pytest.mark.slow
def test_a_profile_of_another_pair_is_refused_unless_forced(command: Command, asked: list[str], tmp_path: Path) -> None:
    other = profile(tmp_path, 0.01, target_identity="0" * 64, pair="another")
    refused = command(*asked, "--profile", other, "--methods", "speculative", "--max-tokens", "16")
    assert refused.code == 2 and "--force-profile" in refused.err
    assert (
        command(*asked, "--profile", other, "--methods", "speculative", "--max-tokens", "16", "--force-profile").code
        == 0
    )


@pytest.mark.slow
def test_a_search_knows_how_weights_are_stored(command: Command, asked: list[str], tmp_path: Path) -> None:
    how = ("--profile", profile(tmp_path, 0.01), *SOME, "--weights")
    done = command(*asked, *how, "int8")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "tuned.json").read_text())["tuned_for"]["weights"] == "int8"
    refused = command(*asked, *how, "tiny")
    assert refused.code == 2 and "Unknown storage of weights 'tiny'" in refused.err


@pytest.mark.parametrize("suites", ["exam", "exam-edits", "own-math,exam-questions"])
def test_nothing_is_tuned_on_the_exam(command: Command, tmp_path: Path, suites: str) -> None:
    done = command("tune", "--suites", suites, "--profile", "c10", "--out", str(tmp_path / "tuned.json"))
    assert done.code == 2 and "nothing is tuned on it" in done.err and not (tmp_path / "tuned.json").exists()


def test_nor_on_the_exams_files(command: Command, tmp_path: Path) -> None:
    file = PROMPTS_FOLDER / "exam-edits.jsonl"
    done = command("tune", "--prompts", str(file), "--profile", "c10", "--out", str(tmp_path / "tuned.json"))
    assert done.code == 2 and "exam-edits: the exam tests planners" in done.err
