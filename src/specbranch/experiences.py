"""What was learned of a pair on this machine: by an LLM while it runs, and in a file from process to process.

Owns the file: which one belongs to a pair, what stands in it, how news are added. Invariants: news are added to what
the file holds at that moment, under a lock, so processes at work at once lose nothing; what is damaged or foreign is
never believed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specbranch.config import SpeculativeConfig
from specbranch.core.costs import KEPT, Costs, LearnedCosts, Timed
from specbranch.core.experience import Experience, Insight, News, Tally
from specbranch.core.stance import Findings
from specbranch.files import replacing

log = logging.getLogger("specbranch")

VARIABLE = "SPECBRANCH_EXPERIENCE"  # the folder to keep it in; "off": nowhere
FORMAT = 4
PAUSE = 5.0  # seconds between two writes, unless it is the last
WAIT = 2.0  # seconds for another process to finish its write
MOST_WAYS = 64  # configurations whose experience is at hand; a request may bring any
TALLIES = ("first", "other", "cover", "looked")
ANY = -math.inf
# seconds that can be
LEAST: dict[Timed, float] = {
    "target": 1e-9,
    "step": 1e-9,
    "setup": 0.0,
    "host": 0.0,
    "slow_down": ANY,
    "draft_slow_down": ANY,
}


class Experiences:
    """An experience for each way to decode, all with the same costs; kept in a file where there is one."""

    def __init__(self, costs: Costs, has_draft: bool, file: ExperienceFile | None = None) -> None:
        self.learned = costs if isinstance(costs, LearnedCosts) else None
        self._costs = costs
        self._has_draft = has_draft
        self._file = file
        self._kept = file.read() if file else Kept()
        self._made: dict[str, Experience] = {}
        self._written = time.monotonic()
        if file and self.learned is not None:
            self._kept.give(self.learned)
            self.learned.news = []

    def of(self, config: SpeculativeConfig) -> Experience:
        """What requests of this configuration have shown."""
        name = _name(config)
        if name in self._made:
            self._made[name] = self._made.pop(name)  # the last used comes last
        else:
            for old in list(self._made)[: max(len(self._made) + 1 - MOST_WAYS, 0)]:
                del self._made[old]  # what it has shown since the last write is lost
            made = self._made[name] = Experience(self._costs, self._has_draft)
            if self._file:
                made.insight = self._kept.insights.pop(name, made.insight)
                made.insight.news = []
                if made.stance is not None:
                    made.stance.believe(self._kept.stances.pop(name, {}))
        return self._made[name]

    def write(self, last: bool = False) -> None:
        """Add what is new to the file; not at every call, unless it is the last."""
        if self._file is None or self.learned is None or (time.monotonic() < self._written + PAUSE and not last):
            return
        self._written = time.monotonic()
        insights = {name: one.insight.news for name, one in self._made.items() if one.insight.news}
        stances = {name: one.stance.found() for name, one in self._made.items() if one.stance is not None}
        news = self.learned.news or []
        if (news or insights) and not self._added(self._file, news, insights, stances):
            return
        self.learned.news = []
        for one in self._made.values():
            one.insight.news = []

    def _added(
        self,
        file: ExperienceFile,
        costs: list[tuple[Timed, int, float]],
        insights: Mapping[str, list[News]],
        stances: Mapping[str, Findings],
    ) -> bool:
        """Whether the news are in the file; where it can never be written that is said once, and nothing is kept."""
        try:
            file.add(costs, insights, stances)
        except Timeout:
            return False  # another process is at it: next time
        except Exception as error:  # an answer is not to be lost for this
            log.warning("What was learned is not kept: %s cannot be written (%s).", file.path, error)
            self._file = None
        return True


@dataclass(slots=True)
class Kept:
    """What a file holds."""

    costs: LearnedCosts = field(default_factory=LearnedCosts)
    insights: dict[str, Insight] = field(default_factory=dict)
    stances: dict[str, Findings] = field(default_factory=dict)

    def give(self, costs: LearnedCosts) -> None:
        """Hand the times over."""
        for kind, by_rows in self.costs.times.items():
            for rows, times in by_rows.items():
                for seconds in times:
                    costs.take(kind, rows, seconds)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        times = {
            kind: {str(rows): list(times) for rows, times in by_rows.items()}
            for kind, by_rows in self.costs.times.items()
        }
        insights = {name: _told(insight) for name, insight in self.insights.items()}
        return {"costs": times, "insights": insights, "stances": self.stances}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Kept:
        """From JSON; raises where something does not fit."""
        insights = {str(name): _insight(told) for name, told in values["insights"].items()}
        stances = {str(name): _findings(told) for name, told in values["stances"].items()}
        known = cls(insights=insights, stances=stances)
        for kind in known.costs.times:
            for rows, times in values["costs"][kind].items():
                for seconds in times[-KEPT:]:
                    known.costs.take(kind, int(rows), _number(seconds, LEAST[kind]))
        return known


class ExperienceFile:
    """The file of one pair under one set of circumstances, all of which stand in it."""

    def __init__(self, folder: Path, circumstances: Mapping[str, Any]) -> None:
        self.circumstances = dict(circumstances)
        digest = sha256(json.dumps(self.circumstances, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{digest[:16]}.json"

    def read(self, aloud: bool = True) -> Kept:
        """Return what is known; nothing if there is no file, or one that is damaged or of something else, which is
        said aloud."""
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT or values["circumstances"] != self.circumstances:
                raise ValueError("it is of another version or another pair")
            return Kept.from_dict(values)
        except FileNotFoundError:
            return Kept()
        except Exception as error:  # whatever is wrong with it, it is not needed
            if aloud:
                log.warning("What was learned earlier in %s is ignored (%s); it is learned anew.", self.path, error)
            return Kept()

    def add(
        self,
        costs: list[tuple[Timed, int, float]],
        insights: Mapping[str, list[News]],
        stances: Mapping[str, Findings] | None = None,
    ) -> None:
        """Add news to what the file holds, or raise; of what was found at a load the latest stands."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock"), timeout=WAIT):
            kept = self.read(aloud=False)  # it was said when it was first read
            for time_taken in costs:
                kept.costs.take(*time_taken)
            for name, news in insights.items():
                insight = kept.insights.setdefault(name, Insight())
                for one in news:
                    insight.take(*one)
            for name, found in (stances or {}).items():
                kept.stances[name] = {**kept.stances.get(name, {}), **found}
            values = {"format": FORMAT, "circumstances": self.circumstances, **kept.to_dict()}
            with replacing(self.path) as part:
                part.write_text(json.dumps(values), encoding="utf-8")


