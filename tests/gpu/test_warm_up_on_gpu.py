"""After a full warm-up nothing is captured or compiled in the middle of an answer, on a GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from small_tokenizers import byte_level, save
from specbranch import LLM
from specbranch.core.methods import METHODS
from specbranch.models.gpu.kernel_step import KernelStep
from specbranch.models.gpu.runner import GpuRunner

pytestmark = pytest.mark.gpu

WORDS = ("One", "Two birds sat", "Three of them sat on a wall and", "A much longer prompt: " + "and so on, " * 40)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 24, "ignore_eos": True},
    {"max_tokens": 24, "ignore_eos": True, "temperature": 0.8, "seed": 1},
    {"max_tokens": 24, "ignore_eos": True, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "seed": 1},
    {"max_tokens": 24, "ignore_eos": True, "logprobs": 2},
)
CASES = [(method, size) for method in ("autoregressive", "specbranch") for size in (1, 2, 3, 5, 8, 16, 33, 64)]
CASES += [(method, size) for method in METHODS if method not in ("autoregressive", "specbranch") for size in (1, 4, 16)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a disturbed draft in a shape that the kernels support."""
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=421,
        hidden_size=384,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    for name in ("target", "draft"):
        model.save_pretrained(folder / name)
        save(byte_level(), folder / name)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.1)
    return str(folder / "target"), str(folder / "draft")


def loaded(models: tuple[str, str], method: str, size: int, **more: Any) -> LLM:
    options = {"max_batch": size, "context_length": 1024, "cache_tokens": 64 * 1024}
    return LLM(*models, method=method, device="cuda", options=options, **more)


def answer(llm: LLM, size: int) -> list[tuple[int, ...]]:
    """Answer as many prompts as the batch holds with each kind of sampling, and one alone."""
    texts = []
    for sampling in SAMPLINGS:
        texts += [
            tuple(output.token_ids) for output in llm.generate([WORDS[n % len(WORDS)] for n in range(size)], sampling)
        ]
        texts.append(tuple(llm.generate(WORDS[1], sampling).token_ids))
    return texts


@pytest.mark.parametrize("method, size", CASES)
def test_nothing_is_captured_after_the_load(method: str, size: int, models: tuple[str, str]) -> None:
    with loaded(models, method, size) as llm:
        runner = llm.target_runner
        assert isinstance(runner, GpuRunner) and isinstance(runner.graphs.step, KernelStep)
        assert llm.late_captures == 0
        answer(llm, size)
        assert llm.late_captures == 0


@pytest.mark.parametrize("method", ["speculative", "specbranch"])
def test_nothing_is_captured_by_the_ratio_rule(method: str, models: tuple[str, str]) -> None:
    options = {"max_batch": 4, "context_length": 1024}
    with LLM(*models, speculative={"method": method, "rule": "ratio"}, device="cuda", options=options) as llm:
        answer(llm, 4)
        assert llm.late_captures == 0


def test_a_lazy_warm_up_gives_the_same_text_and_counts_its_captures(models: tuple[str, str]) -> None:
    with loaded(models, "specbranch", 4) as full, loaded(models, "specbranch", 4, warm_up="lazy") as lazy:
        assert answer(full, 4) == answer(lazy, 4)
        assert lazy.late_captures > full.late_captures == 0


def test_each_kind_of_step_is_timed_and_takes_some_memory(models: tuple[str, str]) -> None:
    with loaded(models, "specbranch", 16) as llm:
        for runner in llm.core.models.runners:
            assert isinstance(runner, GpuRunner)
            times = runner.step_times()
            assert 5 < len(times) <= len(runner.graphs._warmed)
            assert all(0.0 < time.seconds < 1.0 for time in times)
            assert runner.forward_seconds(1) is not None
            assert runner.graphs.warm_up_bytes >= 0  # of this process, whatever others on the GPU free


