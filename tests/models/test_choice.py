"""Choosing among logits: tokens, best entries, confidence and who is reached, in plain operations; on a GPU by
kernels too."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from specbranch.core.noise import keys
from specbranch.models.files.head_columns import Columns
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.layout import BEFORE, BOUND, CONFIDENCE, NO_ROW, ROOT_ROW, deepest
from specbranch.models.sampling.noise_rows import Noise

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 5000


def some_rows(rows: int, seed: int) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """Logits, what to choose of them (a tree, noise in every other row), and their noise."""
    rng, noise = random.Random(seed), Noise()
    logits = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3
    table = np.zeros((6, rows), dtype=np.int32)
    table[0] = np.linspace(0.4, 1.6, rows, dtype=np.float32).view(np.int32)
    kv_slots = [(seed, 0, 10 + row) for row in range(rows)]
    for row, key in enumerate(kv_slots):
        table[1:3, row], table[3, row] = np.array(keys(*key), dtype=np.uint32).view(np.int32), row % 2
        table[4, row] = row if row % 7 == 0 else rng.randrange(row - row % 7, row)
    table[5] = ROOT_ROW
    return logits, table, torch.stack(noise.rows(kv_slots, WIDTH))


def expected_scores(logits: torch.Tensor, table: np.ndarray, noise: torch.Tensor) -> torch.Tensor:
    scores = logits / torch.from_numpy(table[0].view(np.float32).copy())[:, None]
    return torch.where(torch.from_numpy(table[3])[:, None] > 0, scores + noise, scores)


def chosen(
    logits: torch.Tensor, table: np.ndarray, count: int, device: str, columns: Columns | None = None
) -> torch.Tensor:
    picks = torch.zeros(512, dtype=torch.int32, device=device)
    chooser = Chooser(picks, logits.shape[1], columns)
    assert chooser.by_kernels == (device == "cuda")
    counts = torch.tensor([0, deepest(table[4])], dtype=torch.int32, device=device)
    lines = chooser(logits.to(device), torch.from_numpy(table).to(device), counts, count).cpu()
    assert torch.equal(picks[: len(lines)].cpu(), lines[:, 0].int())
    return lines


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_the_best_entries_are_found_with_their_scores(rows: int, count: int, device: str) -> None:
    logits, table, noise = some_rows(rows, seed=rows)
    scores = expected_scores(logits, table, noise)
    lines = chosen(logits, table, count, device)
    top, best = scores.topk(count)
    assert torch.equal(lines[:, BEFORE : BEFORE + count].long(), best) and torch.equal(lines[:, 0].long(), best[:, 0])
    torch.testing.assert_close(lines[:, BEFORE + count :], top, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lines[:, CONFIDENCE], scores.softmax(-1).amax(-1), rtol=1e-4, atol=0)
    if count > 1:  # of the law itself, whatever the noise
        law = (logits / torch.from_numpy(table[0].view(np.float32).copy())[:, None]).double().softmax(-1)
        bound = 1.0 - (0.2 * -(law * law.log()).sum(-1)).sqrt()
        torch.testing.assert_close(lines[:, BOUND].double(), bound.clamp(min=0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_entries_the_lowest_is_taken_and_what_is_forbidden_never(device: str) -> None:
    logits, table, _ = some_rows(3, seed=1)
    table[3] = 0
    logits[0, [4000, 17, 2500]] = 50.0
    logits[1] = -torch.inf
    logits[1, 4999] = -3.0
    lines = chosen(logits, table, 8, device)
    assert lines[0, BEFORE : BEFORE + 3].tolist() == [17, 2500, 4000]
    assert lines[1, 0] == 4999 and lines[1, CONFIDENCE] == lines[1, BOUND] == 1.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_reached_whose_ancestors_say_what_was_chosen(seed: int, device: str) -> None:
    rows, rng = 40, random.Random(seed)
    logits, table, _ = some_rows(rows, seed)
    tokens = chosen(logits, table, 1, device)[:, 0].int().tolist()
    reached = []
    for row in range(rows):
        parent = int(table[4, row])
        if parent != row:
            table[5, row] = rng.choice([tokens[parent], tokens[parent], tokens[parent] + 1, NO_ROW])
        reached.append(parent == row or (reached[parent] and int(table[5, row]) == tokens[parent]))
    assert 0 < sum(reached) < rows
    assert chosen(logits, table, 1, device)[:, 1].tolist() == reached


@pytest.mark.parametrize("device", DEVICES)
def test_a_reduced_head_chooses_tokens_by_their_own_noise(device: str) -> None:
    logits, table, noise = some_rows(8, seed=3)
    ids = torch.arange(0, WIDTH, 3)
    lines = chosen(logits[:, ids], table, 1, device, Columns(ids.to(device), WIDTH))
    expected = expected_scores(logits, table, noise)[:, ids].argmax(-1)
    assert torch.equal(lines[:, 0].long(), ids[expected])
