"""The doctor finds what is wrong, calls nothing well that was not looked at, and recommends what its prediction
says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from specbranch.assembly import ModelChoice
from specbranch.clock.profile import CostProfile
from specbranch.lab.doctor.examine import DoctorReport, Patient, examine
from specbranch.lab.doctor.finding import Finding
from specbranch.lab.doctor.pair import agreement, costs, kernels, models_at_hand
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.loading import load_native
from specbranch.pairs import Pair
from specbranch.training.distill.agreement import Agreement
from tiny_pair import make_pair


def patient(target: str, draft: str) -> Patient:
    return Patient(ModelChoice(target, device="cpu"), ModelChoice(draft, device="cpu", shorten=True), "tiny")


def about(findings: list[Finding], what: str) -> Finding:
    return next(finding for finding in findings if finding.about == what)


@pytest.fixture(scope="module")
def examined(pair: tuple[str, str]) -> tuple[DoctorReport, list[Finding], list[str]]:
    reported: list[Finding] = []
    steps: list[str] = []
    report = examine(patient(*pair), reported.append, lambda what, done, total: steps.append(what))
    return report, reported, steps


@pytest.mark.slow
def test_a_sound_pair_is_well_and_every_method_is_predicted(
    examined: tuple[DoctorReport, list[Finding], list[str]],
) -> None:
    report, reported, steps = examined
    assert report.is_well and reported == report.findings and steps[-1] == "Done"
    here = {"Python", "torch", "CPU", "GPU", "Memory", "Cache folder"}
    both = {"Target", "Draft", "Vocabulary", "Agreement", "Costs", "Method"}
    assert here | both <= {finding.about for finding in reported}
    methods = {one.method: one for one in report.predictions}
    assert {"autoregressive", "speculative", "pearl", "specbranch", "lookup", "auto"} <= methods.keys()
    assert methods["autoregressive"].speedup == 1.0 and all(one.speedup > 0 for one in report.predictions)


def test_kernels_are_reported_with_the_storage_of_weights(pair: tuple[str, str], tmp_path: Path) -> None:
    small = kernels("target", load_native(pair[0], context_length=64, weights="int8"))
    if load_kernel("int8") is not None:
        assert small.level == "ok" and "is used, with weights in int8" in small.said
    wide = LlamaConfig(
        vocab_size=99, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(wide).save_pretrained(tmp_path)
    slow = kernels("draft", load_native(tmp_path, context_length=64, weights="int4"))
    assert slow.level == "note" and "no compiled step for int4" in slow.said and "--draft-weights" in slow.advice


def test_a_model_that_is_not_here_is_a_problem_and_the_rest_is_not_called_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_draft: Path
) -> None:
    monkeypatch.setenv("SPECBRANCH_CACHE", str(tmp_path / "empty"))
    report = examine(patient("smollm2-135m", str(tiny_draft)))
    assert not report.is_well and report.predictions == [] and report.best is None
    found = about(report.findings, "Target")
    assert found.level == "problem" and "specbranch models pull smollm2-135m" in found.advice
    assert "not looked at" in about(report.findings, "Pair").said
    assert not (tmp_path / "empty" / "models").exists(), "nothing is fetched"


def test_an_executor_that_cannot_run_the_pair_is_a_problem(pair: tuple[str, str]) -> None:
    report = examine(replace(patient(*pair), executor="streams"))
    assert about(report.findings, "Pair").level == "problem" and "on a GPU" in about(report.findings, "Pair").said


def test_a_damaged_folder_is_a_problem(tmp_path: Path, pair: tuple[str, str]) -> None:
    report = examine(patient(pair[0], str(tmp_path)))
    assert about(report.findings, "Draft").level == "problem" and not report.is_well


def test_a_pairs_draft_without_weights_is_a_problem(
    tiny: Pair, tmp_path: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text((tiny_draft / "config.json").read_text())
    monkeypatch.setenv("SPECBRANCH_DRAFTS", str(tmp_path))
    found = about(examine(patient(tiny.target, "tiny")).findings, "Draft")
    assert found.level == "problem" and "no model.safetensors" in found.said


def test_another_vocabulary_is_noted(pair: tuple[str, str], tmp_path: Path) -> None:
    import json

    _, other = make_pair(tmp_path)
    file = Path(other) / "tokenizer.json"
    held = json.loads(file.read_text())
    words = held["model"]["vocab"]
    (one, first), (two, second) = list(words.items())[40], list(words.items())[50]
    words[one], words[two] = second, first
    file.write_text(json.dumps(held))
    found = about(list(models_at_hand(ModelChoice(pair[0]), ModelChoice(other))), "Vocabulary")
    assert found.level == "note" and "another vocabulary" in found.said and "token strings are common" in found.said


@pytest.mark.parametrize(("top1", "level"), [(0.1, "problem"), (0.4, "note"), (0.7, "ok")])
def test_a_draft_that_hardly_agrees_is_reported(top1: float, level: str) -> None:
    found = agreement(Agreement(100, top1, top1 + 0.1, ()))
    assert found.level == level and f"{top1:.0%}" in found.said


def test_a_dear_draft_is_noted() -> None:
    cheap, dear = (CostProfile(target=((1, 1.0), (4, 1.5)), draft=((1, step),)) for step in (0.1, 0.8))
    found = costs(cheap)
    assert found.level == "ok" and "c = 10.0" in found.said and "1.50 times" in found.said
    assert costs(dear).level == "note"


@pytest.mark.default_model
@pytest.mark.slow
def test_the_default_pair_is_well(default_model: Path) -> None:
    report = examine(patient("smollm2-135m", "smollm2-default"))
    assert report.is_well and report.best is not None
    assert about(report.findings, "Kernels of the target").level in ("ok", "note")
    assert "first choice" in about(report.findings, "Agreement").said
