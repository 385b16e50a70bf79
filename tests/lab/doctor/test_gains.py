"""The doctor recommends what its prediction says, and that follows the costs."""

from __future__ import annotations

import pytest

from specbranch.assembly import ModelChoice
from specbranch.clock.profile import CostProfile
from specbranch.lab.doctor.gains import Prediction, answers, predict, recommendation
from specbranch.lab.measure.loaded_pair import load_pair


def test_the_quickest_method_is_recommended_with_its_setting() -> None:
    made = [Prediction("autoregressive", {}, 1.0, 1.0), Prediction("adaptive", {"num_speculative_tokens": 3}, 1.6, 2.0)]
    best, finding = recommendation(made)
    assert best.method == "adaptive" and finding.level == "ok"
    assert finding.advice == "Use --method adaptive --num-speculative-tokens 3."


def test_plain_decoding_is_recommended_where_nothing_gains() -> None:
    made = [
        Prediction("autoregressive", {}, 1.0, 1.0),
        Prediction("pearl", {"num_speculative_tokens": 3}, 1.01, 2.0),
    ]
    best, finding = recommendation(made)
    assert best.method == "autoregressive" and finding.level == "note" and "--method autoregressive" in finding.advice


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "gains"), [(0.001, True), (10.0, False)])
def test_the_prediction_follows_the_costs(pair: tuple[str, str], draft: float, gains: bool) -> None:
    loaded = load_pair(ModelChoice(pair[0], device="cpu"), ModelChoice(pair[1], device="cpu"), "tiny")
    profile = CostProfile(target=((1, 1.0), (16, 1.0)), draft=((1, draft),), overlap=False)
    found = {one.method: one.speedup for one in predict(loaded, answers(loaded), profile)}
    assert (found["speculative"] > 1) is gains
