"""Baselines for a predictor: other ways to predict the accepted length of a draft, each as a distribution of that
length.

Owns the baselines and their comparison. Each gives the probability that the draft's next token is accepted, position by
position. The measure is the log-loss in nats per round. They differ in their inputs. The last round's length and H-RAD
predict before anything is drafted. Confidence and entropy use the draft's own scores; the hybrid uses both. Frequencies
are counted on training rounds and evaluated on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbranch.core.trees import EDGES  # the planner's classes of what a draft says
from specbranch.hrad.network import Network
from specbranch.training.hrad.rounds import UNKNOWN_LABEL, LabelledRounds, outcomes
from specbranch.training.hrad.train import found_near

LEAST_CHANCE, MOST_CHANCE = 1e-4, 1 - 1e-4  # no law is sure
TRUST = 2.0  # observations that the overall share counts as, in each class

# The chance of each token of a draft once all before it are taken [rounds, longest].
LengthLaw = Callable[[LabelledRounds], Tensor]


@dataclass(frozen=True, slots=True)
class RivalLoss:
    """The log-loss of one baseline, and its difference to the predictor's."""

    nats: float
    low: float  # of the difference to H-RAD's, a paired bootstrap over texts: 95 % lie between; above 0 H-RAD is better
    high: float


def laws(network: Network, learned: LabelledRounds, unseen: LabelledRounds) -> dict[str, LengthLaw]:
    """Return every baseline, fitted to some rounds; the hybrid is fitted to others, which the network did not see."""
    h_rad = predicted(network)
    confidence = _by_class(lambda rounds: _class_of(rounds.confidence), len(EDGES) + 1, learned, by_position=False)
    entropy = _by_class(lambda rounds: _class_of(rounds.entropy), len(EDGES) + 1, learned, by_position=False)
    return {
        "no knowledge": _by_class(
            lambda rounds: torch.zeros_like(rounds.taken)[:, None].expand(-1, rounds.longest), 1, learned
        ),
        "last length": _by_class(lambda rounds: _last_class(rounds)[:, None].expand(-1, rounds.longest), 4, learned),
        "entropy": entropy,
        "confidence": confidence,
        "H-RAD": h_rad,
        "confidence and entropy": _hybrid((confidence, entropy), unseen),
        "hybrid": _hybrid((confidence, entropy, h_rad), unseen),
    }


def predicted(network: Network) -> LengthLaw:
    """Return the predictions of a network."""

    def law(rounds: LabelledRounds) -> Tensor:
        with torch.no_grad():
            steps = [network.steps(part) for part in torch.split(rounds.features, 8192)]
            return torch.cat(steps).clamp(LEAST_CHANCE, MOST_CHANCE)

    return law


def losses(law: LengthLaw, rounds: LabelledRounds) -> Tensor:
    """Return the log-loss of each round's length; a length cut short by the end of the text counts as far as it is
    known."""
    chances, seen, true = law(rounds), *outcomes(rounds)
    nats = -torch.where(true, chances, 1 - chances).log()
    return (nats * seen).sum(1)


def compare(
    found: Mapping[str, LengthLaw], rounds: LabelledRounds, seed: int = 0, draws: int = 2000
) -> dict[str, RivalLoss]:
    """Compare all baselines with H-RAD on some rounds, with a bootstrap over texts."""
    nats = {name: losses(law, rounds).double().cpu() for name, law in found.items()}
    texts, owner = torch.unique(rounds.text.cpu(), return_inverse=True)
    count = torch.zeros(texts.numel(), dtype=torch.float64).index_add_(
        0, owner, torch.ones(owner.numel(), dtype=torch.float64)
    )
    weights = torch.randint(texts.numel(), (draws, texts.numel()), generator=torch.Generator().manual_seed(seed))

    def interval(difference: Tensor) -> tuple[float, float]:
        summed = torch.zeros(texts.numel(), dtype=torch.float64).index_add_(0, owner, difference)
        means = summed[weights].sum(1) / count[weights].sum(1)
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high

    return {name: RivalLoss(float(own.mean()), *interval(own - nats["H-RAD"])) for name, own in nats.items()}


def _class_of(values: Tensor) -> Tensor:
    return torch.bucketize(values, torch.tensor(EDGES, device=values.device))


def _last_class(rounds: LabelledRounds) -> Tensor:
    """Return the class of the previous round: none, nothing accepted, few, many."""
    before = rounds.before
    return torch.where(before == UNKNOWN_LABEL, 0, torch.where(before == 0, 1, torch.where(before <= 3, 2, 3)))


def _by_class(
    classes: Callable[[LabelledRounds], Tensor], many: int, learned: LabelledRounds, by_position: bool = True
) -> LengthLaw:
    """Return frequencies by class, and by position where the class is the same throughout."""

    def index(rounds: LabelledRounds) -> Tensor:
        position = (
            torch.arange(rounds.longest, device=rounds.taken.device)
            if by_position
            else torch.zeros(rounds.longest, dtype=torch.int64)
        )
        return classes(rounds) * rounds.longest + position.to(rounds.taken.device)

    seen, true = outcomes(learned)
    at = index(learned)[seen]
    size = many * learned.longest
    counted = torch.bincount(at, minlength=size).double()
    right = torch.bincount(at, weights=true[seen].double(), minlength=size)
    overall = right.sum() / counted.sum().clamp_min(1.0)
    shares = ((right + TRUST * overall) / (counted + TRUST)).float().clamp(LEAST_CHANCE, MOST_CHANCE)
    return lambda rounds: shares[index(rounds)]


def _hybrid(said: Sequence[LengthLaw], rounds: LabelledRounds) -> LengthLaw:
    """Combine distributions: the log-odds at each position are a weighted sum of theirs and a shift. It starts as
    the first one and is regularised towards it."""
    device, longest = rounds.taken.device, rounds.longest
    start = torch.zeros(len(said) + 1, longest, device=device)
    start[0] = 1.0

    def heard(some: LabelledRounds) -> Tensor:
        return torch.stack([torch.logit(law(some)) for law in said] + [torch.ones(len(some), longest, device=device)])

    given = heard(rounds)
    found = found_near(start, lambda weights: (weights[:, None] * given).sum(0), rounds)
    return lambda some: torch.sigmoid((found[:, None] * heard(some)).sum(0)).clamp(LEAST_CHANCE, MOST_CHANCE)
