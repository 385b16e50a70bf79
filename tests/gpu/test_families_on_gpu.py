"""Families by Triton kernels on a GPU: what plain torch gives, and the same bits for a row in any step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from decoded_together import decode_together
from packed_steps import PAGES, chain_with_siblings, some_work
from specbranch.core.methods import METHODS
from specbranch.core.pages import PAGE, Pool
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.cache.kv_memory import Memory, Table
from specbranch.models.families.operations import Attention
from specbranch.models.forward.step_rows import ChunkRows, Rows
from specbranch.models.gpu import attention
from specbranch.models.gpu.attention import attend_by_kernels, attend_plainly
from specbranch.models.gpu.kernel_step import KernelStep
from specbranch.models.gpu.layout import pack, views
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.gpu.small import PLAIN_FUNCTIONS
from specbranch.models.gpu.step import GpuStep
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from tiny_models import GREEDY, planted, random_model, saved, some_tokens

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 384, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.1, "bos_token_id": 0,
    "eos_token_id": 1, "head_dim": 64,
}  # fmt: skip
GEMMA = {**SIZES, "head_dim": 256, "sliding_window": 200, "query_pre_attn_scalar": 200}
EXPERTS = {"num_local_experts": 9, "num_experts_per_tok": 3}
CONFIGS = {
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=150),
    "gemma2": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA, sliding_window_pattern=3),
    "mixtral": lambda: MixtralConfig(**SIZES, **EXPERTS, sliding_window=400),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=40, num_experts_per_tok=4, moe_intermediate_size=192, norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gpt-oss": lambda: GptOssConfig(**SIZES, **EXPERTS, sliding_window=128),
    "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layer_interval=2, pad_token_id=0),
    "draft-window": lambda: LlamaConfig(**SIZES),
}  # fmt: skip
DRAFT_WINDOWS = {"draft-window": 150}
STORED = {"mixtral": ("int8", "int4", "fp8"), "gemma3": ("int8",)}
CASES = [(kind, None) for kind in CONFIGS] + [(kind, one) for kind, some in STORED.items() for one in some]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(filter(None, case)))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    kind, weights = request.param
    folder = saved(random_model(CONFIGS[kind](), seed=1), Path(tmp_path_factory.mktemp(kind)))
    made = load_native(
        folder, context_length=2000, device="cuda", dtype="bfloat16", weights=weights, cache_tokens=300 * 256,
        draft_window=DRAFT_WINDOWS.get(kind),
    )  # fmt: skip
    assert isinstance(made, GpuRunner) and isinstance(made.graphs.step, KernelStep)
    return made


@pytest.fixture
def runner(loaded: NativeRunner) -> Iterator[NativeRunner]:
    """One model for many tests; what a failed one left open is closed."""
    yield loaded
    for seq in list(loaded.sequences):
        loaded.close(seq)


def bits(rows: list[Any]) -> torch.Tensor:
    return torch.stack([row.logits for row in rows]).cpu()


@torch.inference_mode()
def test_a_step_by_kernels_gives_what_a_plain_step_gives(runner: NativeRunner) -> None:
    arch, device = runner.decoder.arch, torch.device("cuda")
    pool, found = Pool(PAGES), []
    memory = Memory(arch, PAGES + 1, device, torch.bfloat16)
    before = memory.data.normal_().clone()
    table = Table(pool, pool.take(4))
    packed, bucket = pack([Rows(table, some_tokens(13), 700, 700, [(2 << at) - 1 for at in range(13)])], PAGES * PAGE)
    step = views(torch.from_numpy(packed).to(device), bucket, PAGES)
    plain = GpuStep(runner.decoder, memory, attend_plainly, PLAIN_FUNCTIONS)
    for one in (KernelStep(runner.decoder, memory), plain):
        memory.data.copy_(before)
        found.append(one.forward(step)[0][:13].float())
    # near ties of experts may flip a row, as both round at other places
    errors = (found[0] - found[1]).abs().amax(1) / found[1].abs().max()
    assert errors.median() < 0.05 and found[0].isfinite().all()


@pytest.mark.parametrize("prefix", [1, 20, 250, 700, 1016])
def test_a_row_has_the_same_bits_in_any_batch(prefix: int, runner: NativeRunner) -> None:
    line, text = some_tokens(30, seed=9), some_tokens(prefix)
    for seq in range(6):
        runner.open(seq, GREEDY)
        runner.extend(seq, text if seq < 3 else some_tokens(100 * seq, seed=seq))
    alone = []
    for token in line:
        alone += runner.score([Feed(0, (token,), (ROOT,))])[0]
        runner.keep(0, (0,), 1)
    expected = bits(alone)
    chain = Feed(1, tuple(line), tuple(range(ROOT, 29)))
    assert torch.equal(bits(runner.score([chain])[0]), expected)
    runner.keep(1, (), 0)
    others = [Feed(seq, (1, 2, 3), (ROOT, 0, 0)) for seq in (3, 4, 5)]
    assert torch.equal(bits(runner.score([others[0], chain, *others[1:]])[1]), expected)
    feed, nodes = planted(random.Random(prefix), line)
    rows = runner.score([Feed(2, feed.tokens, feed.parents)])[0]
    assert torch.equal(bits([rows[node] for node in nodes]), expected)


def test_a_prompt_may_be_cut_anywhere(runner: NativeRunner) -> None:
    """Where steps take no rows of prompts, as with stored weights, only at whole chunks."""
    chunk = runner.prefill_chunk
    cuts = (3, 200) if chunk == 1 else (chunk,)
    text = some_tokens(cuts[-1] + 411)
    runner.open(0, GREEDY)
    runner.extend(0, text)
    (whole,) = runner.score([Feed(0, (5,), (ROOT,))])[0]
    runner.open(1, GREEDY)
    for begin, end in pairwise((0, *cuts, len(text))):
        runner.extend(1, text[begin:end])
        runner.flush()
    (parts,) = runner.score([Feed(1, (5,), (ROOT,))])[0]
    assert torch.equal(bits([whole]), bits([parts]))


@pytest.mark.parametrize("count", [40, 130])
def test_a_row_has_the_same_bits_among_many_and_what_is_no_number_stays_in_its_row(
    count: int, runner: NativeRunner
) -> None:
    for seq in range(count):
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(3 + 5 * (seq % 60), seed=seq))
    runner.flush()
    torch.cuda.synchronize()
    runner.memory.data[runner.sequences[1].table.pages[0], :, :, :, 0] = float("nan")
    feeds = [Feed(seq, (seq % 300,), (ROOT,)) for seq in range(count)]
    alone = [runner.score([feed])[0][0] for feed in feeds if feed.seq % 17 == 0]
    for seq in range(count):
        runner.keep(seq, (), 0)
    among = [rows[0] for rows in runner.score(feeds)]
    assert torch.equal(bits(among[::17]), bits(alone))
    assert among[1].logits.isnan().all() and not bits(among[::17]).isnan().any()
    for seq in range(count):
        runner.close(seq)
    runner.memory.data.nan_to_num_(0.0)
    torch.cuda.synchronize()  # the runner has a stream of its own


@pytest.mark.parametrize("kind", CONFIGS)
def test_twelve_at_once_by_all_methods_get_what_plain_decoding_gives_each(kind: str, tmp_path: Path) -> None:
    target = random_model(CONFIGS[kind](), seed=2)
    saved(target, tmp_path / "target")
    for parameter in target.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.12)
    saved(target, tmp_path / "draft")
    runners = [
        load_native(tmp_path / name, context_length=512, device="cuda", dtype="bfloat16", draft_window=window)
        for name, window in (("target", None), ("draft", 20 if kind in DRAFT_WINDOWS else None))
    ]
    executor = Serial(Verifier(runners[0]), Drafter(runners[1]))
    names = [name for name in METHODS if name != "autoregressive"]
    for temperature in (0.0, 0.9):
        together = decode_together(executor, (names + names)[:12], temperature)
        plain = decode_together(executor, ["autoregressive"] * 12, temperature)
        assert [one.tokens for one in together] == [one.tokens for one in plain]


FORMS = {
    "window": Attention(window=40),
    "bounded": Attention(window=300, softcap=5.0, scale=0.2),
    "sinks": Attention(window=128, sinks=True),
    "draft-window": Attention(window=40, first=4),
    "long-draft-window": Attention(window=500, first=4),
}


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(8, 2, 64), (16, 2, 128), (4, 2, 256)], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_attention_gives_what_plain_operations_give(form: Attention, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    sinks = torch.randn(heads, device="cuda", dtype=torch.bfloat16) if form.sinks else None
    memory = torch.randn(2, 65, kv_heads, PAGE, head_dim).to("cuda", torch.bfloat16)
    for seed in range(6):
        _, work = some_work(seed)
        packed, bucket = pack([rows for _, rows in work], 64 * PAGE)
        step = views(torch.from_numpy(packed).to("cuda"), bucket)
        count = sum(len(rows.tokens) for _, rows in work)
        q = torch.randn(bucket.total, heads, head_dim).to("cuda", torch.bfloat16)
        found, expected = (
            attend(q, *memory, step, None, False, form, sinks)[:count].float()
            for attend in (attend_by_kernels, attend_plainly)
        )
        assert (found - expected).abs().max() < 2e-2


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(8, 2, 64), (4, 2, 256)], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_row_of_a_prompt_has_the_bits_of_a_single_row(
    form: Attention, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, head_dim = shape
    torch.manual_seed(1)
    sinks = torch.randn(heads, device="cuda", dtype=torch.bfloat16) if form.sinks else None
    form = replace(form, window=None if form.window == 300 else form.window)
    memory = torch.randn(2, 41, kv_heads, PAGE, head_dim).to("cuda", torch.bfloat16)
    tile_rows, table = attention.chunk_tile_rows(heads // kv_heads, head_dim), Table(Pool(40), list(range(30)))
    for start, count in ((7000, 48), (700, 30), (5, 20)):
        queries, found = torch.randn(count, heads, head_dim).to("cuda", torch.bfloat16), []
        for programs in (1, 16):
            monkeypatch.setattr(attention, "splits_chunks", lambda *_, programs=programs: programs > 1)
            monkeypatch.setattr(attention, "CHUNK_PROGRAMS", programs * kv_heads)
            packed, bucket = pack([], 40 * PAGE, chunks=[ChunkRows(table, [0] * count, start)], tile_rows=tile_rows)
            step = views(torch.from_numpy(packed).to("cuda"), bucket, 32)
            q = torch.zeros(bucket.total, heads, head_dim, device="cuda", dtype=torch.bfloat16)
            q[bucket.rows : bucket.rows + count] = queries
            found.append(attend_by_kernels(q, *memory, step, None, False, form, sinks)[bucket.rows :][:count])
        assert torch.equal(*found)
        for at in (0, count // 2, count - 1):
            packed, bucket = pack([Rows(table, [0], start + at, start + at, [1])], 40 * PAGE)
            one = views(torch.from_numpy(packed).to("cuda"), bucket, 32)
            alone = attend_by_kernels(queries[at : at + 1], *memory, one, None, False, form, sinks)
            assert torch.equal(alone[0], found[0][at])


def test_a_chain_behind_siblings_reads_its_own_window(runner: NativeRunner) -> None:
    """Rows whose KV slots do not lie at their positions, across the edge of a window."""
    tokens = some_tokens(24, seed=4)
    for seq in (0, 1):
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(190))
    single = [
        runner.score([Feed(0, (token,), (ROOT if at == 0 else at - 1,))])[0][0] for at, token in enumerate(tokens)
    ]
    fed, parents, nodes = chain_with_siblings(tokens, behind=2)
    rows = runner.score([Feed(1, tuple(fed), tuple(parents))])[0]
    assert torch.equal(bits([rows[node] for node in nodes]), bits(single))
