"""The network of H-RAD: from a target's hidden states to the chances that none, some or all of a draft is taken, for
every draft length.

Owns the layers and the scaling before and after them. The trunk is the paper's, 5H → 256 → 64. Where the paper ends in
three classes for one draft length, this ends in one chance for each place of a draft: that its token is taken once all
before it are. The three classes follow from them for any length, and agree with each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

OUTCOMES = 3
WIDE_LAYER, NARROW_LAYER = 256, 64
DROPOUT = 0.2
FARTHEST = 10.0  # standard deviations: a few places of a residual stream are far out, and would drown the rest


class Network(nn.Module):
    """Chances for features [rows, width]."""

    mean: Tensor
    scale: Tensor
    sharpness: Tensor
    shift: Tensor

    def __init__(self, width: int, longest: int, forgets: float = 0.0) -> None:
        """`forgets`: the share of the features that is left out at random while it learns."""
        super().__init__()
        self.width, self.longest = width, longest
        for name, tensor in (("mean", torch.zeros(width)), ("scale", torch.ones(width))):
            self.register_buffer(name, tensor)
        # calibration: what scores become
        for name, tensor in (
            ("sharpness", torch.ones(longest)),
            ("shift", torch.zeros(longest)),
        ):
            self.register_buffer(name, tensor)
        self.first, self.second, self.last = (
            nn.Linear(width, WIDE_LAYER),
            nn.Linear(WIDE_LAYER, NARROW_LAYER),
            nn.Linear(NARROW_LAYER, longest),
        )
        self.dropout, self.forgetting = nn.Dropout(DROPOUT), nn.Dropout(forgets)

    def fit_scale(self, features: Tensor) -> None:
        """Learn where the features lie."""
        self.mean.copy_(features.float().mean(0))
        self.scale.copy_(features.float().std(0, correction=0).clamp_min(1e-6))

    def forward(self, features: Tensor) -> Tensor:
        """Score each place of a draft: the log of the odds that its token is taken once all before it are [rows,
        longest]."""
        x = ((features.float() - self.mean) / self.scale).clamp_(-FARTHEST, FARTHEST)
        x = torch.relu_(self.first(self.forgetting(x) if self.training else x))
        x = torch.relu_(self.second(self.dropout(x) if self.training else x))
        scores: Tensor = self.last(self.dropout(x) if self.training else x)
        return torch.addcmul(self.shift, scores, self.sharpness)

    def steps(self, features: Tensor) -> Tensor:
        """The chance of each token once all before it are taken [rows, longest]."""
        return torch.sigmoid(self.forward(features))

    def chances(self, features: Tensor) -> Tensor:
        """The chances that none, some or all of a draft is taken, for each length [rows, longest, 3]."""
        steps = self.steps(features)
        none, whole = (1 - steps[:, :1]).expand_as(steps), steps.cumprod(1)
        return torch.stack((none, (1 - none - whole).clamp_min(0.0), whole), dim=-1)
