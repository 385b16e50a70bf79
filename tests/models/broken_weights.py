"""Ways to damage the weights of a saved model: what is read from such a file is NaN or infinite somewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
Damage = Callable[[Weights], object]
NAN, INF = float("nan"), float("inf")
DAMAGE: dict[str, Damage] = {
    "all NaN": lambda weights: [tensor.fill_(NAN) for tensor in weights.values()],
    "one infinite": lambda weights: weights["model.layers.1.mlp.down_proj.weight"][3, 4:5].fill_(INF),
    "a token of the head NaN": lambda weights: weights["lm_head.weight"][7].fill_(NAN),
    "a token of the head infinite": lambda weights: weights["lm_head.weight"][7, 3:5].fill_(INF),
}


def damage(folder: Path, how: Damage) -> None:
    """Write the weights of a folder anew, damaged."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    how(weights)
    save_file(weights, file, metadata={"format": "pt"})
