"""A predictor with random weights, for a tiny pair."""

from __future__ import annotations

from pathlib import Path

import torch

from specbranch.assembly import identity
from specbranch.hrad.network import Network
from specbranch.hrad.predictor import About, Predictor

LAYERS, LONGEST = 2, 6


def made(target: str, draft: str, folder: Path, hidden: int = 32, layers: int = LAYERS) -> Path:
    """Save a predictor with random weights."""
    torch.manual_seed(1)
    about = About("target", identity(target), "draft", identity(draft), LONGEST, layers, hidden)
    network = Network(about.width, LONGEST)
    with torch.no_grad():
        network.last.weight.mul_(30.0)  # every class comes up
        network.last.bias.add_(1.0)
    Predictor(about, network).save(folder)
    return folder
