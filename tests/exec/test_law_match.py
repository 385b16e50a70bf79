"""Under the match rule, over seeds: autoregressive decoding emits the target's joint law, and neighbours know nothing
of each other.

Every other method equals it token for token (the identity tests), so its law is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from exact import CAUGHT, PROMPT, SOUND, Drawn, Pair, Tokens, draw, independence, joint_law, requests
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core import noise
from specbranch.core.experience import Experience
from specbranch.core.methods import METHODS, MethodRounds
from specbranch.core.session import Session
from specbranch.lab.toys.toys import ToyLaw
from tiers import tiered

LENGTH = 4
TARGET = ToyLaw(vocabulary=4, seed=4, sharpness=1.3)
PAIR = Pair(TARGET, TARGET)
CONFIG = SpeculativeConfig(method="autoregressive")
SEEDS = range(4000)
# its tokens show the noise and nothing else
FLAT = Pair(ToyLaw(vocabulary=4, sharpness=0.0), ToyLaw(vocabulary=4, sharpness=0.0))


def start(session: Session) -> MethodRounds:
    return METHODS["autoregressive"].start(session, CONFIG, Experience())


def decode(pair: Pair, temperature: float, seeds: Sequence[int], samples: Sequence[int] = (0,)) -> Drawn:
    params = SamplingParams(temperature=temperature, max_tokens=LENGTH)
    return draw(pair, start, requests(params, "match", seeds, samples))


@cache
def over_seeds(temperature: float) -> Drawn:
    return decode(PAIR, temperature, SEEDS)


@pytest.fixture(scope="module")
def flat() -> list[Tokens]:
    """Outputs of three neighbouring samples under neighbouring seeds, sample after sample."""
    return decode(FLAT, 1.0, range(800), range(3)).outputs


@pytest.mark.parametrize("temperature", tiered((0.6, 1.0, 1.5), (1.0).__eq__))
def test_over_seeds_autoregressive_emits_the_joint_law(temperature: float) -> None:
    drawn = over_seeds(temperature)
    assert drawn.p_value(joint_law(TARGET, PROMPT, LENGTH, temperature)) > SOUND


@pytest.mark.slow
def test_over_samples_of_one_seed_autoregressive_emits_the_joint_law() -> None:
    drawn = decode(PAIR, 1.0, [11], range(4000))
    assert drawn.p_value(joint_law(TARGET, PROMPT, LENGTH)) > SOUND


def test_law_of_another_temperature_is_caught() -> None:
    drawn = over_seeds(1.0)
    assert drawn.p_value(joint_law(TARGET, PROMPT, LENGTH, 1.15)) < CAUGHT


@pytest.mark.slow
def test_tokens_at_neighbouring_positions_are_independent(flat: list[Tokens]) -> None:
    for position in range(LENGTH - 1):
        assert independence([o[position] for o in flat], [o[position + 1] for o in flat]) > SOUND


def test_tokens_of_neighbouring_samples_are_independent(flat: list[Tokens]) -> None:
    assert independence([o[1] for o in flat[::3]], [o[1] for o in flat[1::3]]) > SOUND
    assert independence([o[1] for o in flat[1::3]], [o[0] for o in flat[2::3]]) > SOUND


def test_tokens_of_neighbouring_seeds_are_independent(flat: list[Tokens]) -> None:
    assert min(neighbouring_seeds(flat[::3])) > SOUND


def neighbouring_seeds(outputs: list[Tokens]) -> list[float]:
    """P-values of independence between each seed and the next, at the same position and at positions one apart."""
    pairs = [(0, 0), (1, 1), (1, 0), (2, 1), (0, 1)]
    return [independence([o[a] for o in outputs[:-1]], [o[b] for o in outputs[1:]]) for a, b in pairs]


@pytest.fixture
def additive_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fault: seed and position are added before they are hashed."""
    sound = noise.keys
    noise.gumbel_row.cache_clear()
    monkeypatch.setattr(noise, "keys", lambda seed, sample, position: sound(seed + position, sample, 0))
    yield
    noise.gumbel_row.cache_clear()


@pytest.mark.slow
def test_key_made_by_adding_seed_and_position_is_caught(additive_keys: None) -> None:
    assert min(neighbouring_seeds(decode(FLAT, 1.0, range(1500)).outputs)) < CAUGHT
