"""The choice of the way: is the next round plain decoding, or a planned one?

Owns what both ways are expected to bring, and what plain rounds and whole rounds teach. Does not own how a planned
round is made (`planner.py`), or how batches compare the ways (`goodput.py`). Invariant: a lone session is decoded
plainly only if a plan would neither draft nor verify looked-up tokens.
"""

from __future__ import annotations

from functools import partial

from specbranch.core.forest_plan import catch_up_seconds, forest_plan
from specbranch.core.goodput import LEAST_TRIAL, Outlook, Way
from specbranch.core.learning import LookedUp
from specbranch.core.market import pays_alone
from specbranch.core.planner import Planner, share_of_catching_up
from specbranch.core.session import Session
from specbranch.core.trees import NO_TREE, Tree, match_class

MODELLED_CHAIN = 6  # tokens of the longest chain by which the goodput of drafting in a batch is expected


class WayChoice:
    """Chooses for one request."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._experience, self._costs = planner, planner.experience, planner.costs
        self.looked_up: LookedUp | None = None  # what lookup would have proposed in a plain round of a lone session

    def choose(self, session: Session, tree: Tree) -> Way:
        """Choose how a session decodes its next round; a planned one starts with that.

        In a batch the choice goes by goodput. A lone session plans unless a plan would do nothing.
        """
        batch_size = session.batch_size
        if batch_size > 1 and not self._costs.prices_all:
            expected = partial(self._outlook, session)
            way = self._experience.goodput.choose(batch_size, session.clock, expected)
            if way == "plain":
                return way
        self._planner.begin(len(session.tokens), batch_size, session.room)
        return "plain" if batch_size == 1 and tree == NO_TREE and self._nothing_pays(session.unsent) else "planned"

    def drafts_first(self, context: int) -> bool:
        """True if a lone session is likely to draft behind its prompt; so the draft prefills the prompt at once."""
        self._planner.begin(context)
        return not self._planner.knows_draft or pays_alone(self._planner.first_offer(1.0, 1))

    def joins_plainly(self, session: Session) -> bool:
        """True if a session joins a batch that decodes plainly."""
        return session.batch_size > 1 and self._experience.goodput.is_plain(session.clock)

    def plain_rounds(self, session: Session) -> int:
        """Return how many plain rounds its batch makes before the choice is looked at again."""
        return 1 if self._costs.prices_all else self._experience.goodput.rounds_left(session.clock)

    def forest_rounds(self, until_report: int) -> int:
        """Return how many rounds the device makes before a method hears of them; few of a trial, as it may end."""
        return min(until_report, LEAST_TRIAL) if self._experience.goodput.is_trial else until_report

    def record_round(
        self, batch_size: int, way: Way, tokens: int, seconds: float, rounds: int = 1, since: int = 0
    ) -> None:
        """Learn from whole rounds: their goodput in a batch; of a lone session, what drafting brought.

        `since`: the round of the loop behind which the first of them came.
        """
        planner, costs = self._planner, self._costs
        plain = planner.target_seconds(1) + costs.gap("plain") if batch_size == 1 else seconds
        planner.learning.end_round(batch_size, planner.rate, seconds - plain)
        if batch_size > 1 and not costs.prices_all:
            self._experience.goodput.record(batch_size, since, way, tokens, rounds)

    def _outlook(self, session: Session, batch_size: int) -> Outlook:
        """Return what the model expects of a session among others like it, on a machine as fast as at load."""
        costs, insight = self._costs, self._experience.insight
        plain = costs.target_seconds(batch_size) + costs.gap("plain", batch_size)
        if not costs.knows_target:
            return Outlook({"plain": 1.0, "planned": 1.0 if self._experience.has_draft else 0.0})
        if session.in_forest:
            wishes = [self._planner.forest_wish()] * batch_size
            context = len(session.tokens)
            once = batch_size * catch_up_seconds(costs, session.undrafted, context)
            plan = forest_plan(wishes, context, batch_size, once * share_of_catching_up(session.room))
            rate = costs.factor / max(plain, 1e-12)
            change = once / costs.factor if plan.steps else 0.0
            return Outlook({"plain": rate, "planned": plan.gain * rate}, change)
        looked = insight.looked_tokens
        rows = round(batch_size * (1.0 + 2.0 * looked))
        found = (1.0 + looked) / (costs.target_seconds(rows) + costs.gap("lookup", batch_size))
        right = min(insight.hits.shares()[0], 0.99)
        once = self._planner.catch_up_seconds(session.unsent) * batch_size
        paid = once * share_of_catching_up(session.room)
        for length in range(1, MODELLED_CHAIN + 1) if self._planner.knows_draft else ():
            seconds = paid + costs.draft_setup + length * costs.draft_seconds(batch_size)
            seconds += costs.target_seconds(batch_size * (1 + length)) + costs.host_of_drafting(batch_size)
            found = max(found, (1.0 - right ** (length + 1)) / (1.0 - right) / seconds)
        rates: dict[Way, float] = {"plain": costs.factor / max(plain, 1e-12), "planned": costs.factor * found}
        return Outlook(rates, once / costs.factor)

    def _nothing_pays(self, uncomputed: int) -> bool:
        """True if a plan of a lone session would neither draft nor verify looked-up tokens."""
        planner, costs = self._planner, self._costs
        words, tokens = planner.look_up()
        self.looked_up = (match_class(words), tokens[0]) if tokens else None
        if not costs.knows_target or (planner.can_draft and not costs.knows_draft):
            return False
        if costs.plain_due:
            return True
        if planner.worth_verifying(words, tokens):
            return False
        if not planner.can_draft:
            return True
        chance = planner.chance_of_lookup(words, tokens)
        if pays_alone(planner.first_offer(1.0 - chance, uncomputed)):
            return False
        return not self._experience.has_credit(planner.probe_seconds(uncomputed))
