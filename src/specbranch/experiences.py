"""Learned statistics of a pair on this machine: costs and acceptance, in memory and in a file.

`Experiences` holds one `Experience` for each configuration of a running LLM. `ExperienceFile` saves them for the next
process. Owns which file belongs to a pair, its format, and how news are merged into it. It does not own what is
learned: see `core/experience.py`. Invariant: news are merged into what the file holds at that moment, under a lock, so
concurrent processes lose nothing. A background thread writes, so decoding waits for no disk and no lock. A file with an
impossible number is ignored as a whole. A configuration that the file does not know starts from the draft's evaluation,
in memory and in the file alike.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeGuard, get_args

from filelock import FileLock, Timeout

from specbranch.config import SpeculativeConfig
from specbranch.core.cost_curves import TIMES_KEPT, Curve, Recent
from specbranch.core.costs import Costs, MeasuredCosts, RunKind
from specbranch.core.draft_evaluation import DraftEvaluation
from specbranch.core.experience import EVALUATED_CLASS, MOST_SHIFT, Experience, Insight, News, Tally
from specbranch.files import replacing

log = logging.getLogger("specbranch")

EXPERIENCE_VARIABLE = "SPECBRANCH_EXPERIENCE"  # the folder to save it in; "off": nowhere
EXPERIENCE_FORMAT = 7
WRITE_PAUSE = 5.0  # seconds between two writes, unless it is the last
WRITE_WAIT = 2.0  # seconds for another process to finish its write
MOST_CONFIGURATIONS = 64  # configurations whose experience is in memory; a request may bring any
AT_CLOSE = 5.0  # seconds that closing waits for a running write
MOST_NEWS = 20_000  # of one kind that wait for a lock; the file drops older ones anyway
MOST_BYTES = 16 << 20  # of a file
TALLIES = ("first", "other", "cover", "hits", "looked")
MOST_KNOWN_ROWS = 1 << 20
MOST_LOAD = 32  # as a power of two of sessions
HOUR = 3600.0
SavedCosts = dict[str, Any]  # JSON values


class Experiences:
    """One `Experience` for each configuration, all with the same costs; saved in a file if there is one."""

    def __init__(
        self,
        costs: Costs,
        has_draft: bool,
        file: ExperienceFile | None = None,
        prior: DraftEvaluation | None = None,
    ) -> None:
        """`prior`: the draft's own evaluation, from which a configuration starts that the file does not know."""
        self.prior = prior
        self.learned = costs if isinstance(costs, MeasuredCosts) else None
        self._costs = costs
        self._has_draft = has_draft
        self._writer = BackgroundWriter(file, prior) if file else None
        self._kept = file.read() if file else Kept()
        self._made: dict[str, Experience] = {}
        self._written = time.monotonic()
        if file and self.learned is not None:
            self._kept.give(self.learned)

    def of(self, config: SpeculativeConfig) -> Experience:
        """Return the statistics that requests of this configuration have shown."""
        name = _name(config)
        if name in self._made:
            self._made[name] = self._made.pop(name)  # the most recently used comes last
        else:
            for old in list(self._made)[: max(len(self._made) + 1 - MOST_CONFIGURATIONS, 0)]:
                del self._made[old]  # what it has shown since the last write is lost
            made = self._made[name] = Experience(self._costs, self._has_draft, self.prior)
            if self._writer:
                made.insight = self._kept.insights.pop(name, made.insight)
                made.insight.news = []
        return self._made[name]

    def start_again(self, file: ExperienceFile | None, prior: DraftEvaluation | None) -> None:
        """Forget what an exchanged draft has shown; `file` and `prior` are those of the new one.

        The times of forwards stay as a first guess: rounds correct them.
        """
        if self._writer is not None and self.learned is not None and not self._writer.failed:
            # a thread: the last write waits for an earlier one, and requests run meanwhile
            Thread(target=self._writer.finish, args=(self._news([]),), daemon=True).start()
        self.prior, self._written = prior, time.monotonic()
        self._writer = BackgroundWriter(file, prior) if file else None
        self._kept = file.read() if file else Kept()
        if file and self.learned is not None:
            self._kept.give(self.learned)
        for name, made in self._made.items():
            made.start_again(self._kept.insights.pop(name, Insight.starting_from(prior)))
            made.insight.news = [] if file else None

    def write(self, last: bool = False) -> None:
        """Have news added to the file, at most every WRITE_PAUSE seconds, without waiting. The `last` call writes at
        once and waits until the news are there, up to a limit."""
        if (
            self._writer is None
            or self.learned is None
            or (time.monotonic() < self._written + WRITE_PAUSE and not last)
        ):
            return
        self._written = time.monotonic()
        news = self._news(None if self._writer.failed else [])
        if self._writer.failed:
            self._writer = None
        elif last:
            self._writer.finish(news)
        else:
            self._writer.write(news)

    def _news(self, begin: list[Any] | None) -> LearnedNews:
        """Return the news since the last call. Later news are collected in copies of `begin`; None collects none."""
        assert self.learned is not None
        made = self._made.items()
        news = LearnedNews(
            costs_to_dict(self.learned),
            {name: one.insight.news for name, one in made if one.insight.news},
        )
        for _, one in made:
            one.insight.news = None if begin is None else begin.copy()
        return news


