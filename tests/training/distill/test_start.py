"""A training that starts from a finished draft starts from that draft, head and all, and ends within its bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specbranch.models.drafts.draft_folder import DraftInfo, fingerprint_of
from specbranch.models.drafts.load import open_for_target
from specbranch.models.files.locate import locate
from specbranch.models.files.weights import read_weights
from specbranch.models.loading import open_model
from specbranch.training.distill.draft_saving import DraftWeights, save_draft
from specbranch.training.distill.material import Material
from specbranch.training.distill.model import TrainedLayer
from specbranch.training.distill.start import StartingDraft
from specbranch.training.distill.train import train
from specbranch.training.distill.train_settings import TrainSettings
from tiny_models import SHAPE, saved, tiny

IDS = [1, 5, 40, 100]
SETTINGS = TrainSettings(layers=(0, 2), seconds=600.0, most_steps=25, rows=2, length=24, head_tokens=4, warmup=3)


def conversations(count: int) -> Material:
    tokens = torch.randint(0, SHAPE["vocab_size"], (12 * count,), dtype=torch.int32)
    return Material(tokens, torch.arange(0, 12 * count + 1, 12), torch.full((count,), 3))


@pytest.mark.usefixtures("one_thread")
def test_it_starts_from_the_draft_and_stops_at_its_bound_whatever_time_is_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = str(saved(tiny("qwen2"), tmp_path / "target"))
    arch, source = open_model(locate(target))
    weights = read_weights(arch, source, torch.device("cpu"), torch.float32)
    other = tiny("qwen2", 7)  # no layer of the target
    theirs = read_weights(
        arch, open_model(locate(str(saved(other, tmp_path / "other"))))[1], torch.device("cpu"), torch.float32
    )
    own = DraftWeights([theirs.layers[0], theirs.layers[1]], theirs.norm, torch.tensor(IDS))
    save_draft(tmp_path / "draft", arch, own, DraftInfo("tiny", fingerprint_of(arch, source), (0, 2), len(IDS)))
    found = open_for_target(tmp_path / "draft", target)
    start = StartingDraft.of(found, torch.device("cpu"))
    student = start.student(found, weights)
    assert student.head_ids is not None and student.head_ids.tolist() == IDS
    for block, layer in zip(student.blocks, own.layers, strict=True):
        assert isinstance(block, TrainedLayer)
        assert torch.equal(block.weights().qkv.weight, layer.qkv.weight.bfloat16().float())
    still = replace(SETTINGS, learning_rate=1e-12)
    done = train(arch, weights, conversations(20), conversations(4), still, tmp_path / "run", start=start)
    assert done.steps == 25 and done.student.head_ids is not None and done.student.head_ids.tolist() == IDS
    for name, tensor in student.state_dict().items():
        assert torch.allclose(done.student.state_dict()[name], tensor, atol=1e-9), name
