"""Keys and values in bfloat16 and int8: less memory, the same promise between methods, and refusals in sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch import LLM, SamplingParams, SpeculativeConfig
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter
from specbranch.experiences import experience_folder
from specbranch.models.cache import pool_size
from specbranch.models.cache.kv_memory import _quantised, page_bytes, widened
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.precision import resolve_cache_dtype
from specbranch.models.sampling.logit_rows import collate
from test_identity_models import SHAPINGS, compare
from tiers import each_value
from tiny_models import GREEDY, saved, some_tokens, tiny

SMALL = {"bfloat16": torch.bfloat16, "int8": torch.int8}
small = pytest.mark.parametrize("cache_dtype", SMALL)
compiled = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def compiled_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: saved(tiny(kind), tmp_path_factory.mktemp(kind)) for kind in ("llama", "qwen3")}
    near = tiny("llama")
    for parameter in near.parameters():
        parameter.data.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return {**made, "draft": saved(near, tmp_path_factory.mktemp("draft"))}


def loaded(folder: Path, cache_dtype: str | None, **options: object) -> NativeRunner:
    return load_native(folder, context_length=512, tail=64, cache_dtype=cache_dtype, **options)


def scored(runner: NativeRunner) -> torch.Tensor:
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(300))
    found = collate(runner.score([Feed(0, (1, 2, 3, 4, 5), (ROOT, 0, 0, 2, 1))])[0])
    runner.close(0)
    return found


@pytest.mark.slow
@each_value
@compiled
@small
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_compiled_step_stores_what_the_plain_one_does(
    kind: str, cache_dtype: str, folders: dict[str, Path]
) -> None:
    fused = loaded(folders[kind], cache_dtype)
    assert fused.compiled and fused.cache_dtype == cache_dtype
    plain = NativeRunner(fused.decoder, fused.context_length, fused.tail, cache_dtype=SMALL[cache_dtype])
    plain._fused, plain.prefill_chunk = None, fused.prefill_chunk
    whole = loaded(folders[kind], None)
    own, twin, exact = (scored(runner) for runner in (fused, plain, whole))
    near, far = (own - twin).abs().max(), (own - exact).abs().max()
    assert near < 0.2 * far, "as far from the twin as from a cache in float32"
    assert far < 0.05 * exact.abs().max()


@small
def test_a_pool_knows_how_much_a_page_takes(
    cache_dtype: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: int(20e6))
    runner, whole = (loaded(folders["qwen3"], kind) for kind in (cache_dtype, None))
    head_dim = whole.architecture.head_dim
    share = 0.5 if cache_dtype == "bfloat16" else (head_dim + 4) / (4 * head_dim)
    for one in (runner, whole):
        assert one.memory.data[0].nbytes == page_bytes(one.architecture, one.memory.data.dtype)
    assert runner.memory.data[0].nbytes == share * whole.memory.data[0].nbytes
    assert runner.pool.pages == pytest.approx(whole.pool.pages / share, abs=1 / share)


def stored_and_exact(folder: Path, cache_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first layer has of a token in a cache of this type, and in one of float32."""
    found = []
    for runner in (loaded(folder, cache_dtype), loaded(folder, None)):
        runner.open(0, GREEDY)
        runner.score([Feed(0, (7,), (ROOT,))])
        found.append(runner.memory.data[runner.sequences[0].table.pages[0], 0, :, :, 0])
    return found[0], found[1]


@compiled
def test_what_is_stored_is_rounded_to_the_nearest(folders: dict[str, Path]) -> None:
    kept, exact = stored_and_exact(folders["llama"], "bfloat16")
    assert torch.equal(kept, exact.to(torch.bfloat16))


@compiled
def test_whole_numbers_have_a_scale_for_each_head(folders: dict[str, Path]) -> None:
    kept, exact = stored_and_exact(folders["llama"], "int8")
    scale = exact.abs().amax(-1, keepdim=True) / 127
    numbers = kept[..., :-4]
    assert torch.equal(kept[..., -4:].contiguous().view(torch.float32), scale) and scale.unique().numel() == 4
    assert (numbers.abs().amax(-1) == 127).all() and ((numbers * scale - exact).abs() <= 0.5001 * scale).all()
    assert torch.equal(kept, _quantised(exact)), "the plain decoder rounds otherwise"


def test_a_head_of_zeros_and_one_that_is_no_number_stay_what_they_are() -> None:
    given = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [float("nan"), 1.0, 2.0]])
    found = widened(_quantised(given), torch.float32)
    assert torch.equal(found[0], given[0]) and found[2].isnan().all() and abs(found[1, 1] + 2.0) < 1e-6


