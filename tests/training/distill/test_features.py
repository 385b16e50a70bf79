"""The feature draft in training against a loop over single rows, and what it starts from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle_rows import Eagle, drafted
from specbranch.errors import BadParameter, ModelError
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.locate import locate
from specbranch.models.files.weights import Weights, read_weights
from specbranch.models.loading import open_model
from specbranch.training.distill.courses import FeatureCourse
from specbranch.training.distill.draft_saving import feature_tensors
from specbranch.training.distill.features import FeatureStack, check_feature_target, check_taps, default_taps
from specbranch.training.distill.material import PADDING, Batch, Material
from specbranch.training.distill.model import Stack
from specbranch.training.distill.teacher import Teacher, moved
from specbranch.training.distill.train_settings import TrainSettings
from tiny_models import saved, some_tokens, tiny

TAPS, DEPTHS = (0, 1, 2), 4
Target = tuple[Architecture, Weights]
pytestmark = pytest.mark.usefixtures("one_thread")


def opened(kind: str, folder: Path) -> Target:
    arch, source = open_model(locate(str(saved(tiny(kind), folder / kind))))
    return arch, read_weights(arch, source, torch.device("cpu"), torch.float64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return opened("qwen2", tmp_path_factory.mktemp("target"))


def texts(lengths: tuple[int, ...]) -> Material:
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)))
    tokens = torch.tensor(some_tokens(sum(lengths)), dtype=torch.int32)
    return Material(tokens, starts, torch.full((len(lengths),), 1))


def course(target: Target, layers: tuple[int, ...] = (2,), depths: int = DEPTHS) -> FeatureCourse:
    """A draft that no symmetry hides anything of: all its weights are moved."""
    settings = TrainSettings(layers=layers, taps=TAPS, depths=depths, steps=1, length=32)
    made = FeatureCourse(*target, settings, torch.arange(0, 131, 3))
    torch.manual_seed(4)
    for parameter in made.student.parameters():
        parameter.data = parameter.data.double() + 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return made


def reference(target: Target, student: FeatureStack) -> Eagle:
    return Eagle(target[0], feature_tensors(target[0], student.weights()), student.embedding, student.head)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layers"), [("llama-linear-biases", (2,)), ("qwen2", (1, 2)), ("qwen3", (2,)), ("llama-llama3", (2,))]
)
def test_every_depth_gives_what_single_rows_give_that_read_their_own_states(
    kind: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    target, lengths = opened(kind, tmp_path), (9, 14, 2, 1)
    compare_with_rows(target, course(target, layers), lengths)


def test_packed_unrolled_rows_are_those_of_a_loop_over_single_ones(target: Target) -> None:
    compare_with_rows(target, course(target), (6, 9))


def compare_with_rows(target: Target, made: FeatureCourse, lengths: tuple[int, ...]) -> None:
    """Compare each conversation's weighted rows at each depth; `follows` and weights say which there are."""
    material, teacher = texts(lengths), Teacher(Stack(*target), TAPS)
    batch = next(material.batches(32, 2, seed=0, epoch=0, question_weight=1.0))
    here = moved(batch, teacher.stack)
    heard = teacher.listen(here)
    rows = made.rows(batch, here, heard, fade=0.5)
    at = (batch.weight.flatten() * (batch.positions.flatten() > 0)).nonzero().view(-1)
    assert torch.allclose(rows.teacher, heard.flatten(0, 1)[at][:, : target[0].hidden])
    draft, seen = reference(target, made.student), 0
    for row, place in enumerate(at.tolist()):
        position = int(batch.positions.flatten()[place])
        start = place - position
        tokens = batch.tokens.flatten()[start : place + 1].tolist()
        states = heard.flatten(0, 1)[start : place + 1, target[0].hidden :]
        for depth in range(DEPTHS):
            told = rows.weight[depth, row].item()
            assert told == (0.5**depth * batch.weight.flatten()[place].item() if position > depth else 0.0)
            if told:
                expected = drafted(draft, tokens, states, position - depth, DEPTHS)[depth]
                got = made.student.logits(rows.student[depth, row])
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
                seen += 1
    assert seen > 3 * DEPTHS


