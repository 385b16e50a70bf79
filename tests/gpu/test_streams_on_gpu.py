"""Streams on a GPU: two models at work at once in one process say what plain decoding says, and their times tell
that they were."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from broken_weights import DAMAGE, damage
from specbranch import LLM
from specbranch.config import Rule, SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Grow, Orders, Verify
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.core.trees import NO_TREE, Growth
from specbranch.errors import ModelError
from specbranch.exec.drafter import Drafter
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.models.loading import load_native
from tiny_models import some_tokens
from toybench import PROFILE, Timeless, run_out

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 384,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.1}
METHODS_TRIED = ("pearl", "specbranch", "tree", "specbranch:confidence")
LONG = 200_000_000  # cycles: about a tenth of a second


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is the target disturbed."""
    torch.manual_seed(1)
    model, folder = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)), tmp_path_factory.mktemp("pair")
    model.save_pretrained(folder / "target")
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.1)
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module", params=["cuda", "cpu"])
def executor(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Streams:
    """The draft on the same GPU, or on the host."""
    target = load_native(folders[0], context_length=600, device="cuda", dtype="bfloat16")
    return Streams(Verifier(target), Drafter(load_native(folders[1], context_length=600, device=request.param)))


def start(loop: Loop, method: str, number: int, rule: Rule = "match", **params: Any) -> Session:
    prompt = some_tokens(20 + 40 * (number % 5), seed=number)
    given = SamplingParams(**{"temperature": 0.7, "max_tokens": 60, **params})
    session = Session(number, prompt, Request(given, number, len(prompt), rule=rule), 500)
    name, _, policy = method.partition(":")
    config = SpeculativeConfig(method=name, policy=policy or None, num_speculative_tokens=4, stop_below=0.2, rule=rule)  # type: ignore[arg-type]
    loop.join(session, METHODS[name].start(session, config, Timeless(PROFILE)))
    return session


def decode(executor: Streams, method: str, number: int, rule: Rule = "match", **params: Any) -> Session:
    loop = Loop(executor)
    session = start(loop, method, number, rule, **params)
    run_out(loop)
    session.stats.check()
    return session


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.9, "top_p": 0.9, "logprobs": 2}], ids=str
)
@pytest.mark.parametrize("method", METHODS_TRIED)
def test_the_text_is_that_of_plain_decoding(method: str, params: dict[str, Any], executor: Streams) -> None:
    accepted = 0
    for number in range(4):
        plain, session = (
            decode(executor, "autoregressive", number, **params),
            decode(executor, method, number, **params),
        )
        assert session.tokens == plain.tokens
        assert session.stats.rounds_without_draft == 0
        accepted += session.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("method", METHODS_TRIED)
def test_requests_beside_each_other_say_what_each_says_alone(method: str, executor: Streams) -> None:
    loop = Loop(executor)
    sessions = [start(loop, method, number) for number in range(6)]
    run_out(loop)
    assert [session.tokens for session in sessions] == [
        decode(executor, "autoregressive", number).tokens for number in range(6)
    ]


def test_methods_mixed_and_joining_one_after_the_other_say_what_each_says_alone(executor: Streams) -> None:
    mixed = (*METHODS_TRIED, "autoregressive", "lookup", "lookahead", "speculative", "adaptive")
    loop, sessions = Loop(executor), list[Session]()
    for number in range(2 * len(mixed)):
        temperature = (0.0, 0.7, 1.2)[number % 3]
        sessions.append(start(loop, mixed[number % len(mixed)], number, temperature=temperature))
        loop.step()
    run_out(loop)
    for number, session in enumerate(sessions):
        alone = decode(executor, "autoregressive", number, temperature=(0.0, 0.7, 1.2)[number % 3])
        assert session.tokens == alone.tokens, mixed[number % len(mixed)]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_draft_that_says_no_number_changes_no_text(device: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Its weights are none: whatever it proposes of that is the target's to refuse."""
    model = AutoModelForCausalLM.from_pretrained(folders[1])
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.save_pretrained(tmp_path / "draft")
    target = load_native(folders[0], context_length=600, device="cuda", dtype="bfloat16")
    broken = Streams(Verifier(target), Drafter(load_native(tmp_path / "draft", context_length=600, device=device)))
    for method in (*METHODS_TRIED, "speculative", "adaptive"):
        for number in range(2):
            plain, session = decode(broken, "autoregressive", number), decode(broken, method, number)
            assert session.tokens == plain.tokens, method


@pytest.mark.parametrize("how", DAMAGE)
def test_a_target_that_is_not_finite_ends_its_requests_with_a_sentence(
    how: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    copytree(folders[0], tmp_path / "target")
    damage(tmp_path / "target", DAMAGE[how])
    target = load_native(tmp_path / "target", context_length=600, device="cuda", dtype="bfloat16")
    broken = Streams(Verifier(target), Drafter(load_native(folders[1], context_length=600, device="cuda")))
    rules: tuple[Rule, ...] = ("match", "ratio")
    for method, rule in product(("autoregressive", *METHODS_TRIED), rules):
        for params in ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.9, "top_p": 0.9, "logprobs": 2}):
            loop = Loop(broken)
            session = start(loop, method, 1, rule, **params)
            run_out(loop)
            assert isinstance(session.error, ModelError), (method, rule, params)
            assert "logits of the target are not finite" in str(session.error)


