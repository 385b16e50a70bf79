"""The serial executor: both models one after the other in this process. It is the reference for every other executor.

Owns its workers, and which sessions decode without a draft. Invariant: a failing draft never loses a request; its
sessions are decoded plainly from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import TypeVar

from specbranch.core.forest import FEW_UNCOMPUTED, ForestOrders, GrowsForests
from specbranch.core.forest_loop import ForestReports
from specbranch.core.loop import DraftState, KVSlots
from specbranch.core.orders import Branch, Context, Drafted, DraftOrder, Grow, Orders, Prefill, Reports, Verdict, Verify
from specbranch.core.request import Request
from specbranch.core.runner import Done, Runner
from specbranch.core.warm_up import warming
from specbranch.exec.drafter import Announce, Drafter
from specbranch.exec.halves import (
    DecodesWithTarget,
    Made,
    Stretch,
    Verifying,
    kv_slots_of,
    parted,
    prefills_of,
    reports_of,
    run_deferred,
)
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import Worker, never

log = logging.getLogger("specbranch")

FOREST_PREFILL = 1024  # tokens that a draft prefills in a round of the forest, about

Found = TypeVar("Found")


class Serial(DecodesWithTarget):
    """Drafts, then verifies."""

    restarts = 0  # a worker in this process is never restarted

    def __init__(
        self, target: Verifier, draft: Drafter | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.target = target
        self.draft = draft
        self.now = clock
        self._warmed = warming(worker.runner for worker in (target, draft) if worker is not None)
        self._without: set[int] = set()  # sessions whose draft has failed
        self._drafted_until = -inf  # when the last draft ended, on the clock
        self._in_forest: set[int] = set()  # sessions for which the draft works in rounds of the forest

    def open(self, session: int, request: Request) -> None:
        """Prepare both workers for a session."""
        self.target.open(session, request)
        if self.draft:
            self.draft.open(session, request)

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Run one round."""
        drafts, verifies = parted(orders)
        heads: dict[int, Branch] = {}
        made, drafting = self._drafted(self._received(drafts, verifies), never, heads.update)
        timed = self._stretch(self.target)
        verifying = Verifying(self.target, verifies, heads, timed, prefills_of(orders))
        run_deferred(orders)
        verdicts = verifying.judged(partial(self._read_ahead, verifies))
        spans = drafting.span() if drafting else None, timed.span()
        return reports_of(orders, made, verdicts, verifying.failed, *spans, self._without, verifying.reached)

    def draft_meanwhile(self, drafts: dict[int, DraftOrder]) -> Made:
        """Draft while the target makes a round of plain decoding; a tree stays with the draft until it is ordered."""
        made, timed = self._drafted(drafts, never, _ignore)
        return Made(made, timed.span() if timed else None, self._without)

    @property
    def grows_forests(self) -> bool:
        """True if both models can go from verify to verify on their device."""
        runner = self.target.runner
        return isinstance(runner, GrowsForests) and runner.grows_with(self._draft_runner)

    def joins_forest(self, session: int, length: int) -> bool:
        """True if a session can take part, behind `length` tokens; then also behind more."""
        runner = self.target.runner
        return isinstance(runner, GrowsForests) and runner.joins_forest(session, length)

    def decode_forest(self, orders: ForestOrders, prefills: Mapping[int, Prefill]) -> ForestReports | None:
        """Make a round of draft trees on the device; `prefills`: of other sessions."""
        runner, timed = self.target.runner, Stretch(self.target, self.now)
        assert isinstance(runner, GrowsForests)
        reached, short = self.target.prefill(prefills)
        runner.flush()
        runner.finish_growing()  # before the draft reads anything: the inputs of its next step are in place
        ready = self._caught_up(orders)
        step = runner.decode_forest(replace(orders, drafting=ready), self._draft_runner)
        if step is None:
            return None
        self.target.rows_fed += step.rows
        orders.meanwhile()
        found = step.reports()
        timed.end()
        steps = tuple(step.steps) if step.ahead and not prefills else None
        return ForestReports(found, timed.span(), step.launched, {**short, **step.failed}, reached, steps)

    def leave_forest(self) -> None:
        """Forget what is launched on the device."""
        self._in_forest = set()
        if isinstance(self.target.runner, GrowsForests):
            self.target.runner.leave_forest()

    @property
    def _draft_runner(self) -> Runner | None:
        return self.draft.runner if self.draft else None

    def _caught_up(self, orders: ForestOrders) -> set[int]:
        """Return the sessions whose text the draft holds, but for a few tokens; it prefills the others a little."""
        ready, left = set[int](), FOREST_PREFILL
        if self.draft is None:
            return ready
        if not orders.plan.steps + orders.plan.more:  # what it misses meanwhile it prefills, once it is wanted again
            self._in_forest = ready
            return ready
        for session in orders.drafting:
            text, slots = orders.texts[session], self.draft.slots(session)
            if session in self._without or orders.limits[session] > self.draft.runner.context_length:
                continue
            if session in self._in_forest:
                ready.add(session)
                continue
            on = Context(0, tuple(text[:-1]))
            if not self.draft.is_within_reach(session, on):
                continue
            before = len(slots.prefix)
            if len(on) - before > FEW_UNCOMPUTED and left > 0:
                work = partial(self.draft.prefill_further, session, Prefill(on, left))
                self._attempt((session,), work, None)
                left -= len(slots.prefix) - before
            if len(on) - len(slots.prefix) <= FEW_UNCOMPUTED:
                ready.add(session)
        self._in_forest = ready
        return ready

    def exchange_draft(self, draft: Drafter) -> None:
        """Let another draft work from the next round on. It reads the text of a session with its first order there."""
        old, self.draft = self.draft, draft
        for session, request in old.requests.items() if old else ():
            draft.open(session, request)
            old.free(session)  # type: ignore[union-attr]
        self._warmed = warming((self.target.runner, draft.runner))
        self._without.clear()

    def kv_slots(self) -> tuple[KVSlots, ...]:
        """Return the KV slots of each model that counts them."""
        return kv_slots_of(self.target, self.draft)

    @property
    def late_captures(self) -> int:
        """How often a model captured a CUDA graph or compiled a kernel in the middle of an answer."""
        return sum([runner.late_captures for runner in self._warmed])

    @property
    def draft_state(self) -> DraftState:
        """ "ready": a draft in this process always is, if there is one."""
        return "ready" if self.draft else "none"

    def free(self, session: int) -> None:
        """Free a session's KV cache in both models."""
        self._without.discard(session)
        self._in_forest.discard(session)
        self.target.free(session)
        if self.draft:
            self.draft.free(session)

    def close(self) -> None:
        """Nothing to stop."""

    def _received(self, drafts: dict[int, DraftOrder], verifies: Mapping[int, Verify]) -> dict[int, DraftOrder]:
        """Return the orders; a lone tree gets the target as its receiver, if that is possible."""
        session, order = next(iter(drafts.items()), (0, None))
        if len(drafts) > 1 or verifies or not isinstance(order, Grow) or order.sending is None:
            return drafts
        receiver = self.target.receiver(session, order.on, order.sending)
        return {session: Grow(order.on, order.tree, order.growth, order.number, order.sending, receiver)}

    def _stretch(self, worker: Worker) -> Stretch:
        return Stretch(worker, self.now, after=self._drafted_until if worker is self.target else -inf)

    def _drafted(
        self, orders: dict[int, DraftOrder], done: Done, announce: Announce
    ) -> tuple[dict[int, Drafted], Stretch | None]:
        """Draft for all sessions that have a draft; returns None for the time if there is none."""
        orders = {session: order for session, order in orders.items() if session not in self._without}
        if not orders or not self.draft:
            return {}, None
        timed = self._stretch(self.draft)
        nothing: dict[int, Drafted] = {}
        made = self._attempt(orders, partial(draft_or_whole, self.draft, orders, done, announce), nothing)
        timed.begin(self.draft.begun)
        self._drafted_until = timed.end(self.draft.grown_at)
        return made, timed

    def _make_ready(self, verifies: Mapping[int, Verify], done: Done) -> None:
        """Let the draft prepare to compute tokens ahead, until the verdicts are there."""
        session, order = next(iter(verifies.items()), (0, None))
        follows = order is not None and order.follows is not None and len(verifies) == 1
        if self.draft is not None and follows and session not in self._without:
            self._attempt((session,), partial(self.draft.make_ready, session, done), None)

    def _read_ahead(self, verifies: Mapping[int, Verify], verdicts: Mapping[int, Verdict]) -> None:
        """Let the draft compute the tokens that a verdict adds, if the next round starts with drafting."""
        session, order = next(iter(verifies.items()), (0, None))
        if self.draft is None or order is None or order.follows is None or session not in verdicts:
            return
        taken = order.taken(verdicts[session].path, verdicts[session].token)
        if len(verifies) == 1 and session not in self._without and order.follows(taken) == "draft":
            on = order.on.plus(taken, len(self.draft.slots(session).prefix))
            self._attempt((session,), partial(self.draft.read_ahead, session, on), None)

    def _attempt(self, sessions: Collection[int], work: Callable[[], Found], nothing: Found) -> Found:
        """Run the draft.

        If its device has no memory left, or its output is no number, the sessions decode without a draft.
        """
        try:
            return work()
        except RuntimeError as error:  # every error of torch is one
            self._without |= set(sessions)
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            log.warning(
                "The draft failed (%s); %d request(s) go on without it, in plain decoding.", said, len(sessions)
            )
            return nothing


def _ignore(heads: Mapping[int, Branch]) -> None:
    """Ignore announced heads: they are in the answer, too."""


def draft_or_whole(
    drafter: Drafter, orders: dict[int, DraftOrder], done: Done, announce: Announce
) -> dict[int, Drafted]:
    """Draft; sequences that the worker has lost are sent whole."""
    stale = {session for session, order in orders.items() if drafter.stale(session, order.on)}
    return drafter.draft(sent_whole(orders, stale), done, announce)


def sent_whole(orders: Mapping[int, DraftOrder], stale: Container[int]) -> dict[int, DraftOrder]:
    """Return the orders, those of stale sessions with their whole sequence."""
    return {session: replace(o, on=o.on.whole()) if session in stale else o for session, o in orders.items()}
