"""The plan of a round over a draft tree: how far to extend it, what of it to verify, and when.

Owns the economics; which tokens are right is the target's verdict alone. Does not own whether a round is planned at all
(`way_choice.py`), or what is learned from it (`learning.py`). The goal is tokens a second. The planner values a second
at the present rate, so every draft step and every row has a price in tokens. It buys what is expected to bring more
tokens than its price. Invariant: a plan depends on committed tokens, past verdicts, measured times, and what the draft
proposed for nodes of the present tree.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile

from specbranch.core.costs import MOST_UNCOMPUTED
from specbranch.core.draft_gain import draft_gain
from specbranch.core.experience import Experience, Pace
from specbranch.core.forest import ForestWish, NgramSizes
from specbranch.core.learning import Learning
from specbranch.core.lookup import Lookup
from specbranch.core.lookup_gain import looked_rows
from specbranch.core.market import ONCE, LaneGrant, LaneOffer, RowGrant, RowOffer, pays_alone, profit_price, step_prices
from specbranch.core.orders import Following, Follows, Orders, Reports
from specbranch.core.sending import Sending, SendingLater, likeliest_nodes
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, NOT_SCORED, GrowingTree, Growth, Tree, look_class, match_class

# Share of a draft step's price, split among the sessions that share the step. It bounds what a node is worth that the
# draft computes during a verify: the draft could compute that node later, too.
SPARED = 0.7
# Share of the gain of all draft steps during a verify that the first step brings. The planner compares the first step
# with this share of what launching ahead would save: drafting during a verify rules that out.
AT_FIRST = 0.5
LOOKED = 15  # tokens that lookup proposes behind a match, at most
IN_A_ROW = 4  # steps of one width that have to fit into a verify for this width to be used, …
LIGHT = 1.25  # … unless a step costs at most this many times the price of a step of width 1
PLANNED_ROWS = 16  # rows that one verify of a session may have, the root's included
GAIN_DEPTH = 8  # tokens of the longest chain by which the gain of a draft is expected
GAIN_EVERY = 8  # observations after which that is computed anew
CATCH_UP_ROWS = 32  # tokens that one step of a draft catches up with
CATCH_UP = 4.0  # tokens of a round, about: what a draft has to catch up with is paid by the rounds that are left
MUTE = 8  # unanswered orders in a row after which the draft counts as gone: the text may exceed its context


@dataclass(frozen=True, slots=True)
class Breadth:
    """Bounds of a draft tree; within them prices and probabilities decide."""

    candidates: int  # children that a node may get from the draft
    lanes: int  # rows of a draft step
    least: float  # reach below which a candidate is not added


CHAIN = Breadth(1, 1, 0.01)
NARROW = Breadth(4, 8, 0.01)  # without overlap or without branches: the target would hardly verify more
# With both, for drafts before and during a verify: in three verdicts of five the target rejects all that was sent for a
# position, so further candidates are prepared.
WIDE = Breadth(8, 16, 0.001)


class Planner:
    """Plans for one request."""

    def __init__(
        self,
        experience: Experience,
        *,
        ngrams: Lookup | None = None,
        overlap: bool = True,
        trees: bool = True,
        branches: bool = True,
        learns: bool = True,
        most_rows: int = PLANNED_ROWS,
        ahead: bool = True,
        ngram_sizes: NgramSizes | None = None,
    ) -> None:
        """Plan by `experience`; the other parameters leave parts of the method out.

        `overlap`: draft during a verify. `trees`: verify several children of a node. `branches`: extend several of
        them during a verify. `learns`: learn from verdicts. `most_rows`: rows that one verify may have, the root's
        included. `ahead`: False if no verify may be launched ahead of its order. `ngram_sizes`: of lookup in the text
        alone, which a device can do, too.
        """
        self.experience, self.insight, self.costs = experience, experience.insight, experience.costs
        self._ahead = ahead
        self.overlap = overlap and self.costs.overlap
        self._ngrams = ngrams
        self._ngram_sizes = ngram_sizes
        self.learning = Learning(experience, learns)
        self._trees, self._branches = trees, branches
        self._most_rows = most_rows
        self._breadth = WIDE if self.overlap and branches else NARROW if trees or branches else CHAIN
        self._unanswered = 0  # draft orders in a row
        self._context, self._batch_size = 0, 1  # tokens before this round, sessions in it
        self._slowdown = 1.0  # seconds of a plain round in this batch, by those of a lone session's
        self._seconds: dict[int, float] = {}  # of a target forward by its rows, since this round began
        self._room = math.inf  # tokens that the request may still get
        self.rate = 0.0  # tokens a second of this session
        self._last_rows = 0  # rows of the last verify, those of all sessions
        self._pace = Pace()
        self._gain: tuple[tuple[int, ...], float] = ((), 0.0)  # of drafting, and what it was computed for
        self._row = 0.0  # price of one more row to verify, in tokens
        self._made_growth: Growth | None = None
        # Where lookup has proposed, what, and how many tokens of it are known to be right.
        self._followed: tuple[int, tuple[int, ...], int] = (sys.maxsize, (), 0)

    @property
    def can_draft(self) -> bool:
        """True if there is a draft, and it answers."""
        return self.experience.has_draft and self._unanswered < MUTE

    @property
    def knows_draft(self) -> bool:
        """True if the draft can be asked, and the cost of that is known."""
        return self.can_draft and self.costs.knows_target and self.costs.knows_draft

    def begin(self, context: int, batch_size: int = 1, room: float = math.inf) -> None:
        """Compute rate and prices anew for a round after `context` tokens; `room`: those that may still come.

        All sessions of the batch are assumed to do the same. If each of n sessions has w rows, they share a forward of
        w·n rows. It costs the batch n·rate·seconds(w·n) tokens, so one session's share is rate·seconds(w·n).
        """
        costs, self._context, self._seconds, self._batch_size = self.costs, context, {}, batch_size
        self._room = room
        # Seconds of a plain round in this batch, and of a lone session.
        shared, alone = (self.target_seconds(rows) + costs.host for rows in (batch_size, 1))
        self._slowdown = shared / max(alone, 1e-12) if costs.knows_target else 1.0
        # The rate is learned as that of a lone session (`record_forwards`), and scaled to this batch.
        self.rate = self._pace.rate(shared / self._slowdown) / self._slowdown
        self._row = self._row_price()
        self._made_growth = None

    @property
    def _growth(self) -> Growth:
        """The bounds and prices of this round's drafts; made when they are first needed."""
        if self._made_growth is None:
            self._made_growth = Growth(
                self._step_prices(),
                self.learning.chances,
                worth=self.insight.covered,
                children=self._breadth.candidates,
                least=self._breadth.least,
                rows=self._most_rows - 1,
                row_price=self._row,
                lanes=self._breadth.lanes,
            )
        return self._made_growth

    def _row_price(self) -> float:
        """Return the price in tokens of one more row to verify: the mean over the rows that a forward may have.

        In a batch a forward may have twice the rows of the last one, and one of each session.
        """
        batch_size = self._batch_size
        most = self._most_rows if batch_size == 1 else 2 * max(self._last_rows, batch_size) + batch_size
        seconds = self.target_seconds(most) - self.target_seconds(batch_size)
        return max(self.rate * seconds * batch_size / (most - batch_size), 0.0)

    def target_seconds(self, rows: int) -> float:
        """Return the seconds of a target forward at the present context length."""
        if rows not in self._seconds:
            self._seconds[rows] = self.costs.target_seconds(rows, self._context)
        return self._seconds[rows]

    def look_up(self, behind: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
        """Return the length of the match that lookup finds after the text and `behind`, and the tokens behind it."""
        return self._ngrams.find(LOOKED, behind) if self._ngrams else (0, ())

    def worth_verifying(self, words: int, tokens: tuple[int, ...], tree: Tree = NO_TREE) -> tuple[int, ...]:
        """Return the looked-up tokens that are worth a row now, behind a match of `words` tokens.

        None: a plain round is better, the host's part of both included. A run that turns out to be right goes on in the
        next round, behind a longer match.
        """
        if not tokens:
            return ()
        growing = GrowingTree(tree)
        chances = growing.graft(tokens, words, self.learning.chances)
        size, added = self._batch_size, max(self.costs.gap("lookup") - self.costs.gap("plain"), 0.0)
        rounds = [self.target_seconds(size * rows) for rows in range(1, min(len(tokens), self._most_rows - 1) + 2)]
        plain = rounds[0] + self.costs.host
        prices = [
            self.rate * (plain + (seconds - rounds[0]) + added * bool(rows)) - 1.0
            for rows, seconds in enumerate(rounds)
        ]
        return tokens[: looked_rows(chances, prices)]

    def chance_of_lookup(self, words: int, tokens: tuple[int, ...]) -> float:
        """Return the probability that the first of some looked-up tokens is right, if the draft has not scored it."""
        return self.learning.chances.looked[look_class(match_class(words), NOT_SCORED)] if tokens else 0.0

    def with_lookup(self, tree: Tree) -> Tree:
        """Return the tree with the tokens that followed the same words earlier in the text, as one more path."""
        words, tokens = self.look_up()
        if not tokens:
            return tree
        # At least one: the verdict says whether it would have been right, at no cost if it is not verified.
        tokens = self.worth_verifying(words, tokens, tree) or tokens[:1]
        growing = GrowingTree(tree)
        growing.graft(tokens, words, self.learning.chances)
        return growing.tree()

    def launches_lookup(self, tree: Tree, to_verify: list[int]) -> bool:
        """True if the round verifies one path of looked-up tokens alone, and the next can be launched ahead."""
        steps = pairwise((ROOT, *to_verify))
        is_path = all(tree.nodes[n].look and tree.nodes[n].parent == above for above, n in steps)
        return bool(to_verify) and is_path and self._can_launch_ahead

    def launch_ahead(self, tree: Tree, uncomputed: int) -> Follows | None:
        """Return the function that tells a device what to launch behind a verdict; None: nothing is launched ahead."""
        return partial(self._next_after, tree, uncomputed) if self._can_launch_ahead else None

    @property
    def _can_launch_ahead(self) -> bool:
        return self._ahead and self._batch_size == 1 and self.costs.launches_ahead

    def _next_after(self, tree: Tree, uncomputed: int, behind: tuple[int, ...]) -> Following:
        """Return what the next round does first once a verdict adds the tokens `behind`.

        Looked-up tokens: the next round verifies these. "draft": drafting pays first. None: something else, because the
        draft has computed this node already, so the tree goes on from it, or because plain decoding follows.
        """
        node: int | None = ROOT
        for token in behind:
            node = None if node is None else tree.child(node, token)
        if node is not None and tree.nodes[node].scored:
            return None
        words, tokens = self.look_up(behind)
        chance = self.chance_of_lookup(words, tokens)
        offer = self.first_offer(1.0 - chance, uncomputed + len(behind)) if self.knows_draft else None
        if offer is not None and pays_alone(offer):
            return "draft"
        return self.worth_verifying(words, tokens) or None

    def forest_wish(self) -> ForestWish:
        """Return what a device needs to know that grows and verifies the trees of this session."""
        right, covered = self.learning.hits_in_text()
        looked = self.learning.lookup_in_text() if self._ngram_sizes else (0.0,) * LOOKED
        sizes, probe = self._ngram_sizes, self.experience.pay_probe
        return ForestWish(self._growth, right, covered, looked, self.can_draft, sizes, self.costs, probe)

    def follow_lookup(self, tokens: Sequence[int]) -> None:
        """Compare what lookup proposed with the text; `tokens`: as it is now. A device does the same with its rows.

        So it is known what lookup alone would bring, whatever a round has verified. Each depth counts as soon as it is
        decided: otherwise long runs of right tokens would be noticed last.
        """
        start, proposed, right = self._followed
        came = tokens[start : start + len(proposed)]
        while right < len(came) and came[right] == proposed[right]:
            self.learning.record_lookup(right, True)
            right += 1
        if right == len(came) < len(proposed):
            self._followed = start, proposed, right  # it is right so far
            return
        for depth in range(right, LOOKED) if len(tokens) > start else ():
            self.learning.record_lookup(depth, False)
        self._followed = len(tokens), self.look_up()[1], 0

    def lane_offer(self, tree: Tree, uncomputed: int) -> LaneOffer | None:
        """Offer to draft before the verify; None: there is nothing to offer.

        `uncomputed`: committed tokens that the draft has to compute first.
        """
        if not self.knows_draft:
            return None
        growth = self._growth
        gains = self._gains(tree, growth)
        if not tree.root_scored:
            return self.first_offer(gains[0], uncomputed)
        values = [max(growth.worth * gain - growth.row_price, 0.0) for gain in gains if gain >= growth.least]
        return self._lane_offer(values[: growth.lanes], 0) if values else None

    def first_offer(self, gain: float, uncomputed: int) -> LaneOffer:
        """Offer the draft's first step: its candidates after the committed text.

        `gain`: the probability that lookup has not found the target's token already.
        """
        gain *= self._draft_gain()
        if self._batch_size == 1:
            gain = max(gain + self.insight.beyond, 0.0)
        return self._lane_offer([gain], max(uncomputed, 1))

    def _draft_gain(self) -> float:
        """Return what drafting is expected to bring in a round, beyond the price of all but its first step.

        It is computed anew after some observations, or if the rate or the drift has changed by a few percent.
        """
        rate, sessions, learning = self.rate, self._batch_size, self.learning
        at = (
            self.insight.observations // GAIN_EVERY,
            sessions,
            round(20.0 * math.log(rate)),
            round(4.0 * learning.drift),
        )
        if self._gain[0] != at:
            times = [self.target_seconds(sessions * (1 + depth)) for depth in range(GAIN_DEPTH + 1)]
            rows = [max(rate * (after - before), 0.0) for before, after in pairwise(times)]
            step = rate * self.costs.draft_seconds(sessions, self._context)
            self._gain = at, draft_gain(*self.insight.kinds(learning.chances, learning.drift), step, rows)
        return self._gain[1]

    def _lane_offer(self, gains: list[float], uncomputed: int) -> LaneOffer:
        once = share_of_catching_up(self._room)
        return LaneOffer(tuple(gains), uncomputed, self.rate, self.costs, self._context, once)

    def catch_up_seconds(self, uncomputed: int) -> float:
        """Return the seconds of catching up with so many tokens, for which the draft was not asked."""
        if uncomputed <= MOST_UNCOMPUTED or not self.knows_draft:
            return 0.0
        return -(-uncomputed // CATCH_UP_ROWS) * self.costs.draft_seconds(CATCH_UP_ROWS)

    def plan_draft_before_verify(self, tree: Tree, uncomputed: int, grant: LaneGrant) -> Growth | None:
        """Plan how the draft extends the tree while the target waits; None: verify the tree as it is."""
        growth, costs = self._growth, self.costs
        if not self.can_draft or not costs.knows_target:
            return None
        if not costs.knows_draft:
            return replace(growth, step=(0.0,), most=2)  # a price of 0 forces two steps, so that they are timed
        if grant.may:
            self._note_draft(tree, uncomputed)
            self.experience.reset_probe_credit()
            return replace(growth, step=grant.steps) if grant.steps else growth
        probe = self.probe_seconds(uncomputed)
        if not tree.root_scored and self.experience.pay_probe(probe):
            self.learning.note_probe(probe)
            return replace(growth, step=(0.0,), most=0)  # a probe: candidates after the committed text, no further step
        return None

    def _note_draft(self, tree: Tree, uncomputed: int) -> None:
        """Note what the first step of a lone session promises, to compare it with what the round brings."""
        if self._batch_size == 1 and not tree.root_scored:
            offer = self.first_offer(self._gains(tree, self._growth)[0], uncomputed)
            self.learning.note_promise(offer.gains[0] - profit_price(offer) - self.insight.beyond)

    def probe_seconds(self, uncomputed: int) -> float:
        """Return the seconds of asking the draft once.

        A setup that was measured too long must not rule that out for good.
        """
        once = min(self.costs.draft_setup + self.costs.host, 2.0 * self.target_seconds(1))
        return once + self.costs.draft_seconds(max(uncomputed, 1), self._context)

    def _step_prices(self) -> tuple[float, ...]:
        """Return the prices of draft steps by their rows, for a lone session; in a batch the grant has them."""
        lanes = self._breadth.lanes if self._batch_size == 1 else 1
        return step_prices(self.costs, self.rate, self._context, lanes)

    def candidates(self, tree: Tree, room: int) -> list[int]:
        """Return the nodes that may be verified, by falling reach; parents come before their children."""
        return likeliest_nodes(tree, room - 1, self._most_rows - 1, self._trees)

    def sending(self, room: int) -> SendingLater | None:
        """Return by which prices a device chooses the rows to verify, right behind its draft steps.

        None in a batch: the market grants the rows.
        """
        return partial(self._sending, room) if self._batch_size == 1 and self._trees else None

    def _sending(self, room: int) -> Sending:
        plain = self.target_seconds(1)
        prices = [self.rate * (self.target_seconds(1 + count) - plain) for count in range(1, self._most_rows)]
        return Sending(tuple(prices), room - 1)

    def row_offer(self, tree: Tree, numbers: list[int]) -> RowOffer:
        """Offer nodes to be verified."""
        return RowOffer(tuple(tree.nodes[n].reach for n in numbers), self.rate, self.costs, self._context)

    def plan_draft_during_verify(self, tree: Tree, grant: RowGrant) -> Growth | None:
        """Plan how the draft extends the tree while the target verifies the granted rows; None: it does not draft."""
        self._last_rows = grant.rows
        if not (self.overlap and self.knows_draft):
            return None
        free_time = grant.rate * (self.target_seconds(grant.rows) - self.costs.draft_setup)  # in tokens
        if free_time <= 0.0:
            return None
        growth = self._overlapped(grant, free_time)
        # A round in which the draft works rules out that the next one is launched ahead.
        lost = AT_FIRST * grant.rate * self.costs.ahead_saves if self._can_launch_ahead else 0.0  # tokens
        _, profit = growth.best_step(0.0, self._gains(tree, growth))  # tokens
        return growth if profit > lost else None

    def _overlapped(self, grant: RowGrant, free_time: float) -> Growth:
        """Return the bounds and prices of draft steps that run during a verify; all times are in tokens."""
        alone, costs = self._growth, self.costs
        steps = grant.steps or alone.step  # prices by the rows of a step, those of all sessions
        sharing = min(self._batch_size, len(steps))
        # A node is worth at most SPARED times its session's share of a step with one row of each session.
        most_worth = SPARED * steps[sharing - 1] / sharing
        return replace(
            alone,
            # Without branches a step has one row for each session.
            step=_affordable_widths(steps, free_time) if self._branches else steps[: self._batch_size],
            free_time=free_time,
            target_delay=grant.rate * costs.slow_down,
            draft_delay=grant.rate * costs.draft_slow_down,
            worth=min(alone.worth, most_worth),
            row_price=0.0,
            children=alone.children if self._branches else 1,
        )

    def _gains(self, tree: Tree, growth: Growth) -> list[float]:
        """Return the gains of the nodes that the draft may compute next, best first.

        That is the root alone as long as the draft has not scored it.
        """
        growing = GrowingTree(tree)
        if tree.root_scored:
            return [gain for _, gain in growing.open_nodes(growth)]
        return [max(1.0 - sum(node.chance for node in tree.nodes if node.parent == ROOT), 0.0)]

    def record_forwards(self, orders: Orders, reports: Reports, emitted: int, waited: float = 0.0) -> None:
        """Learn the session's rate from one run of the executor, and whether the draft answers.

        `waited`: seconds of rounds that ran without this session.
        """
        if orders.draft is not None and not reports.draft_lost:  # a lost draft comes back
            answered = reports.tree is not None and reports.tree.root_scored
            self._unanswered = 0 if answered else self._unanswered + 1
        seconds = self.experience.record_forwards(orders, reports, waited, self._batch_size)
        self._pace.add(emitted, seconds / self._slowdown)


def share_of_catching_up(room: float) -> float:
    """Return the share of catching up that each round has to pay if so many tokens may still come."""
    return min(max(ONCE, CATCH_UP / max(room, 1)), 1.0)


def _affordable_widths(steps: tuple[float, ...], free_time: float) -> tuple[float, ...]:
    """Return the step prices up to the last width that is cheap, or fits IN_A_ROW times into the free time."""
    bound = max(free_time / IN_A_ROW, LIGHT * steps[0])
    return tuple(takewhile(lambda step: step <= bound, steps))
