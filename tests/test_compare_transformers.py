"""The comparison with transformers: one set of weights for both, which is checked, and a run of it from end to end."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from specbranch.lab.bench.other_engines.transformers_weights import named

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import compare_transformers

    return compare_transformers


def test_transformers_runs_on_our_weights_and_others_are_noticed(script: ModuleType) -> None:
    torch.manual_seed(0)
    cpu, arch = torch.device("cpu"), script.architecture("tiny")
    weights = script.random_weights(arch, cpu)
    runner = script.make_runner(arch, weights, 100)
    model = script.as_transformers(runner.decoder)
    views = {**named(runner.decoder), "lm_head.weight": runner.decoder.head.weight}
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == {
        name: one.data_ptr() for name, one in views.items()
    }
    prompt = torch.randint(0, arch.vocabulary, (20,)).tolist()
    assert script.check(runner, model, prompt)["largest_difference"] < 0.1
    first, *others = weights.layers
    swapped = replace(first, gate_up=replace(first.gate_up, weight=first.gate_up.weight.flip(0)))
    with pytest.raises(SystemExit, match="not the same weights"):
        other = script.make_runner(arch, replace(weights, layers=(swapped, *others)), 100)
        script.check(runner, script.as_transformers(other.decoder), prompt)


@pytest.mark.slow
def test_the_last_line_of_a_run_holds_every_figure(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--context", "20", "--tokens", "4", "--prompt", "40", "--runs", "1"]
    monkeypatch.setattr(sys, "argv", ["compare", "--shapes", "tiny", "--device", "cpu", *sizes])
    script.main()
    *_, last = capsys.readouterr().out.splitlines()
    (found,) = json.loads(last)["shapes"]
    times = ("ours_ms", "step_ms", "eager_ms", "static_ms", "prompt_ours_ms", "prompt_theirs_ms", "prompt_ratio")
    assert all(found[name] > 0 for name in times) and not found["compiled"]
