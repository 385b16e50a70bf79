"""Training material: its file, its split and the batches it is dealt in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specbranch.errors import BadParameter, ModelError
from specbranch.training.distill import material as module
from specbranch.training.distill.material import PADDING, Batch, Material


def made(count: int = 40, longest: int = 17, seed: int = 0) -> Material:
    """Conversations whose tokens are all different, so that a misplaced one shows."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest + 1, (count,), generator=random)
    answers = 1 + torch.remainder(torch.randint(0, 1000, (count,), generator=random), lengths - 1)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return Material(torch.arange(int(starts[-1]), dtype=torch.int32) + 7, starts, answers, {"seed": seed})


def sequences(material: Material) -> list[tuple[int, ...]]:
    return [tuple(material.sequence(index)) for index in range(len(material))]


def dealt(batch: Batch) -> list[tuple[tuple[int, ...], ...]]:
    """The (tokens, positions, weights) of each segment of a batch, row by row."""
    found = []
    for row in range(batch.tokens.shape[0]):
        for segment in range(int(batch.segments[row].max()) + 1):
            at = batch.segments[row] == segment
            found.append(tuple(tuple(part[row][at].tolist()) for part in (batch.tokens, batch.positions, batch.weight)))
    return found


def same(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "positions", "segments", "weight")
    )


def test_an_epoch_deals_every_conversation_once_and_whole() -> None:
    material = made()
    found = [part for batch in material.batches(32, 3, seed=1, epoch=0) for part in dealt(batch)]
    assert sorted(tokens for tokens, _, _ in found) == sequences(material)
    assert all(positions == tuple(range(len(tokens))) for tokens, positions, _ in found)


def test_weight_is_where_the_next_token_is_of_the_answer() -> None:
    material = made()
    answers = {tokens[0]: int(answer) for tokens, answer in zip(sequences(material), material.answers, strict=True)}
    for batch in material.batches(32, 3, seed=1, epoch=0, question_weight=0.25):
        for tokens, _, weight in dealt(batch):
            answer = answers[tokens[0]]
            assert weight == (*(0.25 if at + 1 < answer else 1.0 for at in range(len(tokens) - 1)), 0.0)


def test_all_answer_tokens_are_weighed_once() -> None:
    material = made()
    assert (
        sum(float(batch.weight.sum()) for batch in material.batches(20, 4, seed=0, epoch=3)) == material.answer_tokens
    )


def test_padding_is_marked_and_weighs_nothing() -> None:
    batches = list(made().batches(32, 3, seed=1, epoch=0))
    assert all(batch.tokens.shape == (3, 32) for batch in batches)
    empty = torch.cat([batch.segments for batch in batches]) == PADDING
    assert empty.any() and not torch.cat([batch.weight for batch in batches])[empty].any()
    assert int((~empty).sum()) == made().tokens.numel()


def test_a_batch_is_the_same_whether_or_not_those_before_it_were_dealt() -> None:
    material = made()
    whole = list(material.batches(32, 3, seed=5, epoch=2))
    assert len(whole) > 3
    rest = list(made().batches(32, 3, seed=5, epoch=2, first=2))
    assert len(rest) == len(whole) - 2
    assert all(map(same, rest, whole[2:]))


@pytest.mark.parametrize(("seed", "epoch"), [(5, 3), (6, 2)])
def test_another_epoch_or_seed_deals_otherwise(seed: int, epoch: int) -> None:
    first, other = (next(iter(made().batches(32, 3, *key))) for key in ((5, 2), (seed, epoch)))
    assert not same(first, other)


def test_a_conversation_longer_than_a_row_loses_its_end() -> None:
    material = made()
    found = sorted(tokens for batch in material.batches(8, 3, seed=1, epoch=0) for tokens, _, _ in dealt(batch))
    assert found == [tokens[:8] for tokens in sequences(material)]
    cut = [weight for batch in material.batches(8, 3, seed=1, epoch=0) for _, _, weight in dealt(batch)]
    assert all(weight[-1] == 0.0 for weight in cut)


def test_packing_wastes_little() -> None:
    material = made(400)
    positions = len(list(material.batches(170, 1, seed=0, epoch=0))) * 170
    assert material.tokens.numel() / positions > 0.93


def test_a_split_shares_no_conversation_and_loses_none() -> None:
    material = made()
    train, held = material.split(0.2, seed=3)
    assert len(held) == 8
    assert sorted(sequences(train) + sequences(held)) == sequences(material)
    again = material.split(0.2, seed=3)[1]
    assert sequences(again) == sequences(held) != sequences(material.split(0.2, seed=4)[1])


def test_a_split_leaves_something_on_both_sides() -> None:
    assert [len(part) for part in made(2).split(0.01)] == [1, 1]
    assert [len(part) for part in made(2).split(0.99)] == [1, 1]
    with pytest.raises(BadParameter, match="needs two or more"):
        made(1).split(0.5)


def test_joined_parts_keep_their_conversations_and_answers() -> None:
    parts = [made(3, seed=1), made(5, seed=2)]
    whole = Material.join(parts)
    assert sequences(whole) == [*sequences(parts[0]), *sequences(parts[1])]
    assert whole.answers.tolist() == [*parts[0].answers.tolist(), *parts[1].answers.tolist()]
    assert whole.about["parts"] == [{"seed": 1}, {"seed": 2}]


def test_frequencies_count_answers_only() -> None:
    material = Material(
        torch.tensor([1, 2, 3, 3, 1, 4], dtype=torch.int32), torch.tensor([0, 4, 6]), torch.tensor([2, 1])
    )
    assert material.frequencies(6).tolist() == [0, 0, 0, 2, 1, 0]
    assert material.answer_tokens == 3


def test_a_saved_material_comes_back_with_its_story(tmp_path: Path) -> None:
    material = replace(made(), about={"seed": 3, "settings": {"rows": 8}})
    material.save(tmp_path / "new" / "material.safetensors")
    found = Material.load(tmp_path / "new" / "material.safetensors")
    assert sequences(found) == sequences(material) and found.answers.tolist() == material.answers.tolist()
    assert found.about == material.about
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["material.safetensors"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "material.safetensors"
    made(3).save(path)

    def full(tensors: object, part: Path, metadata: object) -> None:
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(ModelError, match="No space left on device"):
        made(4).save(path)
    assert len(Material.load(path)) == 3
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "material.safetensors"
    made().save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelError, match=r"material\.safetensors is damaged"):
        Material.load(path)
    with pytest.raises(ModelError, match="no material at"):
        Material.load(tmp_path / "absent")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"tokens": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="its format is None"):
        Material.load(tmp_path / "other.safetensors")


def test_starts_that_do_not_cover_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="do not cover"):
        Material(torch.zeros(5, dtype=torch.int32), torch.tensor([0, 4]), torch.tensor([1]))
    with pytest.raises(ValueError, match="outside its conversation"):
        Material(torch.zeros(5, dtype=torch.int32), torch.tensor([0, 5]), torch.tensor([6]))