def test_the_gradient_is_that_of_plain_autograd_over_rows(target: Target) -> None:
    """The attention over text and own rows has a gradient written by hand."""
    made, lengths = course(target, depths=3), (7,)
    material, teacher = texts(lengths), Teacher(Stack(*target), TAPS)
    batch = next(material.batches(8, 1, seed=0, epoch=0, question_weight=1.0))
    here = moved(batch, teacher.stack)
    heard = teacher.listen(here)
    rows = made.rows(batch, here, heard, fade=1.0)
    ours = torch.autograd.grad(made.student.logits(rows.student[2, 3:]).square().sum(), [made.student.fc])[0]
    fc = made.student.fc.detach().clone().requires_grad_()
    tensors = {**feature_tensors(target[0], made.student.weights()), "fc.weight": fc}
    draft = Eagle(target[0], tensors, made.student.embedding, made.student.head)
    total, tokens, states = torch.zeros((), dtype=torch.float64), batch.tokens[0, :7].tolist(), heard[0, :, 48:]
    for position in range(4, 6):  # the rows from the fourth on stand at positions 4 and 5, 6 is the last token
        total = total + drafted(draft, tokens[: position + 1], states, position - 2, 3)[2].square().sum()
    torch.testing.assert_close(ours, torch.autograd.grad(total, [fc])[0], rtol=1e-7, atol=1e-9)


def test_it_starts_as_the_targets_last_layer_one_token_behind(target: Target) -> None:
    arch, weights = target
    settings = TrainSettings(layers=(2,), taps=TAPS, steps=1, length=12)
    made, teacher = FeatureCourse(arch, weights, settings, None), Teacher(Stack(*target), TAPS)
    batch = next(texts((12,)).batches(12, 1, seed=0, epoch=0, question_weight=1.0))
    here = moved(batch, teacher.stack)
    heard = teacher.listen(here)
    rows = made.rows(batch, here, heard, 1.0)
    # The row of token p repeats what the target computed for token p - 1. Rotary angles are rounded to float32.
    torch.testing.assert_close(rows.student[0], heard[0, :10, : arch.hidden], rtol=0, atol=1e-6)
    assert made.student.head.data_ptr() == weights.head.weight.data_ptr()
    assert made.student.embedding.data_ptr() == weights.embedding.data_ptr()


def test_a_conversation_sees_neither_its_neighbours_nor_its_future(target: Target) -> None:
    made, teacher = course(target), Teacher(Stack(*target), TAPS)
    batch = next(texts((8, 9)).batches(32, 1, seed=0, epoch=0, question_weight=1.0))

    def found(batch: Batch) -> Tensor:
        here = moved(batch, teacher.stack)
        return made.rows(batch, here, teacher.listen(here), 1.0).student

    one, last = found(batch), int((batch.segments[0] == 0).sum())
    changed = batch.tokens.clone()
    changed[0, last - 1 :] = 5  # the last token of the first conversation, and the second one
    changed[batch.segments == PADDING] = 7
    other = found(replace(batch, tokens=changed))
    kept = last - 2  # rows from position 1 on to the last but one, which no depth passes
    assert torch.equal(one[0, :kept], other[0, :kept]) and not torch.allclose(one[:, kept:], other[:, kept:])


def test_taps_are_early_in_the_middle_and_before_the_layers_it_starts_from() -> None:
    assert default_taps(28, 1) == (2, 14, 27) and default_taps(28, 2) == (2, 14, 26)
    assert [default_taps(held, 1) for held in (2, 3, 4, 5, 6)] == [
        (0, 1, 2),
        (0, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
        (2, 3, 5),
    ]
    for wrong in ((1, 2), (1, 1, 2), (3, 2, 1), (0, 1, 29), (-1, 2, 3)):
        with pytest.raises(BadParameter, match="expected 3 ascending numbers from 0"):
            check_taps(wrong, 28)
    for held in range(2, 40):
        check_taps(default_taps(held, 1), held)


@pytest.mark.parametrize("kind", ["gemma3", "mistral-window", "smollm3"])
def test_layers_that_are_not_llamas_are_refused(kind: str, tmp_path: Path) -> None:
    arch, _ = open_model(locate(str(saved(tiny(kind), tmp_path))))
    with pytest.raises(ModelError, match="feature drafts have Llama's layers"):
        check_feature_target(arch, (1,), 64)


def test_more_than_two_layers_are_refused(target: Target) -> None:
    with pytest.raises(BadParameter, match="expected 1 to 2"):
        check_feature_target(target[0], (0, 1, 2), 64)
