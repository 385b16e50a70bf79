"""Cases of the regret lab: a machine, a pair and its texts, all drawn from one integer.

Owns the ranges that cases are drawn from. Invariant: a seed gives the same case on every machine and in every process;
nothing else is random in the lab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

REQUEST_TOKENS = 128
REQUESTS = 8  # of a case; more if two batches hold more
BATCH_SIZES = (1, 1, 1, 1, 1, 2, 2, 4, 8, 16)  # requests in flight: half of the cases have one
TARGET_SECONDS = (0.002, 0.05)  # of a forward over one row
DRAFT_SHARE = (1 / 50, 1 / 2)  # of a draft step in a target forward
ROW_SHARE = (0.002, 0.5)  # of a further row in a forward, where rows are not free
FREE_ROWS = (1, 1, 4, 8, 16)  # rows that cost as much as one
MOST_HOST = 0.001  # seconds of a round outside both models
SPIKE_SECONDS = (0.03, 3.0)  # the first run of a kind and size of forward
SLOW_FACTOR = 2.0
AGREEMENT_RANGE = (0.3, 0.95)  # the chance that the first candidate is right
PHASE_TOKENS = (16, 96)  # the length of a stretch of text with one agreement
HALF_BY_REMAINDER: dict[str, int] = {"tune": 0, "report": 1}
Half = Literal["tune", "report"]
Drawn = TypeVar("Drawn")
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a request's text."""

    tokens: int
    agreement: float  # the chance that the draft's first candidate is the target's token
    lookup: float  # the chance that the token found by prompt lookup is


@dataclass(frozen=True, slots=True)
class Case:
    """One machine, one pair, and the texts of all requests."""

    seed: int
    target: float  # seconds of a target forward over one row
    draft_share: float  # of a draft step in such a forward
    row_share: float  # each further row costs this share of a forward
    free_rows: int  # rows of a forward that cost no more than one
    lane_share: float  # each further row of a draft step costs this share of the step
    host: float  # seconds of a round outside both models
    draft_setup: float  # seconds of a draft before its first step
    overlap: bool  # True if draft and target run at the same time (two devices)
    spike: float  # the longest first-time spike in seconds; 0: none
    slow: tuple[Range, ...]  # parts of all tokens during which the machine is twice as slow
    at_once: int
    spread: float  # how much the draft's confidence says about a position: 0 nothing, 1 much
    bias: float  # the draft states its confidence to this power: below 1 it is overconfident
    second: float  # the chance that the next candidate is right where those before it are wrong
    phases: tuple[tuple[Phase, ...], ...]  # by request

    @property
    def batches(self) -> tuple[range, ...]:
        """The requests that are in flight together, batch after batch."""
        return tuple(
            range(at, min(at + self.at_once, len(self.phases))) for at in range(0, len(self.phases), self.at_once)
        )

    @property
    def agreement(self) -> float:
        """The mean over all tokens."""
        return _mean([(phase.tokens, phase.agreement) for request in self.phases for phase in request])

    @property
    def lookup(self) -> float:
        """The mean over all tokens."""
        return _mean([(phase.tokens, phase.lookup) for request in self.phases for phase in request])

    def describe(self) -> str:
        """Say in one line what is special about the case."""
        agreements = [phase.agreement for request in self.phases for phase in request]
        words = [
            f"target {1000 * self.target:.1f} ms",
            f"draft 1/{1 / self.draft_share:.0f}",
            f"row {100 * self.row_share:.1f} % after {self.free_rows}",
            f"host {1000 * self.host:.2f} ms",
            f"agreement {self.agreement:.2f} ({min(agreements):.2f}–{max(agreements):.2f})",
            f"lookup {self.lookup:.2f}",
            f"spikes to {1000 * self.spike:.0f} ms" if self.spike else "no spikes",
        ]
        words += ["slow for a while"] if self.slow else []
        words += ["overlap"] if self.overlap else []
        words += [f"{self.at_once} at once"] if self.at_once > 1 else []
        return ", ".join(words)


