"""The formulas give known values, and predict what the real methods are charged."""

from __future__ import annotations

import math

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.clock.shipped import load_profile
from specbranch.errors import BadParameter
from specbranch.lab.study import formulas
from specbranch.lab.study.toy_runs import Case, charge, compare, plain_ratio
from specbranch.lab.toys.ranked import ranked_pair
from tiers import tiered

# c, α, top-3 hit rate; speedups of serial SD at its best γ, PEARL with γ = c, the same with three branches, two-stage
# at its best length
KNOWN = [
    (10, 0.5, 0.72, 1.46, 1.33, 1.42, 1.50, 2),
    (10, 0.7, 0.86, 1.98, 1.94, 2.06, 2.10, 4),
    (10, 0.9, 0.96, 3.43, 4.20, 4.33, 4.17, 8),
]


@pytest.mark.parametrize(("c", "alpha", "hit", "serial", "pearl", "branches", "two_stage", "length"), KNOWN)
def test_the_model_gives_the_known_speedups(
    c: int, alpha: float, hit: float, serial: float, pearl: float, branches: float, two_stage: float, length: int
) -> None:
    best = formulas.best_length(lambda g: formulas.serial_latency(alpha, c, g))
    assert c / formulas.serial_latency(alpha, c, best) == pytest.approx(serial, abs=0.006)
    assert c / formulas.pearl_latency(alpha, c, c) == pytest.approx(pearl, abs=0.006)
    assert c / formulas.pearl_latency(alpha, c, c, hit) == pytest.approx(branches, abs=0.006)
    assert formulas.best_length(lambda m: formulas.two_stage_latency(alpha, c, m, hit)) == length
    assert c / formulas.two_stage_latency(alpha, c, length, hit) == pytest.approx(two_stage, abs=0.006)


def test_accepted_length_is_the_mean_of_its_law() -> None:
    for alpha, length in ((0.3, 4), (0.8, 9), (1.0, 5), (0.0, 3)):
        chances = [*((1.0 - alpha) * alpha**count for count in range(length)), alpha**length]
        assert sum(chances) == pytest.approx(1.0)
        assert sum(count * chance for count, chance in enumerate(chances)) == pytest.approx(
            formulas.accepted_length(alpha, length)
        )


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("c", [5, 10, 20])
def test_the_theorem_finds_gamma_equal_c_best_whatever_the_acceptance(alpha: float, c: int) -> None:
    at_c = formulas.theorem_latency(alpha, c, c)
    assert at_c <= min(formulas.theorem_latency(alpha, c, g) for g in range(1, 64)) * (1 + 1e-12)


def test_the_theorem_calls_a_weak_pair_slower_than_plain_decoding_where_the_mechanism_is_not() -> None:
    assert formulas.theorem_latency(0.6, 10, 10) > 10 > formulas.pearl_latency(0.6, 10, 10)
    assert formulas.theorem_latency(0.68, 10, 10) < 10
    assert formulas.theorem_latency(0.0, 10, 10) == math.inf
    assert formulas.pearl_latency(0.0, 10, 10) == 10


def test_without_rollback_the_model_is_the_ideal_latency() -> None:
    assert formulas.pearl_latency(1.0, 10, 10) == pytest.approx(1.0)


# Known agreement by the draft's choice: α, and what three heads hit together.
WEAK, MIDDLING, STRONG = (0.5, 0.14, 0.08), (0.7, 0.1, 0.06), (0.9, 0.04, 0.02)
CASES = [
    Case("speculative", WEAK, 10, 2),
    Case("speculative", MIDDLING, 5, 6),
    Case("speculative", STRONG, 20, 12),
    Case("pearl", WEAK, 5, 5),
    Case("pearl", MIDDLING, 10, 10),
    Case("pearl", STRONG, 20, 8),
    Case("pearl", MIDDLING, 5, 8, width=3),
    Case("specbranch", WEAK, 20, 3, width=3),
    Case("specbranch", MIDDLING, 5, 8, width=3),
    Case("specbranch", MIDDLING, 10, 4, width=1),
    Case("specbranch", STRONG, 10, 8, width=3),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", tiered(CASES, lambda case: case in CASES[::8]), ids=str)
def test_predicted_latency_is_within_ten_percent_of_what_the_real_method_is_charged(case: Case) -> None:
    assert abs(compare(case, tokens=1200).off) < 0.10


@pytest.mark.slow
def test_the_comparison_would_notice_a_wrong_model() -> None:
    """A control: the theorem, and the model with another α, of another method or without its correction token, are
    all refused."""
    case = Case("pearl", MIDDLING, 10, 10)
    charged = charge(case, tokens=1200)
    wrong = [
        formulas.theorem_latency(0.7, 10, 10),
        formulas.pearl_latency(0.6, 10, 10),
        formulas.pearl_latency(0.8, 10, 10),
        formulas.serial_latency(0.7, 10, 10),
        10 / formulas.accepted_length(0.7, 9),
    ]
    assert all(abs(latency / charged - 1) > 0.10 for latency in wrong)


def test_the_toys_agree_at_the_rates_they_were_given() -> None:
    target, draft = ranked_pair(MIDDLING)
    state, counts, positions = 1, [0] * 8, 4000
    for token in range(positions):
        state = draft.step(state, token % 8)
        row, said = draft.logits(state), target.logits(state)
        ranked = sorted(range(8), key=lambda t: -row[t])
        counts[ranked.index(max(range(8), key=lambda t: said[t]))] += 1
    for count, rate in zip(counts, MIDDLING, strict=False):
        assert abs(count / positions - rate) < 4 * math.sqrt(rate * (1 - rate) / positions)
    assert counts[3:7] == [0, 0, 0, 0]


@pytest.mark.parametrize("c", [5, 10, 20])
def test_the_formulas_presume_the_plain_ratios_that_ship(c: int) -> None:
    ours, shipped = plain_ratio(c), load_profile(f"c{c}")
    unit = shipped.draft_seconds(1)

    def costs(profile: CostProfile, of: float) -> list[float]:
        return [profile.target_seconds(n) / of for n in (1, 8, 16, 24)] + [
            profile.draft_seconds(w) / of for w in (1, 4, 8)
        ]

    assert costs(ours, 1.0) == pytest.approx(costs(shipped, unit))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: formulas.serial_latency(1.2, 10, 4), "α is 1.2; expected a chance from 0 to 1"),
        (lambda: formulas.accepted_length(-0.1, 4), "α is -0.1"),
        (lambda: formulas.pearl_latency(0.5, 10, 4, 1.5), "hit rate is 1.5"),
        (lambda: formulas.theorem_latency(0.5, 0, 4), "c is 0; expected a number above 0"),
        (lambda: formulas.two_stage_latency(0.5, 10, 0), "draft length is 0; expected at least 1"),
        (lambda: ranked_pair((0.9, 0.3)), "Rates of agreement"),
    ],
)
def test_impossible_numbers_are_refused_in_a_sentence(call: object, sentence: str) -> None:
    with pytest.raises(BadParameter, match=sentence):
        call()  # type: ignore[operator]