@dataclass(frozen=True, slots=True)
class LearnedNews:
    """What was learned and is not in the file yet. Of `costs`, only the latest count."""

    costs: SavedCosts | None = None
    insights: dict[str, list[News]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.costs or self.insights)

    def then(self, later: LearnedNews) -> LearnedNews:
        """Return these news with later ones; of more than MOST_NEWS, the latest."""
        insights = {
            name: [*self.insights.get(name, ()), *later.insights.get(name, ())][-MOST_NEWS:]
            for name in {**self.insights, **later.insights}
        }
        return LearnedNews(later.costs or self.costs, insights)


class BackgroundWriter:
    """Adds news to a file in a background thread. If another process holds the lock, the news wait for the next
    write."""

    def __init__(self, file: ExperienceFile, prior: DraftEvaluation | None = None) -> None:
        self.failed = False  # the file cannot be written; a warning said so
        self._file, self._prior = file, prior
        self._lock = Lock()
        self._waiting = LearnedNews()
        self._thread: Thread | None = None

    def write(self, news: LearnedNews) -> None:
        """Start to add news. If an earlier write still runs, they wait for the next call."""
        self._take(news)
        if self._thread is None or not self._thread.is_alive():
            # A daemon thread, so no process waits for it. It replaces the file as a whole, so it may end at any point.
            thread = Thread(target=self._add, name="specbranch-experience", daemon=True)
            with suppress(RuntimeError):  # the system gives no thread: next time
                thread.start()
                self._thread = thread

    def finish(self, news: LearnedNews) -> None:
        """Add the last news in this thread, after a bounded wait for a running write."""
        self._take(news)
        if self._thread is not None:
            self._thread.join(AT_CLOSE)
        if self._thread is None or not self._thread.is_alive():
            self._add()

    def _take(self, news: LearnedNews) -> None:
        with self._lock:
            self._waiting = self._waiting.then(news)

    def _add(self) -> None:
        with self._lock:
            news, self._waiting = self._waiting, LearnedNews()
        if not news or self.failed:
            return
        try:
            self._file.add(news, self._prior)
        except Timeout:  # another process holds the lock: next time
            with self._lock:
                self._waiting = news.then(self._waiting)
        except Exception as error:  # an answer must not fail for this
            self.failed = True
            log.warning("What was learned is not kept: %s cannot be written (%s).", self._file.path, error)


@dataclass(slots=True)
class Kept:
    """The content of a file."""

    costs: SavedCosts | None = None
    insights: dict[str, Insight] = field(default_factory=dict)

    def give(self, costs: MeasuredCosts) -> None:
        """Copy the times into `costs`."""
        if self.costs is not None:
            set_costs(costs, self.costs)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        insights = {name: _insight_to_dict(insight) for name, insight in self.insights.items()}
        return {"costs": self.costs, "insights": insights}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Kept:
        """Build it from JSON values. Raises if something does not fit, or a number is impossible."""
        insights = {str(name): _insight(saved) for name, saved in values["insights"].items()}
        if values["costs"] is not None:
            set_costs(MeasuredCosts(), values["costs"])  # raises if a number is impossible
        return cls(values["costs"], insights)

    def add(self, news: LearnedNews, prior: DraftEvaluation | None = None) -> None:
        """Merge news; a configuration that is new here starts from `prior`, as it did where the news come from.

        Impossible values, such as the time of a round in which the machine slept, are left out: they would make the
        file unreadable.
        """
        with suppress(ValueError):
            if news.costs is not None:
                set_costs(MeasuredCosts(), news.costs)
                self.costs = news.costs
        for name, learned in news.insights.items():
            if name not in self.insights:
                self.insights[name] = Insight.starting_from(prior)
            insight = self.insights[name]
            for of, at, value in learned:
                insight.take(of, at, value)