def make_case(seed: int) -> Case:
    """Draw a case."""
    draws = Draws(f"case {seed}")
    rows_are_free = draws.chance(0.2)
    at_once = draws.one_of(BATCH_SIZES)
    return Case(
        seed=seed,
        target=draws.by_ratio(TARGET_SECONDS),
        draft_share=draws.by_ratio(DRAFT_SHARE),
        row_share=0.0 if rows_are_free else draws.by_ratio(ROW_SHARE),
        free_rows=draws.one_of(FREE_ROWS),
        lane_share=draws.by_ratio(ROW_SHARE) / 2,
        host=draws.between((0.0, MOST_HOST)),
        draft_setup=draws.between((0.0, MOST_HOST / 2)),
        overlap=draws.chance(0.25),
        spike=draws.by_ratio(SPIKE_SECONDS) if draws.chance(0.8) else 0.0,
        slow=_slow(draws),
        at_once=at_once,
        spread=draws.between((0.0, 1.0)),
        bias=draws.by_ratio((0.5, 2.0)),
        second=draws.between((0.2, 0.7)),
        phases=_phases(draws, max(REQUESTS, 2 * at_once)),
    )


def seeds_of(first: int, count: int, half: Half | None) -> list[int]:
    """Return the first seeds from `first` on; of one half: even seeds to tune constants, odd ones to report."""
    if half is None:
        return list(range(first, first + count))
    start = first + (HALF_BY_REMAINDER[half] - first) % 2
    return list(range(start, start + 2 * count, 2))


class Draws:
    """Random numbers from a text. Only `Random.random` is used: its numbers are the same in every Python."""

    def __init__(self, source: str) -> None:
        self._random = Random(source)

    def chance(self, share: float) -> bool:
        """Return True in this share of all draws."""
        return self._random.random() < share

    def between(self, given: Range) -> float:
        """Draw from a range, uniformly."""
        low, high = given
        return low + (high - low) * self._random.random()

    def by_ratio(self, given: Range) -> float:
        """Draw from a range, uniformly in the logarithm."""
        low, high = given
        return math.exp(self.between((math.log(low), math.log(high))))

    def one_of(self, values: tuple[Drawn, ...]) -> Drawn:
        """Draw one of these."""
        return values[int(len(values) * self._random.random())]


def _slow(draws: Draws) -> tuple[Range, ...]:
    """Draw when the machine is slow, as shares of all tokens: so every method has the same work meanwhile."""
    if draws.chance(0.5):
        return ()
    start = draws.between((0.0, 0.9))
    return ((start, start + draws.between((0.05, 0.3))),)


def _phases(draws: Draws, requests: int) -> tuple[tuple[Phase, ...], ...]:
    """Draw the texts' properties. Each of the two is steady, changes by request, or changes within a request."""
    agreement, lookup = _Course(draws, _part_of(draws, AGREEMENT_RANGE)), _Course(draws, _lookup_range(draws))
    found: list[tuple[Phase, ...]] = []
    for _ in range(requests):
        phases, left = list[Phase](), REQUEST_TOKENS
        agreement.next_request()
        lookup.next_request()
        while left > 0:
            tokens = min(round(draws.between(PHASE_TOKENS)), left)
            phases.append(Phase(tokens, agreement.next_phase(), lookup.next_phase()))
            left -= tokens
        found.append(tuple(phases))
    return tuple(found)


def _part_of(draws: Draws, whole: Range) -> Range:
    """Draw a part of a range: a case whose agreement may be anything has the same mean as all others."""
    low, high = sorted((draws.between(whole), draws.between(whole)))
    return low, high


def _lookup_range(draws: Draws) -> Range:
    return draws.one_of(((0.0, 0.05), (0.0, 0.3), (0.0, 1.0), (0.5, 0.95), (1.0, 1.0)))


class _Course:
    """A chance that is drawn once, for each request, or for each phase."""

    def __init__(self, draws: Draws, within: Range) -> None:
        self._draws, self._within = draws, within
        self._changes = draws.one_of(("never", "request", "phase", "phase"))
        self._now = draws.between(within)

    def next_request(self) -> None:
        if self._changes != "never":
            self._now = self._draws.between(self._within)

    def next_phase(self) -> float:
        if self._changes == "phase":
            self._now = self._draws.between(self._within)
        return self._now


def _mean(weighted: list[tuple[int, float]]) -> float:
    return sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)
