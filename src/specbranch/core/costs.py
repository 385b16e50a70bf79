"""What a round costs: seconds by rows, from a cost profile, or timed at load.

Owns the estimates; what they are used for is the planner's. Invariant: an estimate depends on measured times and on the
number of rows of all sessions together, never on which tokens these are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Literal, Protocol, get_args

from specbranch.core.cost_curves import Curve, ForestCosts, Recent
from specbranch.core.orders import DraftOrder, Orders, Prefill, Reports, Span, Verify

SLOPE = 0.05  # share of the seconds of one row that each further row of a target forward adds, until more is timed
LANE = 0.05  # the same for each further row of a draft step
PLANNING_SECONDS = 0.0001  # of the host for each session's plan, until it is timed
PLAIN_ROUNDS = 2  # plain rounds that are timed first
PRIOR_RUNS = 3  # runs that the first guess of the host's part of a kind of run counts as
PLAIN_SETTLED = 9  # plain runs whose median stays what a plain run takes; later ones move the machine's factor
FADE_EVERY = 256  # runs of other kinds after which that guess counts as one run more
PLAIN_EVERY = 256  # rounds after which a plain round is timed again
FACTOR_RUNS = 7  # latest runs whose median is the machine's common factor; a plain one counts twice
MOST_UNCOMPUTED = 24  # tokens of one session; more is prefill, not a decode step
Model = Literal["target", "draft"]
# Kinds of runs: "draft" and the "verify" behind it are one round; "plain" and "lookup" verify without a draft, "lookup"
# also counts a planned batch that verifies nothing.
RunKind = Literal["plain", "lookup", "draft", "verify"]
Padded = Callable[[int], int]  # the rows of a forward to those it is computed with


class Costs(Protocol):
    """Seconds of a target forward by its rows, of a draft step by its width, and what overlap adds."""

    @property
    def overlap(self) -> bool:
        """True if draft and target can work at the same time."""
        ...

    @property
    def knows_target(self) -> bool:
        """True if the seconds of a target forward are known."""
        ...

    @property
    def knows_draft(self) -> bool:
        """True if the seconds of a draft step are known."""
        ...

    @property
    def prices_all(self) -> bool:
        """True if the cost model covers the whole round; then no comparison with plain decoding is needed."""
        ...

    @property
    def factor(self) -> float:
        """How slow the machine is now, by its speed when costs were measured."""
        ...

    @property
    def plain_due(self) -> bool:
        """True if a plain round should be timed again."""
        ...

    @property
    def launches_ahead(self) -> bool:
        """True if a device can launch the next round right after a verdict, before the host has seen it."""
        ...

    @property
    def ahead_saves(self) -> float:
        """Seconds that launching ahead saves in a round, about."""
        ...

    @property
    def last_run(self) -> float | None:
        """Seconds of the latest run, from the end of the one before; None: the times of its models say it."""
        ...

    @property
    def draft_setup(self) -> float:
        """Seconds that the draft needs once in a round, beside its steps: also the way to its process and back."""
        ...

    @property
    def draft_host(self) -> float:
        """Seconds of the host that drafting before a verify adds to a round."""
        ...

    @property
    def slow_down(self) -> float:
        """Seconds that each draft step adds to a target forward at the same time."""
        ...

    @property
    def draft_slow_down(self) -> float:
        """Seconds that a target forward adds to each draft step at the same time."""
        ...

    @property
    def host(self) -> float:
        """Seconds of a round outside both models."""
        ...

    def gap(self, kind: RunKind, sessions: int = 1) -> float:
        """Return the seconds of the host before a run of this kind."""
        ...

    def host_of_drafting(self, sessions: int) -> float:
        """Return the seconds of a round with a draft before its verify, outside both models."""
        ...

    @property
    def forest(self) -> ForestCosts:
        """What rounds of the forest take."""
        ...

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Return the seconds of one target forward over `tokens` rows, behind `context` tokens."""
        ...

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Return the seconds of one draft forward over `width` rows."""
        ...


class MeasuredCosts:
    """Costs timed at load (`rehearsal.py`), and corrected by rounds.

    A common factor follows the speed of the machine: it is the same for both models, so a phase in which everything is
    slow changes no comparison. What remains corrects the point of the size; that of a plain round stays as it was timed
    at load, so that factor and points cannot drift apart. A single slow round does not count: both are medians. If
    target forwards are padded, all forwards of one padded size share their time.

    A device that launches rounds ahead hides the host behind its work, in some kinds of runs more than in others, so
    the times of its forwards do not compare. There the curves stay as they were timed at load, and each kind of run has
    what its whole runs take beyond them.
    """

    prices_all = False  # planning itself takes time

    def __init__(self, overlap: bool = True, padded: Padded | None = None, launches_ahead: bool = False) -> None:
        self.overlap, self.launches_ahead = overlap, launches_ahead
        self._padded = padded
        self.target, self.step = Curve(SLOPE), Curve(LANE)
        self.setup = 0.0
        self.link = Recent()  # seconds of orders and answers on their way to another process and back
        self.factor = 1.0  # how slow the machine is now, by its speed at load
        self.hosts: dict[tuple[RunKind, int], Recent] = {}  # by the power of two of the sessions, too
        self.slow_downs: dict[Model, Recent] = {model: Recent() for model in get_args(Model)}
        self._ratios: deque[float] = deque(maxlen=FACTOR_RUNS)  # of the latest runs: seconds, by those timed at load
        self.forest = ForestCosts()
        self.last_run: float | None = None  # seconds of the latest whole run, on a device that launches ahead
        self._ended: float | None = None
        self._plain_runs = 0  # that were timed
        self._since_plain = 0  # rounds
        self._unseen: dict[tuple[RunKind, int], int] = {}  # runs of other kinds since one of this kind
        self._reads = False  # the run before this one prefilled in the draft, which may still be at it
        self._drafted_before = False  # the run before this one only drafted

    @property
    def draft_setup(self) -> float:
        """Seconds that the draft needs once in a round, beside its steps: also the way to its process and back."""
        return self.factor * self.setup + self.link.median

    @property
    def slow_down(self) -> float:
        """Seconds that each draft step adds to a target forward at the same time."""
        return max(self.slow_downs["target"].median, 0.0)

    @property
    def draft_slow_down(self) -> float:
        """Seconds that a target forward adds to each draft step at the same time."""
        return max(self.slow_downs["draft"].median, 0.0)

    @property
    def host(self) -> float:
        """Seconds of a plain round outside both models."""
        return self.gap("plain")

    @property
    def draft_host(self) -> float:
        """Seconds of the host that drafting before a verify adds to a round."""
        if not any(kind == "draft" for kind, _ in self.hosts):
            return self.host
        without = self.gap("plain" if any(kind == "plain" for kind, _ in self.hosts) else "draft")
        return max(self.gap("draft") + self.gap("verify") - without, 0.0)

    def host_of_drafting(self, sessions: int) -> float:
        """Return the seconds of a round with a draft before its verify, outside both models."""
        return self.gap("draft", sessions) + self.gap("verify", sessions)

    def gap(self, kind: RunKind, sessions: int = 1) -> float:
        """Return the seconds between the run before and one of this kind, for so many sessions.

        If that was never timed, it follows from the nearest number of sessions: a plan is made for each of them. Plain
        decoding makes none.
        """
        size = sessions.bit_length()
        known = [at for of, at in self.hosts if of == kind]
        if not known:
            return _first_gap(kind, sessions)
        nearest = min(known, key=lambda at: abs(at - size))
        found = self.factor * self.hosts[kind, nearest].median
        times = 2.0 ** (size - nearest)
        # What a device hides of a forward is no plan: it does not grow with the sessions.
        return found if kind == "plain" else found * (times if found > 0.0 else min(times, 1.0))

    @property
    def ahead_saves(self) -> float:
        """Seconds that launching ahead saves: the host's part of a round."""
        return max(self.host, 0.0)

    @property
    def knows_target(self) -> bool:
        """True if a target forward has been timed."""
        return bool(self.target.points)

    @property
    def knows_draft(self) -> bool:
        """True if a draft step has been timed."""
        return bool(self.step.points)

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Return the seconds of one target forward over `tokens` rows."""
        return self.factor * self.target.seconds(self._rows(tokens))

    def covers(self, rows: int) -> bool:
        """True if target forwards of this size, or of smaller and larger ones, have been timed."""
        return self.target.covers(self._rows(rows))

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Return the seconds of one draft forward over `width` rows."""
        return self.factor * self.step.seconds(width)

    def pause(self) -> None:
        """Note an idle pause: the time to the next round is no host time."""
        self._ended, self._drafted_before = None, False

    def observe(self, orders: Mapping[int, Orders], reports: Mapping[int, Reports], prefilled: bool = False) -> None:
        """Learn from a round of all sessions together; `prefilled`: its forward had prompt tokens of the round before.

        A forward with prompt tokens says nothing about decode rows.
        """
        drafting = next((report.drafting for report in reports.values() if report.drafting), None)
        verifying = next((report.verifying for report in reports.values() if report.verifying), None)
        steps, kind = _steps(reports), _kind_of(orders, self._drafted_before)
        overlaps = drafting is not None and verifying is not None and _overlap(drafting, verifying)
        reads = any(_prefills(order.draft) for order in orders.values())
        prefilled = prefilled or any(order.prefill or _prefills(order.verify) for order in orders.values())
        spans = [span for span in (drafting, verifying) if span is not None]
        self._drafted_before = verifying is None
        if drafting is not None and drafting.link:
            self.link.add(drafting.link)
        if drafting is not None and steps and not self.knows_draft and not reads:
            self._drafted(drafting.work_seconds, steps, overlaps)
        elif self.launches_ahead and not overlaps:
            clean = not (prefilled or reads or self._reads)
            self._whole_run(spans, kind, len(orders), self._modelled(verifying, steps) if clean else None)
            self._reads = reads
            return
        elif drafting is not None and steps and not reads:
            self._drafted(drafting.work_seconds, steps, overlaps)
        if verifying is not None and not prefilled:
            self._verified(verifying, len(steps) if overlaps else 0)
        self._between(spans, kind, len(orders))

    def observe_plain(self, span: Span, sessions: int, prefilled: bool) -> None:
        """Learn from a round of plain decoding of so many sessions; `prefilled` as for `observe`."""
        self._drafted_before = False
        if self.launches_ahead:
            self._whole_run([span], "plain", sessions, None if prefilled or self._reads else self._modelled(span, []))
            self._reads = False
            return
        if not prefilled:
            self._verified(span, 0)
        self._between([span], "plain", sessions)

    def observe_forest(self, span: Span, sessions: int, steps: Sequence[int] | None) -> None:
        """Learn from a round that a device has planned by itself; `steps`: rows of the draft steps before its verify.

        None: it says nothing, because it was not launched ahead, or because prompts were read in it.
        """
        self._drafted_before, ended = False, self._ended
        self._whole_run([span], "verify", sessions, None)
        if steps is not None and ended is not None and self.knows_target:
            verify, drafts = self.target.seconds(self._rows(span.tokens)), sum([self.step.seconds(n) for n in steps])
            whole = span.end - ended
            if (expected := self.forest.expected(verify, drafts)) is not None:
                if not self._ratios:  # a single round may be slow because a draft has caught up
                    self._ratios.extend([1.0] * FACTOR_RUNS)
                self._follow(whole, expected, not drafts)
            self.forest.observe(whole / max(self.factor, 1.0), verify, drafts)

    def _modelled(self, verifying: Span | None, steps: list[int]) -> float | None:
        """Return the seconds of a run's forwards, as they were timed at load; None: some were not."""
        seconds = self.draft_setup / self.factor + sum(self.step.seconds(width) for width in steps) if steps else 0.0
        if verifying is not None:
            rows = self._rows(verifying.tokens)
            # A step that was launched ahead may be almost done when its round begins. More rows never take less.
            least = max(self.target.points.values(), default=0.0)
            if self.target.meet(rows, max(verifying.seconds / self.factor, least)):
                return None
            seconds += self.target.seconds(rows)
        return seconds if verifying is not None or (steps and self.knows_draft) else None

    def _whole_run(self, spans: list[Span], kind: RunKind, sessions: int, modelled: float | None) -> None:
        """Learn from a whole run, from the end of the one before it; `modelled`: None if that says nothing."""
        if not spans:
            return
        started, self._ended = self._ended, max(span.end for span in spans)
        whole = self._ended - (min(span.start for span in spans) if started is None else started)
        self.last_run = whole
        if modelled is None or started is None:
            return
        if kind == "plain":
            self._plain_runs += 1
        if kind != "draft":
            self._since_plain = 0 if kind == "plain" else self._since_plain + 1
        at = kind, sessions.bit_length()
        if at not in self.hosts:  # the first run of a kind may include a setup
            prior = [] if kind == "plain" else [self.gap(kind, sessions) / self.factor] * PRIOR_RUNS
            self.hosts[at] = Recent(prior)
            return
        recent = self.hosts[at]
        if kind != "plain" or len(recent.values) < PLAIN_SETTLED:
            recent.add(whole / self.factor - modelled)
        elif kind == "plain":
            self._follow(whole, modelled + recent.median, True)
            if self.factor < 1.0:  # not the machine got faster: its first runs were slow
                recent.add(whole - modelled)
        self._fade(at)

    def _fade(self, seen: tuple[RunKind, int]) -> None:
        """Have the other kinds of runs of this batch size go back to their first guess, slowly."""
        self._unseen[seen] = 0
        for at, recent in self.hosts.items():
            if at[1] == seen[1] and at != seen and at[0] != "plain":
                self._unseen[at] = self._unseen.get(at, 0) + 1
                if self._unseen[at] >= FADE_EVERY:
                    self._unseen[at] = 0
                    recent.add(_first_gap(at[0], 1 << max(at[1] - 1, 0)))

    def _rows(self, rows: int) -> int:
        """Return the number of rows with which a target forward is computed."""
        return self._padded(rows) if self._padded is not None else rows

    def _drafted(self, seconds: float, steps: list[int], overlaps: bool) -> None:
        """Learn from the draft's part of a round."""
        expected = self.factor * self.setup + sum(self.draft_seconds(width) for width in steps)
        if overlaps and self.knows_draft:
            self.slow_downs["draft"].add((seconds - expected) / len(steps))
        elif not self.step.meet(_mean(steps), (seconds / self.factor - self.setup) / len(steps)):
            ratio = seconds / max(expected, 1e-12)
            if all(map(self.step.meets, set(steps))):
                self._follow(ratio, 1.0 / self.factor, False)
                for width in set(steps):
                    self.step.correct(width, self.step.seconds(width) * ratio)

    def _verified(self, span: Span, steps: int) -> None:
        """Learn from the target's part of a round; `steps`: draft steps at the same time."""
        rows = self._rows(span.tokens)
        if steps:
            if self.knows_target:
                self.slow_downs["target"].add((span.seconds - self.target_seconds(span.tokens)) / steps)
        elif not self.target.meet(rows, span.seconds / self.factor):
            plain = rows == self._rows(1)
            if self.target.meets(rows):
                self._follow(span.seconds, self.target.seconds(rows), plain)
                self._plain_runs += span.tokens == 1
                if not plain:
                    self.target.correct(rows, span.seconds / self.factor)
            self._since_plain = 0 if span.tokens == 1 else self._since_plain + 1

    def _follow(self, seconds: float, at_load: float, plain: bool) -> None:
        """Have the machine's factor follow a run."""
        self._ratios.extend([seconds / max(at_load, 1e-12)] * (2 if plain else 1))
        self.factor = median(self._ratios)

    @property
    def plain_due(self) -> bool:
        """True if a plain round should be timed again: all prices are compared with it."""
        return self._plain_runs < PLAIN_ROUNDS or self._since_plain >= PLAIN_EVERY

    def _between(self, spans: list[Span], kind: RunKind, sessions: int) -> None:
        """Learn the host's part of a run."""
        if not spans:
            return
        if self._ended is not None:
            gap = max(min(span.start for span in spans) - self._ended, 0.0)
            self.hosts.setdefault((kind, sessions.bit_length()), Recent()).add(gap / self.factor)
        self._ended = max(span.end for span in spans)


