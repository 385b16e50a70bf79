"""Settings of `serve` from a file, from environment variables and from the command line: which wins, and which
mistakes get a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from in_process import Command

from specbranch.cli.serve import VARIABLES, serve
from specbranch.cli.settings_sources import ONLY_HERE

YAML = "port: 9000\nallow-host: [a.example]\nmax_batch: 4\nno-prefix-cache: true\nmax_branches: 4\nmethod: pearl\n"
TOML = YAML.replace(":", " =").replace("a.example", '"a.example"').replace("pearl", '"pearl"')
JSON = json.dumps({**yaml.safe_load(YAML), "allow-host": "a.example"})  # one name needs no list
FORMS = {"a.yaml": YAML, "a.yml": YAML, "a.toml": TOML, "a.json": JSON}


def effective(command: Command, *options: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that are printed, and their sources."""
    done = command("serve", *options, "--print-config")
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line and not line.startswith("#")]
    sources = {line.partition(":")[0]: line.rpartition("  # ")[2] for line in lines}
    return yaml.safe_load(done.out), sources


@pytest.mark.parametrize("name", FORMS)
def test_a_file_sets_options_in_each_format(name: str, command: Command, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(FORMS[name])
    values, sources = effective(command, "--config", str(file))
    assert (values["port"], values["allow-host"], values["max-batch"]) == (9000, ["a.example"], 4)
    assert values["no-prefix-cache"] is True and values["method"] == "pearl"
    assert values["speculative-config"] == {"max_branches": 4}
    assert sources["port"] == sources["speculative-config"] == str(file) and sources["host"] == "default"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("max-batch: 2\nmax-queue: 2\nmax-body: 2\nmax_branches: 2\nrule: ratio\nno-experience: true\n")
    monkeypatch.setenv("SPECBRANCH_SERVE_CONFIG", str(file))
    for name, value in {"MAX_QUEUE": "3", "MAX_BODY": "3", "METHOD": "pearl", "NO_EXPERIENCE": "no"}.items():
        monkeypatch.setenv(VARIABLES + name, value)
    monkeypatch.setenv("SPECBRANCH_SERVE_SPECULATIVE_CONFIG", '{"max_branches": 3, "ngram_max": 3, "stop_below": 0.3}')
    values, sources = effective(
        command, "--max-body", "4", "--speculative-config", '{"ngram_max": 4, "method": "auto"}'
    )
    assert (values["max-batch"], values["max-queue"], values["max-body"]) == (2, 3, 4)
    assert values["speculative-config"] == {"max_branches": 3, "ngram_max": 4, "stop_below": 0.3}
    assert (values["method"], values["rule"], values["no-experience"]) == ("auto", "ratio", False)
    assert sources["max-queue"] == "SPECBRANCH_SERVE_MAX_QUEUE" and sources["max-body"] == "command line"


def test_printed_settings_are_a_file_that_gives_the_same_settings(command: Command, tmp_path: Path) -> None:
    options = ("--allow-host", "a.example", "--no-prefix-cache", "--without", "lookup", "--log-text")
    values, _ = effective(command, *options)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(values))
    assert effective(command, "--config", str(tmp_path / "again.yaml"))[0] == values | {"without": ["lookup"]}


def test_every_option_has_a_variable(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, str] = {"speculative-config": '{"stop_below": 0.5}', "without": "lookup", "policy": "planner"}
    for option in serve.params:
        name = max(option.opts, key=len).removeprefix("--")
        if option.name in (*ONLY_HERE, "config", "keys"):
            continue
        if name not in given:
            given[name] = "true" if option.is_flag else {click.INT: "7", click.FLOAT: "7.5"}.get(option.type, "auto")
    given |= {"rule": "ratio", "tool-call-parser": "hermes", "reasoning-parser": "none", "method": "specbranch"}
    given |= {"uds-mode": "660", "otlp-traces-endpoint": "http://localhost:4318"}
    given |= {"keep-text-limit": "1000000"}
    given |= {"warm-up": "lazy", "weights": "int8", "draft-weights": "int8", "dtype": "bfloat16", "cache-dtype": "int8"}
    for name, value in given.items():
        monkeypatch.setenv(VARIABLES + name.upper().replace("-", "_"), value)
    values, sources = effective(command)
    assert values.keys() == {*given, "keys"}
    assert {name for name, source in sources.items() if source == "default"} == {"keys"}
    assert all(sources[name] == VARIABLES + name.upper().replace("-", "_") for name in given)
    assert values["allow-host"] == ["auto"] and values["grace"] == 7.5 and values["max-batch"] == 7


