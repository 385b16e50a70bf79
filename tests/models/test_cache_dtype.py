"""Keys and values in bfloat16: half the memory, the same promise between methods, and refusals in sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch import LLM, SamplingParams, SpeculativeConfig
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.native import NativeRunner, load_native
from specbranch.models.rows import collate
from specbranch.models.storage import kept_in
from tiny_models import GREEDY, saved, some_tokens, tiny

compiled = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def compiled_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved(tiny(kind), tmp_path_factory.mktemp(kind)) for kind in ("llama", "qwen3")}


def loaded(folder: Path, cache_dtype: str | None = "bfloat16") -> NativeRunner:
    return load_native(folder, context_length=512, tail=64, cache_dtype=cache_dtype)


def scored(runner: NativeRunner) -> torch.Tensor:
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(300))
    found = collate(runner.score([Feed(0, (1, 2, 3, 4, 5), (ROOT, 0, 0, 2, 1))])[0])
    runner.close(0)
    return found


@compiled
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_compiled_step_stores_what_the_plain_one_does(kind: str, folders: dict[str, Path]) -> None:
    fused = loaded(folders[kind])
    assert fused.compiled and fused.memory.data.dtype is torch.bfloat16
    plain = NativeRunner(fused.decoder, fused.context_length, fused.tail, cache_dtype=torch.bfloat16)
    plain._fused, plain.piece = None, fused.piece
    whole = loaded(folders[kind], None)
    assert fused.memory.data[0].nbytes * 2 == whole.memory.data[0].nbytes
    own, twin, exact = (scored(runner) for runner in (fused, plain, whole))
    near, far = (own - twin).abs().max(), (own - exact).abs().max()
    assert near < 0.2 * far, "as far from the twin as from a cache in float32"
    assert far < 0.05 * exact.abs().max()


@compiled
def test_what_is_stored_is_rounded_to_the_nearest(folders: dict[str, Path]) -> None:
    small, whole = loaded(folders["llama"]), loaded(folders["llama"], None)
    for runner in (small, whole):
        runner.open(0, GREEDY)
        runner.score([Feed(0, (7,), (ROOT,))])
    pages = [runner._held[0].table.pages[0] for runner in (small, whole)]
    kept, exact = (runner.memory.data[page, 0, :, :, 0] for runner, page in zip((small, whole), pages, strict=True))
    assert torch.equal(kept, exact.to(torch.bfloat16))


@compiled
def test_a_token_has_the_same_bits_alone_and_in_a_chain(folders: dict[str, Path]) -> None:
    runner, line = loaded(folders["llama"]), some_tokens(6, seed=2)
    for seq in range(2):
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(125))
    alone = []
    for token in line:
        alone.append(runner.score([Feed(0, (token,), (ROOT,))])[0][0].logits)
        runner.keep(0, (0,), 1)
    chain = runner.score([Feed(1, tuple(line), (ROOT, 0, 1, 2, 3, 4))])[0]
    assert all(torch.equal(row, found.logits) for row, found in zip(alone, chain, strict=True))


@pytest.mark.parametrize("method", ["speculative", "specbranch", "lookup"])
def test_every_method_gives_the_text_of_plain_decoding(method: str, pair: tuple[str, str]) -> None:
    with LLM(*pair, device="cpu", context_length=200, cache_dtype="bfloat16", keep_experience=False) as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        texts = [
            llm.using(speculative=SpeculativeConfig(method=name)).generate("A branch is a guess", params).token_ids
            for name in ("autoregressive", method)
        ]
        assert texts[0] == texts[1] and llm.cache_dtype == "bfloat16"


def test_what_cannot_be_is_refused_in_a_sentence(folders: dict[str, Path], pair: tuple[str, str]) -> None:
    with pytest.raises(BadParameter, match="cache_dtype is 'int3'; expected bfloat16, or float32"):
        loaded(folders["llama"], "int3")
    with pytest.raises(BadParameter, match="Leave --cache-dtype out"):
        LLM(pair[0], runner="transformers", device="cpu", cache_dtype="bfloat16")
    with pytest.raises(BadParameter, match="on cuda keys and values are stored in float16"):
        kept_in("bfloat16", torch.float16, torch.device("cuda"))
    assert kept_in("bfloat16", torch.bfloat16, torch.device("cuda")) is None
