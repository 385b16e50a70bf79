"""Training on tiny random targets: it learns, measures, and goes on after a kill as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specbranch.core.draft_evaluation import JudgedPosition, evaluate
from specbranch.core.learning import SURE
from specbranch.errors import BadParameter, ModelError
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.locate import locate
from specbranch.models.files.weights import Weights, read_weights
from specbranch.models.loading import open_model
from specbranch.progress import Nobody
from specbranch.training.distill import train as training
from specbranch.training.distill.material import Batch, Material
from specbranch.training.distill.model import Stack
from specbranch.training.distill.picture import picture
from specbranch.training.distill.train import (
    CHECKPOINT,
    HELD_OUT_TEXT,
    METRICS,
    PICTURE,
    Trained,
    frequent_tokens,
    train,
)
from specbranch.training.distill.train_settings import TrainSettings, learning_rate
from tiny_models import SHAPE, saved, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = TrainSettings(
    layers=(0, 2),
    steps=14,
    rows=4,
    length=32,
    learning_rate=3e-3,
    warmup=3,
    record_every=2,
    evaluate_every=5,
    checkpoint_seconds=0.0,
    seed=5,
)
Target = tuple[Architecture, Weights]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    arch, source = open_model(locate(str(saved(tiny("qwen2"), tmp_path_factory.mktemp("target")))))
    return arch, read_weights(arch, source, torch.device("cpu"), torch.float32)


def conversations(count: int, seed: int) -> Material:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 24, (count,), generator=random)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    tokens = torch.randint(0, SHAPE["vocab_size"], (int(starts[-1]),), generator=random, dtype=torch.int32)
    return Material(tokens, starts, torch.full((count,), 3))


MATERIAL, HELD_OUT = conversations(60, 1), conversations(12, 2)


def trained(target: Target, folder: Path, settings: TrainSettings = SETTINGS, **more: Any) -> Trained:
    return train(*target, MATERIAL, HELD_OUT, settings, folder, **more)


def same_weights(one: Trained, other: Trained) -> bool:
    state = other.student.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in one.student.state_dict().items())


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


class Killed(BaseException):
    """What a kill looks like from inside."""


class Watcher(Nobody):
    """Sees how many steps there are, and kills the training after some."""

    def __init__(self, kill_after: float = math.inf) -> None:
        self.totals: list[float | None] = []
        self._kill_after = kill_after

    def __call__(self, what: str, done: float, of: float | None, note: str = "") -> None:
        if what == "Training":
            self.totals.append(of)
            if done >= self._kill_after:
                raise Killed


def killed_after(step: int, target: Target, folder: Path, settings: TrainSettings = SETTINGS, **more: Any) -> None:
    with pytest.raises(Killed):
        trained(target, folder, settings, watch=Watcher(step), **more)


def test_training_brings_the_draft_nearer_to_its_target(target: Target, tmp_path: Path) -> None:
    before = trained(target, tmp_path / "none", replace(SETTINGS, steps=1, learning_rate=1e-12)).figures
    after = trained(target, tmp_path / "some", replace(SETTINGS, steps=60, checkpoint_seconds=99.0)).figures
    assert after["divergence"] < 0.8 * before["divergence"]
    assert after["top1"] > before["top1"] and after["top1"] <= after["top3"]
    assert after["outside"] == pytest.approx(0, abs=1e-5) and str(round(after["outside"], 4)) == "0.0"


@pytest.mark.parametrize("head_tokens", [None, 40])
def test_the_counts_are_those_of_the_models_over_each_held_out_answer(
    target: Target, tmp_path: Path, head_tokens: int | None
) -> None:
    """The twin runs both models over one conversation at a time."""
    done = trained(target, tmp_path, replace(SETTINGS, steps=3, head_tokens=head_tokens, rows=64))
    teacher, judged = Stack(*target), []
    for index in range(len(HELD_OUT)):
        ids = HELD_OUT.sequence(index)
        tokens, zeros = torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.int64)
        whole = Batch(tokens, torch.arange(len(ids)).unsqueeze(0), zeros, zeros, zeros)
        with torch.no_grad():
            best = teacher.logits(teacher(whole))[0].argmax(-1).tolist()
            odds = done.student.logits(done.student(whole))[0].softmax(-1)
        names = range(SHAPE["vocab_size"]) if done.student.head_ids is None else done.student.head_ids.tolist()
        for at in range(2, len(ids) - 1):  # an answer begins at token 3, which is predicted at token 2
            ranked = sorted(zip(odds[at].tolist(), names, strict=True), reverse=True)[:SURE]
            right = [name == best[at] for _, name in ranked]
            judged.append(JudgedPosition(tuple(said for said, _ in ranked), right.index(True) if any(right) else None))
    assert done.evaluation == evaluate(judged, HELD_OUT_TEXT)
    assert done.evaluation.positions == done.figures["compared"] == len(judged) > 50
    assert done.evaluation.hits / len(judged) == pytest.approx(done.figures["top1"])


def test_the_target_itself_is_not_changed(target: Target, tmp_path: Path) -> None:
    _, weights = target
    before = [weights.embedding.clone(), weights.layers[0].qkv.weight.clone(), weights.norm.clone()]
    trained(target, tmp_path, replace(SETTINGS, steps=3))
    assert all(map(torch.equal, before, [weights.embedding, weights.layers[0].qkv.weight, weights.norm]))


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(target: Target, tmp_path: Path) -> None:
    whole = trained(target, tmp_path / "whole")
    killed_after(4, target, tmp_path / "killed")
    killed_after(10, target, tmp_path / "killed", resume=True)
    torch.manual_seed(123)  # another process would have another state
    again = trained(target, tmp_path / "killed", resume=True)
    assert same_weights(whole, again) and again.tokens == whole.tokens
    # the comparison can fail
    assert not same_weights(whole, trained(target, tmp_path / "other", replace(SETTINGS, seed=6)))
    mine, theirs = ([r["step"] for r in records(tmp_path / name)] for name in ("killed", "whole"))
    assert mine == theirs


def test_a_kill_while_saving_leaves_the_checkpoint_before(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after(6, target, tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()

    def killed(handle: int) -> None:
        raise Killed

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(Killed):
        trained(target, tmp_path, resume=True)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_a_finished_run_resumed_changes_nothing(target: Target, tmp_path: Path) -> None:
    first = trained(target, tmp_path)
    lines = records(tmp_path)
    again = trained(target, tmp_path, resume=True)
    assert same_weights(first, again) and records(tmp_path) == lines


@pytest.mark.slow
def test_a_time_budget_becomes_steps_that_a_resumed_run_keeps(target: Target, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=None, seconds=0.6)
    watcher = Watcher()
    killed_after(training.CALIBRATION, target, tmp_path, settings)
    done = trained(target, tmp_path, settings, resume=True, watch=watcher)
    assert done.steps >= training.CALIBRATION and set(watcher.totals) == {done.steps}


def test_computing_the_targets_states_counts_in_a_time_budget(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes more than the budget here, by a clock that jumps."""
    remember, clock, jumps = training.Teacher.remember, time.monotonic, [0.0]

    def slow(self: training.Teacher, *given: Any) -> None:
        remember(self, *given)
        jumps.append(1e7)

    monkeypatch.setattr(training.Teacher, "remember", slow)
    # of this module alone: servers of other tests run in this process, and their timers must not jump
    jumping = SimpleNamespace(monotonic=lambda: clock() + sum(jumps), perf_counter=time.perf_counter)
    monkeypatch.setattr(training, "time", jumping)
    done = trained(target, tmp_path, replace(SETTINGS, steps=None, seconds=1e6, most_steps=60))
    assert done.steps == training.CALIBRATION


