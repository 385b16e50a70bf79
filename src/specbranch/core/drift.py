"""How far the acceptance of the present text is from what is usual, in log-odds.

Owns the counts of the latest tokens of a text. Does not own acceptance rates (`experience.py`) or which candidates are
judged (`learning.py`). Invariant: as long as the difference may be chance, the drift is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.trees import log_odds

DRIFT_KEPT = 0.97  # part of the counts that stays after a token
BY_CHANCE = 4.0  # squared standard deviations that are taken off
USUALLY = 2.0  # candidates, right as often as usual, that are counted in addition


class Drift:
    """Hits in the latest tokens of a text, to be compared with what is usual."""

    def __init__(self) -> None:
        self._hits = 0.0
        self._seen: dict[int, float] = {}  # candidates by class

    def pass_tokens(self, count: int) -> None:
        """Let the text go on by so many tokens: older ones count less."""
        kept = DRIFT_KEPT**count
        self._hits *= kept
        for at in self._seen:
            self._seen[at] *= kept

    def observe(self, at: int, right: bool) -> None:
        """Take in the verdict on a candidate of class `at`."""
        self._seen[at] = self._seen.get(at, 0.0) + 1.0
        self._hits += right

    def against(self, usual: Sequence[float]) -> float:
        """Return the drift in log-odds; `usual`: acceptance rates by class, as they are known now."""
        seen = expected = variance = 0.0
        for at, count in self._seen.items():
            seen, expected = seen + count, expected + count * usual[at]
            variance += count * usual[at] * (1.0 - usual[at])
        beyond = self._hits - expected
        sure = 1.0 - BY_CHANCE * variance / max(beyond * beyond, 1e-9)
        if sure <= 0.0 or seen <= 0.0:
            return 0.0
        share = expected / seen
        found = (self._hits + USUALLY * share) / (seen + USUALLY)
        return sure * (log_odds(found) - log_odds(share))
