"""How much text a target writes for the training of its draft, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specbranch.errors import BadParameter

LEAST_QUESTION = 3  # tokens, before an end is let through
LONGEST_QUESTION = 192
# Writing is saved in parts of at most this size, so a kill costs at most one. There are at most SLICES of them: more
# would use the seeds of the next run.
SLICE_SECONDS, SLICE_TOKENS, SLICES = 120.0, 20_000_000, 1000


def question_room(length: int) -> int:
    """Return the maximum number of question tokens in a conversation: a third."""
    return max(min(LONGEST_QUESTION, length // 3), LEAST_QUESTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """How much to write, and how."""

    seconds: float | None = None  # stop after this time, set-up not counted
    tokens: int | None = None  # or when this many were written, questions and all
    rows: int = 1024  # conversations written at once; halved while they do not fit
    length: int = 640  # most tokens of a conversation
    # most tokens of an invented question, one that hands over a text aside; a longer one is closed there
    question_tokens: int = LONGEST_QUESTION
    question_temperature: float = 1.0
    temperature: float = 0.8  # of the answers in every second row; those of the others are greedy, and all of them at 0
    min_p: float = 0.03  # least probability of a sampled token, as a share of the most likely one's
    prompts: tuple[str, ...] = ()  # of the user's: every second conversation answers one of these
    seed: int = 0
    steps: int = 64  # between two looks at what was written

    def __post_init__(self) -> None:
        if self.seconds is None and self.tokens is None:
            raise BadParameter("The writer was given neither seconds nor tokens to stop after; give one of them.")
        whole = {"rows": 1, "length": 16, "question_tokens": LEAST_QUESTION, "steps": 1}
        for name, least in whole.items():
            if getattr(self, name) < least:
                raise BadParameter(f"{name} is {getattr(self, name)}; expected {least} or more.")
        for name in ("seconds", "tokens", "question_temperature"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise BadParameter(f"{name} is {value}; expected a finite number above 0.")
        if not 0 <= self.temperature < math.inf:
            raise BadParameter(f"temperature is {self.temperature}; expected a finite number, 0 or more.")
        if not 0 < self.min_p <= 1:
            raise BadParameter(f"min_p is {self.min_p}; expected more than 0 and at most 1.")

    def slices(self) -> list[WriterSettings]:
        """Split the writing into equal parts, each with a seed of its own."""
        wanted = max(math.ceil((self.seconds or 0) / SLICE_SECONDS), math.ceil((self.tokens or 0) / SLICE_TOKENS), 1)
        count = min(wanted, SLICES)
        seconds = None if self.seconds is None else self.seconds / count
        tokens = None if self.tokens is None else math.ceil(self.tokens / count)
        seeds = range(self.seed * SLICES, self.seed * SLICES + count)
        return [replace(self, seconds=seconds, tokens=tokens, seed=seed) for seed in seeds]
