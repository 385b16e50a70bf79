"""The two halves of a round for all executors: what is drafted, what is verified, and how long each took.

Owns no model and no order of work; the executors say which half starts first. Invariant: every session with orders gets
a report.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from specbranch.core.loop import KVSlots
from specbranch.core.orders import (
    Branch,
    Drafted,
    DraftOrder,
    Orders,
    Prefill,
    Reports,
    Span,
    Verdict,
    Verify,
    as_drafted,
)
from specbranch.core.plain_rounds import PlainOrders, PlainReports
from specbranch.errors import SpecBranchError, not_finite
from specbranch.exec.verifier import OnVerdicts, Scored, Verifier
from specbranch.exec.worker import Worker

Moment = Callable[[], float]  # when something happened, in seconds on the executor's clock; now, if it has not yet
Note = Callable[[], Moment]  # notes the present moment, or the one at which a device reaches this point


class Stretch:
    """A stretch of a worker's work, by the host's clock, or by a device's clock, which notes moments as it reaches
    them."""

    def __init__(self, worker: Worker, now: Callable[[], float], note: Note | None = None, after: float = -inf) -> None:
        """Start a stretch now; `after`: it cannot have started before this moment of the host's clock."""
        self.by_device, self._after = note is not None, after
        self._worker, self._fed = worker, worker.rows_fed
        self._note = note or _noted_by(now)
        self._begun = self._ended = self._note()

    def begin(self, moment: Moment | None) -> None:
        """Note that it started at another moment, if it did."""
        self._begun = moment or self._begun

    def end(self, moment: Moment | None = None) -> float:
        """Note the end at `moment`, or now; returns the end as far as it is known.

        By the host's clock the end is when the work is done. By a device's clock it is when the device has finished all
        that it was given.
        """
        self._ended = moment or self._note()
        return self._ended()

    def span(self) -> Span:
        """Return the span, once the work is done."""
        begun = max(self._begun(), self._after)
        rows = self._worker.rows_fed - self._fed
        return Span(begun, max(self._ended(), begun), rows, self._worker.prefill_counts())


class Verifying:
    """The target's half of a round, running until its verdicts are taken.

    A draft at work calls `ready` and `add_heads`. An error of the target there is raised later, by `judged`.
    """

    def __init__(
        self,
        target: Verifier,
        orders: Mapping[int, Verify],
        heads: Mapping[int, Branch] | None,
        stretch: Stretch,
        reads: Mapping[int, Prefill] | None = None,
    ) -> None:
        """Start the target; arguments as for `Verifier.start`."""
        self.failed: dict[int, SpecBranchError] = {}
        self.reached: dict[int, int] = {}
        self._target, self._stretch = target, stretch
        self._scored: Scored | None = None  # None: there is nothing to verify
        self._error: Exception | None = None
        if orders or reads:
            started = target.start(orders, heads, reads or {})
            self._scored, self.reached, self.failed = started.scored, started.reached, started.failed
            if orders:
                stretch.begin(target.begun)
            self._launched()

    def ready(self) -> bool:
        """True if taking the verdicts would not wait."""
        if self._error is None and self._scored is not None:
            try:
                return self._scored.ready
            except Exception as error:
                self._error = error
        return self._error is not None

    def add_heads(self, heads: Mapping[int, Branch]) -> None:
        """Start to judge the orders that waited for their heads."""
        if self._scored is None or not self._scored.waiting:
            return
        try:
            self._scored = self._target.add_heads(self._scored, heads)
            self._launched()
        except Exception as error:
            self._error = error

    def judged(self, on_verdicts: OnVerdicts) -> dict[int, Verdict]:
        """Wait for the verdicts; `on_verdicts` is called with them as soon as they are there."""
        if self._error is not None:
            raise self._error

        def heard(verdicts: Mapping[int, Verdict]) -> None:
            if not self._stretch.by_device:
                self._stretch.end()
            on_verdicts(verdicts)

        if self._scored is None:
            heard({})
            return {}
        return self._target.judge(self._scored, {}, heard)

    def _launched(self) -> None:
        if self._stretch.by_device:
            self._stretch.end()


def parted(orders: Mapping[int, Orders]) -> tuple[dict[int, DraftOrder], dict[int, Verify]]:
    """Return the draft orders and the verify orders of a round."""
    drafts = {session: order.draft for session, order in orders.items() if order.draft}
    return drafts, {session: order.verify for session, order in orders.items() if order.verify}