def experience_folder() -> Path | None:
    """Where experience is kept: $SPECBRANCH_EXPERIENCE, else in the cache; nowhere if that says "off"."""
    from specbranch.models.files.store import cache_folder

    given = os.environ.get(VARIABLE)
    if given == "off":
        return None
    return Path(given).expanduser() if given else cache_folder() / "experience"


def _name(config: SpeculativeConfig) -> str:
    """A configuration by what differs from the usual one."""
    usual = asdict(SpeculativeConfig())
    return json.dumps({key: value for key, value in asdict(config).items() if value != usual[key]}, sort_keys=True)


def _told(insight: Insight) -> dict[str, Any]:
    tallies = {name: [getattr(insight, name).seen, getattr(insight, name).true] for name in TALLIES}
    return {**tallies, "shifts": insight.shifts, "tokens": insight.tokens, "seconds": insight.seconds}


def _findings(told: Mapping[str, Any]) -> Findings:
    found: Findings = {}
    for load, (best, span) in told.items():
        if not isinstance(best, bool) or not 1 <= int(load) <= 32:
            raise ValueError(f"{load!r} is no load, or {best!r} no way to decode")
        found[int(load)] = best, int(_number(span, 1.0))
    return found


def _insight(told: Mapping[str, Any]) -> Insight:
    insight = Insight(tokens=_number(told["tokens"]), seconds=_number(told["seconds"]))
    for name in TALLIES:
        tally: Tally = getattr(insight, name)
        seen, true = ([_number(x) for x in column] for column in told[name])
        if not (
            len(seen) == len(true) == len(tally.seen)
            and all(0.0 <= t <= s and s > 0.0 for s, t in zip(seen, true, strict=True))
        ):
            raise ValueError(f"{name} does not fit")
        tally.seen, tally.true = seen, true
    shifts = [_number(x) for x in told["shifts"]]
    if len(shifts) != len(insight.shifts):
        raise ValueError("shifts do not fit")
    insight.shifts = shifts
    return insight


def _number(value: object, least: float = -math.inf) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        raise ValueError(f"{value!r} is no number, or none that can be")
    return float(value)
