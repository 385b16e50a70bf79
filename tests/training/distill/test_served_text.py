"""Served texts become material: by a hash of their prompts some are never trained on; the rest is mixed with original
material."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from specbranch.errors import BadParameter
from specbranch.kept_text import KeptHead, KeptText, kept_name
from specbranch.training.distill.kinds import tokens_per_forward
from specbranch.training.distill.material import Material
from specbranch.training.distill.served_text import MOST_REPEATS, mixed, served_text, steps_of

OURS, THEIRS = "a" * 64, "b" * 64


def kept(folder: Path, texts: list[KeptText], vocabulary: str = OURS, number: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [KeptHead("tiny", vocabulary, 1000).line(), *(text.line() for text in texts)]
    (folder / kept_name(number)).write_bytes(b"".join(lines))
    return folder


def some_texts(count: int, start: int = 0) -> list[KeptText]:
    return [
        KeptText((at % 900, at // 900, 7), tuple(range(at % 50, at % 50 + 20))) for at in range(start, start + count)
    ]


def sequences(material: Material) -> set[tuple[int, ...]]:
    return {tuple(material.sequence(index)) for index in range(len(material))}


def test_held_out_texts_are_a_share_by_prompt_and_stay_held_out(tmp_path: Path) -> None:
    first = served_text(kept(tmp_path / "kept", some_texts(400)), OURS, 512)
    assert 30 <= len(first.held_out) <= 90 and len(first.training) + len(first.held_out) == 400
    assert not sequences(first.training) & sequences(first.held_out)
    kept(tmp_path / "kept", some_texts(400, 400), number=2)
    later = served_text(tmp_path / "kept", OURS, 512)
    assert sequences(first.held_out) <= sequences(later.held_out)
    assert sequences(first.training) <= sequences(later.training)


def test_samples_and_later_turns_are_on_the_side_of_their_first_prompt(tmp_path: Path) -> None:
    texts = []
    for text in some_texts(60):
        other = KeptText(text.prompt, tuple(reversed(text.answer)))  # another sample
        later = KeptText((*text.prompt, *text.answer, 5, 6), (1, 2, 3, 4, 5))
        last = KeptText((*later.prompt, *later.answer, 8), (9, 9, 9))
        texts += [last, text, later, other]
    found = served_text(kept(tmp_path / "kept", texts), OURS, 512)
    assert len(found.held_out) % 4 == 0 and 0 < len(found.held_out) < 120
    prompts = [{one[:3] for one in sequences(side)} for side in (found.training, found.held_out)]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 60


def test_texts_of_another_tokenizer_and_repeated_ones_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = kept(tmp_path / "kept", some_texts(30) * 3)
    kept(folder, some_texts(10, 100), THEIRS, number=2)
    found = served_text(folder, OURS, 512)
    assert len(found.training) + len(found.held_out) == 30 and "10 texts" in caplog.text


def test_too_little_is_a_sentence(tmp_path: Path) -> None:
    for texts in ([], some_texts(1)):
        with pytest.raises(BadParameter, match="expected two prompts or more"):
            served_text(kept(tmp_path / "kept", texts), OURS, 512)
    with pytest.raises(BadParameter, match="There is no folder"):
        served_text(tmp_path / "none", OURS, 512)
    found = served_text(kept(tmp_path / "kept", some_texts(2)), OURS, 512)
    assert len(found.training) == len(found.held_out) == 1


def test_a_long_text_is_cut_to_a_row_half_of_which_its_answer_may_take(tmp_path: Path) -> None:
    long = KeptText(tuple(range(300)), tuple(range(300, 340)))
    found = served_text(kept(tmp_path / "kept", [long, *some_texts(9)]), OURS, 64)
    both = sequences(found.training) | sequences(found.held_out)
    assert tuple(range(268, 332)) in both


@pytest.mark.parametrize(("served", "original"), [(10, 400), (400, 400), (5000, 40), (2000, 400)])
def test_half_of_what_is_trained_on_is_original_material(served: int, original: int) -> None:
    made = [_material(count, first) for count, first in ((served, 0), (original, 500))]
    mix = mixed(*made, most=20_000, seed=1)
    from_served = sum(mix.sequence(index)[0] < 500 for index in range(len(mix)))
    assert 0.4 <= from_served / len(mix) <= 0.6
    newest = [index for index in range(len(mix)) if mix.sequence(index)[0] == (served - 1) % 400]
    assert steps_of(mix, 10, 2, 50) == math.ceil(10 / mix.about["repeats"] * 5 * len(mix) / 100)
    assert newest and len(mix) <= 2 * 2 * MOST_REPEATS * max(original, 400)


def _material(count: int, first: int) -> Material:
    tokens = torch.tensor([[first + at % 400, 1, 2, 3, 4] for at in range(count)], dtype=torch.int32).flatten()
    return Material(tokens, torch.arange(0, 5 * count + 1, 5), torch.full((count,), 2))


def test_tokens_a_forward_are_those_of_a_chain_of_five() -> None:
    assert tokens_per_forward([[0] * 12]) == 6.0  # five drafted tokens and the target's own
    assert tokens_per_forward([[1] * 12]) == tokens_per_forward([[None] * 12]) == 1.0
    assert tokens_per_forward([[0, 0, 1, 0, 2, None]]) == 6 / 3  # three, two, one
    assert tokens_per_forward([[0, 1], [0, 1]]) == 2.0  # answers do not run into each other
