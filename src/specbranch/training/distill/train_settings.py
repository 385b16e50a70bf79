"""How a draft is trained: for how long, in which batches, at which learning rate.

Owns the settings of a training and their checks. Invariant: settings that exist make sense, whoever made them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specbranch.errors import BadParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a draft is trained. Exactly one of `steps` and `seconds` says how long."""

    layers: tuple[int, ...]  # those of the target it starts from
    taps: tuple[int, ...] = ()  # layers of the target after which a feature draft reads its state; none: a plain draft
    depths: int = 1  # rows in a row that the draft is trained for, all but the first on its own states
    fade: float = 0.8  # how much a depth counts, as a share of the depth before
    steps: int | None = None
    seconds: float | None = None
    most_steps: int | None = None  # that `seconds` may become
    learning_rate: float = 6e-4
    last_rate: float = 0.02  # share of it that is left at the end
    warmup: int = 100  # steps, or a tenth of all if that is less
    weight_decay: float = 0.01
    clip: float = 1.0
    rows: int = 64  # of a step
    length: int = 1024  # tokens of a row
    question_weight: float = 0.1  # how much a question's token counts; an answer's counts 1
    seed: int = 0
    head_tokens: int | None = None
    record_every: int = 10
    evaluate_every: int = 200
    evaluate_batches: int = 2
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise BadParameter(f"steps is {self.steps} and seconds is {self.seconds}; expected exactly one of them.")
        for name in ("rows", "length", "warmup", "record_every", "evaluate_every", "evaluate_batches", "depths"):
            if getattr(self, name) < 1:
                raise BadParameter(f"{name} is {getattr(self, name)}; expected a whole number ≥ 1.")
        for name in ("steps", "seconds", "learning_rate", "clip", "head_tokens"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise BadParameter(f"{name} is {value}; expected a finite number above 0.")
        if not 0 < self.fade <= 1:
            raise BadParameter(f"fade is {self.fade}; expected more than 0 and at most 1.")
        if not self.taps and self.depths > 1:
            raise BadParameter(f"A plain draft is trained for one depth, not for {self.depths}; unroll feature drafts.")
        if self.depths > self.length:
            raise BadParameter(f"{self.depths} unrolled steps do not fit into rows of {self.length} tokens.")
        if not self.checkpoint_seconds >= 0:
            raise BadParameter(f"checkpoint_seconds is {self.checkpoint_seconds}; expected 0 or more.")


def learning_rate(settings: TrainSettings, step: int, total: int | None) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine."""
    warmup = settings.warmup if total is None else min(settings.warmup, max(total // 10, 1))
    if step < warmup or total is None:
        return settings.learning_rate * min((step + 1) / warmup, 1.0)
    gone = min((step - warmup) / max(total - warmup, 1), 1.0)
    return settings.learning_rate * (settings.last_rate + (1 - settings.last_rate) * (1 + math.cos(math.pi * gone)) / 2)
