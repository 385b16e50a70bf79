"""The fused step for CPUs against the plain decoder, and its promise: a row has the same bits in any company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.models.fused_step import FusedStep
from specbranch.models.kernels import load_kernel
from specbranch.models.linear import MOST_ROWS
from specbranch.models.native import NativeRunner, load_native
from specbranch.models.rows import collate
from tiny_models import CONFIGS, saved, some_tokens, tiny

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def compiled_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved(tiny(kind), tmp_path_factory.mktemp(kind)) for kind in CONFIGS}


def plain(runner: NativeRunner) -> NativeRunner:
    """The same weights without the fused step."""
    other = NativeRunner(runner.decoder, runner.context_length, runner.tail)
    other._fused, other._planner.fused_rows = None, 0
    return other


@pytest.mark.parametrize("kind", CONFIGS)
def test_fused_rows_equal_plain_ones_up_to_rounding(kind: str, threads: int, folders: dict[str, Path]) -> None:
    fused = load_native(folders[kind], context_length=512, tail=64)
    assert fused._fused is not None
    results = []
    for runner in (fused, plain(fused)):
        for seq, length in ((0, 300), (1, 5)):  # more than a block of tokens; a prompt that is stored by the fused step itself
            runner.open(seq)
            runner.extend(seq, some_tokens(length))
        feeds = [Feed(0, (1, 2, 3, 4, 5), (ROOT, 0, 0, 2, 1)), Feed(1, (9, 8), (ROOT, ROOT))]
        results.append(torch.cat([collate(rows) for rows in runner.feed(feeds)]))
    assert (results[0] - results[1]).abs().max() < 1e-5 * results[1].abs().max()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_token_has_the_same_bits_alone_in_a_chain_in_a_tree_and_in_a_batch(kind: str, threads: int, folders: dict[str, Path]) -> None:
    runner = load_native(folders[kind], context_length=512, tail=64)
    line, prompt = some_tokens(6, seed=2), some_tokens(270)
    for seq in range(4):
        runner.open(seq)
        runner.extend(seq, prompt)
    alone = []
    for token in line:
        alone.append(runner.feed([Feed(0, (token,), (ROOT,))])[0][0].logits)
        runner.keep(0, (0,), 1)
    chain = runner.feed([Feed(1, tuple(line), (ROOT, 0, 1, 2, 3, 4))])[0]
    tree = runner.feed([Feed(2, (7, line[0], 3, line[1], line[2], 5, 6), (ROOT, ROOT, 0, 1, 3, 3, 4))])[0]
    batch = runner.feed([Feed(3, tuple(line[:2]), (ROOT, 0)), Feed(2, (line[3],), (4,))])
    for depth, row in enumerate(alone):
        assert torch.equal(row, chain[depth].logits)
    for depth, row in enumerate((tree[1], tree[3], tree[4], batch[1][0])):
        assert torch.equal(row.logits, alone[depth])
    assert torch.equal(batch[0][1].logits, alone[1])


def test_moved_places_keep_their_bits(folders: dict[str, Path]) -> None:
    runner = load_native(folders["llama"], context_length=512, tail=64)
    for seq in range(2):
        runner.open(seq)
        runner.extend(seq, some_tokens(20))
    runner.feed([Feed(0, (1, 2, 3, 4), (ROOT, ROOT, 1, 2))])
    runner.keep(0, (1, 2, 3), 2)
    runner.feed([Feed(1, (2, 3, 4), (ROOT, 0, 1))])
    after = [runner.feed([Feed(seq, (5,), (last,))])[0][0].logits for seq, last in ((0, 0), (1, 2))]
    assert torch.equal(*after)


def test_more_rows_than_the_kernels_take_go_the_plain_way(folders: dict[str, Path]) -> None:
    runner = load_native(folders["llama"], context_length=512, tail=64)
    runner.open(0)
    runner.open(1)
    many = runner.feed([Feed(0, tuple(some_tokens(17)), (ROOT, *range(16)))])[0]
    few = runner.feed([Feed(1, tuple(some_tokens(16)), (ROOT, *range(15)))])[0]
    assert (collate(many)[:16] - collate(few)).abs().max() < 1e-5 * collate(few).abs().max()


def test_there_is_one_list_of_operations_for_each_number_of_rows(folders: dict[str, Path]) -> None:
    runner, rng = load_native(folders["llama"], context_length=200, tail=64), random.Random(0)
    assert runner._fused is not None
    for seq in range(6):
        runner.open(seq)
    for _ in range(300):
        feeds = [Feed(seq, (1,) * rows, tuple(range(ROOT, rows - 1))) for seq in range(6) if (rows := rng.randint(0, 4))]
        runner.feed(feeds)
        for feed in feeds:
            runner.keep(feed.seq, (), 0)
    assert 10 < len(runner._fused._lists) <= MOST_ROWS


def test_stale_values_behind_the_sequence_change_nothing(folders: dict[str, Path]) -> None:
    runner = load_native(folders["llama"], context_length=512, tail=64)
    runner.open(0)
    fresh = collate(runner.feed([Feed(0, (1, 2), (ROOT, 0))])[0])
    runner._open[0].cache.data[:, :, :, 2:] = float("nan")
    runner.keep(0, (), 0)
    assert torch.equal(collate(runner.feed([Feed(0, (1, 2), (ROOT, 0))])[0]), fresh)


def test_a_compiled_step_that_is_wrong_is_not_used(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = load_native(folders["llama"], context_length=64)
    assert right._fused is not None
    logits = FusedStep.logits
    monkeypatch.setattr(FusedStep, "logits", lambda self, step: logits(self, step) + 0.1)
    wrong = load_native(folders["llama"], context_length=64)
    assert wrong._fused is None and "disagrees" in caplog.text