def _first_gap(kind: RunKind, sessions: int) -> float:
    """Return the host's part of a kind of run, before one was timed: a plan is made for each session."""
    return 0.0 if kind == "plain" else PLANNING_SECONDS * sessions


def _kind_of(orders: Mapping[int, Orders], drafted: bool) -> RunKind:
    """Return the kind of a run; `drafted`: the run before it only drafted.

    A batch that was planned took the host's time for that, also if it verifies no tokens.
    """
    verifies = [order.verify for order in orders.values() if order.verify is not None]
    if not verifies:
        return "draft"
    planned = len(orders) > 1 and any(order.planned is not None for order in orders.values())
    return "verify" if drafted else "lookup" if planned or any(verify.tokens for verify in verifies) else "plain"


def _prefills(order: DraftOrder | Verify | None) -> bool:
    """True if an order begins with prefill."""
    return order is not None and (
        isinstance(order, Prefill) or order.on.base == 0 or len(order.on.tail) > MOST_UNCOMPUTED
    )


def _mean(steps: Sequence[int]) -> int:
    return round(sum(steps) / len(steps))


def _overlap(one: Span, other: Span) -> bool:
    return min(one.end, other.end) > max(one.start, other.start)


def _steps(reports: Mapping[int, Reports]) -> list[int]:
    """Return the rows of each draft step of a round; all sessions step together."""
    return [sum(widths) for widths in zip_longest(*(_steps_of(report) for report in reports.values()), fillvalue=0)]


def _steps_of(report: Reports) -> list[int]:
    if report.tree is not None:
        return list(report.tree.steps)
    longest = max((len(branch.confidence) for branch in report.branches), default=0)
    return [len(report.branches)] * longest
