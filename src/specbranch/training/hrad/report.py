"""What there is to say of a predictor: how often each class is told rightly, what is taken for what, whether chances
come true.

Owns the figures, all on rounds that were not learned from.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from specbranch.hrad.network import OUTCOMES, Network
from specbranch.training.hrad.rivals import compare, laws, losses, predicted
from specbranch.training.hrad.rounds import UNKNOWN_LABEL, LabelledRounds
from specbranch.training.hrad.train import DealtRounds, FitSettings, fit

CLASS_NAMES = ("none", "some", "all")
BINS = 10


@torch.no_grad()
def figures(network: Network, rounds: LabelledRounds, length: int) -> dict[str, Any]:
    """Accuracy, confusion and calibration for drafts of one length."""
    labels = rounds.labels()[:, length - 1]
    known = labels != UNKNOWN_LABEL
    chances, labels = network.chances(rounds.features[known])[:, length - 1], labels[known]
    told = chances.argmax(-1)
    confusion = torch.bincount(labels * OUTCOMES + told, minlength=OUTCOMES**2).view(OUTCOMES, OUTCOMES)
    per_class = confusion.diagonal() / confusion.sum(1).clamp_min(1)
    hard = told != 1
    return {
        "length": length,
        "rounds": labels.numel(),
        "accuracy": float((told == labels).float().mean()),
        "accuracy_by_class": dict(zip(CLASS_NAMES, per_class.tolist(), strict=True)),
        "shares": dict(zip(CLASS_NAMES, (confusion.sum(1) / max(labels.numel(), 1)).tolist(), strict=True)),
        "confusion": confusion.tolist(),  # a row for each true class, a column for each told
        "log_loss": float(torch.nn.functional.nll_loss(chances.clamp_min(1e-8).log(), labels)),
        "hard_share": float(hard.float().mean()),  # rounds settled by none or all
        "hard_accuracy": float((told == labels)[hard].float().mean()) if bool(hard.any()) else None,
        "calibration": {name: calibration(chances[:, at], labels == at) for at, name in enumerate(CLASS_NAMES)},
        "calibration_error": sum(_error(chances[:, at], labels == at) for at in range(OUTCOMES)) / OUTCOMES,
    }


def calibration(said: torch.Tensor, true: torch.Tensor) -> list[dict[str, float]]:
    """What was said and how often it came true, in bins of equal width that have anything in them."""
    at = (said * BINS).long().clamp(max=BINS - 1)
    found = ((at == one) for one in range(BINS))
    return [
        {"said": float(said[inside].mean()), "true": float(true[inside].float().mean()), "rounds": int(inside.sum())}
        for inside in found
        if bool(inside.any())
    ]


def _error(said: torch.Tensor, true: torch.Tensor) -> float:
    """Mean distance between what was said and how often it came true, bins weighed by their rounds."""
    return sum(abs(one["said"] - one["true"]) * one["rounds"] for one in calibration(said, true)) / max(said.numel(), 1)


def rivalry(network: Network, parts: DealtRounds, seed: int = 0) -> dict[str, Any]:
    """Every way to foretell a draft's length, in nats a round."""
    return {
        name: asdict(one)
        for name, one in compare(laws(network, parts.learned, parts.calibrated), parts.judged, seed).items()
    }


def across_tasks(
    parts: DealtRounds, tasks: tuple[str, ...], settings: FitSettings, network: Network
) -> dict[str, dict[str, float]]:
    """For each kind of text: the log-loss there of the whole predictor, and of one that never saw such texts."""
    found = {}
    for number, name in enumerate(tasks):
        own = parts.judged.where(parts.judged.task == number)
        learned, calibrated = (part.where(part.task != number) for part in (parts.learned, parts.calibrated))
        if not (len(own) and len(learned) and len(calibrated)):
            continue
        other = fit(DealtRounds(learned, calibrated, own), settings).network
        found[name] = {
            "rounds": len(own),
            "nats": float(losses(predicted(network), own).mean()),
            "nats_unseen": float(losses(predicted(other), own).mean()),
        }
    return found