def forget_kernels() -> None:
    """Drop all compiled kernels of this process, so that the next load compiles them."""
    from triton.runtime.jit import JITFunction

    from specbranch.models.gpu import attention_kernels, choice_kernels, product_kernels, send_kernels, tree_kernels

    for module in (attention_kernels, choice_kernels, product_kernels, send_kernels, tree_kernels):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()


@pytest.mark.parametrize("method", ["autoregressive", "specbranch"])
def test_captures_compile_nothing_as_threads_have_compiled_it(
    method: str, models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton import knobs

    from specbranch.models.gpu.step import Graphs

    with loaded(models, method, 4, warm_up="lazy") as lazy:  # its load sets Triton's hook
        texts = answer(lazy, 4)
    counted, real, capture = knobs.runtime.jit_post_compile_hook, Graphs._captured, False
    assert counted is not None
    apart, captured = list[str](), list[str]()

    def compiled(**about: Any) -> Any:
        if about["is_manual_warmup"]:
            apart.append(about["repr"])
        elif capture:
            captured.append(about["repr"])
        return counted(**about)

    def in_capture(graphs: Graphs, kind: Any) -> Any:
        nonlocal capture
        capture = True
        try:
            return real(graphs, kind)
        finally:
            capture = False

    forget_kernels()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with monkeypatch.context() as patch:
        patch.setattr(Graphs, "_captured", in_capture)
        patch.setattr(knobs.runtime, "jit_post_compile_hook", compiled)
        llm = loaded(models, method, 4)
    with llm:
        assert captured == [] and len(apart) > 10
        assert answer(llm, 4) == texts
        assert llm.late_captures == 0


def test_without_threads_captures_compile_and_give_the_same_text(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(models, "specbranch", 4) as llm:
        texts = answer(llm, 4)
    forget_kernels()
    with monkeypatch.context() as patch:
        patch.setattr("specbranch.models.gpu.step.begin_compilation", lambda: None)
        other = loaded(models, "specbranch", 4)
    with other:
        assert answer(other, 4) == texts
        assert other.late_captures == 0


def test_a_kernel_that_does_not_compile_is_reported(models: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    real = JITFunction._do_compile

    def broken(kernel: Any, *given: Any, **more: Any) -> Any:
        if kernel.fn.__name__ == "gated":
            raise RuntimeError("gated does not compile")
        return real(kernel, *given, **more)

    forget_kernels()
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", broken)
        with pytest.raises(RuntimeError, match="gated does not compile"):
            loaded(models, "autoregressive", 4)
    with loaded(models, "autoregressive", 4) as llm:
        answer(llm, 4)
        assert llm.late_captures == 0


def test_the_log_says_where_the_time_of_a_warm_up_goes(
    models: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="specbranch"), loaded(models, "autoregressive", 4):
        pass
    (said,) = [record.getMessage() for record in caplog.records if "graphs are ready" in record.getMessage()]
    assert all(f"{what} " in said for what in ("compiled", "run", "captured", "timed"))


def test_a_warm_up_without_memory_says_so_and_answers_all_the_same(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from specbranch.models.gpu.step import Graphs

    real, count = Graphs._warmed_up, 0

    def full(graphs: Graphs, kind: Any) -> Any:
        nonlocal count
        count += 1
        if count > 4:
            raise torch.OutOfMemoryError("no memory is left")
        return real(graphs, kind)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Graphs, "_warmed_up", full)
        llm = loaded(models, "autoregressive", 16)
    assert "does not hold all CUDA graphs" in caplog.text
    with llm, loaded(models, "autoregressive", 16) as other:
        assert answer(llm, 3) == answer(other, 3)
        assert llm.late_captures > 0


def test_the_second_load_captures_what_the_first_has_met(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECBRANCH_CACHE", str(tmp_path))
    with loaded(models, "autoregressive", 2) as llm:
        llm.using("lookahead").generate(WORDS[0], SAMPLINGS[0])
    assert list((tmp_path / "kinds").glob("*.json"))
    with loaded(models, "autoregressive", 2) as llm:
        answer(llm, 2)
        assert llm.late_captures == 0
