"""The loop's rounds of plain decoding: they are run, and what comes back is handed out.

Owns what becomes of the tokens, and in which order a session that does not decode plainly drafts and verifies beside
the others. Does not own who takes part (`core/plain_rounds.py`), or which sessions are live (`core/loop.py`).
Invariants: a session that decodes plainly costs the host no orders and no call of its method. Whatever is launched and
not read has no effect: its orders stand, and an executor can carry them out again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from specbranch.core.costs import MeasuredCosts
from specbranch.core.members import Member
from specbranch.core.orders import Context, Orders, Reports, Span, TokenLogprobs, Verdict, Verify
from specbranch.core.plain_rounds import PlainBatch, PlainOrders, PlainReports, PlainRounds, going_on
from specbranch.core.prefill_budget import Prefills, rows_of
from specbranch.core.runner import NO_TOKEN
from specbranch.core.session import Session
from specbranch.core.trace import Trace
from specbranch.errors import not_finite

log = logging.getLogger("specbranch")

PLAIN_ORDERS = Orders(verify=Verify(Context(0, ())))  # what watchers of plain rounds see: one token, nothing drafted


class PlainHost(Protocol):
    """The loop, as far as rounds of plain decoding need it."""

    trace: Trace | None
    costs: MeasuredCosts | None

    @property
    def members(self) -> Mapping[int, Member]:
        """The live sessions."""
        ...

    def now(self) -> float:
        """Return the time in seconds, on the clock of all spans."""
        ...

    def answer_offers(self, ready: Mapping[int, Member], rows: int) -> None:
        """Answer the offers of sessions; `rows`: of all others in the same forward."""
        ...

    def deliver(self, member: Member, orders: Orders, reports: Reports) -> None:
        """Hand a session its reports; remove it if they end it."""
        ...

    def fail(self, session: Session, error: Exception) -> None:
        """End one session with an error."""
        ...

    def call_watcher(self, session: Session, orders: Orders, reports: Reports, added: int) -> None:
        """Call the watcher of a session's rounds, if it has one."""
        ...

    def remove(self, session: Session) -> None:
        """Remove a session, and free its KV cache."""
        ...


