"""The GPU's step without a GPU: packing, attention in plain operations, and the forward over both."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from packed_steps import PAGES, Stepper, chain_with_siblings, decoder_of, expected_slots, some_work
from specbranch.core.pages import PAGE, Pool
from specbranch.core.slots import ROOT, Slots
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows, rows_of_chunk, shared_end, split_into_steps
from specbranch.models.gpu.attention import attend_plainly, choose_attend
from specbranch.models.gpu.layout import LONGEST_OWN, MOST_STEP_ROWS, Bucket, Views, bucket_of, pack, packed_size, views
from tiers import each_value
from tiny_models import SHAPE, in_double, logits_of, some_tokens, tiny

torch.set_num_threads(1)
SPARE = 64 * PAGE


def packed_views(work: list[Rows], spare: int = SPARE) -> Views:
    packed, bucket = pack(work, spare)
    return views(torch.from_numpy(packed), bucket)


def table_of(step: Views, row: int) -> list[int]:
    """The table of the one group that a row is in."""
    (begin,) = [begin for first, count, begin in step.groups.tolist() if first <= row < first + count]
    return step.tables[begin:].tolist()


def slots_seen(step: Views, row: int) -> list[int]:
    """The KV slots that a packed row reads, one after the other."""
    table = table_of(step, row)
    shared = [table[at // PAGE] * PAGE + at % PAGE for at in range(int(step.shared[row]))]
    return shared + step.own[row, : int(step.own_count[row])].tolist()


@pytest.mark.parametrize("seed", range(60))
def test_a_packed_row_reads_its_ancestors_in_order_and_then_itself(seed: int) -> None:
    _, work = some_work(seed)
    step = packed_views([rows for _, rows in work])
    row = 0
    for seq, rows in work:
        for node in range(rows.start - rows.prefix, rows.start - rows.prefix + len(rows.tokens)):
            kv_slots = expected_slots(seq, node)
            assert slots_seen(step, row) == kv_slots
            assert (int(step.tokens[row]), int(step.positions[row])) == (
                seq.slots.tokens[node],
                seq.slots.position(node),
            )
            assert int(step.slots[row]) == kv_slots[-1]
            assert int(step.shared[row]) >= shared_end(seq.slots.position(node), rows.prefix)
            row += 1


@pytest.mark.parametrize("seed", range(20))
def test_padding_reads_and_writes_the_spare_slot_and_is_in_no_group(seed: int) -> None:
    _, work = some_work(seed)
    rows = sum(len(rows.tokens) for _, rows in work)
    step = packed_views([rows for _, rows in work])
    assert step.groups[:, 1].sum() == rows
    assert (step.groups[:, 1] <= 16).all()
    assert (step.slots[rows:] == SPARE).all() and (step.own[rows:] == SPARE).all()
    assert (step.own_count[rows:] == 1).all() and (step.shared[rows:] == 0).all()
    assert (step.tokens[rows:] == 0).all() and (step.positions[rows:] == 0).all()


def test_what_a_row_shares_depends_on_its_position_alone() -> None:
    """A tail of 30, whether it lies at its own positions or behind siblings, and a prefix that holds some of it
    already."""
    for prefix, behind in ((100, 0), (100, 2), (110, 0), (110, 1)):
        tokens, parents, chain = chain_with_siblings(range(131 - prefix), behind)
        pool, slots = Pool(4), Slots(4096)
        slots.extend([0] * prefix)
        slots.grow(tokens, parents)
        node = chain[-1]
        seen = sum(1 << one for one in slots.path(node))
        step = packed_views([Rows(Table(pool, [0, 1]), [1], slots.slot_of(node), prefix, [seen])])
        assert (int(step.positions[0]), int(step.shared[0]), int(step.own_count[0])) == (130, 96, 35)


def test_a_long_chunk_dealt_out_to_steps_has_short_paths() -> None:
    table = Table(Pool(8), [5, 3, 1, 0])
    for some in split_into_steps([rows_of_chunk(table, [1] * 600, 50)], 128):
        step = packed_views(some)
        assert int(step.own_count.max()) <= 64
        assert slots_seen(step, 0) == table.flat(np.arange(int(step.positions[0]) + 1)).tolist()


def test_a_path_that_does_not_fit_is_refused() -> None:
    seen = sum(2 << 2 * node for node in range(LONGEST_OWN + 1))
    with pytest.raises(ValueError, match="own path has 193 KV slots"):
        pack([Rows(Table(Pool(4), [0, 1, 2]), [1], 2 * LONGEST_OWN + 1, 0, [seen])], SPARE)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 512 sampled rows"):
        bucket_of([rows_of_chunk(Table(Pool(4), [0, 1, 2]), [1] * 513, 0)])


def test_sections_lie_where_the_bucket_says_and_at_whole_cache_lines() -> None:
    for bucket in (Bucket(1, 1), Bucket(16, 1), Bucket(128, 128), Bucket(16, 16, 48)):
        step = views(torch.zeros(packed_size(bucket) + 7, dtype=torch.int32), bucket)
        parts = [part for name in Views.__slots__ if isinstance(part := getattr(step, name), torch.Tensor)]
        parts.sort(key=torch.Tensor.storage_offset)
        assert parts[-1].data_ptr() == step.tables.data_ptr()  # the only one whose length varies
        parts.pop()
        assert all(part.storage_offset() % 32 == 0 for part in parts)
        ends = [
            part.storage_offset()
            + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            for part in parts
        ]
        assert all(end < after.storage_offset() for end, after in zip(ends, parts[1:], strict=False))
        assert ends[-1] < packed_size(bucket)


def attended(q: np.ndarray, keys: np.ndarray, values: np.ndarray, kv_slots: list[int]) -> list[np.ndarray]:
    """One row's attention in loops, float64."""
    share = len(q) // keys.shape[1]
    found = []
    for head, query in enumerate(q):
        k, v = (
            np.array([side[slot // PAGE, head // share, slot % PAGE] for slot in kv_slots]) for side in (keys, values)
        )
        weights = np.exp(k @ query / math.sqrt(len(query)))
        found.append(weights @ v / weights.sum())
    return found


@each_value
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_plain_attention_equals_a_loop_over_ancestors(seed: int, dtype: torch.dtype) -> None:
    _, work = some_work(seed)
    step = packed_views([rows for _, rows in work])
    torch.manual_seed(seed)
    q = torch.randn(len(step.slots), 6, 8).to(dtype)
    keys, values = torch.randn(2, 65, 2, PAGE, 8).to(dtype)
    got = attend_plainly(q, keys, values, step).view(q.shape).double().numpy()
    row = 0
    for seq, rows in work:
        for node in range(rows.start - rows.prefix, rows.start - rows.prefix + len(rows.tokens)):
            expected = attended(
                q[row].double().numpy(), keys.double().numpy(), values.double().numpy(), expected_slots(seq, node)
            )
            assert (
                np.abs(got[row] - expected).max()
                <= {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
            )
            row += 1


def test_plain_attention_reads_nothing_that_was_never_written() -> None:
    _, work = some_work(3)
    step = packed_views([rows for _, rows in work])
    written = {slot for seq, _ in work for node in range(len(seq.slots.tokens)) for slot in expected_slots(seq, node)}
    keys = torch.full((65, 2, PAGE, 8), torch.nan)
    for slot in written | {SPARE}:
        keys[slot // PAGE, :, slot % PAGE] = 1.0
    assert attend_plainly(torch.randn(len(step.slots), 6, 8), keys, keys, step).isfinite().all()


def test_a_cpu_attends_plainly() -> None:
    assert choose_attend(torch.device("cpu"), torch.float32, 4, 2, 16) is attend_plainly


@pytest.fixture
def torch_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")


@pytest.mark.usefixtures("torch_linear")
@pytest.mark.parametrize("kind", ["llama", "llama-linear-biases", "qwen2", "qwen3"])
def test_logits_equal_those_of_transformers(kind: str) -> None:
    model, tokens = in_double(tiny(kind)), some_tokens(330)
    stepper = Stepper(decoder_of(model, "cpu", torch.float64), "cpu", torch.float64)
    seq = stepper.open(tokens[:300])
    fed, parents, chain = chain_with_siblings(tokens[300:], behind=1)
    got = stepper.score([seq.grow(fed, parents)])[chain]
    expected = logits_of(model, tokens)[300:]
    assert torch.allclose(got, expected, rtol=0, atol=1e-9 * expected.abs().max().item())


@pytest.mark.usefixtures("torch_linear")
def test_a_vocabulary_may_be_larger_than_a_step_has_rows() -> None:
    model = in_double(
        AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "vocab_size": 3 * MOST_STEP_ROWS})).eval()
    )
    tokens = list(range(0, 3 * MOST_STEP_ROWS, 97))
    stepper = Stepper(decoder_of(model, "cpu", torch.float64), "cpu", torch.float64)
    got = stepper.score([stepper.open().read(tokens)])
    assert torch.allclose(got, logits_of(model, tokens), rtol=0, atol=1e-9)


@pytest.mark.usefixtures("torch_linear")
def test_several_sequences_in_one_step_get_what_each_gets_alone() -> None:
    stepper = Stepper(decoder_of(in_double(tiny("llama")), "cpu", torch.float64), "cpu", torch.float64)
    alone, together = ([stepper.open(some_tokens(length, seed=length)) for length in (5, 260, 70)] for _ in range(2))
    feeds = [([7, 8], [ROOT, 0]), ([9], [ROOT]), (list(range(20)), [ROOT] * 20)]
    expected = torch.cat([stepper.score([seq.grow(*feed)]) for seq, feed in zip(alone, feeds, strict=True)])
    got = stepper.score([seq.grow(*feed) for seq, feed in zip(together, feeds, strict=True)])
    assert torch.allclose(got, expected, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("torch_linear")
def test_a_fork_reads_the_pages_it_shares() -> None:
    stepper = Stepper(decoder_of(in_double(tiny("llama")), "cpu", torch.float64), "cpu", torch.float64)
    first = stepper.open(some_tokens(300))
    table = first.table.fork(300)
    table.own(300, 301, stepper.memory.copy)
    expected = stepper.score([first.grow([5], [ROOT])])
    stepper.score([first.grow([6], [ROOT])])
    got = stepper.score([Rows(table, [5], 300, 300, [1])])
    assert torch.allclose(got, expected, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("torch_linear")
def test_hidden_states_are_what_enters_the_last_layers_and_the_last_of_all_normed() -> None:
    model, tokens = in_double(tiny("qwen3")), some_tokens(40)
    stepper = Stepper(decoder_of(model, "cpu", torch.float64), "cpu", torch.float64)
    packed, bucket = pack([stepper.open().read(tokens)], PAGES * PAGE)
    stepper.graphs.bring(packed)
    states = stepper.graphs.run_brought(bucket, 3).states
    hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert states is not None
    assert torch.allclose(states[:40], torch.cat([one[0] for one in hidden[-3:]], -1), rtol=0, atol=1e-9)


@each_value
@pytest.mark.parametrize("behind", [1, 3])
@pytest.mark.parametrize("prefix", [0, 20, 60, 300, 760])
def test_a_row_behind_siblings_has_the_bits_of_a_single_step(
    prefix: int, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across a group of positions and a page; with the products' own kernel, whose rows do not depend on each other.

    In plain operations this holds within one bucket of pages: torch sums longer rows, if only by zeros, in another
    order.
    """
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    tokens = some_tokens(prefix + 14)
    stepper = Stepper(decoder_of(tiny("llama"), "cpu", torch.float32), "cpu", torch.float32)
    start, chain_tokens = tokens[:prefix], tokens[prefix:]
    single = stepper.open(start)
    expected = torch.cat(
        [stepper.score([single.grow([token], [ROOT if at == 0 else at - 1])]) for at, token in enumerate(chain_tokens)]
    )
    among = stepper.open(start)
    fed, parents, chain = chain_with_siblings(chain_tokens, behind)
    got = []
    for begin in range(0, len(fed), 16):  # as many rows as that kernel takes
        got.append(stepper.score([among.grow(fed[begin : begin + 16], parents[begin : begin + 16])]))
    assert torch.equal(torch.cat(got)[chain], expected)
