"""The GPU's step where it belongs: Triton against plain operations, bits that depend on positions alone, graphs, and
no waiting."""

from __future__ import annotations

import random

import pytest
import torch

from packed_steps import PAGES, Stepper, chain_with_siblings, decoder_of, some_work
from specbranch.core.pages import PAGE, Pool
from specbranch.core.slots import ROOT, Slots
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import ChunkRows, Rows, rows_of_nodes
from specbranch.models.gpu import attention
from specbranch.models.gpu.attention import attend_by_kernels, attend_plainly, choose_attend
from specbranch.models.gpu.layout import Views, pack, views
from tiny_models import logits_of, some_tokens, tiny

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPES = {
    "mha": (8, 8, 128),
    "gqa": (16, 4, 128),
    "narrow": (16, 4, 64),
    "seven": (14, 2, 64),
    "odd": (10, 2, 80),
    "one": (16, 1, 128),
}
TOLERATED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def inference():  # type: ignore[no-untyped-def]
    with torch.inference_mode():
        yield


def packed_views(work: list[Rows], pages: int) -> Views:
    packed, bucket = pack(work, pages * PAGE)
    return views(torch.from_numpy(packed).to(DEVICE), bucket)


@pytest.mark.parametrize("dtype", TOLERATED, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_kernels_give_what_plain_operations_give(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = shape
    for seed in range(6):
        _, work = some_work(seed)
        step = packed_views([rows for _, rows in work], 64)
        count = sum(len(rows.tokens) for _, rows in work)  # padding may be anything
        torch.manual_seed(seed)
        q = torch.randn(len(step.slots), heads, head_dim).to(DEVICE, dtype)
        memory = torch.randn(65, 2, 2, kv_heads, PAGE, head_dim).to(DEVICE, dtype)  # two layers: pages are strided
        keys, values = memory[:, 1].unbind(1)
        found, expected = (
            attend(q, keys, values, step)[:count].double() for attend in (attend_by_kernels, attend_plainly)
        )
        error = (found - expected).abs().max()
        assert error <= TOLERATED[dtype]


def test_kernels_are_chosen_on_a_gpu_and_plain_operations_for_float64() -> None:
    device = torch.device("cuda")
    for heads, kv_heads, head_dim in SHAPES.values():
        for dtype in TOLERATED:
            assert choose_attend(device, dtype, heads, kv_heads, head_dim) is attend_by_kernels
        assert choose_attend(device, torch.float64, heads, kv_heads, head_dim) is attend_plainly


def test_what_no_row_shares_may_be_anything() -> None:
    pool, work = some_work(1)
    step = packed_views([rows for _, rows in work], 64)
    taken = {page for seq, _ in work for page in seq.table.pages} | {64}
    memory = torch.full((65, 2, 4, PAGE, 64), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    for page in taken:
        memory[page] = 1.0
    for seq, _ in work:  # beyond what the sequence holds
        last, used = seq.table.pages[-1], len(seq.slots) - (len(seq.table.pages) - 1) * PAGE
        if not pool.is_shared(last):
            memory[last, :, :, used:] = torch.nan
    q = torch.randn(len(step.slots), 8, 64).to(DEVICE, torch.bfloat16)
    count = sum(len(rows.tokens) for _, rows in work)
    assert attend_by_kernels(q, memory[:, 0], memory[:, 1], step)[:count].isfinite().all()


class Written:
    """A chain's keys, values and queries by position, laid into pages wherever its nodes lie; all else is garbage."""

    def __init__(self, prefix: int, count: int, shape: tuple[int, int, int]) -> None:
        heads, self.kv_heads, self.head_dim = shape
        self.prefix, self.count = prefix, count
        self.both = torch.randn(prefix + count, 2, self.kv_heads, self.head_dim).to(DEVICE, torch.bfloat16)
        self.queries = torch.randn(count, heads, self.head_dim).to(DEVICE, torch.bfloat16)

    def attend(self, behind: int, pages: list[int], rows: list[int], beside: int = 0) -> torch.Tensor:
        """Attend with some rows of the chain, fed with `behind` siblings each to some pages, other sequences beside
        them."""
        slots = Slots(4096)
        slots.extend([0] * self.prefix)
        tokens, parents, chain = chain_with_siblings(range(self.count), behind)
        slots.grow(tokens, parents)
        table = Table(Pool(32), pages)
        memory = torch.randn(33, 2, self.kv_heads, PAGE, self.head_dim).to(DEVICE, torch.bfloat16)
        kv_slots = torch.tensor([*range(self.prefix), *(slots.slot_of(node) for node in chain)])
        flat = torch.from_numpy(table.flat(kv_slots.numpy())).to(DEVICE)
        memory[flat // PAGE, :, :, flat % PAGE] = self.both
        nodes = range(chain[rows[0]] - behind, chain[rows[-1]] + 1)
        others = [Rows(Table(Pool(32), [20 + at]), [1] * 3, 90, 90, [1, 3, 7]) for at in range(beside)]
        step = packed_views([*others, rows_of_nodes(table, slots, nodes)], 32)
        queries = torch.randn(len(step.slots), *self.queries.shape[1:]).to(DEVICE, torch.bfloat16)
        at = [3 * beside + chain[row] - nodes.start for row in rows]
        queries[at] = self.queries[rows]
        return attend_by_kernels(queries, memory[:, 0], memory[:, 1], step)[at]


@pytest.mark.parametrize("shape", [SHAPES["mha"], SHAPES["gqa"], SHAPES["seven"]], ids=["mha", "gqa", "seven"])
@pytest.mark.parametrize("prefix", [0, 20, 120, 250, 700, 1000, 1016, 1020])
def test_a_row_has_the_same_bits_alone_and_among_others_and_behind_siblings(
    prefix: int, shape: tuple[int, int, int]
) -> None:
    torch.manual_seed(prefix)
    choose = random.Random(prefix)
    written = Written(prefix, 16, shape)
    pages = list(range(5))
    alone = torch.cat([written.attend(0, pages, [row]) for row in range(16)])
    for behind, beside in ((0, 0), (1, 0), (3, 0), (0, 4), (1, 2)):
        choose.shuffle(pages)
        assert torch.equal(written.attend(behind, pages, list(range(16)), beside), alone)
    others = torch.cat([written.attend(2, pages, [row], beside=1) for row in range(16)])
    assert torch.equal(others, alone)


def test_bits_differ_where_a_key_differs() -> None:
    """That the test above would notice."""
    torch.manual_seed(0)
    written = Written(300, 2, SHAPES["gqa"])
    before = written.attend(0, [0, 1], [1])
    written.both[200, 1] += 0.5
    assert not torch.equal(written.attend(0, [0, 1], [1]), before)


@pytest.mark.parametrize("kind", ["llama", "llama-linear-biases", "qwen2", "qwen3"])
def test_logits_of_graphs_equal_those_of_transformers(kind: str) -> None:
    model, tokens = tiny(kind), some_tokens(330)
    stepper = Stepper(decoder_of(model, DEVICE, torch.float32), DEVICE, torch.float32, capture=True)
    seq = stepper.open(tokens[:300])
    fed, parents, chain = chain_with_siblings(tokens[300:], behind=1)
    got = stepper.score([seq.grow(fed, parents)])[chain].cpu()
    expected = logits_of(model, tokens)[300:]
    assert torch.allclose(got, expected, rtol=0, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("attend", [attend_by_kernels, attend_plainly])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replayed_graph_gives_what_running_gives(dtype: torch.dtype, attend) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_of(tiny("qwen3"), DEVICE, dtype)
    graphs, plain = (Stepper(decoder, DEVICE, dtype, attend, capture=capture) for capture in (True, False))
    seqs = [stepper.open(some_tokens(250)) for stepper in (graphs, plain)]
    for feed in (
        ([1], [ROOT]),
        ([2], [0]),
        ([3, 4, 5, 6], [1, 1, 2, 3]),
        ([7], [1]),
        ([8, 9, 10, 11], [6, 7, 8, 9]),
        ([12], [10]),
    ):
        replayed, run = (stepper.score([seq.grow(*feed)]) for stepper, seq in zip((graphs, plain), seqs, strict=True))
        assert torch.equal(replayed, run)


def test_tapped_states_of_graphs_equal_those_of_running() -> None:
    decoder = decoder_of(tiny("llama"), DEVICE, torch.float32)
    found = []
    for capture in (True, False):
        stepper = Stepper(decoder, DEVICE, torch.float32, capture=capture)
        packed, bucket = pack([stepper.open().read(some_tokens(16))], PAGES * PAGE)
        stepper.graphs.run(packed, bucket)
        ran = stepper.graphs.run_brought(bucket, 2)
        assert ran.states is not None and ran.states.shape == (16, 2 * decoder.arch.hidden)
        found.append((ran.logits.clone(), ran.states.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_results_of_one_graph_outlast_the_capture_of_another() -> None:
    stepper = Stepper(decoder_of(tiny("llama"), DEVICE, torch.bfloat16), DEVICE, torch.bfloat16, capture=True)
    seq = stepper.open(some_tokens(100))
    first = stepper.score([seq.grow([1], [ROOT])])
    stepper.score([seq.grow([2, 3, 4], [ROOT, 0, 1])])
    stepper.score([seq.grow(list(range(20)), [ROOT] * 20)])
    again = stepper.open(some_tokens(100))
    assert torch.equal(stepper.score([again.grow([1], [ROOT])]), first)


@pytest.mark.parametrize("capture", [True, False])
def test_a_step_waits_for_nothing(capture: bool) -> None:
    stepper = Stepper(decoder_of(tiny("qwen3"), DEVICE, torch.bfloat16), DEVICE, torch.bfloat16, capture=capture)
    seq = stepper.open(some_tokens(100))
    for token in (1, 2):
        stepper.score([seq.grow([token], [ROOT])])
    packed, bucket = pack([seq.grow([3], [ROOT])], PAGES * PAGE)
    on_device = torch.from_numpy(packed).to(DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stepper.graphs.run(packed, bucket)
        stepper.graphs.run(on_device, bucket)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_several_sequences_in_one_step_get_what_each_gets_alone() -> None:
    stepper = Stepper(decoder_of(tiny("llama"), DEVICE, torch.float32), DEVICE, torch.float32, capture=True)
    alone, together = ([stepper.open(some_tokens(length, seed=length)) for length in (5, 260, 70)] for _ in range(2))
    feeds = [([7, 8], [ROOT, 0]), ([9], [ROOT]), (list(range(20)), [ROOT] * 20)]
    expected = torch.cat([stepper.score([seq.grow(*feed)]) for seq, feed in zip(alone, feeds, strict=True)])
    got = stepper.score([seq.grow(*feed) for seq, feed in zip(together, feeds, strict=True)])
    assert torch.allclose(got, expected, rtol=0, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64), (12, 2, 128), (4, 4, 64)], ids=str)
def test_a_prompts_row_has_the_bits_of_a_decode_row_however_its_blocks_are_shared(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows behind a long context, by one program or many, with and without memory for their results."""
    heads, kv_heads, head_dim = shape
    pool = Pool(200)
    torch.manual_seed(1)
    memory = torch.randn(2, 201, kv_heads, PAGE, head_dim).to(DEVICE, dtype)
    tile_rows = attention.chunk_tile_rows(heads // kv_heads)
    for start, count in ((7000, 48), (3000, 100), (700, 30), (5, 20), (18_000, 20)):
        table = Table(pool, pool.take(-(-(start + count) // PAGE)))
        queries = torch.randn(count, heads, head_dim).to(DEVICE, dtype)
        found = []
        for programs, room in ((1, 1 << 28), (4, 1 << 28), (16, 1 << 28), (128, 1 << 28), (16, 1 << 20)):
            monkeypatch.setattr(attention, "splits_chunks", lambda *_, programs=programs: programs > 1)
            monkeypatch.setattr(attention, "CHUNK_PROGRAMS", programs * kv_heads)
            monkeypatch.setattr(attention, "PARTIAL_BYTES", room)
            packed, bucket = pack([], 200 * PAGE, chunks=[ChunkRows(table, [0] * count, start)], tile_rows=tile_rows)
            step = views(torch.from_numpy(packed).to(DEVICE), bucket, 80)
            q = torch.zeros(bucket.total, heads, head_dim, device=DEVICE, dtype=dtype)
            q[bucket.rows : bucket.rows + count] = queries
            found.append(attend_by_kernels(q, *memory, step)[bucket.rows : bucket.rows + count])
        assert all(torch.equal(one, found[0]) for one in found[1:])
        plain = attend_plainly(q, *memory, step)[bucket.rows : bucket.rows + count]
        assert (found[0].double() - plain.double()).abs().max() <= TOLERATED[dtype]
        for at in (0, count // 2, count - 1):
            position = start + at
            packed, bucket = pack([Rows(table, [0], position, position, [1])], 200 * PAGE)
            alone = attend_by_kernels(
                queries[at : at + 1], *memory, views(torch.from_numpy(packed).to(DEVICE), bucket, 80)
            )
            assert torch.equal(alone[0], found[0][at])
        table.shrink(0)
