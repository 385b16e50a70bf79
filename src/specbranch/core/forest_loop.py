"""The loop's rounds of the forest: who takes part, what is planned for all, and what becomes of the reports.

Owns which sessions share such a round. Does not own the values (`core/forest.py`), the plan (`core/forest_plan.py`), or
which sessions are live (`core/loop.py`). Invariants: a session's method hears of every round that brought it tokens.
Whatever is launched and not read has no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol, runtime_checkable

from specbranch.core.forest import ForestOrders, ForestPlan, ForestReport, ForestWish
from specbranch.core.forest_plan import (
    FEW_SESSIONS,
    MOST_FOREST_SESSIONS,
    PLAN_ROUNDS,
    catch_up_seconds,
    forest_plan,
    probing,
)
from specbranch.core.members import Member
from specbranch.core.orders import Orders, Prefill, Reports, Span, Verdict
from specbranch.core.plain_loop import PLAIN_ORDERS, PlainHost
from specbranch.core.planner import share_of_catching_up
from specbranch.core.prefill_budget import Prefills
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree, chosen
from specbranch.errors import SpecBranchError, not_finite

log = logging.getLogger("specbranch")


@dataclass(frozen=True, slots=True)
class ForestReports:
    """What came back of a round."""

    sessions: Mapping[int, ForestReport]
    span: Span
    launched: frozenset[int]  # sessions that take part in the round that is launched now
    failed: Mapping[int, SpecBranchError]
    reached: Mapping[int, int]  # tokens that the target holds after Prefill orders
    steps: Sequence[int] | None = None  # rows of the draft steps before its verify; None: its time says nothing


@runtime_checkable
class DecodesForests(Protocol):
    """An executor that may make such rounds."""

    @property
    def grows_forests(self) -> bool:
        """True if its models can do that."""
        ...

    def joins_forest(self, session: int, length: int) -> bool:
        """True if a session can take part, behind `length` tokens; then also behind more."""
        ...

    def decode_forest(self, orders: ForestOrders, prefills: Mapping[int, Prefill]) -> ForestReports | None:
        """Make a round; `prefills`: of other sessions. None: sessions have to order it."""
        ...

    def leave_forest(self) -> None:
        """Forget what is launched."""
        ...


class ForestLoop:
    """Runs rounds of the forest for a loop."""

    def __init__(self, executor: object, prefills: Prefills, host: PlainHost) -> None:
        able = isinstance(executor, DecodesForests) and executor.grows_forests
        self._executor = executor if isinstance(executor, DecodesForests) and able else None
        self._prefills, self._host = prefills, host
        self._launched: frozenset[int] = frozenset()  # sessions that take part in the round in flight
        self._plan: tuple[tuple[int, ...], int, ForestPlan] | None = None  # for whom, rounds it is left for
        self._has_failed = False  # a warning said so

    def takes(self, session: Session) -> bool:
        """True if a session that is opened can take part."""
        if self._executor is None or session.state is not None or session.prediction is not None:
            return False
        return self._executor.joins_forest(session.number, len(session.tokens))

    def forget(self) -> None:
        """Forget what is launched: rounds of another kind come."""
        if self._executor is not None and (self._launched or self._plan):
            self._executor.leave_forest()
        self._launched, self._plan = frozenset(), None

    def round(self) -> list[Session] | None:
        """Run one round for the whole batch; None: it has to be one of another kind."""
        if self._executor is None:
            return None
        members = [member for member in self._host.members.values() if not member.paused]
        decoding = [member for member in members if self._decodes(member)]
        taking_part = set(map(id, decoding))
        others = [member for member in members if id(member) not in taking_part]
        prefilling = [member for member in others if member.uncomputed > 0]
        ends = len(prefilling) < len(others) or not any(_wish(member) for member in decoding)
        ends = ends or len(members) > MOST_FOREST_SESSIONS
        # Steps of plain decoding take prompts along, so a burst of them goes with these until none waits.
        burst = len(members) > FEW_SESSIONS and (len(prefilling) > 1 or not self._launched)
        ends = ends or (bool(prefilling) and burst)
        if ends or (prefilling and self._prefills.limits.prompt_tokens is None):
            # what is in flight is read first, so that it is not in vain
            decoding = [member for member in decoding if member.session.number in self._launched]
            prefilling = []
        if not decoding:
            self.forget()
            return None
        prefills = self._prefills.beside_plain(prefilling, len(decoding))
        reports = self._run(decoding, prefills, goes_on=not ends)
        if reports is None:
            self.forget()
            return None
        return self._deliver(decoding, prefills, reports)

    def _decodes(self, member: Member) -> bool:
        """True if a session can take part now: its method leaves the round to the device, or asks for its next token
        alone."""
        orders, session = member.orders, member.session
        if member.committed and member.plain_rounds > 1 and orders is not None and orders.forest is not None:
            return True  # it goes on as before
        member.renew()
        orders = member.orders
        if orders is None or orders.verify is None or orders.draft is not None or member.uncomputed:
            return False
        return session.in_forest and orders.verify.is_plain

    def _run(self, decoding: Sequence[Member], prefills: Mapping[int, Orders], goes_on: bool) -> ForestReports | None:
        assert self._executor is not None
        wishes = {member.session.number: wish for member in decoding if (wish := _wish(member)) is not None}
        sessions = [member.session for member in decoding]

        def meanwhile() -> None:
            for member in decoding:
                if member.deferred is not None:
                    member.deferred.attempt()

        plan = self._planned(sessions, wishes)
        orders = ForestOrders(
            {session.number: session.tokens for session in sessions},
            {session.number: session.limit for session in sessions},
            {session.number for session in sessions if goes_on and session.room > 1},
            plan,
            [number for number, wish in wishes.items() if wish.drafts],
            [number for number, wish in wishes.items() if wish.looks is not None and wish.looks == plan.looks],
            meanwhile,
        )
        self._launched = frozenset()  # if the round fails or is interrupted, nothing is launched
        if plan.steps + plan.more:
            for number in orders.drafting:
                self._host.members[number].session.drafted_length = len(orders.texts[number])
        try:
            reading = {number: order.prefill for number, order in prefills.items() if order.prefill is not None}
            return self._executor.decode_forest(orders, reading)
        except Exception as error:
            level = logging.DEBUG if self._has_failed else logging.WARNING
            log.log(level, "A round of draft trees on the device failed; it is ordered anew.", exc_info=error)
            self._has_failed = True
            return None

    def _planned(self, sessions: Sequence[Session], wishes: Mapping[int, ForestWish]) -> ForestPlan:
        """Return the plan of the round; one plan serves the same sessions for some rounds."""
        numbers = tuple(session.number for session in sessions)
        if self._plan is not None and self._plan[0] == numbers and self._plan[1] > 0:
            self._plan = numbers, self._plan[1] - 1, self._plan[2]
            return self._plan[2]
        context = fmean(len(session.tokens) for session in sessions)
        catching_up = 0.0
        for session in sessions:
            if (wish := wishes.get(session.number)) is not None and wish.drafts:
                seconds = catch_up_seconds(wish.costs, session.undrafted, context)
                catching_up += seconds * share_of_catching_up(session.room)
        plan = forest_plan(list(wishes.values()), context, len(sessions), catching_up)
        probe = probing(plan, list(wishes.values()), context)
        self._plan = numbers, PLAN_ROUNDS - 1, probe or plan
        return self._plan[2]

    def _deliver(
        self, decoding: Sequence[Member], prefills: Mapping[int, Orders], reports: ForestReports
    ) -> list[Session]:
        """Hand sessions what came back; returns who got anything."""
        host, span, took_part, now = self._host, reports.span, list[Session](), self._host.now()
        self._launched = reports.launched
        if host.costs is not None:
            host.costs.observe_forest(span, len(decoding), reports.steps)
        self._prefills.costs.observe(span, True, host.now(), False)
        for member in decoding:
            session = member.session
            if (error := reports.failed.get(session.number)) is not None:
                took_part.append(session)
                host.deliver(member, Orders(), Reports(error=error, verifying=span))
            elif (report := reports.sessions.get(session.number)) is not None:
                took_part.append(session)
                several = _wish(member) and member.plain_rounds > 1 and host.trace is None and session.stats.emitted
                if several and report.tokens and report.ended is None and not session.launched:
                    self._commit(member, report, span, now)
                else:
                    member.renew()
                    self._hand_over(member, report, span)
        for number, orders in prefills.items():
            member = host.members[number]
            took_part.append(member.session)
            error = reports.failed.get(number)
            host.deliver(member, orders, Reports(verifying=span, error=error, reached=reports.reached.get(number)))
        return took_part

    def _commit(self, member: Member, report: ForestReport, span: Span, now: float) -> None:
        """Give a session what a round brought; its method hears of the last one of several rounds."""
        session, host = member.session, self._host
        before = session.stats.emitted
        try:
            member.commit_forest(report, span.seconds, now)
        except Exception as error:
            host.fail(session, error)
        if session.on_round:
            orders, found = _as_ordered(replace(PLAIN_ORDERS, forest=_wish(member)), report, span)
            host.call_watcher(session, orders, found, session.stats.emitted - before)
        if session.finished:
            host.remove(session)

    def _hand_over(self, member: Member, report: ForestReport, span: Span) -> None:
        """Hand a session the tree that was verified for it, and the verdict."""
        orders = member.orders
        assert orders is not None
        if report.ended == "not finite" or not report.tokens:
            error = not_finite("the target")
            self._host.deliver(member, orders, Reports(error=error, verifying=span))
            return
        orders, found = _as_ordered(orders, report, span)
        if found.verdict is not None and len(found.verdict.path) < len(report.tokens) - 1:
            on_tree = len(found.verdict.path)
            said = f"a device reported {len(report.tokens)} tokens, and {on_tree} of them are on its tree"
            self._host.deliver(member, orders, Reports(error=RuntimeError(said), verifying=span))
            return
        self._host.deliver(member, orders, found)


def _as_ordered(orders: Orders, report: ForestReport, span: Span) -> tuple[Orders, Reports]:
    """Return a round of the device as if a method had ordered to verify its tree.

    A session that decodes plainly from now on gets the tree of the round that was in flight, too.
    """
    tree, verify = report.tree, orders.verify
    assert verify is not None
    numbers = [n for n, node in enumerate(tree.nodes) if node.sent]
    sent = chosen(tree, numbers)
    verify = replace(
        verify, tokens=tuple(node.token for node in sent.nodes),
        parents=tuple(node.parent for node in sent.nodes) if numbers else None, goes_on=False,
    )  # fmt: skip
    verdict = verdict_on(sent, report.tokens, report.ended is not None)
    has_tree = orders.forest is not None or bool(numbers)
    return replace(orders, verify=verify), Reports(verdict=verdict, verifying=span, tree=tree if has_tree else None)


def verdict_on(sent: Tree, tokens: Sequence[int], ended: bool) -> Verdict:
    """Return the verdict that gives a session these tokens; `ended`: the last of them ends it, wherever it stands."""
    path, here = list[int](), ROOT
    for token in tokens if ended else tokens[:-1]:
        found = sent.child(here, token)
        if found is None:
            break
        path.append(found)
        here = found
    return Verdict(tuple(path), tokens[-1])


def _wish(member: Member) -> ForestWish | None:
    return member.orders.forest if member.orders is not None else None
