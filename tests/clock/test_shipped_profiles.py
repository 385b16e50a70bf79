"""Cost profiles that ship: found by name, whole, and saying what they were measured with."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.clock.shipped import load_profile, shipped_profiles
from specbranch.errors import BadParameter


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_says_what_it_was_measured_with(name: str) -> None:
    profile = load_profile(name)
    assert profile.pair and profile.hardware and profile.note
    assert profile.target_seconds(1) <= profile.target_seconds(8) <= profile.target_seconds(16)
    assert profile.draft_seconds(1) <= profile.draft_seconds(8) < profile.target_seconds(8)


def test_the_h200_profile_gives_back_what_was_measured() -> None:
    profile = load_profile("h200-1b-8b")
    assert [profile.target_seconds(rows) for rows in (1, 16, 64, 512)] == pytest.approx(
        [4.07e-3, 4.34e-3, 5.3e-3, 29.8e-3]
    )
    assert profile.target_seconds(5) == profile.target_seconds(16)  # steps are padded
    assert profile.draft_seconds(1) == pytest.approx(0.95e-3)
    # A step beside the target takes 0.713 ms longer, and the target 0.497 for each.
    assert (profile.slow_down, profile.draft_slow_down) == pytest.approx((0.497e-3, 0.713e-3))
    assert (profile.draft_setup, profile.host, profile.asking) != (0.0, 0.0, 0.0)


def test_a_profile_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    mine = CostProfile(target=((1, 2.0),), draft=((1, 1.0),), pair="mine & yours", hardware="a desk", note="guessed")
    mine.save(tmp_path / "mine.json")
    assert load_profile(tmp_path / "mine.json") == mine


def test_an_unknown_profile_offers_the_nearest() -> None:
    with pytest.raises(BadParameter, match=r"Did you mean 'h200-1b-8b'\?.*FILE\.json"):
        load_profile("h200-1b-8")
    with pytest.raises(BadParameter, match="cannot be read"):
        load_profile("gone.json")


def test_a_description_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadParameter, match="pair is 5; expected a text"):
        CostProfile(target=((1, 2.0),), draft=((1, 1.0),), pair=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_holds_for_any_pair(name: str) -> None:
    load_profile(name).check_pair("any target", "any draft")


def test_a_profile_of_another_pair_is_refused_by_whichever_model_differs() -> None:
    mine = CostProfile(target=((1, 2.0),), draft=((1, 1.0),), pair="mine", target_identity="t", draft_identity="d")
    mine.check_pair("t", "d")
    mine.check_pair("t", None)
    for target, draft, said in (
        ("x", "d", "whose target differs"),
        ("t", "x", "whose draft differs"),
        ("x", "x", "target and draft differ "),
    ):
        with pytest.raises(
            BadParameter,
            match=f"measured with mine, {'whose ' * (not said.startswith('whose'))}{said}.*--force-profile",
        ):
            mine.check_pair(target, draft)


def test_everything_a_profile_says_survives_its_file(tmp_path: Path) -> None:
    reported = CostProfile(
        target=((1, 2.0),),
        draft=((1, 1.0),),
        overlap=False,
        draft_slow_down=0.5,
        context=64,
        target_per_context=((1, 0.0), (4, 0.1)),
        target_identity="t",
        provenance={"made": "today"},
    )
    reported.save(tmp_path / "told.json")
    assert load_profile(tmp_path / "told.json") == reported
