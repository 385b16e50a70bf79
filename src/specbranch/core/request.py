"""What a worker must know of a request besides its tokens: sampling parameters, noise and rule.

Owns no state. Invariant: a request never changes, and is sent once, when a session opens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specbranch.config import Rule, SamplingParams
from specbranch.core.grammar import Constraint, Guide


@dataclass(frozen=True, slots=True)
class Request:
    """Sampling parameters with everything resolved: seed, sample number, end tokens."""

    params: SamplingParams
    seed: int
    prompt_length: int
    sample: int = 0
    rule: Rule = "match"
    eos_ids: tuple[int, ...] = ()
    wants_forecast: bool = False  # the method uses a forecaster's signal with each verdict
    # the grammar of its answer; it stays in this process
    constraint: Constraint | None = field(default=None, repr=False, compare=False)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen: then there is no noise, and both rules are the same."""
        return self.params.temperature == 0.0

    @property
    def by_ratio(self) -> bool:
        """True if proposals are sampled, and accepted by p/q."""
        return self.rule == "ratio" and not self.greedy

    @property
    def is_constrained(self) -> bool:
        """True if a grammar decides which tokens may follow."""
        return self.constraint is not None or self.params.is_constrained

    @property
    def ending_ids(self) -> frozenset[int]:
        """The tokens that end the request."""
        return frozenset((*self.params.stop_token_ids, *(() if self.params.ignore_eos else self.eos_ids)))


class Spot(NamedTuple):
    """A row's position, and all else that sampling may depend on besides its logits.

    `position` is the index in the sequence of the token to be sampled. `history` returns the tokens before it, the
    row's own ancestors included; it is called only if a penalty needs them. `attempt` numbers the orders that drafted
    this position.
    """

    request: Request
    position: int
    history: Callable[[], Sequence[int]]
    attempt: int = 0
    allowed: Guide | None = None  # the tokens that may be chosen; None: any
