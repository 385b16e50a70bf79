"""The stored target: its scores of a batch are those of the target itself, in whatever batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch.models.files.locate import Located
from specbranch.models.files.weights import read_weights
from specbranch.models.loading import open_model
from specbranch.training.distill import teacher as teacher_module
from specbranch.training.distill.attention import by_stretches, has_stretches, mask_of, masked
from specbranch.training.distill.material import PADDING, Batch, Material
from specbranch.training.distill.model import Stack
from specbranch.training.distill.teacher import Teacher, moved
from specbranch.training.distill.unrolled_attention import has_flash
from tiny_models import saved, some_tokens, tiny

torch.set_num_threads(1)


def stack(folder: Path) -> Stack:
    arch, source = open_model(Located("folder", saved(tiny("llama"), folder)))
    return Stack(arch, read_weights(arch, source, torch.device("cpu"), torch.float64))


def material() -> Material:
    lengths = [5, 17, 9, 30, 12, 7]
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)))
    tokens = torch.tensor(some_tokens(sum(lengths)), dtype=torch.int32)
    return Material(tokens, starts, torch.full((len(lengths),), 2))


def test_what_was_remembered_is_what_is_said_now_however_it_is_packed(tmp_path: Path) -> None:
    target, text = stack(tmp_path), material()
    remembering, heard = Teacher(target), list[tuple[int, int]]()
    remembering.remember(text, 32, 2, lambda what, done, of, note: heard.append((done, of)))
    assert heard[-1] == (80, 80)
    for batch in text.batches(32, 3, seed=7, epoch=2):
        here, filled = moved(batch, target), batch.segments != PADDING
        torch.testing.assert_close(remembering(here)[filled], target(here)[filled], rtol=0, atol=1e-10)


def test_source_says_where_a_token_stands_in_the_material() -> None:
    text = material()
    for batch in text.batches(32, 2, seed=1, epoch=0):
        filled = batch.segments != PADDING
        assert torch.equal(text.tokens[batch.source[filled]].long(), batch.tokens[filled])


def test_there_is_no_room_for_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, text = Teacher(stack(tmp_path)), material()
    assert teacher.has_room(text)
    monkeypatch.setattr(teacher_module, "CPU_ROOM", 80 * teacher.stack.embedding.shape[1] * 8 - 1)
    assert not teacher.has_room(text)


def test_edges_stand_where_segments_change() -> None:
    segments = torch.tensor([[0, 0, 1, PADDING], [0, 0, 0, 0], [PADDING] * 4, [0, 1, 2, 2]])
    batch = Batch(*[segments] * 5).with_edges()
    assert batch.edges is not None and batch.edges.tolist() == [0, 2, 3, 4, 8, 12, 13, 14, 16]


@pytest.mark.gpu
def test_attention_by_stretches_is_used_on_a_gpu_and_gives_the_masked_result() -> None:
    device = torch.device("cuda")
    with torch.no_grad():  # a teacher asks first
        assert has_stretches(device, torch.bfloat16, 64) and has_flash(device, torch.bfloat16, 64)
    segments = torch.cat((torch.zeros(1, 100), torch.ones(1, 150), torch.full((1, 6), -1)), 1).long()
    batch = Batch(*[segments] * 5).with_edges()
    assert batch.edges is not None
    inputs = [torch.randn(1, 256, 9, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    found = by_stretches(batch.edges.to(device), *inputs)
    expected = masked(mask_of(segments.to(device), torch.bfloat16), *inputs)
    torch.testing.assert_close(found[:, :250], expected[:, :250], rtol=0.03, atol=0.03)
