"""The evaluation of a predictor: accuracy by class, confusion, and calibration.

Owns the figures, all on held-out rounds.
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
    """Return accuracy, confusion and calibration for drafts of one length."""
    labels = rounds.labels()[:, length - 1]
    known = labels != UNKNOWN_LABEL
    chances, labels = network.chances(rounds.features[known])[:, length - 1], labels[known]
    predicted_class = chances.argmax(-1)
    confusion = torch.bincount(labels * OUTCOMES + predicted_class, minlength=OUTCOMES**2).view(OUTCOMES, OUTCOMES)
    per_class = confusion.diagonal() / confusion.sum(1).clamp_min(1)
    hard = predicted_class != 1
    return {
        "length": length,
        "rounds": labels.numel(),
        "accuracy": float((predicted_class == labels).float().mean()),
        "accuracy_by_class": dict(zip(CLASS_NAMES, per_class.tolist(), strict=True)),
        "shares": dict(zip(CLASS_NAMES, (confusion.sum(1) / max(labels.numel(), 1)).tolist(), strict=True)),
        "confusion": confusion.tolist(),  # a row for each true class, a column for each predicted one
        "log_loss": float(torch.nn.functional.nll_loss(chances.clamp_min(1e-8).log(), labels)),
        "hard_share": float(hard.float().mean()),  # rounds settled by none or all
        "hard_accuracy": float((predicted_class == labels)[hard].float().mean()) if bool(hard.any()) else None,
        "calibration": {name: calibration(chances[:, at], labels == at) for at, name in enumerate(CLASS_NAMES)},
        "calibration_error": sum(_error(chances[:, at], labels == at) for at in range(OUTCOMES)) / OUTCOMES,
    }


def calibration(said: torch.Tensor, true: torch.Tensor) -> list[dict[str, float]]:
    """Return predicted and observed frequencies, in non-empty bins of equal width."""
    at = (said * BINS).long().clamp(max=BINS - 1)
    found = ((at == one) for one in range(BINS))
    return [
        {"said": float(said[inside].mean()), "true": float(true[inside].float().mean()), "rounds": int(inside.sum())}
        for inside in found
        if bool(inside.any())
    ]


def _error(said: torch.Tensor, true: torch.Tensor) -> float:
    """Return the mean distance between predicted and observed frequencies, weighted by rounds."""
    return sum(abs(one["said"] - one["true"]) * one["rounds"] for one in calibration(said, true)) / max(said.numel(), 1)


def rivalry(network: Network, parts: DealtRounds, seed: int = 0) -> dict[str, Any]:
    """Return the log-loss of every way to predict the accepted length, in nats per round."""
    return {
        name: asdict(one)
        for name, one in compare(laws(network, parts.learned, parts.calibrated), parts.judged, seed).items()
    }


def across_tasks(
    parts: DealtRounds, tasks: tuple[str, ...], settings: FitSettings, network: Network
) -> dict[str, dict[str, float]]:
    """Return for each kind of text the log-loss of the full predictor, and of one trained without such texts."""
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
