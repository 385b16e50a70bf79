"""The network of H-RAD: from a target's hidden states to the chances that none, some or all of a draft is accepted.

Owns the layers and the scaling before and after them, but neither training nor files. The trunk is the paper's,
5H → 256 → 64. The paper ends in three classes for one draft length. This network ends in one chance for each position
of a draft: that its token is accepted once all before it are. Invariant: the three classes follow from these chances
for any length, and agree with each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

OUTCOMES = 3
WIDE_LAYER, NARROW_LAYER = 256, 64
DROPOUT = 0.2
FARTHEST = 10.0  # standard deviations: a few dimensions of a residual stream are outliers, and would drown the rest


class Network(nn.Module):
    """Chances for features [rows, width]."""

    mean: Tensor
    scale: Tensor
    sharpness: Tensor
    shift: Tensor

    def __init__(self, width: int, longest: int, forgets: float = 0.0) -> None:
        """`forgets`: the share of the features that training drops at random."""
        super().__init__()
        self.width, self.longest = width, longest
        for name, tensor in (("mean", torch.zeros(width)), ("scale", torch.ones(width))):
            self.register_buffer(name, tensor)
        # calibration of the scores
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
        """Take mean and scale from training features."""
        self.mean.copy_(features.float().mean(0))
        self.scale.copy_(features.float().std(0, correction=0).clamp_min(1e-6))

    def forward(self, features: Tensor) -> Tensor:
        """Score each position of a draft: the log-odds that its token is accepted once all before it are [rows,
        longest]."""
        x = ((features.float() - self.mean) / self.scale).clamp_(-FARTHEST, FARTHEST)
        x = torch.relu_(self.first(self.forgetting(x) if self.training else x))
        x = torch.relu_(self.second(self.dropout(x) if self.training else x))
        scores: Tensor = self.last(self.dropout(x) if self.training else x)
        return torch.addcmul(self.shift, scores, self.sharpness)

    def steps(self, features: Tensor) -> Tensor:
        """Return the chance of each token once all before it are accepted [rows, longest]."""
        return torch.sigmoid(self.forward(features))

    def chances(self, features: Tensor) -> Tensor:
        """Return the chances that none, some or all of a draft is accepted, for each length [rows, longest, 3]."""
        steps = self.steps(features)
        none, whole = (1 - steps[:, :1]).expand_as(steps), steps.cumprod(1)
        return torch.stack((none, (1 - none - whole).clamp_min(0.0), whole), dim=-1)
