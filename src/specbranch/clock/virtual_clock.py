"""The executor on a modelled clock: real tokens, with times charged by a cost profile instead of measured.

Owns the virtual clock. Invariant: the tokens are those of the serial executor; only spans and "draft until the target
is done" depend on the profile.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from specbranch.clock.profile import Beginning, CostProfile
from specbranch.core.orders import (
    Branch,
    Draft,
    Drafted,
    DraftOrder,
    Following,
    Grow,
    Orders,
    Prefill,
    Reports,
    Span,
    Verdict,
    Verify,
)
from specbranch.core.runner import Done, Feed
from specbranch.exec.drafter import Announce, Drafter
from specbranch.exec.halves import parted, prefills_of, reports_of
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import never


class Charge:
    """The seconds of both models in one round: at the same time, or one after the other if the profile has no
    overlap."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.hears = False  # the host receives each draft step, as in a chain
        self.draft = 0.0
        self.target = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the round, without the host's part."""
        return max(self.draft, self.target) if self.profile.overlap else self.draft + self.target

    @property
    def together(self) -> float:
        """Seconds in which both models work."""
        return min(self.draft, self.target) if self.profile.overlap else 0.0

    @property
    def target_start(self) -> float:
        """Seconds from the start of the round to that of the target."""
        return 0.0 if self.profile.overlap else self.draft

    def verified(self, rows: int, context: float | None = None) -> None:
        """Charge a target forward."""
        self.target += self.profile.target_seconds(rows, context) if rows else 0.0

    def stepped(self, rows: int, context: float | None = None) -> None:
        """Charge a draft forward, with the setup before the first; if the target is still at work, both slow down."""
        self.draft = self.draft or self.profile.draft_setup
        if self.profile.overlap and self.draft < self.target:
            self.target += self.profile.slow_down
            self.draft += self.profile.draft_slow_down
        self.draft += max(self.profile.draft_seconds(rows, context), self.profile.hearing if self.hears else 0.0)

    def target_done(self) -> bool:
        """True if the target would be done by now; without overlap it has not started."""
        return self.profile.overlap and self.draft >= self.target


class MeteredDrafter(Drafter):
    """A Drafter that charges each of its forwards."""

    charge: Charge
    lets_grow = False  # the target may be done after any draft step

    def draft(
        self, orders: Mapping[int, DraftOrder], done: Done = never, announce: Announce | None = None
    ) -> dict[int, Drafted]:
        """Carry out the orders; the host receives each step of a chain."""
        self.charge.hears = any(isinstance(order, Draft) for order in orders.values())
        return super().draft(orders, done, announce)

    def _count(self, work: Sequence[Feed]) -> None:
        """Charge one step of that width."""
        super()._count(work)
        if work:
            held = [self.slots(item.seq) for item in work]
            context = statistics.fmean(len(slots.prefix) + len(slots.tokens) for slots in held)
            self.charge.stepped(sum(len(item.tokens) for item in work), context)

    def _extend(self, session: int, tokens: Sequence[int]) -> None:
        self.charge.stepped(len(tokens), len(self.slots(session).prefix))
        super()._extend(session, tokens)


class RoundStarts:
    """How rounds are started, by the hints of the round before; `Serial` and the runners start them by the same
    rules."""

    def __init__(self) -> None:
        self.following: dict[int, Following] = {}  # what could be launched with the verdicts of the last round
        self._by_itself: set[int] = set()  # sessions whose target goes on by itself

    def beginning(self, verifies: Mapping[int, Verify], reads: Mapping[int, Prefill]) -> Beginning:
        """Return how this round is started."""
        heard = {at for at, order in verifies.items() if _begins(self.following.get(at), order.tokens)}
        if reads or not verifies or not verifies.keys() <= self._by_itself | heard:
            return Beginning.ASKED  # drafts for a target that is running already are planned meanwhile
        return Beginning.BY_ITSELF if verifies.keys() <= self._by_itself else Beginning.HEARD

    def note(
        self, drafts: Mapping[int, DraftOrder], verifies: Mapping[int, Verify], verdicts: Mapping[int, Verdict]
    ) -> None:
        """Note the hints of this round."""
        grown = next(iter(drafts.values()), None)
        received = len(drafts) == 1 and not verifies and isinstance(grown, Grow) and grown.sending is not None
        self._by_itself = set(drafts) if received else {session for session, order in verifies.items() if order.goes_on}
        self.following = _followed(verifies, verdicts)


class VirtualClock(Serial):
    """Both models on a virtual clock, in seconds since it was made."""

    decodes_plainly = False  # every round is charged by its orders

    def __init__(self, target: Verifier, draft: MeteredDrafter | None, profile: CostProfile) -> None:
        super().__init__(target, draft, lambda: self._now)
        self.profile = profile
        self.metered = draft
        self._now = 0.0
        self._starts = RoundStarts()

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Run one round and charge it."""
        charge, heads = Charge(self.profile), dict[int, Branch]()
        drafts, verifies = parted(orders)
        fed, held = self.target.rows_fed, self._mean_held(verifies)
        scored, failed = self.target.score(verifies)
        verified = self.target.rows_fed - fed
        charge.verified(verified, held)
        reads = prefills_of(orders)
        before = self._mean_held(reads)
        reached, short = self.target.prefill(reads)
        self.target.runner.flush()
        chunk_rows = self.target.rows_fed - fed - verified
        charge.verified(chunk_rows, before)  # prefill is a forward of its own
        if self.metered:
            self.metered.charge = charge
        made, timed = self._drafted(drafts, charge.target_done, heads.update)
        verdicts = self.target.judge(scored, heads)
        beginning = self._starts.beginning(verifies, reads)
        self._starts.note(drafts, verifies, verdicts)
        hidden = self._draft_seconds_hidden(drafts)
        host = max(self.profile.host_seconds(beginning) - hidden, 0.0)
        start = self._now + host - self.profile.host  # planning comes before the round
        self._now += charge.seconds + host
        begun = start + charge.target_start
        drafted = timed.span() if timed else Span(0.0, 0.0)
        drafting = Span(start, start + charge.draft, drafted.tokens, drafted.prompts)
        verifying = Span(begun, begun + charge.target, verified + chunk_rows, self.target.prefill_counts())
        return reports_of(orders, made, verdicts, failed | short, drafting, verifying, self._without, reached)

    def _draft_seconds_hidden(self, drafts: Mapping[int, DraftOrder]) -> float:
        """Return the seconds in which the draft computes a verdict's tokens while the host plans; see
        `Serial._read_ahead`."""
        session, order = next(iter(drafts.items()), (0, None))
        ahead = len(drafts) == 1 and isinstance(order, Grow) and self._starts.following.get(session) == "draft"
        return min(self.profile.draft_seconds(1), self.profile.asking) if ahead else 0.0

    def _mean_held(self, sessions: Iterable[int]) -> float:
        """Return the mean number of tokens that the target holds of these sessions."""
        lengths = [len(self.target.slots(session).prefix) for session in sessions]
        return statistics.fmean(lengths) if lengths else 0.0


def _followed(verifies: Mapping[int, Verify], verdicts: Mapping[int, Verdict]) -> dict[int, Following]:
    """Return what can be launched with each verdict."""
    return {
        session: order.follows(order.taken(verdict.path, verdict.token))
        for session, order in verifies.items()
        if order.follows is not None and (verdict := verdicts.get(session)) is not None
    }


def _begins(following: Following, tokens: Sequence[int]) -> bool:
    """True if the launched tokens are those of the order, or continue them."""
    return isinstance(following, tuple) and tuple(tokens) == following[: len(tokens)]