def test_under_ratio_requests_are_served_too(executor: Streams) -> None:
    for number, method in enumerate(("pearl", "specbranch:confidence", "specbranch")):
        session = decode(executor, method, number, "ratio", temperature=1.0)
        assert session.finished == "length" and session.stats.rounds_without_draft == 0


def ordered(base: int, tokens: tuple[int, ...], most: int) -> Orders:
    """Verify, and extend a tree by some steps beside it."""
    on = Context(base, tokens)
    growth = Growth((0.0,), Timeless(PROFILE).insight.chances(), free_time=1e9, most=most, worth=1.0, least=0.0)
    return Orders(Grow(on, NO_TREE, growth, base), Verify(on))


def test_both_models_are_at_work_at_the_same_time(executor: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is made to take long; the draft has all its steps made before the verdict is there."""
    runner: Any = executor.target.runner
    prompt = tuple(some_tokens(40))
    executor.open(0, Request(SamplingParams(), 0, len(prompt)))
    executor.run({0: ordered(0, prompt, 8)})
    real = runner.graphs.run_brought

    def slowly(*given: Any, **named: Any) -> Any:
        ran = real(*given, **named)
        torch.cuda._sleep(LONG)
        return ran

    monkeypatch.setattr(runner.graphs, "run_brought", slowly)
    executor.run({0: ordered(40, (5,), 8)})  # whatever has to be captured is now: a quick target would end that early
    started = time.perf_counter()
    report = executor.run({0: ordered(41, (6,), 8)})[0]
    ended = time.perf_counter()
    executor.free(0)
    assert report.drafting and report.verifying and report.tree
    assert sum(report.tree.steps) >= 4
    assert report.verifying.start < report.drafting.start < report.drafting.end < report.verifying.end, (
        "the spans are apart"
    )
    assert report.verifying.seconds > 0.02 and report.drafting.seconds < 0.5 * report.verifying.seconds
    assert started - 1e-3 < report.verifying.start and report.verifying.end < ended + 1e-3, (
        "the device's times are not the host's"
    )


def test_a_tree_is_extended_until_the_verdict_is_there_and_no_longer(executor: Streams) -> None:
    prompt = tuple(some_tokens(40))
    executor.open(0, Request(SamplingParams(), 0, len(prompt)))
    executor.run({0: ordered(0, prompt, 60)})
    for at in range(3):
        report = executor.run({0: ordered(40 + at, (at,), 60)})[0]
    executor.free(0)
    assert report.tree and report.drafting and report.verifying
    assert sum(report.tree.steps) < 40, "nobody asked whether the verdict was there"


def test_memory_is_flat_over_many_requests(executor: Streams) -> None:
    used = []
    for number in range(50):
        decode(executor, METHODS_TRIED[number % len(METHODS_TRIED)], number)
        used.append(torch.cuda.memory_reserved())
    assert used[-1] <= used[30]
    runner: Any = executor.target.runner
    runner.check()
    assert runner.pool.free == runner.pool.pages


def test_an_interrupt_within_a_round_leaves_both_models_usable(
    executor: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [decode(executor, "autoregressive", number).tokens for number in range(3)]
    for number, method in enumerate(("pearl", "specbranch", "tree")):
        loop = Loop(executor)
        session = start(loop, method, number)
        for _ in range(3):
            loop.step()
        for name, worker in (("propose", executor.draft), ("judge", executor.target)):
            with monkeypatch.context() as patch:
                patch.setattr(worker, name, interrupted)
                with suppress(KeyboardInterrupt):  # a round may have nothing to draft
                    loop.step()
        run_out(loop)
        assert session.tokens == expected[number]


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_draft_without_memory_leaves_the_text_to_the_target(
    executor: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    expected, loop = decode(executor, "autoregressive", 1).tokens, Loop(executor)
    session = start(loop, "pearl", 1)
    for _ in range(3):
        loop.step()
    with monkeypatch.context() as patch:
        assert executor.draft
        patch.setattr(executor.draft.runner, "propose", fails)
        loop.step()
    run_out(loop)
    assert session.tokens == expected and session.stats.rounds_without_draft > 10
    assert decode(executor, "pearl", 1).stats.rounds_without_draft == 0


def test_each_model_has_a_stream_of_its_own(folders: tuple[Path, Path]) -> None:
    made: list[Any] = [load_native(folder, context_length=300, device="cuda") for folder in folders]
    streams = {torch.cuda.default_stream().cuda_stream, *(runner.stream.cuda.cuda_stream for runner in made)}
    assert len(streams) == 3


@pytest.mark.parametrize("draft_device", ["cuda", "cpu"])
def test_it_is_had_by_its_name(draft_device: str, pair: tuple[str, str]) -> None:
    texts = []
    for executor in ("serial", "streams"):
        llm = LLM(
            *pair,
            executor=executor,
            device="cuda",
            options={"draft_device": draft_device, "context_length": 256},
            dtype="float32",
        )  # type: ignore[arg-type]
        with llm:
            texts.append(
                llm.generate("The cat sat on", SamplingParams(temperature=0.8, seed=3, max_tokens=60)).token_ids
            )
    assert texts[0] == texts[1]
