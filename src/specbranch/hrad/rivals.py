"""What a predictor is held against: other ways to foretell how many tokens of a draft are taken, each as a law of that length.

Owns the rivals and their comparison. Every one says how likely the draft's next token is taken, place by place, and is judged by the
logarithm of the chance it gave to what came true (log-loss, in nats a round). They differ in what they know: the last round's length and
H-RAD speak before anything is drafted, confidence and entropy see the draft's own scores place by place, the hybrid sees both. Shares are
counted on the rounds that were learned from, on others they are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbranch.hrad.network import ALL, Network
from specbranch.hrad.rounds import UNKNOWN, Rounds

EDGES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)  # between classes of confidence
LEAST, MOST = 1e-4, 1 - 1e-4  # no law is sure
TRUST = 2.0  # observations that the overall share counts as, in each class
EPOCHS = 300

Law = Callable[[Rounds], Tensor]  # the chance of each token of a draft once all before it are taken [rounds, longest]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Log-loss of one way to foretell, beside the predictor's."""

    nats: float
    low: float  # of the difference to H-RAD's, a paired bootstrap over texts: 95 % lie between; above 0 H-RAD is better
    high: float


def laws(network: Network, learned: Rounds) -> dict[str, Law]:
    """Return every way to foretell, fitted to some rounds."""
    h_rad = predicted(network)
    return {
        "no knowledge": _by_class(lambda rounds: torch.zeros_like(rounds.taken)[:, None].expand(-1, rounds.longest), 1, learned),
        "last length": _by_class(lambda rounds: _last_class(rounds)[:, None].expand(-1, rounds.longest), 4, learned),
        "entropy": _by_class(lambda rounds: _class_of(rounds.entropy), len(EDGES) + 1, learned, by_place=False),
        "confidence": _by_class(lambda rounds: _class_of(rounds.confidence), len(EDGES) + 1, learned, by_place=False),
        "H-RAD": h_rad,
        "hybrid": _hybrid(h_rad, learned),
    }


def predicted(network: Network) -> Law:
    """What a network says: of a draft of n tokens all are taken with the chance of class ALL; each token's own chance is their ratio."""

    def law(rounds: Rounds) -> Tensor:
        with torch.no_grad():
            whole = torch.cat([network.chances(part)[..., ALL] for part in torch.split(rounds.features, 8192)])
        reach = torch.cummin(whole, dim=1).values.clamp_min(1e-8)
        before = torch.cat((torch.ones_like(reach[:, :1]), reach[:, :-1]), dim=1)
        return (reach / before).clamp(LEAST, MOST)

    return law


def losses(law: Law, rounds: Rounds) -> Tensor:
    """The log-loss of each round's length; a length that the text's end cut short counts for what is known of it."""
    chances, seen, true = law(rounds), *outcomes(rounds)
    nats = -torch.where(true, chances, 1 - chances).log()
    return (nats * seen).sum(1)


def outcomes(rounds: Rounds) -> tuple[Tensor, Tensor]:
    """Which places of a draft are judged at all, and where the token was taken, each [rounds, longest]."""
    place = torch.arange(rounds.longest, device=rounds.taken.device)
    true = place < rounds.taken[:, None]
    seen = (place <= rounds.taken[:, None]) & (place < rounds.left[:, None])
    return seen, true


def compare(found: Mapping[str, Law], rounds: Rounds, seed: int = 0, draws: int = 2000) -> dict[str, Comparison]:
    """Hold all laws against H-RAD on some rounds, texts drawn again and again."""
    nats = {name: losses(law, rounds).double().cpu() for name, law in found.items()}
    texts, owner = torch.unique(rounds.text.cpu(), return_inverse=True)
    count = torch.zeros(texts.numel(), dtype=torch.float64).index_add_(0, owner, torch.ones(owner.numel(), dtype=torch.float64))
    weights = torch.randint(texts.numel(), (draws, texts.numel()), generator=torch.Generator().manual_seed(seed))

    def interval(difference: Tensor) -> tuple[float, float]:
        summed = torch.zeros(texts.numel(), dtype=torch.float64).index_add_(0, owner, difference)
        means = summed[weights].sum(1) / count[weights].sum(1)
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high

    return {name: Comparison(float(own.mean()), *interval(own - nats["H-RAD"])) for name, own in nats.items()}


def _class_of(values: Tensor) -> Tensor:
    return torch.bucketize(values, torch.tensor(EDGES, device=values.device))


def _last_class(rounds: Rounds) -> Tensor:
    """By the round before: there was none, nothing was taken, a few, many."""
    before = rounds.before
    return torch.where(before == UNKNOWN, 0, torch.where(before == 0, 1, torch.where(before <= 3, 2, 3)))


def _by_class(classes: Callable[[Rounds], Tensor], many: int, learned: Rounds, by_place: bool = True) -> Law:
    """Shares counted by class, and by place where the class is the same all along."""

    def index(rounds: Rounds) -> Tensor:
        place = torch.arange(rounds.longest, device=rounds.taken.device) if by_place else torch.zeros(rounds.longest, dtype=torch.int64)
        return classes(rounds) * rounds.longest + place.to(rounds.taken.device)

    seen, true = outcomes(learned)
    at = index(learned)[seen]
    size = many * learned.longest
    counted = torch.bincount(at, minlength=size).double()
    right = torch.bincount(at, weights=true[seen].double(), minlength=size)
    overall = right.sum() / counted.sum().clamp_min(1.0)
    shares = ((right + TRUST * overall) / (counted + TRUST)).float().clamp(LEAST, MOST)
    return lambda rounds: shares[index(rounds)]


def _hybrid(h_rad: Law, learned: Rounds) -> Law:
    """Logistic regression on H-RAD's chance and the classes of confidence and entropy, with how far H-RAD counts at each place."""
    device, longest, many = learned.taken.device, learned.longest, len(EDGES) + 1
    sure, sorted_, weight = (torch.zeros(size, device=device, requires_grad=True) for size in (many, many, longest))

    def law(rounds: Rounds) -> Tensor:
        said = torch.logit(h_rad(rounds))
        scores = sure[_class_of(rounds.confidence)] + sorted_[_class_of(rounds.entropy)] + weight * said
        return torch.sigmoid(scores).clamp(LEAST, MOST)

    parameters: Sequence[Tensor] = (sure, sorted_, weight)
    optimiser = torch.optim.Adam(parameters, lr=0.05)
    seen, true = outcomes(learned)
    said = torch.logit(h_rad(learned))
    confidence, entropy = _class_of(learned.confidence)[seen], _class_of(learned.entropy)[seen]
    place = torch.arange(longest, device=device).expand(len(learned), -1)[seen]
    said, true = said[seen], true[seen].float()
    for _ in range(EPOCHS):
        scores = sure[confidence] + sorted_[entropy] + weight[place] * said
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, true)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
    return law
