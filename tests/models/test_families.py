"""Families whose layers are not Llama's: against transformers, and against themselves in other batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.sampling.logit_rows import collate
from tiny_models import FURTHER, GREEDY, in_double, logits_of, saved, some_tokens, tiny

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


@pytest.fixture(autouse=True)
def torch_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved(tiny(kind), tmp_path_factory.mktemp(kind)) for kind in FURTHER}


def chain(seq: int, tokens: list[int], after: int = ROOT) -> Feed:
    return Feed(seq, tuple(tokens), (after, *range(after + 1, after + len(tokens))))


def scores(runner: NativeRunner, tokens: list[int], seq: int = 99) -> torch.Tensor:
    """The row after each token, fed in one go to a fresh sequence."""
    runner.open(seq, GREEDY)
    rows = runner.score([chain(seq, tokens)])[0]
    runner.close(seq)
    return collate(rows)


def assert_same(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", FURTHER)
def test_logits_of_every_family_equal_those_of_transformers(
    kind: str, dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    reference = tiny(kind) if dtype == torch.float32 else in_double(tiny(kind))
    tokens = some_tokens(300)
    runner = load_native(folders[kind], context_length=512, dtype=dtype, tail=64)
    assert not runner.decoder.plain
    runner.open(0, GREEDY)
    runner.extend(0, tokens[:270])  # two chunks
    rows = runner.score([chain(0, tokens[270:])])[0]
    assert_same(collate(rows), logits_of(reference, tokens)[270:], TOLERANCE[dtype])


@pytest.mark.parametrize("kind", FURTHER)
def test_each_node_of_a_tree_is_scored_as_its_own_path(kind: str, folders: dict[str, Path]) -> None:
    runner = load_native(folders[kind], context_length=512, dtype="float64", tail=64)
    prompt, tokens, parents = some_tokens(61), some_tokens(9, seed=5), [ROOT, 0, 0, ROOT, 3, 1, 1, 2, 4]
    runner.open(0, GREEDY)
    runner.extend(0, prompt)
    rows = runner.score([Feed(0, tuple(tokens[:6]), tuple(parents[:6]))])[0]
    rows += runner.score([Feed(0, tuple(tokens[6:]), tuple(parents[6:]))])[0]
    for node, row in enumerate(rows):
        sequence = runner.slots(0).sequence(node)
        runner.open(1, GREEDY)
        runner.extend(1, sequence[:-1])
        (alone,) = runner.score([chain(1, sequence[-1:])])[0]
        runner.close(1)
        assert_same(row.logits, alone.logits, 1e-12)
