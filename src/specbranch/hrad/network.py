"""The network of H-RAD: from a target's hidden states to the chances that none, some or all of a draft is taken, for each draft length.

Owns the layers and the scaling before and after them. The trunk is the paper's, 5H → 256 → 64; where the paper has one set of three classes
for one draft length, this has one for every length up to the longest, so that one predictor serves all settings.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NONE, SOME, ALL = range(3)
CLASSES = 3
WIDE, NARROW = 256, 64
DROPOUT = 0.2
FARTHEST = 10.0  # standard deviations: a few places of a residual stream are far out, and would drown the rest
IMPOSSIBLE = -1e4  # in place of minus infinity, which has no gradient


class Network(nn.Module):
    """Scores [rows, longest, 3] for features [rows, width]."""

    mean: Tensor
    scale: Tensor
    sharpness: Tensor

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.width, self.longest = width, longest
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("sharpness", torch.ones(longest))  # what calibration multiplies the scores of each length by
        self.first, self.second, self.last = nn.Linear(width, WIDE), nn.Linear(WIDE, NARROW), nn.Linear(NARROW, CLASSES * longest)
        self.dropout = nn.Dropout(DROPOUT)

    def fit_scale(self, features: Tensor) -> None:
        """Learn where the features lie."""
        self.mean.copy_(features.float().mean(0))
        self.scale.copy_(features.float().std(0, correction=0).clamp_min(1e-6))

    def forward(self, features: Tensor) -> Tensor:
        """Score the three classes for each length."""
        x = ((features.float() - self.mean) / self.scale).clamp(-FARTHEST, FARTHEST)
        x = self.dropout(torch.relu(self.first(x)))
        x = self.dropout(torch.relu(self.second(x)))
        scores: Tensor = self.last(x).unflatten(-1, (self.longest, CLASSES)) * self.sharpness[:, None]
        return scores + _impossible(scores)

    def chances(self, features: Tensor) -> Tensor:
        """The chances of the classes [rows, longest, 3]."""
        return self.forward(features).softmax(-1)


def _impossible(scores: Tensor) -> Tensor:
    """Of a draft of one token there is no part: added to the scores."""
    mask = torch.zeros(scores.shape[-2:], device=scores.device)
    mask[0, SOME] = IMPOSSIBLE
    return mask
