"""Families whose layers are not Llama's: against transformers, and against themselves in other batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from decoded_together import decode_together
from packed_steps import Stepper, chain_with_siblings
from specbranch.core.methods import METHODS
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.sampling.logit_rows import collate
from tiers import tiered
from tiny_models import FURTHER, GREEDY, in_double, logits_of, saved, some_tokens, tiny

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


@pytest.fixture(autouse=True)
def torch_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved(tiny(kind), tmp_path_factory.mktemp(kind)) for kind in FURTHER}


def chain(seq: int, tokens: list[int], after: int = ROOT) -> Feed:
    return Feed(seq, tuple(tokens), (after, *range(after + 1, after + len(tokens))))


def scores(runner: NativeRunner, tokens: list[int], seq: int = 99) -> torch.Tensor:
    """The row after each token, fed in one go to a fresh sequence."""
    runner.open(seq, GREEDY)
    rows = runner.score([chain(seq, tokens)])[0]
    runner.close(seq)
    return collate(rows)


def assert_same(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", FURTHER)
def test_logits_of_every_family_equal_those_of_transformers(
    kind: str, dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    reference = tiny(kind) if dtype == torch.float32 else in_double(tiny(kind))
    tokens = some_tokens(300)
    runner = load_native(folders[kind], context_length=512, dtype=dtype, tail=64)
    assert not runner.decoder.plain
    runner.open(0, GREEDY)
    runner.extend(0, tokens[:270])  # two chunks
    rows = runner.score([chain(0, tokens[270:])])[0]
    assert_same(collate(rows), logits_of(reference, tokens)[270:], TOLERANCE[dtype])


@pytest.mark.parametrize("kind", FURTHER)
def test_each_node_of_a_tree_is_scored_as_its_own_path(kind: str, folders: dict[str, Path]) -> None:
    runner = load_native(folders[kind], context_length=512, dtype="float64", tail=64)
    prompt, tokens, parents = some_tokens(61), some_tokens(9, seed=5), [ROOT, 0, 0, ROOT, 3, 1, 1, 2, 4]
    runner.open(0, GREEDY)
    runner.extend(0, prompt)
    rows = runner.score([Feed(0, tuple(tokens[:6]), tuple(parents[:6]))])[0]
    rows += runner.score([Feed(0, tuple(tokens[6:]), tuple(parents[6:]))])[0]
    for node, row in enumerate(rows):
        sequence = runner.slots(0).sequence(node)
        runner.open(1, GREEDY)
        runner.extend(1, sequence[:-1])
        (alone,) = runner.score([chain(1, sequence[-1:])])[0]
        runner.close(1)
        assert_same(row.logits, alone.logits, 1e-12)


@pytest.mark.parametrize("kind", FURTHER)
def test_a_step_of_the_gpu_gives_the_logits_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    decoder = load_native(folders[kind], context_length=512, dtype="float64", tail=64).decoder
    stepper, tokens = Stepper(decoder, "cpu", torch.float64), some_tokens(290)
    seq = stepper.open(tokens[:270])
    fed, parents, chain_nodes = chain_with_siblings(tokens[270:], behind=1)
    got = stepper.score([seq.grow(fed, parents)])[chain_nodes]
    assert_same(got, logits_of(in_double(tiny(kind)), tokens)[270:], 1e-9)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    @cache
    def make(kind: str) -> tuple[Path, Path]:
        """Save a target and a draft that is the target with its weights disturbed, so that it agrees now and then."""
        folder, target = tmp_path_factory.mktemp(f"pair-{kind}"), tiny(kind)
        saved(target, folder / "target")
        torch.manual_seed(5)
        for parameter in target.parameters():
            parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.12)
        return folder / "target", saved(target, folder / "draft")

    return make


@pytest.mark.parametrize("temperature", tiered((0.0, 0.9), (0.9).__eq__))
@pytest.mark.parametrize(
    "case",
    tiered(
        [f"{kind} {way}" for kind in FURTHER for way in ("cpu", "gpu")],
        {"gpt-oss cpu", "qwen3-moe gpu"}.__contains__,
    ),
)
def test_twelve_at_once_by_all_methods_get_what_plain_decoding_gives_each(
    case: str, temperature: float, pairs: Callable[[str], tuple[Path, Path]]
) -> None:
    kind, way = case.split()
    target, draft = (load_native(path, context_length=128, dtype="float64") for path in pairs(kind))
    if way == "gpu":
        target, draft = (GpuRunner(runner.decoder, 128) for runner in (target, draft))
    executor = Serial(Verifier(target), Drafter(draft))
    names = [name for name in METHODS if name != "autoregressive"]
    methods = (names + names)[:12]
    together = decode_together(executor, methods, temperature)
    plain = decode_together(executor, ["autoregressive"] * 12, temperature)
    assert [one.tokens for one in together] == [one.tokens for one in plain]
    assert sum(one.stats.accepted for one in together) > 0 < sum(one.stats.rejected for one in together)


@pytest.mark.skipif(load_kernel() is None, reason="torch's products depend on the number of rows")
@pytest.mark.parametrize("kind", FURTHER)
def test_a_row_has_the_same_bits_whoever_shares_its_step_and_its_experts(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    runner = load_native(folders[kind], context_length=128, dtype="float32")
    for seq in range(16):
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(20 + 2 * seq, seed=seq))
    alone = [runner.score([chain(seq, [seq])])[0][0].logits.clone() for seq in range(16)]
    for seq in range(16):
        runner.keep(seq, (), 0)
    together = runner.score([chain(seq, [seq]) for seq in range(16)])
    assert all(torch.equal(rows[0].logits, one) for rows, one in zip(together, alone, strict=True))


@pytest.mark.skipif(load_kernel() is None, reason="torch's products depend on the number of rows")
@pytest.mark.parametrize("kind", FURTHER)
def test_a_row_behind_siblings_has_the_bits_of_a_single_step(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows of another sequence in the same step, across a group of positions and a page."""
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    runner = load_native(folders[kind], context_length=512, dtype="float32", tail=80)
    tokens = some_tokens(262)
    for seq in (0, 1, 2):
        runner.open(seq, GREEDY)
        runner.extend(seq, tokens[:240] if seq < 2 else some_tokens(70, seed=3))
    single = []
    for at, token in enumerate(tokens[240:]):
        single.append(runner.score([Feed(0, (token,), (ROOT if at == 0 else at - 1,))])[0][0].logits.clone())
    fed, parents, nodes = chain_with_siblings(tokens[240:], behind=2)
    rows = runner.score([chain(2, some_tokens(9)), Feed(1, tuple(fed), tuple(parents))])[1]
    assert all(torch.equal(rows[node].logits, one) for node, one in zip(nodes, single, strict=True))
