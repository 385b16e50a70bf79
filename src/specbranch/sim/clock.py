"""An executor whose decisions are real and whose time is charged by a cost profile: timelines without the hardware.

Owns the virtual clock. Invariant: the tokens are those of the serial executor; only spans and "draft until the target is done" depend
on the profile.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from specbranch.core.orders import Branch, Drafted, DraftOrder, Orders, Reports, Span, as_drafted
from specbranch.core.request import Request
from specbranch.core.runner import Feed
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import draft_or_whole
from specbranch.exec.verifier import Verifier
from specbranch.sim.profile import CostProfile


class Charge:
    """The two models' time within one round: side by side, or the draft and then the target where the profile knows no overlap."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.draft = 0.0
        self.target = 0.0

    @property
    def seconds(self) -> float:
        """What the round takes, the host's part left out."""
        return max(self.draft, self.target) if self.profile.overlap else self.draft + self.target

    @property
    def together(self) -> float:
        """How long both are at work."""
        return min(self.draft, self.target) if self.profile.overlap else 0.0

    @property
    def target_start(self) -> float:
        """When the target begins, after the round's beginning."""
        return 0.0 if self.profile.overlap else self.draft

    def verified(self, rows: int, context: float | None = None) -> None:
        """Charge a target forward."""
        self.target += self.profile.target_seconds(rows, context) if rows else 0.0

    def stepped(self, rows: int, context: float | None = None) -> None:
        """Charge a draft forward; if the target is still at work, both slow down."""
        if self.profile.overlap and self.draft < self.target:
            self.target += self.profile.slow_down
            self.draft += self.profile.draft_slow_down
        self.draft += self.profile.draft_seconds(rows, context)

    def target_done(self) -> bool:
        """Whether the target would have finished by now; where the two take turns it has not begun."""
        return self.profile.overlap and self.draft >= self.target


class MeteredDrafter(Drafter):
    """A Drafter that charges each of its forwards."""

    charge: Charge

    def _count(self, work: Sequence[Feed]) -> None:
        """Charge one step of that width."""
        super()._count(work)
        if work:
            context = statistics.fmean(len(self.slots(item.seq).prefix) + len(self.slots(item.seq).tokens) for item in work)
            self.charge.stepped(sum(len(item.tokens) for item in work), context)

    def _extend(self, session: int, tokens: Sequence[int]) -> None:
        self.charge.stepped(len(tokens), len(self.slots(session).prefix))
        super()._extend(session, tokens)


class VirtualClock:
    """Both models on a virtual clock."""

    restarts = 0

    def __init__(self, target: Verifier, draft: MeteredDrafter | None, profile: CostProfile) -> None:
        self.target = target
        self.draft = draft
        self.profile = profile
        self._now = 0.0

    def now(self) -> float:
        """Virtual seconds since the executor was made."""
        return self._now

    def open(self, session: int, request: Request) -> None:
        """Prepare both workers for a session."""
        self.target.open(session, request)
        if self.draft:
            self.draft.open(session, request)

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Carry out one round and charge it."""
        charge, heads = Charge(self.profile), dict[int, Branch]()
        fed, held = self.target.rows_fed, self._held(orders)
        scored, failed = self.target.score({session: o.verify for session, o in orders.items() if o.verify})
        verified = self.target.rows_fed - fed
        charge.verified(verified, held)
        made, drafted = self._drafts({session: o.draft for session, o in orders.items() if o.draft}, charge, heads)
        verdicts = self.target.judge(scored, heads)
        start, self._now = self._now, self._now + charge.seconds + self.profile.host
        begun = start + charge.target_start
        return {
            session: Reports(
                **as_drafted(made.get(session, ())),
                verdict=verdicts.get(session),
                drafting=Span(start, start + charge.draft, drafted) if order.draft else None,
                verifying=Span(begun, begun + charge.target, verified) if order.verify else None,
                error=failed.get(session),
            )
            for session, order in orders.items()
        }

    def leave(self, session: int) -> None:
        """Free what a session holds."""
        self.target.leave(session)
        if self.draft:
            self.draft.leave(session)

    def close(self) -> None:
        """Nothing to stop."""

    def _held(self, orders: Mapping[int, Orders]) -> float:
        """How many tokens the target holds of a sequence it is about to verify, on average."""
        lengths = [len(self.target.slots(session).prefix) for session, order in orders.items() if order.verify]
        return statistics.fmean(lengths) if lengths else 0.0

    def _drafts(self, orders: dict[int, DraftOrder], charge: Charge, heads: dict[int, Branch]) -> tuple[dict[int, Drafted], int]:
        if not orders or not self.draft:
            return {}, 0
        self.draft.charge = charge
        fed = self.draft.rows_fed
        made = draft_or_whole(self.draft, orders, charge.target_done, heads)
        return made, self.draft.rows_fed - fed
