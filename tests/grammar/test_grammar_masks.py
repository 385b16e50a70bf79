"""Masks as arrays: packed bits over a vocabulary, over the columns of a reduced head, and beside sets of tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from specbranch.config import SamplingParams
from specbranch.core.grammar import Allowed, Mask
from specbranch.core.request import Request, Spot
from specbranch.core.runner import Ask
from specbranch.models.files.head_columns import Columns, finder
from specbranch.models.sampling import sample
from specbranch.models.sampling.logit_rows import rows_of
from specbranch.models.sampling.sampler import TorchSampler
from specbranch.models.sampling.sheet import sheet_of

VOCABULARY = 37


def spots(allowed: list[Allowed | None], **given: float) -> list[Spot]:
    request = Request(SamplingParams(**given), 1, 2)  # type: ignore[arg-type]
    return [Spot(request, 5 + n, list, 0, one) for n, one in enumerate(allowed)]


def some_sets(count: int) -> list[frozenset[int]]:
    rng = random.Random(3)
    return [frozenset(rng.sample(range(VOCABULARY), rng.randint(1, VOCABULARY))) for _ in range(count)]


def test_a_mask_is_the_set_of_its_tokens_whatever_its_length() -> None:
    """A mask may be shorter than the vocabulary, which models pad, or longer."""
    for one in some_sets(20):
        for extra in (0, 5):
            mask = Mask(Mask.of(one).bits + bytes(extra))
            arrays = sheet_of(spots([mask, None]), VOCABULARY, finder(None, VOCABULARY))
            shaped = sample.edited(
                torch.zeros(2, VOCABULARY), {name: torch.from_numpy(a) for name, a in arrays.items()}
            )
            assert set(np.flatnonzero(np.isfinite(shaped[0].numpy())).tolist()) == one
            assert bool(torch.isfinite(shaped[1]).all())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("reduced", [False, True])
def test_masks_and_sets_give_the_same_tokens_and_proposals(reduced: bool, temperature: float) -> None:
    columns = Columns(torch.tensor(sorted(random.Random(5).sample(range(VOCABULARY), 20))), VOCABULARY)
    torch.manual_seed(2)
    rows = rows_of(torch.randn(12, 20 if reduced else VOCABULARY), columns if reduced else None)
    sets: list[Allowed | None] = [*some_sets(11), None]
    masks: list[Allowed | None] = [None if one is None else Mask.of(list(one)) for one in sets]
    sampler = TorchSampler(VOCABULARY)
    for given in ({"temperature": temperature}, {"temperature": temperature, "top_k": 3, "repetition_penalty": 1.2}):
        one, other = (spots(some, **given) for some in (sets, masks))
        assert sampler.pick(rows, one) == sampler.pick(rows, other)
        asks = [[Ask(0, n, 3, allowed=spot.allowed) for n, spot in enumerate(some)] for some in (one, other)]
        assert sampler.propose(rows, one, asks[0]) == sampler.propose(rows, other, asks[1])


def test_a_head_without_any_allowed_token_proposes_nothing() -> None:
    columns = Columns(torch.tensor([3, 4, 9]), VOCABULARY)
    rows = rows_of(torch.randn(1, 3), columns)
    (spot,) = spots([Mask.of([5, 6])])
    (found,) = TorchSampler(VOCABULARY).propose(rows, [spot], [Ask(0, 0, 2, allowed=spot.allowed)])
    assert found.tokens == () and found.confidence == 0.0 and found.said == ()


def test_scores_that_are_no_number_are_told_also_under_a_mask() -> None:
    block = torch.randn(1, VOCABULARY)
    block[0, 7] = torch.nan
    for allowed, fine in ((Mask.of([7, 8]), False), (Mask.of([8, 9]), True)):
        (spot,) = spots([allowed])
        (found,) = TorchSampler(VOCABULARY).propose(rows_of(block), [spot], [Ask(0, 0, allowed=allowed)])
        assert (found.confidence == found.confidence) is fine  # NaN is not equal to itself


def test_packed_bits_forbid_the_same_columns_on_every_device() -> None:
    """A GPU unpacks them in torch, a CPU in numpy."""
    for width in (1, 7, 8, 29, VOCABULARY):
        sets: list[Allowed | None] = [Mask.of([at for at in one if at < width]) for one in some_sets(9)]
        packed = sheet_of(spots(sets), width, finder(None, width))["allowed"]
        forbidden = sample.forbidden(torch.from_numpy(packed), width)
        assert forbidden.tolist() == [[token not in (one or ()) for token in range(width)] for one in sets]