class ExperienceFile:
    """The file of one pair under one key (`assembly.experience_key`). The whole key is in the file."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.key = dict(key)
        digest = sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{digest[:16]}.json"

    def read(self, aloud: bool = True) -> Kept:
        """Return the content of the file, empty if there is none. A damaged file, or one with another key, is empty,
        too; with `aloud` a warning says so."""
        try:
            if (size := self.path.stat().st_size) > MOST_BYTES:
                raise ValueError(f"it has {size} bytes")
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if values["format"] != EXPERIENCE_FORMAT or values["circumstances"] != self.key:
                raise ValueError("it is of another version or another pair")
            return Kept.from_dict(values)
        except FileNotFoundError:
            return Kept()
        except Exception as error:  # of any kind: decoding works without the file
            if aloud:
                log.warning("What was learned earlier in %s is ignored (%s); it is learned anew.", self.path, error)
            return Kept()

    def add(self, news: LearnedNews, prior: DraftEvaluation | None = None) -> None:
        """Merge news into the file, see `Kept.add`; raise if that fails."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock"), timeout=WRITE_WAIT):
            kept = self.read(aloud=False)  # the first read has warned
            kept.add(news, prior)
            values = {"format": EXPERIENCE_FORMAT, "circumstances": self.key, **kept.to_dict()}
            with replacing(self.path) as part:
                part.write_text(json.dumps(values), encoding="utf-8")


def experience_folder() -> Path | None:
    """Return the folder of experience files: $SPECBRANCH_EXPERIENCE, else one in the cache folder. None if it is
    "off"."""
    from specbranch.models.files.store import cache_folder

    given = os.environ.get(EXPERIENCE_VARIABLE)
    if given == "off":
        return None
    return Path(given).expanduser() if given else cache_folder() / "experience"


def _name(config: SpeculativeConfig) -> str:
    """Return a key for a configuration: its values that are no defaults."""
    usual = asdict(SpeculativeConfig())
    return json.dumps({key: value for key, value in asdict(config).items() if value != usual[key]}, sort_keys=True)


def costs_to_dict(costs: MeasuredCosts) -> SavedCosts | None:
    """Return timed costs as JSON values; None: nothing was timed."""
    if not costs.knows_target:
        return None
    curves = {name: {str(rows): seconds for rows, seconds in curve.points.items()} for name, curve in _curves(costs)}
    hosts = [[kind, size, list(one.values)] for (kind, size), one in costs.hosts.items()]
    slow_downs = {model: list(one.values) for model, one in costs.slow_downs.items()}
    return {**curves, "setup": costs.setup, "hosts": hosts, "slow_downs": slow_downs}


def set_costs(costs: MeasuredCosts, saved: SavedCosts) -> None:
    """Set timed costs from JSON values. Raises if a number is impossible."""
    for name, curve in _curves(costs):
        for rows, seconds in saved[name].items():
            curve.set(_count(rows, 1, MOST_KNOWN_ROWS), _number(seconds, 1e-9, HOUR))
    for kind, size, times in saved["hosts"]:
        if kind not in get_args(RunKind):
            raise ValueError(f"{kind!r:.40} is no kind of run")
        recent = costs.hosts.setdefault((kind, _count(str(size), 1, MOST_LOAD)), Recent())
        for seconds in times[-TIMES_KEPT:]:
            recent.add(_number(seconds, -HOUR, HOUR))  # a device may hide part of a forward
    for model, one in costs.slow_downs.items():
        for seconds in saved["slow_downs"][model][-TIMES_KEPT:]:
            one.add(_number(seconds, -HOUR, HOUR))
    costs.setup = _number(saved["setup"], 0.0, HOUR)


def _curves(costs: MeasuredCosts) -> list[tuple[str, Curve]]:
    return [("target", costs.target), ("step", costs.step)]


def _insight_to_dict(insight: Insight) -> dict[str, Any]:
    tallies: dict[str, Tally] = {name: getattr(insight, name) for name in TALLIES}
    columns = {name: [tally.seen, tally.true, tally.met, tally.right] for name, tally in tallies.items()}
    return {**columns, "shifts": insight.shifts}


def _insight(saved: Mapping[str, Any]) -> Insight:
    insight = Insight()
    for name in TALLIES:
        tally: Tally = getattr(insight, name)
        most = tally.most + EVALUATED_CLASS  # of `met`, which may count more than `seen`
        seen, true, met, right = ([_number(x, 0.0, most) for x in column] for column in saved[name])
        if not (
            len(seen) == len(true) == len(met) == len(right) == len(tally.seen)
            and all(t <= s <= tally.most and s > 0.0 for s, t in zip(seen, true, strict=True))
            and all(r <= m for r, m in zip(right, met, strict=True))
        ):
            raise ValueError(f"{name} does not fit")
        tally.seen, tally.true, tally.met, tally.right = seen, true, met, right
    shifts = [_number(x, -MOST_SHIFT, MOST_SHIFT) for x in saved["shifts"]]
    if len(shifts) != len(insight.shifts):
        raise ValueError("shifts do not fit")
    insight.shifts = shifts
    return insight


def _is_in(value: object, least: float, most: float) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _number(value: object, least: float, most: float) -> float:
    if not _is_in(value, least, most):  # no comparison holds for NaN
        raise ValueError(f"{value!r:.40} where a number from {least:g} to {most:g} is expected")
    return value


def _count(text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise ValueError(f"{text!r:.40} where a whole number from {least} to {most} is expected")
    return int(text)
