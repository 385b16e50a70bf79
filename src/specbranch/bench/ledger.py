"""What a replay did, written down so that any profile can price it: a method's decisions do not depend on the clock, only its seconds do.

Owns the book of a play. Holds for fixed lengths; a method that drafts until the target is done, or chooses by the profile, has to be played
under it. Invariant: `Book.seconds` is what the same play would have been charged under that profile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specbranch.bench.play import Player
from specbranch.config import SpeculativeConfig
from specbranch.core.orders import Orders, Reports
from specbranch.sim.clock import Charge, VirtualClock
from specbranch.sim.profile import CostProfile

Forward = tuple[float, float]  # rows, and the tokens held before them
Round = tuple[Forward, tuple[Forward, ...]]  # the target's, of no rows if it had nothing to do; the draft's


@dataclass(frozen=True, slots=True)
class Book:
    """The decoding rounds of one play."""

    decoded: int  # tokens after the first
    entries: array[float]  # for each round how many draft steps there were, the target's rows and context, and those of each step

    def seconds(self, profile: CostProfile) -> float:
        """Charge it: seconds from the first token to the last."""
        return sum(_charged(one, profile) for one in self._rounds())

    def _rounds(self) -> Iterator[Round]:
        entries, at = self.entries, 0
        while at < len(entries):
            end = at + 3 + 2 * int(entries[at])
            steps = tuple((entries[n], entries[n + 1]) for n in range(at + 3, end, 2))
            yield (entries[at + 1], entries[at + 2]), steps
            at = end


def _charged(one: Round, profile: CostProfile) -> float:
    charge, (target, steps) = Charge(profile), one
    charge.verified(int(target[0]), target[1])
    for rows, context in steps:
        charge.stepped(int(rows), context)
    return charge.seconds + profile.host


class BookingPlayer(Player):
    """A player that keeps books."""

    def book(self, config: SpeculativeConfig) -> Book:
        """Play a record and write down what was done; the first round reads the prompt and is left out."""
        if config.until_target:
            raise ValueError("a draft that goes on until the target is done depends on the profile")
        meter = _Meter()
        stats = self.play(config, meter)
        rounds = meter.rounds[1:]
        numbers = (number for target, steps in rounds for number in (len(steps), *target, *(x for step in steps for x in step)))
        return Book(stats.emitted - 1, array("f", numbers))

    def _executor(self, profile: CostProfile) -> VirtualClock:
        made = super()._executor(profile)
        return _Rounds(made.target, made.draft, profile)


class _Meter(CostProfile):
    """A profile that writes down what it is asked the price of."""

    __slots__ = ("rounds",)
    rounds: list[tuple[list[float], list[Forward]]]

    def __init__(self) -> None:
        super().__init__(target=((1, 1.0),), draft=((1, 1.0),))
        object.__setattr__(self, "rounds", [])

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Note a target forward; what is asked before the first round is no forward."""
        if self.rounds:
            self.rounds[-1][0][:] = (tokens, context or 0.0)
        return 1.0

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Note a draft step, likewise."""
        if self.rounds:
            self.rounds[-1][1].append((width, context or 0.0))
        return 1.0


class _Rounds(VirtualClock):
    """A clock that tells its meter when a round begins."""

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Carry out one round."""
        assert isinstance(self.profile, _Meter)
        self.profile.rounds.append(([0.0, 0.0], []))
        return super().run(orders)