def test_out_of_memory_halves_the_rows_at_a_time_and_says_so(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trained(target, tmp_path / "whole", replace(SETTINGS, steps=3))
    part = training._Training._part

    def short_of_memory(run: training._Training, batch: Batch, total: float) -> torch.Tensor:
        loss = part(run, batch, total)  # fails late: gradients that were added already must not count twice
        if batch.tokens.shape[0] > 1:
            raise torch.OutOfMemoryError
        return loss

    monkeypatch.setattr(training._Training, "_part", short_of_memory)
    small = trained(target, tmp_path / "small", replace(SETTINGS, steps=3))
    assert "going on with 2 rows" in caplog.text and "going on with 1 rows" in caplog.text
    for name, tensor in small.student.state_dict().items():
        assert torch.allclose(tensor, whole.student.state_dict()[name], atol=2e-4), name


def test_no_memory_for_one_row_is_a_sentence(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(run: training._Training, batch: Batch, total: float) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training._Training, "_part", never)
    with pytest.raises(BadParameter, match="does not fit into memory"):
        trained(target, tmp_path)


def test_out_of_memory_halves_the_rows_of_a_comparison_too(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trained(target, tmp_path / "whole", replace(SETTINGS, steps=1))
    compare = training.compare

    def short_of_memory(rows: Any, *more: Any) -> Any:
        if "going on with 2 rows" not in caplog.text:
            raise torch.OutOfMemoryError
        return compare(rows, *more)

    monkeypatch.setattr(training, "compare", short_of_memory)
    assert trained(target, tmp_path / "small", replace(SETTINGS, steps=1)).figures == pytest.approx(
        whole.figures, abs=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(("fitting", "words"), [(2, "listening to 2 rows"), (0, "asked at every step")])
def test_out_of_memory_while_listening_takes_fewer_rows_or_does_without(
    fitting: int,
    words: str,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = trained(target, tmp_path / "whole", replace(SETTINGS, steps=3))
    remember = training.Teacher.remember

    def short_of_memory(teacher: Any, material: Material, length: int, rows: int, heard: Any) -> None:
        if rows > fitting:
            raise torch.OutOfMemoryError
        remember(teacher, material, length, rows, heard)

    monkeypatch.setattr(training.Teacher, "remember", short_of_memory)
    small = trained(target, tmp_path / "small", replace(SETTINGS, steps=3))
    assert words in caplog.text
    for name, tensor in small.student.state_dict().items():
        assert torch.allclose(tensor, whole.student.state_dict()[name], atol=2e-4), name


@pytest.mark.slow
def test_a_resumed_run_remembers_only_where_there_is_still_room(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after(4, target, tmp_path)
    monkeypatch.setattr(training.Teacher, "has_room", lambda *given: False)
    monkeypatch.setattr(
        training.Teacher, "remember", lambda *given: pytest.fail("it was not asked whether there is room")
    )
    assert trained(target, tmp_path, resume=True).steps == 14


def test_metrics_and_picture_tell_loss_and_agreement(target: Target, tmp_path: Path) -> None:
    done = trained(target, tmp_path)
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 5, 6, 8, 10, 12, 14, 14]
    assert [line["step"] for line in lines if "top1" in line] == [5, 10, 14]
    assert all(line["tokens_per_second"] > 0 and line["loss"] > 0 for line in lines[:-1])
    assert lines[-1]["top1"] == done.figures["top1"]
    root = ET.fromstring((tmp_path / PICTURE).read_text())
    lines_drawn = [line for line in root.iter() if line.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines_drawn] == [8, 3]


def test_a_picture_of_nothing_is_still_a_picture() -> None:
    assert ET.fromstring(picture([])).tag.endswith("svg")


def test_a_reduced_head_learns_the_most_frequent_tokens(target: Target, tmp_path: Path) -> None:
    done = trained(target, tmp_path, replace(SETTINGS, head_tokens=40))
    ids = done.student.head_ids
    assert ids is not None and done.student.head.shape[0] == 40
    counts = MATERIAL.frequencies(SHAPE["vocab_size"])
    assert counts[ids].min() >= counts[[token for token in range(131) if token not in ids.tolist()]].max()
    assert 0 < done.figures["outside"] < 1
    assert ids.tolist() == sorted(ids.tolist())


@pytest.mark.parametrize("count", [0, 131])
def test_a_head_as_large_as_the_vocabulary_is_refused(count: int) -> None:
    with pytest.raises(BadParameter, match="expected 1 to 130"):
        frequent_tokens(MATERIAL, 131, count)


@pytest.mark.parametrize("damage", ["cut", "other bytes", "other object"])
def test_a_damaged_checkpoint_is_a_sentence(damage: str, target: Target, tmp_path: Path) -> None:
    killed_after(4, target, tmp_path)
    file = tmp_path / CHECKPOINT
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:2000])
    elif damage == "other bytes":
        file.write_bytes(b"no checkpoint at all")
    else:
        save_file({"other": torch.ones(2)}, file)
    with pytest.raises(ModelError, match="is damaged"):
        trained(target, tmp_path, resume=True)


def test_a_checkpoint_of_other_settings_or_material_is_refused(target: Target, tmp_path: Path) -> None:
    killed_after(4, target, tmp_path)
    with pytest.raises(BadParameter, match=r"learning_rate was 0.003, now 0.1"):
        trained(target, tmp_path, replace(SETTINGS, learning_rate=0.1), resume=True)
    with pytest.raises(BadParameter, match="material was"):
        train(*target, HELD_OUT, HELD_OUT, SETTINGS, tmp_path, resume=True)


def test_a_loss_that_is_no_number_stops_the_run(target: Target, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="lower learning rate"):
        trained(target, tmp_path, replace(SETTINGS, learning_rate=1e30))


def test_the_rate_rises_then_falls_to_its_last_share() -> None:
    settings = replace(SETTINGS, steps=100, warmup=10, learning_rate=1.0, last_rate=0.1)
    rates = [learning_rate(settings, step, 100) for step in range(101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)
    assert learning_rate(settings, 50, None) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": None},
        {"seconds": 3.0},
        {"rows": 0},
        {"steps": 0},
        {"learning_rate": -1.0},
        {"clip": math.nan},
        {"steps": None, "seconds": math.inf},
        {"checkpoint_seconds": math.nan},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadParameter):
        replace(SETTINGS, **wrong)


FEATURES = replace(SETTINGS, layers=(2,), taps=(0, 1, 2), depths=3, rows=4)


def test_training_a_feature_draft_beats_its_start_at_every_depth(target: Target, tmp_path: Path) -> None:
    """It starts as the target one token behind, so nearly any training helps; the last depth shows the unrolling."""
    before = trained(target, tmp_path / "none", replace(FEATURES, steps=1, learning_rate=1e-12)).figures
    done = trained(target, tmp_path / "some", replace(FEATURES, steps=60, checkpoint_seconds=99.0))
    after, losses = done.figures, [one["loss"] for one in records(tmp_path / "some") if "loss" in one]
    assert after["divergence"] < 0.8 * before["divergence"] and losses[-1] < 0.8 * losses[0]
    assert len(after["top1_by_depth"]) == 3 and after["top1_by_depth"][0] == round(after["top1"], 4)
    assert after["top1"] > before["top1"], (after["top1_by_depth"], before["top1_by_depth"])
    assert sum(after["top1_by_depth"]) > sum(before["top1_by_depth"])
    # Positions at depth 0, and those deeper ones that drafting would have come to.
    met = sum(done.evaluation.first.met)
    assert after["compared"] < met < 3 * after["compared"]


def test_a_feature_draft_killed_and_resumed_ends_with_the_same_weights(target: Target, tmp_path: Path) -> None:
    short = replace(FEATURES, steps=6)
    whole = trained(target, tmp_path / "whole", short)
    killed_after(4, target, tmp_path / "killed", short)
    again = trained(target, tmp_path / "killed", short, resume=True)
    assert same_weights(whole, again) and whole.evaluation == again.evaluation
    assert not same_weights(whole, trained(target, tmp_path / "other", replace(short, depths=2)))
    with pytest.raises(BadParameter, match="taps was"):
        trained(target, tmp_path / "killed", replace(short, taps=(0, 1, 3)), resume=True)


def test_few_rows_at_a_time_bound_the_memory_of_unrolled_steps(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(target, tmp_path / "whole", replace(FEATURES, steps=2))
    sizes, part = list[int](), training._Training._part

    def watched(run: training._Training, batch: Batch, total: float) -> torch.Tensor:
        sizes.append(batch.tokens.numel() * run.settings.depths)
        return part(run, batch, total)

    monkeypatch.setattr(training, "AT_ONCE", 2 * 32 * 3)
    monkeypatch.setattr(training._Training, "_part", watched)
    small = trained(target, tmp_path / "small", replace(FEATURES, steps=2))
    assert max(sizes) == 2 * 32 * 3
    for name, tensor in small.student.state_dict().items():
        assert torch.allclose(tensor, whole.student.state_dict()[name], atol=2e-4), name
