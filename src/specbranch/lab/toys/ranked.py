"""A toy pair with known agreement: the target's token is the draft's first choice, its second … with given
probabilities.

Owns the distribution of such a target. Invariant: the choice at a position is drawn from a hash of the whole prefix. So
positions agree independently, and a wrong cache still gives a wrong distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from specbranch.errors import BadParameter
from specbranch.lab.toys.toys import Logits, State, ToyLaw

VOCABULARY = 8


@dataclass(frozen=True, slots=True)
class RankedLaw(ToyLaw):
    """The distribution of a target that agrees with the plain `ToyLaw` of the same seed at known rates, at
    temperature 0."""

    rates: tuple[float, ...] = ()  # the chances of the draft's first choice, its second …; the rest: its last

    def logits(self, state: State) -> Logits:
        """Return the draft's logits, with the winning token raised above all."""
        row = list(ToyLaw.logits(self, state))
        ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
        row[ranked[self._rank(state)]] = row[ranked[0]] + 1.0
        return tuple(row)

    def _rank(self, state: State) -> int:
        hashed = blake2b(state.to_bytes(8, "little"), digest_size=8, person=b"rank").digest()
        drawn = int.from_bytes(hashed, "little") / 2.0**64
        reached = (rank for rank, share in enumerate(accumulate(self.rates)) if drawn < share)
        return next(reached, self.vocabulary - 1)


def ranked_pair(rates: Sequence[float], seed: int = 0) -> tuple[RankedLaw, ToyLaw]:
    """Return a target and a draft that agree at these rates."""
    if not 1 <= len(rates) < VOCABULARY or min(rates) < 0 or sum(rates) > 1 + 1e-9:
        raise BadParameter(
            f"Rates of agreement are {tuple(rates)!r}; expected 1 to {VOCABULARY - 1} chances that sum to at most 1."
        )
    return RankedLaw(VOCABULARY, seed, rates=tuple(rates)), ToyLaw(VOCABULARY, seed)
