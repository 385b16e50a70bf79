"""The trainable stack against the native decoder, packed rows against separate ones, and the loss against plain
autograd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specbranch.core.runner import Feed
from specbranch.errors import BadParameter, ModelError
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.locate import locate
from specbranch.models.files.weights import Weights, read_weights
from specbranch.models.loading import load_native, open_model
from specbranch.training.distill.material import Batch
from specbranch.training.distill.model import DeepRows, Stack, compare, counted, divergence, spread_layers
from tiny_models import CONFIGS, DENSE, GREEDY, in_double, logits_of, saved, some_tokens, tiny


def opened(kind: str, folder: Path) -> tuple[Architecture, Weights]:
    arch, source = open_model(locate(str(saved(tiny(kind), folder / kind))))
    return arch, read_weights(arch, source, torch.device("cpu"), torch.float64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Architecture, Weights]:
    return opened("llama-linear-biases", tmp_path_factory.mktemp("target"))


def alone(tokens: list[int]) -> Batch:
    ids = torch.tensor([tokens])
    return Batch(
        ids, torch.arange(len(tokens))[None], torch.zeros_like(ids), torch.ones(ids.shape), torch.zeros_like(ids)
    )


def packed(lines: list[list[int]]) -> Batch:
    tokens = torch.tensor([[token for line in lines for token in line]])
    positions = torch.cat([torch.arange(len(line)) for line in lines])[None]
    segments = torch.cat([torch.full((len(line),), index) for index, line in enumerate(lines)])[None]
    return Batch(tokens, positions, segments, torch.ones(tokens.shape), torch.arange(tokens.numel())[None])


def some_rows(hidden: int, seed: int, depths: int, count: int = 11) -> DeepRows:
    numbers = torch.Generator().manual_seed(seed)
    teacher = torch.randn(count, hidden, dtype=torch.float64, generator=numbers)
    student = torch.randn(depths, count, hidden, dtype=torch.float64, generator=numbers).requires_grad_()
    weight = torch.linspace(0.0, 1, depths * count, dtype=torch.float64).view(depths, count)
    return DeepRows(teacher, student, weight, torch.ones(count, dtype=torch.bool))


@pytest.mark.parametrize("kind", [*CONFIGS, *DENSE])
def test_a_stack_of_all_layers_gives_the_logits_of_the_native_decoder(kind: str, tmp_path: Path) -> None:
    arch, weights = opened(kind, tmp_path)
    tokens = some_tokens(40)
    stack = Stack(arch, weights)
    got = stack.logits(stack(alone(tokens)))[0]
    runner = load_native(tmp_path / kind, dtype="float64", context_length=64)
    runner.open(0, GREEDY)
    rows = runner.score([Feed(0, tuple(tokens), tuple(range(-1, len(tokens) - 1)))])[0]
    expected = torch.stack([row.block[row.index] for row in rows])
    assert torch.allclose(got, expected, rtol=0, atol=1e-9)
    assert torch.allclose(got, logits_of(in_double(tiny(kind)), tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "what"), [("mixtral", "experts"), ("gemma2", "bounded logits")])
def test_layers_that_cannot_be_trained_are_refused(kind: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"has layers with {what}; expected dense layers"):
        Stack(*opened(kind, tmp_path))


def test_packed_segments_equal_separate_sequences(target: tuple[Architecture, Weights]) -> None:
    lines = [some_tokens(count, seed=count) for count in (5, 1, 17, 9)]
    stack = Stack(*target, (0, 2))
    together = stack(packed(lines))[0].split([len(line) for line in lines])
    for line, got in zip(lines, together, strict=True):
        assert torch.allclose(got, stack(alone(line))[0], rtol=0, atol=1e-12)


def test_positions_and_segments_both_matter(target: tuple[Architecture, Weights]) -> None:
    batch = packed([some_tokens(6), some_tokens(6, seed=2)])
    stack = Stack(*target)
    for wrong in (
        replace(batch, positions=torch.arange(12)[None] // 2),
        replace(batch, segments=torch.zeros_like(batch.segments)),
    ):
        assert not torch.allclose(stack(wrong), stack(batch), atol=1e-3)


def test_embedding_and_head_are_the_targets_own_memory_and_a_trained_layer_is_not(
    target: tuple[Architecture, Weights],
) -> None:
    _, weights = target
    stack = Stack(*target, (0,), trained=True)
    assert (
        stack.embedding.data_ptr() == weights.embedding.data_ptr()
        and stack.head.data_ptr() == weights.head.weight.data_ptr()
    )
    assert not {"embedding", "head"} & stack.state_dict().keys()
    trained = stack.get_parameter("blocks.0.qkv_weight")
    assert trained.requires_grad and trained.data_ptr() != weights.layers[0].qkv.weight.data_ptr()
    frozen = Stack(*target).get_parameter("blocks.0.qkv_weight")
    assert not frozen.requires_grad and frozen.data_ptr() == weights.layers[0].qkv.weight.data_ptr()


def test_a_half_precision_target_is_trained_in_float32_and_run_in_its_own(
    target: tuple[Architecture, Weights], tmp_path: Path
) -> None:
    arch, source = open_model(locate(str(saved(tiny("qwen3"), tmp_path / "m"))))
    weights = read_weights(arch, source, torch.device("cpu"), torch.bfloat16)
    student, teacher = Stack(arch, weights, (0, 2), trained=True), Stack(arch, weights)
    batch = alone(some_tokens(9))
    hidden = student(batch)
    assert hidden.dtype == torch.bfloat16
    divergence(counted(teacher(batch), [hidden], [torch.ones(1, 9)]), student.head).backward()
    for parameter in student.parameters():
        assert parameter.dtype == torch.float32 and parameter.grad is not None and parameter.grad.abs().sum() > 0


@pytest.mark.parametrize(("chunk", "depths"), [(3, 1), (4, 3), (4096, 2)])
def test_the_losss_value_and_gradient_are_those_of_autograd(chunk: int, depths: int) -> None:
    head = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rows = some_rows(8, seed=3, depths=depths)
    loss = divergence(rows, head, chunk) * 0.7
    (got,) = torch.autograd.grad(loss, rows.student)
    p, q = ((hidden @ head.T).log_softmax(-1) for hidden in (rows.teacher, rows.student))
    plain = ((p.exp() * (p - q)).sum(-1) * rows.weight).sum() * 0.7
    (expected,) = torch.autograd.grad(plain, rows.student)
    assert torch.allclose(loss, plain, rtol=1e-12)
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)


def test_the_losss_gradient_reaches_every_weight_as_autograds_does(target: tuple[Architecture, Weights]) -> None:
    student, teacher = Stack(*target, (0, 2), trained=True), Stack(*target)
    batch = packed([some_tokens(7), some_tokens(5, seed=3)])
    weight = torch.ones(1, 12, dtype=torch.float64)
    weight[0, [6, 11]] = 0
    rows = counted(teacher(batch), [student(batch)], [weight])
    assert rows.student.shape[:2] == (1, 10)
    ours = torch.autograd.grad(divergence(rows, student.head), list(student.parameters()), retain_graph=True)
    p, q = (student.logits(hidden).log_softmax(-1) for hidden in (rows.teacher, rows.student[0]))
    plain = torch.autograd.grad((p.exp() * (p - q)).sum(), list(student.parameters()))
    assert all(torch.allclose(one, other, rtol=1e-9, atol=1e-11) for one, other in zip(ours, plain, strict=True))


def test_a_stack_does_not_diverge_from_itself(target: tuple[Architecture, Weights]) -> None:
    stack = Stack(*target)
    hidden = stack(alone(some_tokens(20)))
    found = compare(counted(hidden, [hidden], [torch.ones(1, 20)]).depth(0), stack, stack.head).means()
    assert found == pytest.approx({"divergence": 0.0, "top1": 1.0, "top3": 1.0, "outside": 0.0}, abs=1e-12)


def test_a_reduced_head_is_compared_on_its_tokens_and_misses_the_rest(target: tuple[Architecture, Weights]) -> None:
    arch, weights = target
    ids = torch.tensor([3, 7, 19, 40, 77, 100])
    whole, small = Stack(*target), Stack(arch, weights, head_ids=ids)
    hidden = whole(alone(some_tokens(30)))
    p = whole.logits(hidden)[0].softmax(-1)
    found = compare(counted(hidden, [hidden], [torch.ones(1, 30)]).depth(0), small, whole.head, chunk=7).means()
    assert small.logits(hidden).shape[-1] == 6
    assert found["divergence"] == pytest.approx(0, abs=1e-12)  # the same hidden states, renormalised alike
    assert found["outside"] == pytest.approx(1 - p[:, ids].sum(-1).mean().item())
    assert found["top1"] == pytest.approx(_share(p, ids)) and found["top1"] < 1


def _share(p: Tensor, ids: Tensor) -> float:
    return torch.isin(p.argmax(-1), ids).double().mean().item()


def test_a_draft_starts_from_layers_at_equal_distances() -> None:
    assert spread_layers(2, 30) == (0, 29)
    assert spread_layers(4, 30) == (0, 10, 19, 29)
    assert spread_layers(3, 5) == (0, 2, 4)
    assert spread_layers(1, 5) == (0,)
    assert spread_layers(5, 5) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("count", [0, 6])
def test_more_layers_than_the_target_has_are_refused(count: int) -> None:
    with pytest.raises(BadParameter, match="expected 1 to 5"):
        spread_layers(count, 5)
