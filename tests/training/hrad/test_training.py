"""Training finds what is there to be found, and its figures are of texts it never saw."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specbranch.core.forecast import Signal
from specbranch.errors import BadParameter
from specbranch.hrad.network import Network
from specbranch.training.hrad.report import across_tasks, figures, rivalry
from specbranch.training.hrad.rivals import losses, predicted
from specbranch.training.hrad.rounds import LabelledRounds, outcomes
from specbranch.training.hrad.train import FitSettings, calibrate, dealt, fit, nats

WIDTH, LONGEST, TEXTS, EACH = 24, 6, 40, 60
SETTINGS = FitSettings(epochs=8, batch=128, learning_rate=3e-3, forgets=0.0)


def planted(seed: int = 0, reported: float = 3.0, sure: float = 1.0) -> LabelledRounds:
    """Rounds whose chances depend on the first feature and on the draft's confidence."""
    generator = torch.Generator().manual_seed(seed)
    many = TEXTS * EACH
    features = torch.randn(many, WIDTH, generator=generator) * 5 + 2
    ease = (features[:, 0] - 2) / 5
    confidence = torch.rand(many, LONGEST, generator=generator)
    chance = torch.sigmoid(0.5 + reported * ease[:, None] + sure * torch.logit(confidence.clamp(0.01, 0.99)))
    right = torch.rand(many, LONGEST, generator=generator) < chance
    taken = torch.where(right.all(1), LONGEST, (~right).int().argmax(1))
    text = torch.arange(TEXTS).repeat_interleave(EACH)
    left = torch.full((many,), 50)
    return LabelledRounds(features.half(), taken, left, taken.roll(1), confidence, confidence**2, text, text % 2)


@pytest.mark.slow
def test_a_network_learns_what_is_planted_and_says_it_with_the_right_chances() -> None:
    parts = dealt(planted())
    fitted = fit(parts, SETTINGS)
    reported = figures(fitted.network, parts.judged, LONGEST)
    rivals = rivalry(fitted.network, parts)
    assert reported["accuracy"] > 1.25 * max(reported["shares"].values())
    assert reported["calibration_error"] < 0.1
    assert rivals["H-RAD"]["nats"] < rivals["last length"]["nats"] - 0.1
    assert rivals["last length"]["low"] > 0, "the interval excludes no difference"
    assert rivals["hybrid"]["nats"] < min(rivals["H-RAD"]["nats"], rivals["confidence"]["nats"]) - 0.05
    assert sum(map(sum, reported["confusion"])) == reported["rounds"] == len(parts.judged)


@pytest.mark.slow
def test_without_a_signal_a_network_is_no_better_than_no_knowledge() -> None:
    parts = dealt(planted(reported=0.0))
    rivals = rivalry(fit(parts, SETTINGS).network, parts)
    assert rivals["no knowledge"]["low"] < 0.02, "it seems to know what cannot be known"
    assert rivals["confidence"]["high"] < 0


def test_no_text_is_in_two_parts_and_none_is_lost() -> None:
    rounds = planted()
    parts = dealt(rounds, seed=3)
    texts = [set(part.text.tolist()) for part in (parts.learned, parts.calibrated, parts.judged)]
    assert sum(map(len, texts)) == len(set.union(*texts)) == TEXTS
    assert len(parts.learned) + len(parts.calibrated) + len(parts.judged) == len(rounds)


def test_few_texts_are_refused() -> None:
    rounds = planted()
    with pytest.raises(BadParameter, match="Write more"):
        dealt(rounds.where(rounds.text < 4))


@pytest.mark.slow
def test_calibration_mends_chances_that_are_too_sure() -> None:
    parts = dealt(planted())
    network = fit(parts, SETTINGS).network
    with torch.no_grad():
        network.sharpness.mul_(4.0)
        network.shift.add_(1.0)
    off = nats(network, parts.judged)
    calibrate(network, parts.calibrated)
    assert nats(network, parts.judged) < off - 0.2


def test_the_loss_is_the_logarithm_of_what_came_true() -> None:
    rounds = planted().where(torch.arange(5))
    network = Network(WIDTH, LONGEST).eval()
    steps = network.steps(rounds.features).detach()
    seen, true = outcomes(rounds)
    by_hand = [
        -sum(float((steps[r, n] if true[r, n] else 1 - steps[r, n]).log()) for n in range(LONGEST) if seen[r, n])
        for r in range(len(rounds))
    ]
    assert losses(predicted(network), rounds).tolist() == pytest.approx(by_hand, rel=1e-4)


def test_the_three_classes_agree_with_each_other_at_every_length() -> None:
    network = Network(WIDTH, LONGEST).eval()
    chances = network.chances(torch.randn(50, WIDTH))
    assert torch.allclose(chances.sum(-1), torch.ones(50, LONGEST), atol=1e-5)
    assert torch.equal(chances[..., 0], chances[:, :1, 0].expand(-1, LONGEST)), (
        "whether none is taken does not hang on the length"
    )
    assert bool((chances[:, 1:, 2] <= chances[:, :-1, 2]).all())
    assert float(chances[:, 0, 1].detach().abs().max()) < 1e-6, "of one token there is no part"


def test_a_signal_has_the_chances_of_the_network() -> None:
    network, some = Network(WIDTH, LONGEST).eval(), torch.randn(20, WIDTH)
    for steps, chances in zip(network.steps(some).tolist(), network.chances(some).tolist(), strict=True):
        assert torch.allclose(torch.tensor(Signal.of(steps).chances), torch.tensor(chances), atol=1e-6)


@pytest.mark.slow
def test_a_kind_of_text_that_was_never_seen_costs_what_it_has_of_its_own() -> None:
    rounds = planted()
    odd = rounds.task == 1
    turned = rounds.features.clone()
    turned[odd, 0] = 4 - turned[odd, 0]  # in every second text the feature says the opposite …
    turned[:, 1] = odd.half() * 10  # … and another one tells which these are
    parts = dealt(replace(rounds, features=turned))
    found = across_tasks(parts, ("even", "odd", "none of this kind"), SETTINGS, fit(parts, SETTINGS).network)
    assert set(found) == {"even", "odd"}
    assert all(one["nats_unseen"] > one["nats"] + 0.1 for one in found.values()), found


@pytest.mark.slow
def test_any_number_of_steps_can_be_made() -> None:
    rounds = planted()
    few = dealt(rounds.where(torch.arange(len(rounds)) % 10 == 0))
    assert all(fit(few, FitSettings(epochs=epochs, batch=10_000)).epoch >= 1 for epochs in (1, 2, 9))


def test_features_that_are_not_finite_are_a_sentence() -> None:
    rounds = planted()
    rounds.features[0, 0] = float("inf")
    with pytest.raises(BadParameter, match="no finite loss"):
        fit(dealt(rounds), FitSettings(epochs=1))


@pytest.mark.parametrize(
    "values",
    [{"epochs": 0}, {"batch": 0}, {"learning_rate": 2.0}, {"weight_decay": -1.0}, {"forgets": 1.0}, {"seed": 10**30}],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(BadParameter, match="expected"):
        FitSettings(**values)  # type: ignore[arg-type]
