"""Training of a predictor: rounds are split by text; the network trains on most, is calibrated on some and evaluated on
the rest.

Owns the recipe. Invariant: no text has rounds in two of the three parts, so the evaluation uses unseen texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specbranch.errors import BadParameter
from specbranch.hrad.network import Network
from specbranch.progress import Onlooker, silent
from specbranch.training.hrad.rounds import LabelledRounds, outcomes

CALIBRATED, JUDGED = 0.1, 0.15  # shares of the texts
LEAST_TEXTS = 8
CALIBRATION_STEPS, LEASH = 300, 1e-4
WARMING = 0.1  # share of the steps


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How the network is trained."""

    epochs: int = 20
    batch: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    forgets: float = 0.2  # share of the features left out at random in every step
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1:
            raise BadParameter(
                f"{self.epochs} epochs of batches of {self.batch} were asked for; expected at least 1 of each."
            )
        if not 0 < self.learning_rate < 1:
            raise BadParameter(f"learning_rate is {self.learning_rate}; expected a number between 0 and 1.")
        if not 0 <= self.weight_decay < 100:
            raise BadParameter(f"weight_decay is {self.weight_decay}; expected a number from 0 to 100.")
        if not 0 <= self.forgets < 1:
            raise BadParameter(f"forgets is {self.forgets}; expected a share from 0, below 1.")
        if not 0 <= self.seed < 2**53:
            raise BadParameter(f"seed is {self.seed}; expected a whole number from 0 to {2**53 - 1}.")


@dataclass(frozen=True, slots=True)
class DealtRounds:
    """Rounds split by text."""

    learned: LabelledRounds
    calibrated: LabelledRounds
    judged: LabelledRounds


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained network, and its loss on the calibration texts."""

    network: Network
    epoch: int
    nats: float


def dealt(rounds: LabelledRounds, seed: int = 0) -> DealtRounds:
    """Split rounds by text."""
    texts: Tensor = rounds.text.unique()  # type: ignore[no-untyped-call]
    if texts.numel() < LEAST_TEXTS:
        raise BadParameter(
            f"Rounds of {texts.numel()} texts were found; training and evaluation need {LEAST_TEXTS}. Write more."
        )
    order = texts[torch.randperm(texts.numel(), generator=torch.Generator().manual_seed(seed)).to(texts.device)]
    first = max(round(CALIBRATED * texts.numel()), 1)
    second = first + max(round(JUDGED * texts.numel()), 1)
    calibrated, judged = (torch.isin(rounds.text, part) for part in (order[:first], order[first:second]))
    return DealtRounds(rounds.where(~(calibrated | judged)), rounds.where(calibrated), rounds.where(judged))


def fit(parts: DealtRounds, settings: FitSettings, watch: Onlooker = silent) -> Fitted:
    """Train a network, keep its best state on held-out texts, and calibrate it on those."""
    rounds = parts.learned
    torch.manual_seed(settings.seed)
    network = Network(rounds.features.shape[1], rounds.longest, settings.forgets).to(rounds.features.device)
    network.fit_scale(rounds.features)
    epoch = learn(network, parts, settings, watch)
    calibrate(network, parts.calibrated)
    return Fitted(network.eval(), epoch, nats(network, parts.calibrated))


def learn(network: Network, parts: DealtRounds, settings: FitSettings, watch: Onlooker = silent) -> int:
    """Train for all epochs with a decaying learning rate; return the best epoch."""
    rounds, device = parts.learned, parts.learned.features.device
    optimiser = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    steps = settings.epochs * -(-len(rounds) // settings.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _pace(step / steps))
    generator = torch.Generator().manual_seed(settings.seed)
    seen, true = outcomes(rounds)
    best, kept, held = math.inf, 0, dict[str, Tensor]()
    for epoch in range(1, settings.epochs + 1):
        network.train()
        order = torch.randperm(len(rounds), generator=generator).to(device)
        for chosen in torch.split(order, settings.batch):
            loss = loss_of(network(rounds.features[chosen]), seen[chosen], true[chosen])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
        unseen = nats(network.eval(), parts.calibrated)
        if unseen < best:
            best, kept, held = unseen, epoch, {name: tensor.clone() for name, tensor in network.state_dict().items()}
        watch("Training", epoch, settings.epochs, f"{unseen:.3f} nats a round")
    if not held:
        raise BadParameter(
            "Training came to no finite loss: hidden states may be too large. Lower --learning-rate, or read fewer "
            "--layers."
        )
    network.load_state_dict(held)
    return kept


def _pace(done: float) -> float:
    """Return the learning rate relative to its peak: warm-up over the first tenth of the steps, then decay to 0."""
    if done < WARMING:
        return max(done, 1e-3) / WARMING
    return 0.5 + 0.5 * math.cos(math.pi * min((done - WARMING) / (1 - WARMING), 1.0))


def loss_of(scores: Tensor, seen: Tensor, true: Tensor) -> Tensor:
    """Return nats per round: the log-loss of the accepted lengths, as far as they are known."""
    each = binary_cross_entropy_with_logits(scores, true.float(), reduction="none")
    return (each * seen).sum() / len(scores)


@torch.no_grad()
def nats(network: Network, rounds: LabelledRounds) -> float:
    """Return the same over many rounds."""
    return float(loss_of(_scores(network, rounds), *outcomes(rounds)))


@torch.no_grad()
def _scores(network: Network, rounds: LabelledRounds) -> Tensor:
    return torch.cat([network(part) for part in torch.split(rounds.features, 8192)])


def calibrate(network: Network, rounds: LabelledRounds) -> None:
    """Fit scale and shift of the scores at each position, so that probabilities match frequencies (Platt)."""
    scores = _scores(network, rounds)
    start = torch.stack((torch.ones_like(network.sharpness), torch.zeros_like(network.shift)))
    sharpness, shift = found_near(start, lambda weights: scores * weights[0] + weights[1], rounds)
    network.shift.mul_(sharpness).add_(shift)
    network.sharpness.mul_(sharpness)


def found_near(start: Tensor, scores: Callable[[Tensor], Tensor], rounds: LabelledRounds) -> Tensor:
    """Fit weights to some rounds, regularised towards their start: few rounds reach far positions."""
    seen, true = outcomes(rounds)
    weights = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([weights], lr=0.02)
    for _ in range(CALIBRATION_STEPS):
        loss = loss_of(scores(weights), seen, true) + LEASH * ((weights - start) ** 2).sum()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return weights.detach()
