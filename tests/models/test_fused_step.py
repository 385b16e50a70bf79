"""The fused step for CPUs against the plain decoder, and its promise: a row has the same bits in any batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from specbranch.core.pages import Pool
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.models.cache.kv_memory import Table
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.cpu.row_kernel_text import STRETCH
from specbranch.models.files.head_columns import Columns
from specbranch.models.files.locate import locate
from specbranch.models.files.weights import ReducedHead, read_weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.fused_step import STEP_ROWS, FusedStep
from specbranch.models.forward.step_rows import Rows, split_into_steps
from specbranch.models.loading import load_native, open_model
from specbranch.models.runners.native import COMPILED_CHUNK, NativeRunner
from specbranch.models.sampling.logit_rows import TensorRow, collate
from tiers import each_value
from tiny_models import CONFIGS, GREEDY, SHAPE, planted, saved, some_tokens, tiny

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
    other._fused = None
    return other


@each_value
@pytest.mark.parametrize("kind", CONFIGS)
def test_fused_rows_equal_plain_ones_up_to_rounding(kind: str, threads: int, folders: dict[str, Path]) -> None:
    fused = load_native(folders[kind], context_length=512, tail=64)
    assert fused._fused is not None
    results = []
    for runner in (fused, plain(fused)):
        # more than a block of tokens; a prompt that is stored by the fused step itself
        for seq, length in ((0, 300), (1, 5)):
            runner.open(seq, GREEDY)
            runner.extend(seq, some_tokens(length))
        feeds = [Feed(0, (1, 2, 3, 4, 5), (ROOT, 0, 0, 2, 1)), Feed(1, (9, 8), (ROOT, ROOT))]
        results.append(torch.cat([collate(rows) for rows in runner.score(feeds)]))
    assert (results[0] - results[1]).abs().max() < 1e-5 * results[1].abs().max()


@pytest.mark.parametrize("size", [STRETCH, STRETCH + 32, 2 * STRETCH + 5])
def test_a_gate_of_several_stretches_equals_the_plain_one(
    size: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "wide", lambda: LlamaConfig(**{**SHAPE, "intermediate_size": size}))
    fused = load_native(saved(tiny("wide"), tmp_path), context_length=64, tail=16)
    results = []
    for runner in (fused, plain(fused)):
        runner.open(0, GREEDY)
        results.append(collate(runner.score([Feed(0, (1, 2, 3), (ROOT, 0, 0))])[0]))
    assert fused._fused is not None and (results[0] - results[1]).abs().max() < 1e-5 * results[1].abs().max()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_token_has_the_same_bits_alone_in_a_chain_in_a_tree_and_in_a_batch(
    kind: str, threads: int, folders: dict[str, Path]
) -> None:
    runner = load_native(folders[kind], context_length=512, tail=64)
    line, prompt = some_tokens(6, seed=2), some_tokens(270)
    for seq in range(4):
        runner.open(seq, GREEDY)
        runner.extend(seq, prompt)
    alone = []
    for token in line:
        alone.append(runner.score([Feed(0, (token,), (ROOT,))])[0][0].logits)
        runner.keep(0, (0,), 1)
    chain = runner.score([Feed(1, tuple(line), (ROOT, 0, 1, 2, 3, 4))])[0]
    tree = runner.score([Feed(2, (7, line[0], 3, line[1], line[2], 5, 6), (ROOT, ROOT, 0, 1, 3, 3, 4))])[0]
    batch = runner.score([Feed(3, tuple(line[:2]), (ROOT, 0)), Feed(2, (line[3],), (4,))])
    for depth, row in enumerate(alone):
        assert torch.equal(row, chain[depth].logits)
    for depth, row in enumerate((tree[1], tree[3], tree[4], batch[1][0])):
        assert torch.equal(row.logits, alone[depth])
    assert torch.equal(batch[0][1].logits, alone[1])


@each_value
@pytest.mark.parametrize("prefix", [5, 40, 100, 128, 230, 250, 256, 300])
def test_a_node_behind_siblings_has_the_bits_of_plain_decoding(
    prefix: int, threads: int, folders: dict[str, Path]
) -> None:
    runner, line = load_native(folders["llama"], context_length=512, tail=128), some_tokens(40, seed=9)
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(prefix))
    alone = []
    for token in line:
        alone.append(runner.score([Feed(0, (token,), (ROOT,))])[0][0].logits)
        runner.keep(0, (0,), 1)
    runner.rewind(0, prefix)
    feed, nodes = planted(random.Random(prefix), line)
    rows = runner.score([feed])[0]
    assert all(torch.equal(rows[node].logits, expected) for node, expected in zip(nodes, alone, strict=True))
    runner.keep(0, nodes[:20], 20)
    again = runner.score([Feed(0, tuple(line[20:]), tuple(range(ROOT, 19)))])[0]
    assert all(torch.equal(row.logits, expected) for row, expected in zip(again, alone[20:], strict=True))


def test_moved_slots_keep_their_bits(folders: dict[str, Path]) -> None:
    runner = load_native(folders["llama"], context_length=512, tail=64)
    for seq in range(2):
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(20))
    runner.score([Feed(0, (1, 2, 3, 4), (ROOT, ROOT, 1, 2))])
    runner.keep(0, (1, 2, 3), 2)
    runner.score([Feed(1, (2, 3, 4), (ROOT, 0, 1))])
    after = [runner.score([Feed(seq, (5,), (last,))])[0][0].logits for seq, last in ((0, 0), (1, 2))]
    assert torch.equal(*after)


# --- many rows ---


def in_int8(folder: Path) -> NativeRunner:
    """The model with its matrices in int8, as drafts are."""
    arch, source = open_model(locate(str(folder)))
    weights = read_weights(arch, source, torch.device("cpu"), torch.float32)
    matrices = ("qkv", "out", "gate_up", "down")
    layers = tuple(
        replace(layer, **{name: getattr(layer, name).stored_as("int8") for name in matrices})
        for layer in weights.layers
    )
    ids = torch.arange(0, arch.vocabulary, 2)
    head = ReducedHead(weights.head.rows(ids).stored_as("int8"), Columns(ids, arch.vocabulary))
    return NativeRunner(Decoder(arch, replace(weights, layers=layers, reduced=head), 300), 200, 64)


RUNNERS: dict[str, Callable[[Path], NativeRunner]] = {
    "float32": lambda folder: load_native(folder, context_length=200, tail=64),
    "int8": in_int8,
}


def sizes_of(rows: int, rng: random.Random) -> list[int]:
    """Split rows among several sequences."""
    sizes = [min(rows, rng.randint(1, 40))]
    return sizes + (sizes_of(rows - sizes[0], rng) if rows > sizes[0] else [])


def nodes_of(seq: int, size: int, shape: str, rng: random.Random) -> Feed:
    parents = range(ROOT, size - 1) if shape == "chain" else [rng.randrange(ROOT, node) for node in range(size)]
    return Feed(seq, tuple(rng.randrange(131) for _ in range(size)), tuple(parents))


def batch_of(runner: NativeRunner, rows: int, shape: str, rng: random.Random) -> list[Feed]:
    """Nodes of several sequences behind prompts of their own, some of them none."""
    feeds = [nodes_of(seq, size, shape, rng) for seq, size in enumerate(sizes_of(rows, rng))]
    for feed in feeds:
        runner.open(feed.seq, GREEDY)
        runner.extend(feed.seq, some_tokens(rng.choice((0, 3, 70)), seed=feed.seq))
    return feeds


def poison(runner: NativeRunner, seq: int) -> Feed:
    """A sequence in whose cache there is nothing but NaN, and a row of it."""
    runner.open(seq, GREEDY)
    runner.extend(seq, some_tokens(5))
    runner.flush()
    runner.memory.data[runner.sequences[seq].table.pages] = float("nan")
    return Feed(seq, (1,), (ROOT,))


def one_by_one(runner: NativeRunner, feed: Feed) -> list[TensorRow]:
    return [
        runner.score([Feed(feed.seq, (token,), (parent,))])[0][0]
        for token, parent in zip(feed.tokens, feed.parents, strict=True)
    ]


@each_value
@pytest.mark.parametrize("weights", RUNNERS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("rows", [17, 33, 64, 65, 150])
def test_a_row_has_the_same_bits_alone_and_among_many(
    rows: int, shape: str, weights: str, threads: int, folders: dict[str, Path]
) -> None:
    runner, rng = RUNNERS[weights](folders["llama"]), random.Random(rows)
    assert runner._fused is not None
    feeds = batch_of(runner, rows - 2, shape, rng)
    bad = [poison(runner, 100), poison(runner, 101)]
    together = runner.score([bad[0], *feeds, bad[1]])
    assert all(collate(found).isnan().any() for found in (together[0], together[-1]))
    for feed, found in zip(feeds, together[1:-1], strict=True):
        runner.keep(feed.seq, (), 0)
        assert torch.equal(collate(found), collate(one_by_one(runner, feed)))


def test_hidden_states_have_the_same_bits_alone_and_among_many(threads: int, folders: dict[str, Path]) -> None:
    runner = RUNNERS["float32"](folders["qwen3"])
    feeds = batch_of(runner, 150, "tree", random.Random(0))
    together = torch.split(runner.show(feeds, 2), [len(feed.tokens) for feed in feeds])
    for feed, found in zip(feeds, together, strict=True):
        runner.keep(feed.seq, (), 0)
        alone = [
            runner.show([Feed(feed.seq, (token,), (parent,))], 2)
            for token, parent in zip(feed.tokens, feed.parents, strict=True)
        ]
        assert torch.equal(torch.cat(alone), found)


def test_there_is_one_list_of_operations_for_each_number_of_rows(folders: dict[str, Path]) -> None:
    runner, rng = RUNNERS["float32"](folders["llama"]), random.Random(0)
    assert runner._fused is not None
    for seq in range(6):
        runner.open(seq, GREEDY)
    for _ in range(300):
        feeds = [nodes_of(seq, rng.randint(0, 14), "chain", rng) for seq in rng.sample(range(6), rng.randint(1, 6))]
        runner.score(feeds)
        for feed in feeds:
            runner.keep(feed.seq, (), 0)
    assert 40 < len(runner._fused._lists) <= STEP_ROWS


def test_rows_are_dealt_out_in_order(folders: dict[str, Path]) -> None:
    table = Table(Pool(1))
    work = [
        Rows(table, tokens, 3, 3, [2**i for i in range(len(tokens))])
        for tokens in ((1, 2, 3), (), (4, 5), (6, 7, 8, 9, 10), (11,))
    ]
    steps = list(split_into_steps(work, 4))
    assert [[rows.tokens for rows in step] for step in steps] == [
        [(1, 2, 3), (4,)],
        [(5,), (6, 7, 8)],
        [(9, 10), (11,)],
    ]
    assert [rows.start for rows in steps[1]] == [4, 3] and steps[2][0].start == 6
    assert steps[2][0].seen == [8, 16]
    assert [len(step) for step in split_into_steps(work[:3], 5)] == [2] and not list(split_into_steps([], 4))


def test_prompts_are_prefilled_by_the_compiled_step_chunk_by_chunk_as_many_as_fit(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, read = RUNNERS["float32"](folders["llama"]), list[list[int]]()
    monkeypatch.setattr(FusedStep, "store", lambda _, work: read.append([len(rows.tokens) for rows in work]))
    for seq, tokens in enumerate((COMPILED_CHUNK - 1, COMPILED_CHUNK, COMPILED_CHUNK + 1, 3 * COMPILED_CHUNK)):
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(tokens))
    runner.flush()
    chunk = COMPILED_CHUNK
    assert read == [[chunk - 1, chunk, chunk, 1, chunk], [chunk, chunk]] and sum(read[0]) == STEP_ROWS


def test_stale_values_behind_the_sequence_change_nothing(folders: dict[str, Path]) -> None:
    runner = load_native(folders["llama"], context_length=512, tail=64)
    runner.open(0, GREEDY)
    fresh = collate(runner.score([Feed(0, (1, 2), (ROOT, 0))])[0])
    runner.memory.data[:, :, :, :, 2:] = float("nan")
    runner.keep(0, (), 0)
    assert torch.equal(collate(runner.score([Feed(0, (1, 2), (ROOT, 0))])[0]), fresh)


def test_a_compiled_step_that_is_wrong_is_not_used(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = load_native(folders["llama"], context_length=64)
    assert right._fused is not None
    logits = FusedStep.logits
    monkeypatch.setattr(FusedStep, "logits", lambda self, work: logits(self, work) + 0.1)
    wrong = load_native(folders["llama"], context_length=64)
    assert wrong._fused is None and "disagrees" in caplog.text


def test_weights_that_are_no_numbers_are_loaded_all_the_same(tmp_path: Path) -> None:
    """Whoever uses them finds out: a target says so, a draft is left out."""
    model = tiny("llama")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    runner = load_native(saved(model, tmp_path), context_length=64)
    runner.open(0, GREEDY)
    assert torch.isnan(collate(runner.score([Feed(0, (1, 2), (ROOT, 0))])[0])).all()
