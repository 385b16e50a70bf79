"""The shared noise: one hash for every kind of integer, independent neighbours, and a transform that is right for rare
tokens.

The transform is checked by a sum over its whole grid, not by sampling: 1e-7 is out of reach of any sample.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats as scipy_stats

from exact import CAUGHT, SOUND, independence
from specbranch.core.noise import MASK, SCALE, exponential, gumbel_row, key_bytes, keys, mix, uniform
from tiers import tiered

Key = tuple[int, int]
Keys = Callable[[int, int, int], Key]
IDS = (0, 1, 2, 3, 255, 256, 49_151, 151_935, 2**31 - 1, 2**31, MASK)
BITS = 32

# One hash


@pytest.mark.parametrize("key", [(0, 0), (1, 2), (MASK, MASK), (0x80000000, 0x7FFFFFFF), keys(7, 0, 3)])
def test_mix_is_the_same_on_python_numpy_and_torch_integers(key: Key) -> None:
    torch = pytest.importorskip("torch")
    plain = [mix(token, key) for token in IDS]
    assert all(0 <= bits <= MASK for bits in plain)
    assert mix(np.array(IDS, dtype=np.int64), key).tolist() == plain
    assert mix(np.array(IDS, dtype=np.uint32), key).tolist() == plain
    assert mix(torch.tensor(IDS, dtype=torch.int64), key).tolist() == plain


def test_mix_gives_no_two_tokens_of_a_row_the_same_bits() -> None:
    for position in range(8):
        bits = mix(np.arange(100_000, dtype=np.int64), keys(0, 0, position))
        assert np.unique(bits).size == bits.size


def test_gumbel_row_is_the_transform_of_the_hash() -> None:
    key = keys(5, 1, 9)
    assert gumbel_row(5, 1, 9, 20) == tuple(-math.log(exponential(mix(t, key))) for t in range(20))


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    assert gumbel_row(5, 1, 9, 50)[:20] == gumbel_row(5, 1, 9, 20)


def test_keys_are_one_hash_of_seed_sample_and_position() -> None:
    for seed, sample, position in ((0, 0, 0), (7, 3, 12), (-5, 1, 2**40), (2**64 + 1, 0, 9), (7, 3, 12)):
        packed = struct.pack("<Qqq", seed % 2**64, sample, position)
        expected = blake2b(packed, digest_size=8, person=b"sb-noise").digest()
        assert key_bytes(seed, sample, position) == expected
        assert keys(seed, sample, position) == struct.unpack("<II", expected)


def test_seeds_of_any_size_and_sign_have_keys_of_their_own() -> None:
    seeds = [0, 1, -1, 2**31, 2**32, 2**63, 2**64 - 2]
    assert len({keys(seed, 0, 0) for seed in seeds}) == len(seeds)


def test_hash_bits_are_uniform_over_ids() -> None:
    bits = np.concatenate([mix(np.arange(4096, dtype=np.int64), keys(seed, 0, 0)) for seed in range(64)])
    for shift in (0, 12, 24):  # low, middle and high byte
        assert scipy_stats.chisquare(np.bincount((bits >> shift) & 255, minlength=256)).pvalue > SOUND


# Independent neighbours

SEEDS = 3000
STEPS = {
    "position": (0, 0, 1, 0),
    "seed": (1, 0, 0, 0),
    "sample": (0, 1, 0, 0),
    "token": (0, 0, 0, 1),
    "seed against position": (1, 0, -1, 0),
    "seed against sample": (1, -1, 0, 0),
    "sample against position": (0, 1, -1, 0),
    "position against token": (0, 0, 1, -1),
    "seed against token": (1, 0, 0, -1),
}
RANKS = 3  # the top three bits: eight ranks


def ranks(of: Keys, step: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of the noise at many positions, and at those one step further on."""
    seed, sample, position, token = step
    ids = np.arange(1, 9, dtype=np.int64)
    here = [mix(ids, of(s, 1, 1 + s % 5)) for s in range(SEEDS)]
    there = [mix(ids + token, of(s + seed, 1 + sample, 1 + s % 5 + position)) for s in range(SEEDS)]
    return np.concatenate(here) >> (BITS - RANKS), np.concatenate(there) >> (BITS - RANKS)


