"""A draft with a window: what it computes, by the plain formula, and what it leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from decoded_together import decode_together
from packed_steps import Stepper
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.request import Request
from specbranch.core.runner import Feed
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.families.operations import FIRST_SEEN, attention_of
from specbranch.models.files.locate import locate
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native, open_model
from specbranch.models.runners.native import NativeRunner
from specbranch.models.sampling.logit_rows import collate
from tiers import each_value, tiered
from tiny_models import GREEDY, exact_softmax, in_double, saved, some_tokens, tiny
from toybench import PROFILE, Timeless, run_out

torch.set_num_threads(1)
WINDOW = 24
# a tree behind the prompt: chains, siblings, children of either
TREE = (ROOT, 0, 0, ROOT, 3, 1, 1, 2, 4, 8, 9, 10)
needs_kernel = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: saved(tiny(kind), tmp_path_factory.mktemp(kind)))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")


@torch.inference_mode()
def by_the_formula(model: PreTrainedModel, tokens: list[int], window: int) -> torch.Tensor:
    """What transformers gives under a mask: each row sees the first positions and its last `window` ones."""
    at, own = torch.arange(len(tokens)), torch.arange(len(tokens))[:, None]
    seen = (at <= own) & ((at < FIRST_SEEN) | (at > own - window))
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    with exact_softmax():
        return model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]


def path_to(tree: tuple[int, ...], node: int) -> list[int]:
    return [*(path_to(tree, tree[node]) if tree[node] != ROOT else []), node]


def opened(runner: NativeRunner, prompt: list[int], seq: int = 0) -> NativeRunner:
    runner.open(seq, GREEDY)
    runner.extend(seq, prompt)
    return runner


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("window", [1, 2, WINDOW])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_rows_of_a_tree_are_those_of_the_plain_formula(
    kind: str, window: int, folder: Callable[[str], Path]
) -> None:
    """With products of its own for each row, and with one for all rows."""
    reference = in_double(tiny(kind))
    # fewer than the first positions; less and more than a page
    for length, together in ((2, False), (70, False), (300, False), (2, True), (300, True)):
        prompt, tokens = some_tokens(length), some_tokens(len(TREE), seed=5)
        runner = load_native(folder(kind), context_length=512, dtype="float64", tail=64, draft_window=window)
        runner.decoder.together = together
        rows = opened(runner, prompt).score([Feed(0, tuple(tokens), TREE)])[0]
        for node, row in enumerate(rows):
            text = [*prompt, *(tokens[one] for one in path_to(TREE, node))]
            assert apart(row.logits, by_the_formula(reference, text, window)[-1]) < 1e-9


@pytest.mark.parametrize("window", [1, WINDOW])
def test_a_step_of_the_gpu_gives_the_rows_of_the_plain_formula(window: int, folder: Callable[[str], Path]) -> None:
    decoder = load_native(folder("llama"), context_length=512, dtype="float64", tail=64, draft_window=window).decoder
    stepper, prompt, tokens = Stepper(decoder, "cpu", torch.float64), some_tokens(270), some_tokens(len(TREE), seed=5)
    rows = stepper.score([stepper.open(prompt).grow(tokens, TREE)])
    for node, row in enumerate(rows):
        text = [*prompt, *(tokens[one] for one in path_to(TREE, node))]
        assert apart(row, by_the_formula(in_double(tiny("llama")), text, window)[-1]) < 1e-9


@needs_kernel
@each_value
@pytest.mark.parametrize("window", [1, 2, WINDOW, 150])
@pytest.mark.parametrize("length", [2, 5, 31, 70, 260, 300])
def test_the_compiled_step_gives_the_rows_of_the_plain_formula(
    length: int, window: int, folder: Callable[[str], Path], compiled: None
) -> None:
    runner = load_native(folder("llama"), context_length=512, tail=64, draft_window=window)
    assert runner.compiled
    prompt, tokens = some_tokens(length), some_tokens(len(TREE), seed=5)
    rows = opened(runner, prompt).score([Feed(0, tuple(tokens), TREE)])[0]
    reference = in_double(tiny("llama"))
    for node, row in enumerate(rows):
        text = [*prompt, *(tokens[one] for one in path_to(TREE, node))]
        assert apart(row.logits, by_the_formula(reference, text, window)[-1]) < 1e-5


@needs_kernel
def test_a_row_under_a_window_has_the_same_bits_alone_in_a_tree_and_in_a_batch(
    folder: Callable[[str], Path], compiled: None
) -> None:
    runner = load_native(folder("llama"), context_length=512, tail=64, draft_window=WINDOW)
    line, prompt = some_tokens(6, seed=2), some_tokens(270)
    for seq in range(3):
        opened(runner, prompt, seq)
    alone = []
    for token in line:
        alone.append(runner.score([Feed(0, (token,), (ROOT,))])[0][0].logits)
        runner.keep(0, (0,), 1)
    chain = runner.score([Feed(1, tuple(line), (ROOT, 0, 1, 2, 3, 4))])[0]
    tree = runner.score([Feed(2, (7, line[0], 3, line[1], line[2], 5, 6), (ROOT, ROOT, 0, 1, 3, 3, 4))])[0]
    batch = runner.score([Feed(1, (5, 6), (5, 6)), Feed(2, (line[3],), (4,))])
    assert all(torch.equal(row.logits, expected) for row, expected in zip(chain, alone, strict=True))
    for depth, row in enumerate((tree[1], tree[3], tree[4], batch[1][0])):
        assert torch.equal(row.logits, alone[depth])


@needs_kernel
def test_a_window_as_long_as_the_text_leaves_every_bit_as_it_is(folder: Callable[[str], Path], compiled: None) -> None:
    feed, prompt = Feed(0, tuple(some_tokens(len(TREE), seed=5)), TREE), some_tokens(150)
    rows = {}
    for window in (None, 170, 100):
        runner = load_native(folder("llama"), context_length=512, tail=64, draft_window=window)
        rows[window] = collate(opened(runner, prompt).score([feed])[0])
    assert torch.equal(rows[None], rows[170])
    assert not torch.allclose(rows[None], rows[100])


def test_a_window_as_long_as_the_models_own_context_is_none(folder: Callable[[str], Path]) -> None:
    arch, _ = open_model(locate(str(folder("llama"))))
    assert arch.with_draft_window(arch.context_length) is arch.with_draft_window(None) is arch
    assert arch.with_draft_window(arch.context_length).choose_context(4096, shorten=True) == arch.context_length
    assert arch.with_draft_window(64).choose_context(4096, shorten=True) == 4096
    # within 64 + 4 positions nothing is hidden
    assert arch.with_draft_window(64).is_plain(64 + FIRST_SEEN)
    assert not arch.with_draft_window(64).is_plain(64 + FIRST_SEEN + 1)


def test_layers_with_shorter_windows_of_their_own_keep_them(folder: Callable[[str], Path]) -> None:
    arch, _ = open_model(locate(str(folder("gpt-oss"))))  # 24 positions in every second layer
    seen = [(one.window, one.first) for one in map(attention_of, arch.with_draft_window(100).forms(512))]
    assert seen == [(24, 0), (100, FIRST_SEEN), (24, 0)]
    seen = [(one.window, one.first) for one in map(attention_of, arch.with_draft_window(10).forms(512))]
    assert seen == [(10, FIRST_SEEN)] * 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is the target with its weights disturbed, so that it agrees now and then."""
    path, target = tmp_path_factory.mktemp("windowed"), tiny("llama")
    saved(target, path / "target")
    torch.manual_seed(5)
    for parameter in target.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.05)
    return path / "target", saved(target, path / "draft")