def kv_slots_of(target: Worker, draft: Worker | None = None) -> tuple[KVSlots, ...]:
    """Return the KV slots of the models that count them."""
    workers: tuple[tuple[Literal["target", "draft"], Worker | None], ...] = (("target", target), ("draft", draft))
    return tuple(
        KVSlots(model, total, worker.runner.kv_slots_free, worker.runner.page)
        for model, worker in workers
        if worker is not None and (total := worker.runner.kv_slots)
    )


def prefills_of(orders: Mapping[int, Orders]) -> dict[int, Prefill]:
    """Return the target's prefill orders."""
    return {session: order.prefill for session, order in orders.items() if order.prefill}


def run_deferred(orders: Mapping[int, Orders]) -> None:
    """Run the deferred tasks of a round, now that the target works."""
    for order in orders.values():
        if order.deferred:
            order.deferred.attempt()


def reports_of(
    orders: Mapping[int, Orders],
    made: Mapping[int, Drafted],
    verdicts: Mapping[int, Verdict],
    failed: Mapping[int, SpecBranchError],
    drafting: Span | None,
    verifying: Span | None,
    lost: Container[int] = (),
    reached: Mapping[int, int] | None = None,
) -> dict[int, Reports]:
    """Put both halves together into reports.

    `lost`: sessions without a draft, whatever they ordered. `reached`: tokens that the target holds after Prefill
    orders.
    """
    return {
        session: Reports(
            **as_drafted(made.get(session, ())),
            verdict=verdicts.get(session),
            drafting=drafting if order.draft and session not in lost else None,
            verifying=verifying if order.verify or order.prefill else None,
            draft_lost=order.draft is not None and session in lost,
            error=failed.get(session)
            or (not_finite("the target") if order.verify and session not in verdicts else None),
            reached=(reached or {}).get(session),
        )
        for session, order in orders.items()
    }


def _noted_by(now: Callable[[], float]) -> Note:
    def note() -> Moment:
        moment = now()
        return lambda: moment

    return note


class DecodesWithTarget:
    """Rounds of plain decoding of an executor (`DecodesPlainly`): its target makes them.

    Meanwhile the draft works for sessions that do not decode plainly.
    """

    target: Verifier
    now: Callable[[], float]

    @property
    def decodes_plainly(self) -> bool:
        """True if the target makes such rounds."""
        return self.target.decodes_batches

    def decodes(self, session: int, length: int) -> bool:
        """True if the target decodes a session so, behind `length` tokens; then also behind more."""
        return self.target.decodes(session, length)

    def decode(self, orders: PlainOrders) -> PlainReports | None:
        """Run a round of plain decoding, with the orders of other sessions; None: it has to be ordered."""
        timed = Stretch(self.target, self.now)
        started = self.target.decode(orders)
        if started is None:
            return None
        orders.meanwhile()
        made = self.draft_meanwhile(orders.drafts) if orders.drafts else NOTHING_MADE
        step = started.step
        tokens = step.sampled()
        verdicts = self.target.judge(started.verified, {}) if started.verified else {}
        timed.end()
        span, others = timed.span(), orders.unverified
        drafted = reports_of(others, made.drafted, {}, started.failed, made.span, span, made.lost, started.reached)
        verified = _verdict_reports(started.verified, verdicts, span)
        return PlainReports(
            tokens, span, step.ahead, step.launched, started.failed, step.logprobs, drafted, verified, started.launched
        )

    def draft_meanwhile(self, drafts: dict[int, DraftOrder]) -> Made:
        """Draft while the target works."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Made:
    """What the draft made in a round of plain decoding, and which sessions have no draft."""

    drafted: Mapping[int, Drafted]
    span: Span | None = None
    lost: Container[int] = ()


NOTHING_MADE = Made({})


def _verdict_reports(scored: Scored | None, verdicts: Mapping[int, Verdict], span: Span) -> dict[int, Reports]:
    """Return the reports of verify orders in a decode step that was read."""
    trials = [trial for trial in scored.judged if trial.seq not in scored.freed] if scored else []
    return {
        trial.seq: Reports(verdict=verdicts[trial.seq], verifying=span)
        if trial.seq in verdicts
        else Reports(verifying=span, error=not_finite("the target"))
        for trial in trials
    }