def test_a_file_may_name_the_file_of_tune_as_its_base(command: Command, tmp_path: Path) -> None:
    tuned, file = tmp_path / "tuned.json", tmp_path / "a.yaml"
    tuned.write_text(json.dumps({"method": "pearl", "max_branches": 3, "tuned_for": {"pair": "tiny"}}))
    file.write_text(f"config: {tuned}\nmax_branches: 5\n")
    values, sources = effective(command, "--config", str(file))
    assert values["method"] == "pearl" and values["speculative-config"] == {"max_branches": 5}
    assert sources["method"] == str(tuned) and sources["speculative-config"] == str(file)
    assert effective(command, "--config", str(tuned))[0]["speculative-config"] == {"max_branches": 3}


MISTAKES = {
    "unknown key": ("max-batchs: 4", "has 'max_batchs', which is no option and no speculative setting. Did you mean "),
    "wrong type": ("max-batch: many", "max-batch in {file} is 'many'; expected a whole number."),
    "a fraction": ("max-batch: 1.5", "max-batch in {file} is 1.5; expected a whole number."),
    "true for a number": ("grace: true", "grace in {file} is True; expected a number."),
    "a number for a text": ("model-name: 7", "model-name in {file} is 7; expected a text, in quotes."),
    "a text for a flag": ("log-text: maybe", "log-text in {file} is 'maybe'; expected true or false."),
    "a mapping for a list": ("allow-host: {a: b}", "expected a list of texts."),
    "out of range": ("max-batch: 0", "max_batch is 0; expected a whole number"),
    "a bad setting": ("stop_below: low", "{file}: stop_below is 'low'"),
    "an unknown setting inside": ("speculative-config: {max_branch: 2}", "Did you mean 'max_branches'"),
    "settings that are a list": ("speculative-config: [1]", "speculative-config in {file} is [1]; expected names"),
    "twice": ("max-batch: 1\nmax_batch: 2", "twice, once with - and once with _"),
    "a key that is a word of YAML": ("on: 1", "has the key True; expected names of options. Quote"),
    "something that is done once": ("new-key: ann", "which only the command line takes"),
    "no names": ("- 1", "are [1]; expected names of options with values."),
    "no YAML": ("a: [", "cannot be read (while parsing a flow"),
    "a base that has one": ("config: {file}", "expected a file of settings that names no other."),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_file_names_the_file(mistake: str, command: Command, tmp_path: Path) -> None:
    text, said = MISTAKES[mistake]
    file = tmp_path / "a.yaml"
    file.write_text(text.replace("{file}", str(file)))
    done = command("serve", "--config", str(file), "--print-config")
    assert done.code == 2 and said.replace("{file}", str(file)) in done.err and done.out == ""


def test_a_file_that_is_not_there_gets_a_sentence(command: Command, tmp_path: Path) -> None:
    done = command("serve", "--config", str(tmp_path / "none.yaml"))
    assert done.code == 2 and "none.yaml cannot be read (No such file or directory)" in done.err


def test_an_unknown_variable_is_warned_about_and_a_wrong_one_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_SERVE_MAX_BATCHES", "4")
    done = command("serve", "--print-config")
    assert done.code == 0 and "SPECBRANCH_SERVE_MAX_BATCHES is ignored" in done.err
    assert "Did you mean 'SPECBRANCH_SERVE_MAX_BATCH'?" in done.err
    monkeypatch.setenv("SPECBRANCH_SERVE_PORT", "tcp://10.0.0.1:8000")
    done = command("serve", "--print-config")
    assert done.code == 2 and "SPECBRANCH_SERVE_PORT is 'tcp://10.0.0.1:8000' (as Kubernetes sets it" in done.err
    monkeypatch.setenv("SPECBRANCH_SERVE_PORT", "")
    monkeypatch.setenv("SPECBRANCH_SERVE_SPECULATIVE_CONFIG", "{")
    assert "SPECBRANCH_SERVE_SPECULATIVE_CONFIG is no JSON" in command("serve", "--print-config").err


def test_what_the_models_are_loaded_with_is_what_the_sources_say(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import specbranch.cli.serve
    from specbranch.cli.options import load_options, speculative_config

    loaded: list[dict[str, Any]] = []
    monkeypatch.setattr(specbranch.cli.serve, "load_llm", loaded.append)
    monkeypatch.setattr("specbranch.serve.run.serve", lambda *given: None)
    (tmp_path / "a.yaml").write_text("max_branches: 5\nmethod: pearl\nno-prefix-cache: true\nport: 0\n")
    monkeypatch.setenv("SPECBRANCH_SERVE_CONTEXT_LENGTH", "64")
    assert command("serve", "--config", str(tmp_path / "a.yaml"), "--rule", "ratio").code == 0
    assert speculative_config(loaded[0]) == {"max_branches": 5, "method": "pearl", "rule": "ratio"}
    assert load_options(loaded[0]).prefix_cache is False and load_options(loaded[0]).context_length == 64
