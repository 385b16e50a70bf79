"""The native runner against transformers, and against itself by other ways to the same sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter, CacheFull, ModelError
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.sampling.logit_rows import collate
from tiny_models import CONFIGS, GREEDY, in_double, logits_of, saved, some_tokens, tiny

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


@pytest.fixture(autouse=True)
def torch_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")  # other kinds have tests of their own; this one needs no measuring


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved(tiny(kind), tmp_path_factory.mktemp(kind)) for kind in CONFIGS}


@pytest.fixture
def runner(folders: dict[str, Path]) -> NativeRunner:
    return load_native(folders["llama-llama3"], context_length=600, dtype="float64", tail=40)


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
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_of_every_family_equal_those_of_transformers(
    kind: str, dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    reference = tiny(kind) if dtype == torch.float32 else in_double(tiny(kind))
    tokens = some_tokens(300)
    runner = load_native(folders[kind], context_length=512, dtype=dtype, tail=64)
    runner.open(0, GREEDY)
    runner.extend(0, tokens[:270])  # two chunks
    rows = runner.score([chain(0, tokens[270:])])[0]
    assert_same(collate(rows), logits_of(reference, tokens)[270:], TOLERANCE[dtype])


def test_sharded_folder_gives_the_same_logits_as_a_single_file(folders: dict[str, Path], tmp_path: Path) -> None:
    shards = saved(tiny("qwen2"), tmp_path, shards=True)
    assert len(list(shards.glob("*.safetensors"))) > 1
    tokens = some_tokens(20)
    assert torch.equal(
        scores(load_native(shards, context_length=64), tokens),
        scores(load_native(folders["qwen2"], context_length=64), tokens),
    )


def test_prompt_in_chunks_equals_prompt_in_one_go(runner: NativeRunner) -> None:
    tokens = some_tokens(520)
    runner.open(0, GREEDY)
    runner.open(1, GREEDY)
    runner.extend(0, tokens)
    for start, stop in ((0, 3), (3, 4), (4, 300), (300, 520)):
        runner.extend(1, tokens[start:stop])
    one, chunks = runner.score([chain(0, [7])])[0], runner.score([chain(1, [7])])[0]
    assert_same(collate(chunks), collate(one), 1e-12)


def test_each_node_of_a_tree_is_scored_as_its_own_path(runner: NativeRunner) -> None:
    prompt, tokens, parents = some_tokens(11), some_tokens(9, seed=5), [ROOT, 0, 0, ROOT, 3, 1, 1, 2, 4]
    runner.open(0, GREEDY)
    runner.extend(0, prompt)
    rows = runner.score([Feed(0, tuple(tokens[:6]), tuple(parents[:6]))])[0]
    rows += runner.score([Feed(0, tuple(tokens[6:]), tuple(parents[6:]))])[0]  # a second feed onto inner nodes
    for node, row in enumerate(rows):
        assert_same(row.logits, scores(runner, runner.slots(0).sequence(node))[-1], 1e-12)


def test_one_row_that_must_not_see_its_sibling_is_masked(runner: NativeRunner) -> None:
    runner.open(0, GREEDY)
    runner.extend(0, [1, 2])
    runner.score([Feed(0, (3,), (ROOT,))])
    (row,) = runner.score([Feed(0, (4,), (ROOT,))])[0]
    assert_same(row.logits, scores(runner, [1, 2, 4])[-1], 1e-12)


@pytest.mark.parametrize("commit", [0, 1, 3])
def test_after_keep_a_sequence_goes_on_as_if_fed_afresh(commit: int, runner: NativeRunner) -> None:
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(10))
    runner.score([Feed(0, tuple(some_tokens(7, seed=3)), (ROOT, ROOT, 1, 1, 2, 3, 5))])
    runner.keep(0, (1, 3, 5), commit)
    last = len(runner.slots(0).tokens) - 1
    rows = runner.score([chain(0, some_tokens(4, seed=4), after=last)])[0]
    whole = runner.slots(0).sequence(last + 4)
    assert len(whole) == 17
    assert_same(collate(rows), scores(runner, whole)[-4:], 1e-12)


def test_dropping_the_tail_leaves_no_trace(runner: NativeRunner) -> None:
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(10))
    runner.score([chain(0, some_tokens(8, seed=8))])
    runner.keep(0, (), 0)
    (row,) = runner.score([chain(0, [5])])[0]
    assert_same(row.logits, scores(runner, [*some_tokens(10), 5])[-1], 1e-12)


def test_a_batch_of_sequences_equals_one_by_one(runner: NativeRunner) -> None:
    feeds = [chain(0, some_tokens(3)), Feed(1, (5, 6, 7), (ROOT, ROOT, 1)), chain(2, [9])]
    alone = []
    for together in (False, True):
        for seq in range(3):
            runner.open(seq, GREEDY)
            runner.extend(seq, some_tokens(4 + 9 * seq, seed=seq))
        blocks = runner.score(feeds) if together else [runner.score([feed])[0] for feed in feeds]
        alone.append([collate(rows) for rows in blocks])
        for seq in range(3):
            runner.close(seq)
    for one, batched in zip(*alone, strict=True):
        assert_same(batched, one, 1e-12)


def test_rows_stay_valid_while_more_is_fed(runner: NativeRunner) -> None:
    runner.open(0, GREEDY)
    (row,) = runner.score([chain(0, [3])])[0]
    before = row.logits.clone()
    runner.score([chain(0, [4, 5, 6], after=0)])
    assert torch.equal(row.logits, before)


def test_a_closed_sequence_hands_its_memory_on_and_nothing_of_its_content(runner: NativeRunner) -> None:
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(30))
    runner.close(0)
    assert runner.pool.free == runner.pool.pages
    fresh = scores(runner, some_tokens(5))
    assert_same(fresh, scores(load_like(runner), some_tokens(5)), 1e-12)


def load_like(runner: NativeRunner) -> NativeRunner:
    return NativeRunner(runner.decoder, runner.context_length, runner.tail)


def test_a_batch_in_which_one_sequence_is_full_changes_none(runner: NativeRunner) -> None:
    for seq in range(2):
        runner.open(seq, GREEDY)
    with pytest.raises(CacheFull):
        runner.score([chain(0, [1, 2]), chain(1, some_tokens(41))])
    assert len(runner.slots(0)) == len(runner.slots(1)) == 0
    runner.slots(0).check()


def test_a_failed_extend_leaves_the_prefix_as_it_was(runner: NativeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.open(0, GREEDY)
    runner.extend(0, [1, 2, 3])
    runner.flush()
    monkeypatch.setattr(runner.decoder, "store", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        runner.extend(0, [4, 5])
        runner.flush()
    assert runner.slots(0).prefix == [1, 2, 3]


def test_token_outside_the_vocabulary_is_refused(runner: NativeRunner) -> None:
    runner.open(0, GREEDY)
    with pytest.raises(BadParameter, match="131 is outside"):
        runner.extend(0, [1, 131])
    with pytest.raises(BadParameter, match="-1 is outside"):
        runner.score([Feed(0, (-1,), (ROOT,))])


def test_context_longer_than_the_model_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="1 to 1024"):
        load_native(folders["llama"], context_length=1025)
    assert load_native(folders["llama"]).context_length == 1024


def test_unknown_dtype_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(BadParameter, match="float23"):
        load_native(folders["llama"], dtype="float23")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CONFIGS)
def test_on_a_gpu_every_family_gives_the_same_logits(kind: str, folders: dict[str, Path]) -> None:
    tokens = some_tokens(300)
    rows = {}
    for where in ("cpu", "cuda"):
        runner = load_native(folders[kind], context_length=512, device=where, dtype="float64", tail=64)
        runner.open(0, GREEDY)
        runner.extend(0, tokens[:270])
        runner.score([chain(0, tokens[270:283])])
        runner.keep(0, range(5), 3)
        rows[where] = collate(runner.score([Feed(0, (1, 2, 3), (1, 1, 3))])[0]).cpu()
    assert_same(rows["cuda"], rows["cpu"], 1e-9)
