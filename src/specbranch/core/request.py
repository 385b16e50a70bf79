"""What a worker must know of a request besides its tokens: how to sample, with which noise, under which rule.

Owns no state; it is sent once, when a session opens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specbranch.config import Rule, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """Sampling parameters with everything resolved: the seed drawn, the sample numbered, the end tokens known."""

    params: SamplingParams
    seed: int
    prompt_length: int
    sample: int = 0
    rule: Rule = "match"
    eos_ids: tuple[int, ...] = ()
    wants_forecast: bool = False  # whether the method heeds what a forecaster says at each verdict

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no noise is needed and both rules are one."""
        return self.params.temperature == 0.0

    @property
    def by_ratio(self) -> bool:
        """Whether proposals are sampled and tested by p/q."""
        return self.rule == "ratio" and not self.greedy

    @property
    def ending_ids(self) -> frozenset[int]:
        """The tokens that end the request."""
        return frozenset((*self.params.stop_token_ids, *(() if self.params.ignore_eos else self.eos_ids)))


class Spot(NamedTuple):
    """Where a row stands: all that sampling may depend on besides its logits.

    `position` is the index in the sequence of the token to be drawn; `history` gives the tokens before it, the row's
    own ancestors included, and is called only when a penalty needs them. `attempt` tells apart the orders that drafted
    this position.
    """

    request: Request
    position: int
    history: Callable[[], Sequence[int]]
    attempt: int = 0
    allowed: frozenset[int] | None = None  # the tokens that may be drawn; nothing: any
