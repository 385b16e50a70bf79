"""Training of a predictor: rounds are dealt out by text, the network learns on most of them, is calibrated on some and judged on the rest.

Owns the recipe. Invariant: no text has rounds in two of the three parts, so what is reported was never seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from specbranch.errors import BadParameter
from specbranch.hrad.network import Network
from specbranch.hrad.rounds import UNKNOWN, Rounds

CALIBRATED, JUDGED = 0.1, 0.15  # shares of the texts
LEAST_TEXTS = 8
SHARPEST = 20.0

Progress = Callable[[int, int, float], None]  # epochs done, of how many, loss


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How the network learns."""

    epochs: int = 20
    batch: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1:
            raise BadParameter(f"{self.epochs} epochs of batches of {self.batch} were asked for; expected at least 1 of each.")
        if not 0 < self.learning_rate < 1:
            raise BadParameter(f"learning_rate is {self.learning_rate}; expected a number between 0 and 1.")


@dataclass(frozen=True, slots=True)
class Parts:
    """Rounds dealt out by text."""

    learned: Rounds
    calibrated: Rounds
    judged: Rounds


def quiet(done: int, of: int, loss: float) -> None:
    """Show nothing."""


def dealt(rounds: Rounds, seed: int = 0) -> Parts:
    """Deal rounds out by text."""
    texts: Tensor = rounds.text.unique()  # type: ignore[no-untyped-call]
    if texts.numel() < LEAST_TEXTS:
        raise BadParameter(f"There are rounds of {texts.numel()} texts; training, calibrating and judging need {LEAST_TEXTS}. Write more.")
    order = texts[torch.randperm(texts.numel(), generator=torch.Generator().manual_seed(seed)).to(texts.device)]
    first = max(round(CALIBRATED * texts.numel()), 1)
    second = first + max(round(JUDGED * texts.numel()), 1)
    calibrated, judged = (torch.isin(rounds.text, part) for part in (order[:first], order[first:second]))
    return Parts(rounds.where(~(calibrated | judged)), rounds.where(calibrated), rounds.where(judged))


def fit(parts: Parts, settings: FitSettings, progress: Progress = quiet) -> Network:
    """Train a network and calibrate it."""
    rounds = parts.learned
    torch.manual_seed(settings.seed)
    network = Network(rounds.features.shape[1], rounds.longest).to(rounds.features.device)
    network.fit_scale(rounds.features)
    learn(network, rounds, settings, progress)
    calibrate(network, parts.calibrated)
    return network.eval()


def learn(network: Network, rounds: Rounds, settings: FitSettings, progress: Progress = quiet) -> None:
    """Go over the rounds again and again, the rate falling to nothing."""
    labels, device = rounds.labels(), rounds.features.device
    optimiser = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    steps = settings.epochs * -(-len(rounds) // settings.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, settings.learning_rate, total_steps=steps + 1, pct_start=0.1)
    generator = torch.Generator().manual_seed(settings.seed)
    network.train()
    for epoch in range(settings.epochs):
        total = torch.zeros((), device=device)
        order = torch.randperm(len(rounds), generator=generator).to(device)
        for chosen in torch.split(order, settings.batch):
            loss = loss_of(network(rounds.features[chosen]), labels[chosen])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            total += loss.detach() * chosen.numel()
        progress(epoch + 1, settings.epochs, float(total) / len(rounds))
    network.eval()


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over all lengths whose class is known; none at all is no loss."""
    if bool((labels == UNKNOWN).all()):
        return scores.sum() * 0.0
    return cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=UNKNOWN)


@torch.no_grad()
def calibrate(network: Network, rounds: Rounds) -> None:
    """Find for each length what the scores are to be multiplied by so that chances come true as often as they say."""
    network.sharpness.fill_(1.0)
    scores, labels = network(rounds.features), rounds.labels()
    tried = torch.logspace(-1, 1, 81, device=scores.device).clamp(max=SHARPEST)
    for at in range(rounds.longest):
        known = labels[:, at] != UNKNOWN
        if bool(known.any()):
            losses = torch.stack([cross_entropy(scores[known, at] * by, labels[known, at]) for by in tried])
            network.sharpness[at] = tried[int(losses.argmin())]