@compiled
@small
def test_a_token_has_the_same_bits_alone_in_a_chain_in_a_tree_and_after_a_move(
    cache_dtype: str, folders: dict[str, Path]
) -> None:
    runner, line = loaded(folders["llama"], cache_dtype), some_tokens(6, seed=2)
    for seq in range(3):
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(125))
    alone = []
    for token in line:
        alone.append(runner.score([Feed(0, (token,), (ROOT,))])[0][0].logits)
        runner.keep(0, (0,), 1)
    chain = runner.score([Feed(1, tuple(line), (ROOT, 0, 1, 2, 3, 4))])[0]
    assert all(torch.equal(row, found.logits) for row, found in zip(alone, chain, strict=True))
    tree = runner.score([Feed(2, (9, line[0], 8, line[1], line[2]), (ROOT, ROOT, 0, 1, 3))])[0]
    assert all(torch.equal(tree[node].logits, alone[at]) for at, node in enumerate((1, 3, 4)))
    runner.keep(2, (1, 3, 4), 3)
    moved = runner.score([Feed(2, tuple(line[3:]), (ROOT, 0, 1))])[0]
    assert all(torch.equal(row, found.logits) for row, found in zip(alone[3:], moved, strict=True))


@compiled
@small
def test_what_was_read_has_the_bits_of_what_was_scored(cache_dtype: str, folders: dict[str, Path]) -> None:
    runner, text = loaded(folders["qwen3"], cache_dtype), some_tokens(150, seed=3)
    held = []
    for seq in range(2):
        runner.open(seq, GREEDY)
        if seq == 0:
            runner.extend(seq, text)
        else:
            for start in range(0, len(text), 50):
                some = text[start : start + 50]
                runner.score([Feed(seq, tuple(some), tuple(range(ROOT, len(some) - 1)))])
                runner.keep(seq, tuple(range(len(some))), len(some))
        held.append(runner.memory.data[runner.sequences[seq].table.pages[0], :, :, :, : len(text)])
    assert torch.equal(*held)


@each_value
@small
@pytest.mark.parametrize("shaping", ["greedy", "everything"])
def test_every_method_gives_the_tokens_of_plain_decoding(
    shaping: str, cache_dtype: str, folders: dict[str, Path]
) -> None:
    def load(path: Path, dtype: torch.dtype, **options: object) -> NativeRunner:
        return load_native(path, cache_dtype=cache_dtype, **options)

    sessions = compare(load, folders["llama"], folders["draft"], SHAPINGS[shaping], runs=1)
    assert sum(session.stats.accepted for session in sessions.values()) > 0


@each_value
@small
@pytest.mark.parametrize("method", ["specbranch", "lookup"])
def test_both_models_take_the_setting_and_answers_are_those_of_plain_decoding(
    method: str, cache_dtype: str, pair: tuple[str, str]
) -> None:
    with LLM(
        *pair, device="cpu", options={"context_length": 200, "cache_dtype": cache_dtype, "keep_experience": False}
    ) as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        prompts = ["A branch is a guess", "A branch is a twig"]  # the second begins like the first
        texts = [
            [answer.token_ids for answer in llm.using(speculative=config).generate(prompts, params)]
            for config in (SpeculativeConfig(method=name) for name in ("autoregressive", method))
        ]
        assert texts[0] == texts[1] and llm.cache_dtype == cache_dtype
        assert llm.drafter.runner.cache_dtype == llm.target_runner.cache_dtype == cache_dtype


def test_what_is_learned_with_another_cache_is_kept_apart(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_CACHE", str(tmp_path))
    for kind in (None, "float32", "int8"):
        with LLM(*pair, device="cpu", options={"context_length": 200, "cache_dtype": kind}) as llm:
            llm.generate("A branch is a guess", SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(list(experience_folder().glob("*.json"))) == 2


def test_what_cannot_be_is_refused_in_a_sentence(folders: dict[str, Path], pair: tuple[str, str]) -> None:
    with pytest.raises(BadParameter, match="cache_dtype is 'int3'; expected bfloat16, int8, or float32"):
        loaded(folders["llama"], "int3")
    with pytest.raises(BadParameter, match="Leave --cache-dtype out"):
        LLM(pair[0], options={"runner": "transformers", "cache_dtype": "bfloat16"}, device="cpu")
    with pytest.raises(BadParameter, match="on cuda keys and values are stored in float16"):
        resolve_cache_dtype("bfloat16", torch.float16, torch.device("cuda"))
    with pytest.raises(BadParameter, match="cache_dtype is 'int8', but on cuda"):
        resolve_cache_dtype("int8", torch.bfloat16, torch.device("cuda"))
    assert resolve_cache_dtype("bfloat16", torch.bfloat16, torch.device("cuda")) is None