def executor_of(pair: tuple[Path, Path], window: int | None, way: str = "cpu") -> Serial:
    kind = {"context_length": 128, "dtype": "float64" if way == "gpu" else "float32"}
    target, draft = load_native(pair[0], **kind), load_native(pair[1], **kind, draft_window=window)
    if way == "gpu":
        target, draft = (GpuRunner(runner.decoder, 128) for runner in (target, draft))
    return Serial(Verifier(target), Drafter(draft))


@needs_kernel
@pytest.mark.parametrize("temperature", tiered((0.0, 0.9), (0.9).__eq__))
@pytest.mark.parametrize("way", tiered(("cpu", "gpu"), "cpu".__eq__))
def test_every_method_gives_what_plain_decoding_gives_whatever_the_draft_sees(
    way: str, temperature: float, pair: tuple[Path, Path], compiled: None
) -> None:
    """Twelve in a batch, then some alone. The texts get longer than the window."""
    executor = executor_of(pair, 8, way)
    names = [name for name in METHODS if name != "autoregressive"]
    methods = (names + names)[:12]
    together = decode_together(executor, methods, temperature)
    plain = decode_together(executor, ["autoregressive"] * 12, temperature)
    assert [one.tokens for one in together] == [one.tokens for one in plain]
    assert sum(one.stats.accepted for one in together) > 0 < sum(one.stats.rejected for one in together)
    for name in ("speculative", "pearl", "specbranch"):
        assert decode_together(executor, [name], temperature)[0].tokens == plain[0].tokens