def winners(of: Keys, step: tuple[int, int, int, int]) -> tuple[list[int], list[int]]:
    """Which of four equally likely tokens wins at many positions, and at those one step further on."""
    seed, sample, position, token = step
    ids = np.arange(1, 5, dtype=np.int64)
    here = [int(mix(ids, of(s, 1, 1 + s % 5)).argmin()) for s in range(SEEDS)]
    there = [int(mix(ids + token, of(s + seed, 1 + sample, 1 + s % 5 + position)).argmin()) for s in range(SEEDS)]
    return here, there


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_noise_ranks_of_neighbours_are_independent(step: str) -> None:
    assert independence(*ranks(keys, STEPS[step])) > SOUND


# a shifted row has tokens in common
@pytest.mark.parametrize("step", [name for name, step in STEPS.items() if step[3] == 0])
def test_tokens_drawn_at_neighbouring_positions_are_independent(step: str) -> None:
    assert independence(*winners(keys, STEPS[step])) > SOUND


def additive(seed: int, sample: int, position: int) -> Key:
    """Fault: seed and position are added, so the next seed repeats the noise one position earlier."""
    return keys(seed + position, sample, 0)


def test_key_made_by_adding_seed_and_position_is_caught() -> None:
    assert independence(*ranks(additive, STEPS["seed against position"])) < CAUGHT
    assert independence(*winners(additive, STEPS["seed against position"])) < CAUGHT


def test_uniforms_of_neighbouring_decisions_are_independent() -> None:
    def eighths(*what: object) -> list[int]:
        return [int(8 * uniform(seed, *what)) for seed in range(4000)]  # type: ignore[arg-type]

    decisions = [
        (0, 5, "draft"),
        (0, 5, "accept"),
        (0, 5, "accept", 1),
        (0, 5, "residual"),
        (0, 5, "own"),
        (0, 6, "own"),
        (1, 6, "own"),
    ]
    for one, other in pairwise(decisions):
        assert independence(eighths(*one), eighths(*other)) > SOUND
    here = eighths(0, 5, "accept")
    assert independence(here[1:], here[:-1]) > SOUND


# The transform, summed over its grid

RARE = (1e-4, 1e-5, 1e-6, 1e-7)
FAR = 32.0  # in units of p: beyond it a token loses with probability 1 - e^-32


def grid_exponential(bits: np.ndarray) -> np.ndarray:
    """`noise.exponential` on an array; the first test below ties the two together."""
    return -np.log1p(-(bits + 0.5) * SCALE)


def grid_survivors(x: np.ndarray) -> np.ndarray:
    """How large a part of the grid has an exponential above x: counted, not approximated."""
    below: np.ndarray = np.maximum(np.floor(-np.expm1(-x) / SCALE - 0.5) + 1.0, 0.0)
    return 1.0 - below * SCALE


def chance_of_winning(p: float, exponentials: np.ndarray, weight: float) -> tuple[float, float]:
    """P(a token of probability p wins against the rest), by its lowest exponentials in rising order, and a bound on
    what is left out."""
    wins = grid_survivors(exponentials * (1.0 - p) / p)
    return float(wins.sum() * weight), float(wins[-1])


def test_array_form_of_the_transform_is_the_transform() -> None:
    bits = [0, 1, 2, 429, 429_496, 2**31, MASK - 1, MASK]
    assert grid_exponential(np.array(bits, dtype=np.float64)) == pytest.approx(
        [exponential(b) for b in bits], rel=1e-14
    )


def test_transform_is_finite_and_positive_at_both_ends() -> None:
    assert 0.0 < exponential(0) < exponential(MASK) < math.inf


@pytest.mark.parametrize("p", tiered(RARE, min(RARE).__eq__))
def test_rare_token_has_its_probability_over_the_whole_grid(p: float) -> None:
    grid = np.arange(math.ceil(FAR * p / SCALE), dtype=np.float64)
    chance, left_out = chance_of_winning(p, grid_exponential(grid), SCALE)
    assert left_out < 1e-5 * p
    assert chance == pytest.approx(p, rel=1e-6)


def test_24_bit_uniform_cheats_a_rare_token_and_is_caught() -> None:
    step, p = 2.0**-24, 1e-7
    lowest = -np.log1p(-step * np.arange(1, 200, dtype=np.float64))  # −log u for the largest u below 1
    chance, left_out = chance_of_winning(p, lowest, step)
    assert left_out < 1e-5 * p
    assert chance / p == pytest.approx(0.73, abs=0.01)