class PlainLoop:
    """Runs rounds of plain decoding for a loop."""

    def __init__(self, executor: object, prefills: Prefills, host: PlainHost) -> None:
        self._rounds, self._prefills, self._host = PlainRounds(executor), prefills, host

    @property
    def launched(self) -> frozenset[int]:
        """Sessions whose next token is being computed."""
        return self._rounds.launched

    def forget(self) -> None:
        """Forget what is launched: a round of orders comes."""
        self._rounds.forget()

    def round(self) -> list[Session] | None:
        """Run one round for the whole batch; None: it has to be one of what the methods order."""
        chunked = self._prefills.limits.prompt_tokens is not None
        batch = self._rounds.batch(self._host.members.values(), chunked)
        if batch is None:
            return None
        asked = self._asked(batch) if batch.others else {}
        decoding = len(batch.decoding) + rows_of(asked.values())
        asked |= self._prefills.beside_plain(batch.prefilling, decoding)
        reports = self._run(batch, asked)
        if reports is None:
            return None
        self._learn(reports, len(batch.decoding), asked)
        return self._deliver(batch, asked, reports)

    def _asked(self, batch: PlainBatch) -> dict[int, Orders]:
        """Return what sessions order that do not decode plainly; nothing of those whose rows are being computed."""
        idle = {one.session.number: one for one in batch.others if one.session.number not in self._rounds.verifying}
        for member in idle.values():
            member.renew()  # it may have decoded plainly before
        self._host.answer_offers(idle, len(batch.decoding))
        ordered = {number: one.next_orders for number, one in idle.items() if number in self._host.members}
        return {number: orders for number, orders in ordered.items() if orders is not None}

    def _run(self, batch: PlainBatch, asked: Mapping[int, Orders]) -> PlainReports | None:
        """Run a round; None: an error, which a round of orders will trace to its session."""
        rounds, members = self._rounds, self._host.members
        assert rounds.executor is not None
        sessions = [member.session for member in batch.decoding]
        texts = {session.number: session.tokens for session in sessions}
        masks = {session.number: session.state for session in sessions if session.state is not None}
        heads = {number: head for number, orders in asked.items() if orders.verify and (head := members[number].head)}
        deferred = [*(member.deferred for member in batch.decoding), *(orders.deferred for orders in asked.values())]

        def meanwhile() -> None:
            for tasks in deferred:
                if tasks is not None:
                    tasks.attempt()

        rounds.forget()  # if the round fails or is interrupted, nothing is launched
        try:
            return rounds.executor.decode(PlainOrders(texts, going_on(batch), asked, heads, masks, meanwhile))
        except Exception as error:
            level = logging.DEBUG if rounds.has_failed else logging.WARNING
            log.log(level, "A round of plain decoding failed; it is ordered session by session.", exc_info=error)
            rounds.has_failed = True
            return None

    def _learn(self, reports: PlainReports, sessions: int, asked: Mapping[int, Orders]) -> None:
        """Learn the costs of a round; one that also worked for other sessions says nothing of plain decoding."""
        host, prompts = self._host, self._prefills.costs
        mixed = bool(asked) or bool(reports.verified)
        if host.costs is not None:
            host.costs.observe_plain(reports.span, sessions, mixed or prompts.tokens_ahead > 0)
        ahead = reports.ahead and bool(reports.launched)  # then prompt tokens go with the step that was launched now
        prompts.observe(reports.span, True, host.now(), ahead)

    def _deliver(self, batch: PlainBatch, asked: Mapping[int, Orders], reports: PlainReports) -> list[Session]:
        """Hand tokens of plain decoding to their sessions, and their reports to the others; returns who got any."""
        host, rounds = self._host, self._rounds
        rounds.launched, rounds.verifying = reports.launched, reports.verifying
        took_part = self._deliver_tokens(batch.decoding, reports)
        for number, report in reports.verified.items():
            member = host.members.get(number)
            if member is not None and not member.paused:  # otherwise its order comes again
                took_part.append(member.session)
                self._deliver_verdict(member, report)
        for number, orders in asked.items():
            found = reports.others.get(number)
            if found is None and (error := reports.failed.get(number)) is not None:
                found = Reports(error=error, verifying=reports.span)
            if found is not None:  # otherwise it is being verified
                took_part.append(host.members[number].session)
                self._deliver_other(host.members[number], orders, found)
        return took_part

    def _deliver_tokens(self, decoding: Sequence[Member], reports: PlainReports) -> list[Session]:
        span, now, took_part = reports.span, self._host.now(), list[Session]()
        tokens, launched, logprobs = reports.tokens, reports.launched, reports.logprobs
        for member in decoding:
            session = member.session
            number = session.number
            if reports.failed and (error := reports.failed.get(number)) is not None:
                took_part.append(session)
                self._host.deliver(member, Orders(), Reports(error=error, verifying=span))
            elif (token := tokens.get(number)) is not None:
                took_part.append(session)
                session.now, session.launched = now, number in launched
                self._take_token(member, token, logprobs.get(number), span)
        return took_part

    def _deliver_verdict(self, member: Member, report: Reports) -> None:
        """Hand a session the answer to its orders: what was drafted for them before, and the verdict."""
        assert member.orders is not None
        if member.drafted is not None:
            found = replace(member.drafted, verdict=report.verdict, verifying=report.verifying, error=report.error)
            self._host.deliver(member, member.orders, found)
        else:
            self._host.deliver(member, member.orders, report)

    def _deliver_other(self, member: Member, orders: Orders, report: Reports) -> None:
        """Hand a session what was prefilled or drafted; a draft whose verify order comes next is kept."""
        wants = member.orders
        if wants is not None and wants.verify is not None and orders.draft is wants.draft is not None:
            member.drafted = report
        else:
            self._host.deliver(member, orders, report)

    def _take_token(self, member: Member, token: int, logprobs: TokenLogprobs | None, span: Span) -> None:
        """Give a session a token of plain decoding; its method hears of the last one of its plain rounds."""
        session, host = member.session, self._host
        if token == NO_TOKEN:
            session.fail(not_finite("the target"))
        elif member.plain_rounds > 1 and host.trace is None and session.stats.emitted:
            asked = _as_ordered(session) if session.on_round else PLAIN_ORDERS
            try:
                member.commit(token, logprobs, span.seconds)
            except Exception as error:
                host.fail(session, error)
            if session.on_round:
                host.call_watcher(session, asked, Reports(verdict=_verdict(token, logprobs), verifying=span), 1)
        else:
            member.renew()
            assert member.orders is not None
            host.deliver(member, member.orders, Reports(verdict=_verdict(token, logprobs), verifying=span))
            return
        if session.finished:
            host.remove(session)


def _as_ordered(session: Session) -> Orders:
    """Return the next token's orders as watchers see them: with what a grammar allows."""
    if session.state is None:
        return PLAIN_ORDERS
    return Orders(verify=Verify(Context(0, ()), allowed=(session.state,)))


def _verdict(token: int, logprobs: TokenLogprobs | None) -> Verdict:
    return Verdict((), token, None if logprobs is None else (logprobs,))
