"""Whether a model fits, and what its sequences hold of the pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specbranch.config import WEIGHTS, Part, SamplingParams, SpeculativeConfig, WeightsName
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.errors import CacheFull, ModelError
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.cache import pool_size
from specbranch.models.cache.kv_memory import page_bytes
from specbranch.models.cache.pool_size import pool_pages, weight_bytes
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.locate import locate
from specbranch.models.files.weights import read_weights
from specbranch.models.loading import load_native, open_model
from specbranch.models.runners.native import NativeRunner
from tiers import tiered
from tiny_models import GREEDY, SHAPE, saved, some_tokens, tiny
from toybench import SHARED, Timeless, run_out

GPU = torch.device("cuda")  # is only named here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def large(folder: Path) -> Architecture:
    """The shape of an 8B model."""
    arch = load_native(folder).architecture
    sizes = {
        "hidden": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 14336,
        "vocabulary": 128256,
    }
    return replace(arch, name="large", tied=False, **sizes)


def test_weights_are_counted_as_they_are_loaded(folder: Path) -> None:
    runner = load_native(folder)
    matrices = [runner.decoder.embedding]
    for layer in runner.decoder.layers:
        matrices += [getattr(layer, name).weight for name in ("qkv", "out", "gate_up", "down")]
    assert weight_bytes(runner.architecture, torch.float32) == sum(matrix.nbytes for matrix in matrices)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [kind for kind in WEIGHTS if kind != "stored"])
def test_stored_weights_are_counted_with_their_scales(stored: WeightsName, tied: bool, tmp_path: Path) -> None:
    # not all of them fit int4
    sizes = {**SHAPE, "hidden_size": 128, "intermediate_size": 200, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
    arch, source = open_model(locate(str(saved(model, tmp_path))))
    # In float64, beside which every storage is another; a CPU may hold int8 otherwise than it is stored.
    weights = read_weights(arch, source, torch.device("cpu"), torch.float64, stored)
    held = [part for matrix in weights.matrices for part in (matrix.weight, matrix.scale) if part is not None]
    assert weight_bytes(arch, torch.float64, stored) == sum(part.nbytes for part in (weights.embedding, *held))


@pytest.mark.parametrize(
    ("gigabytes", "dtype", "kv_slots", "error"),
    [
        (
            17.0,
            torch.bfloat16,
            131072,
            r"16\.1 GB in bfloat16, its cache 17\.2 GB; 17\.0 GB are .*16\.3 GB too few.*at most 7040",
        ),
        (20.0, torch.float32, 4096, r"32\.1 GB in float32.*--dtype bfloat16"),
        (
            10.0,
            torch.bfloat16,
            4096,
            r"6\.6 GB too few\. Load it with --weights int8 \(of a draft: --draft-weights int8\)\.$",
        ),
        (6.0, torch.bfloat16, 4096, r"GB too few\. Load it with --weights int4 "),
        (12.0, torch.float32, 4096, r"32\.1 GB in float32.*GB too few\. Load it with --weights int8 "),
        (5.0, torch.bfloat16, 4096, r"GB too few\. Free memory there, or choose a smaller model or another device\.$"),
    ],
)
def test_what_does_not_fit_says_how_much_is_missing_and_what_would(
    gigabytes: float,
    dtype: torch.dtype,
    kv_slots: int,
    error: str,
    large: Architecture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: int(gigabytes * 1e9))
    with pytest.raises(ModelError, match=error):
        pool_pages(large, dtype, GPU, kv_slots, 128)


@pytest.mark.parametrize(("gigabytes", "stored", "larger"), [(10.0, "int8", None), (6.0, "int4", "int8")])
def test_the_storage_that_is_named_does_fit(
    gigabytes: float,
    stored: WeightsName,
    larger: WeightsName | None,
    large: Architecture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: int(gigabytes * 1e9))
    assert pool_pages(large, torch.bfloat16, GPU, 4096, 128, stored=stored) >= 17
    with pytest.raises(ModelError, match=f"--weights {stored}"):
        pool_pages(large, torch.bfloat16, GPU, 4096, 128, stored=larger)


def test_a_longer_context_or_smaller_weights_are_both_offered_where_both_fit(
    large: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: int(17e9))
    with pytest.raises(ModelError, match=r"\. Set --context-length to at most 7040, or load it with --weights int8 \("):
        pool_pages(large, torch.bfloat16, GPU, 40000, 128)


def test_the_setting_that_is_named_does_fit(large: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: int(17e9))
    assert pool_pages(large, torch.bfloat16, GPU, 7040, 128) >= 28
    assert pool_pages(large, torch.bfloat16, GPU, 131072, 128, cache_tokens=7168) == 28


def test_a_pool_is_bounded_by_memory_and_by_sequences(large: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: int(100e9))
    page = page_bytes(large, torch.bfloat16)
    assert pool_pages(large, torch.bfloat16, GPU, 900, 100) == 4 * pool_size.MOST_SEQUENCES["cuda"]
    assert 512 <= pool_pages(large, torch.bfloat16, GPU, 130944, 128) <= pool_size.POOL_SHARE * 84e9 / page
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: int(40e9))
    assert pool_pages(large, torch.bfloat16, GPU, 130944, 128) == 512, "one context, however little that leaves"


def test_weights_alone_must_fit_on_a_cpu(large: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: int(20e9))
    assert pool_pages(large, torch.bfloat16, torch.device("cpu"), 130944, 128) == 131072 // PAGE
    with pytest.raises(
        ModelError, match=r"does not fit on cpu: its weights take 32\.1 GB in float32; 20\.0 GB are free"
    ):
        pool_pages(large, torch.float32, torch.device("cpu"), 4096, 128)


def test_sequences_hold_what_they_use_and_not_whole_contexts(folder: Path) -> None:
    runner = load_native(folder, context_length=1000)
    for seq in range(32):
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(100))
    assert runner.pool.pages - runner.pool.free == 32
    for seq in range(32):
        runner.close(seq)
    runner.check()
    assert runner.pool.free == runner.pool.pages


def decoded(target: NativeRunner, draft: NativeRunner, prompts: list[list[int]], method: str) -> list[Session]:
    loop = Loop(Serial(Verifier(target), Drafter(draft)))
    # what is looked up counts as drafted, and more is where there is no draft
    without: tuple[Part, ...] = ("lookup",) if method == "specbranch" else ()
    config = SpeculativeConfig(method=method, num_speculative_tokens=4, without=without)
    sessions = [
        Session(number, prompt, Request(SamplingParams(max_tokens=60), 0, len(prompt)), 900)
        for number, prompt in enumerate(prompts)
    ]
    for session in sessions:
        loop.join(session, METHODS[method].start(session, config, Timeless(SHARED)))
    run_out(loop)
    target.check()
    draft.check()
    assert target.pool.free == target.pool.pages
    return sessions


@pytest.mark.slow
@pytest.mark.parametrize("method", tiered(("speculative", "pearl", "tree", "specbranch"), "specbranch".__eq__))
def test_a_full_pool_ends_a_request_with_a_sentence_and_none_of_the_others(method: str, folder: Path) -> None:
    prompts = [some_tokens(150, seed=seed) for seed in range(4)]
    plenty = load_native(folder, context_length=1000)
    expected = [
        session.output
        for session in decoded(plenty, load_native(folder, context_length=1000), prompts, "autoregressive")
    ]
    tight = load_native(folder, context_length=1000, cache_tokens=3 * PAGE)
    sessions = decoded(tight, load_native(folder, context_length=1000), prompts, method)
    failed = [session for session in sessions if session.error is not None]
    assert len(failed) == 1 and isinstance(failed[0].error, CacheFull) and "cache_tokens" in str(failed[0].error)
    assert all(session.output == expected[session.number] for session in sessions if session.error is None)


@pytest.mark.slow
@pytest.mark.parametrize("method", tiered(("speculative", "pearl", "tree", "specbranch"), "specbranch".__eq__))
def test_a_draft_without_memory_for_a_text_leaves_it_to_the_target(method: str, folder: Path) -> None:
    prompts = [some_tokens(150, seed=seed) for seed in range(4)]
    target = load_native(folder, context_length=1000)
    expected = [
        session.output
        for session in decoded(target, load_native(folder, context_length=1000), prompts, "autoregressive")
    ]
    drafted = []
    for pages in (100, 2):
        sessions = decoded(target, load_native(folder, context_length=1000, cache_tokens=pages * PAGE), prompts, method)
        assert [session.output for session in sessions] == expected
        drafted.append(sum(session.stats.drafted for session in sessions))
    assert 0 < drafted[1] < drafted[0]