@needs_kernel
def test_the_window_changes_what_is_drafted_and_a_preempted_text_is_drafted_alike(
    pair: tuple[Path, Path], compiled: None
) -> None:
    """After a preemption the draft reads the text again, in other chunks and steps."""
    found = {}
    for window, preempted in ((None, False), (8, False), (8, True)):
        executor = executor_of(pair, window)
        session = decoded(executor, preempted)
        found[window, preempted] = session
        executor.draft.runner.check()
    plain, narrow, again = found.values()
    assert plain.tokens == narrow.tokens == again.tokens and len(plain.tokens) > 60
    assert (plain.stats.accepted, plain.stats.rejected) != (narrow.stats.accepted, narrow.stats.rejected)


def decoded(executor: Serial, preempted: bool) -> Session:
    """Decode one prompt with chains; take its KV cache away in the middle, if asked to."""
    prompt = some_tokens(40)
    request = Request(SamplingParams(max_tokens=40), seed=0, prompt_length=len(prompt), eos_ids=())
    session, loop = Session(0, prompt, request, 120), Loop(executor)
    config = SpeculativeConfig(method="speculative", num_speculative_tokens=4)
    loop.join(session, METHODS["speculative"].start(session, config, Timeless(PROFILE)))
    if preempted:
        for _ in range(5):
            loop.step()
        loop.preempt(session)
        loop.resume(session)
    run_out(loop)
    return session


@needs_kernel
def test_a_draft_with_a_window_drafts_beyond_its_own_context(
    pair: tuple[Path, Path], tmp_path: Path, compiled: None
) -> None:
    """Without one nothing is drafted there."""
    short = tiny("llama", seed=0)
    short.config.max_position_embeddings = 48
    path = saved(short, tmp_path)
    judged = {}
    for window in (None, 44):
        target = load_native(pair[0], context_length=128)
        draft = load_native(path, context_length=128, shorten=True, draft_window=window)
        assert draft.context_length == (48 if window is None else 128)
        session = decoded(Serial(Verifier(target), Drafter(draft)), preempted=False)
        judged[window] = session.stats.accepted + session.stats.rejected
    assert judged[44] > 3 * judged[None] > 0


def test_the_plain_window_of_a_family_does_not_run_by_the_compiled_step(folder: Callable[[str], Path]) -> None:
    arch, _ = open_model(locate(str(folder("mistral-window"))))
    assert not arch.is_plain_but_for_draft_window(512)
    assert not replace(arch, draft_window=8).is_plain_but_for_draft_window(512)
