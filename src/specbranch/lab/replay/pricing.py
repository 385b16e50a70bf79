"""The rounds of a replay in a form that any profile can price.

Owns those rounds. They serve methods whose decisions do not depend on the clock, i.e. those with fixed lengths. A
method that drafts until the target is done, or plans by the profile, must be replayed under each profile. Invariant:
`PricedRounds.priced` equals the statistics of the same replay under that profile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from specbranch.clock.profile import Beginning, CostProfile
from specbranch.clock.virtual_clock import Charge, VirtualClock
from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.methods import METHODS, PLAIN
from specbranch.core.orders import Orders, Reports
from specbranch.core.stats import Stats
from specbranch.lab.replay.decode import RecordDecoder, ReplayedModel
from specbranch.lab.replay.record import Record, Task
from specbranch.lab.replay.signals import RecordedSignals

OPEN_DECODERS = 24  # decoders kept open: as many as there are records to tune on
Forward = tuple[float, float]  # rows, and the tokens held before them
# the target's (no rows if it had nothing to do), the draft's steps, and how it started
PricedRound = tuple[Forward, tuple[Forward, ...], Beginning]


@dataclass(frozen=True, slots=True)
class PricedRounds:
    """The rounds of one replay."""

    counts: Stats  # its times mean nothing
    # For each round: how many draft steps there were, how it started, the target's rows and context, and those
    # of each step.
    entries: array[float]

    def priced(self, profile: CostProfile) -> Stats:
        """Return the replay's statistics under a profile; the first round is the prefill."""
        (first, host), *later = ((_charge(one, profile), profile.host_seconds(one[2])) for one in self._rounds())
        opening, rest = first.seconds + host, [charge for charge, _ in later]
        return replace(
            self.counts,
            started=0.0,
            first_token=opening,
            finished=opening + sum(charge.seconds + host for charge, host in later),
            draft_busy=sum(charge.draft for charge in rest),
            target_busy=sum(charge.target for charge in rest),
            both_busy=sum(charge.together for charge in rest),
        )

    def _rounds(self) -> Iterator[PricedRound]:
        entries, at = self.entries, 0
        while at < len(entries):
            end = at + 4 + 2 * int(entries[at])
            steps = tuple((entries[n], entries[n + 1]) for n in range(at + 4, end, 2))
            yield (entries[at + 2], entries[at + 3]), steps, Beginning(int(entries[at + 1]))
            at = end


def _charge(one: PricedRound, profile: CostProfile) -> Charge:
    charge, (target, steps, _) = Charge(profile), one
    charge.hears = True  # only planned methods extend trees
    charge.verified(int(target[0]), target[1])
    for rows, context in steps:
        charge.stepped(int(rows), context)
    return charge


def has_fixed_decisions(config: SpeculativeConfig) -> bool:
    """True if a method decides the same under every profile."""
    return not (config.until_target or METHODS[config.method or PLAIN].plans(config))


class ReplayedMethods:
    """Replays with one pair; what does not depend on the clock is decoded once for all clocks. Call `close` at the
    end."""

    def __init__(
        self,
        draft: ReplayedModel | None,
        forecasts: RecordedSignals | None = None,
        target: ReplayedModel | None = None,
    ) -> None:
        self._draft, self._forecasts, self._target = draft, forecasts, target
        self._held: dict[tuple[Task, SpeculativeConfig], PricedRounds] = {}
        # On a GPU a cache takes all its memory from the beginning.
        on_cpu = draft is None or str(getattr(draft.runner, "device", "cpu")) == "cpu"
        self._most = OPEN_DECODERS if on_cpu else 1
        self._decoders: dict[Task, NotingDecoder] = {}  # the last used one comes last

    def stats(
        self, record: Record, config: SpeculativeConfig, profile: CostProfile, experience: Experience | None = None
    ) -> Stats:
        """Return a method's statistics on a record under a profile; a planned method uses `experience`."""
        if has_fixed_decisions(config):
            return self.rounds(record, config).priced(profile)
        return self.decoder(record).decode(config, profile, experience=experience)

    def rounds(self, record: Record, config: SpeculativeConfig) -> PricedRounds:
        """Return the rounds of a method with fixed decisions; they are decoded once."""
        key = record.task, config
        if key not in self._held:
            self._held[key] = self.decoder(record).noted(config)
        return self._held[key]

    @property
    def decoded(self) -> list[SpeculativeConfig]:
        """The settings of all stored rounds."""
        return [config for _, config in self._held]

    def forget(self) -> None:
        """Drop all rounds."""
        self._held.clear()

    def close(self) -> None:
        """Free the models' KV caches; the rounds stay."""
        for decoder in self._decoders.values():
            decoder.close()
        self._decoders.clear()

    def decoder(self, record: Record) -> NotingDecoder:
        """Return the decoder of a record. Some stay open, because a search returns to the same records and their
        prompts are long."""
        decoder = self._decoders.pop(record.task, None)
        if decoder is None:
            if len(self._decoders) >= self._most:
                self._decoders.pop(next(iter(self._decoders))).close()
            for model in (self._draft, self._target):
                if model:
                    model.memory.forget()
            decoder = NotingDecoder(record, self._draft, self._forecasts, self._target)
            decoder.read_ahead()
        self._decoders[record.task] = decoder
        return decoder


class NotingDecoder(RecordDecoder):
    """A decoder that records its rounds, for any profile to price."""

    def noted(self, config: SpeculativeConfig) -> PricedRounds:
        """Decode a record and return its rounds."""
        if not has_fixed_decisions(config):
            raise ValueError(
                "what a draft does until the target is done, and what the planner decides, depends on the profile"
            )
        meter = _Meter()
        stats = self.decode(config, meter)
        numbers = (
            number
            for launched, target, steps in meter.rounds
            for number in (len(steps), *launched, *target, *(x for step in steps for x in step))
        )
        return PricedRounds(stats, array("f", numbers))

    def _executor(self, profile: CostProfile, knows: bool, guesses: bool) -> VirtualClock:
        made = super()._executor(profile, knows, guesses)
        return _Rounds(made.target, made.metered, profile) if isinstance(profile, _Meter) else made


class _Meter(CostProfile):
    """A profile that records the rounds it prices."""

    __slots__ = ("rounds",)
    rounds: list[tuple[list[Beginning], list[float], list[Forward]]]

    def __init__(self) -> None:
        super().__init__(target=((1, 1.0),), draft=((1, 1.0),))
        object.__setattr__(self, "rounds", [])

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Record a target forward; questions before the first round are not forwards."""
        if self.rounds:
            self.rounds[-1][1][:] = (tokens, context or 0.0)
        return 1.0

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Record a draft step, likewise."""
        if self.rounds:
            self.rounds[-1][2].append((width, context or 0.0))
        return 1.0

    def host_seconds(self, start: Beginning) -> float:
        """Record how a round started."""
        self.rounds[-1][0].append(start)
        return 0.0


class _Rounds(VirtualClock):
    """A clock that notifies its meter when a round starts."""

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Run one round."""
        assert isinstance(self.profile, _Meter)
        self.profile.rounds.append(([], [0.0, 0.0], []))
        return super().run(orders)
