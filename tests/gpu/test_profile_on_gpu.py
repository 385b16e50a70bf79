"""A pair on a GPU is measured as its streams run it: what draft and target cost each other, and the rest of a round."""

from __future__ import annotations

import pytest

from specbranch.assembly import ModelChoice
from specbranch.lab.measure.check_profile import CHECKED, check
from specbranch.lab.measure.loaded_pair import load_pair
from specbranch.lab.measure.overlap import TrialRounds
from specbranch.lab.measure.probes import QUICK
from specbranch.lab.measure.profile_pair import measure

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("draft_device", ["cuda", "cpu"])
def test_a_pair_on_streams_makes_a_profile_that_overlaps(pair: tuple[str, str], draft_device: str) -> None:
    target, draft = ModelChoice(pair[0], device="cuda"), ModelChoice(pair[1], device=draft_device)
    loaded = load_pair(target, draft, "tiny", "streams")
    with TrialRounds(loaded.real(), loaded.text(64)) as rounds:
        rounds.both(1)
        alone, beside = rounds.draft(6), rounds.both(6)
        # A device tells its own times: those of six steps, and of a forward that others worked beside.
        assert alone.tokens == beside[1].tokens and alone.seconds > 0 and beside[0] > 0 and beside[1].seconds > 0
    profile = measure(loaded, QUICK)
    assert profile.overlap and "streams executor" in profile.note
    step, forward = profile.draft_seconds(1), profile.target_seconds(1)
    assert 0.0 <= profile.slow_down < 10 * forward and 0.0 <= profile.draft_slow_down < 10 * step
    assert 0.0 <= profile.host < 1.0
    assert [one.method for one in check(profile, loaded, QUICK)] == list(CHECKED)
