"""The policy behind `tree`, `specbranch` and `auto`: how far to extend a draft tree, what of it to verify, and when.

Owns the economics; which tokens are right is the target's verdict alone. The goal is tokens a second. The planner
values a second at the present rate, so every draft step and every row has a price in tokens. It buys what is expected
to bring more tokens than its price. If nothing pays, nothing is drafted: that is plain decoding. Invariant: a plan
depends on committed tokens, past verdicts, measured times, and what the draft proposed for nodes of the present tree.
"""

from __future__ import annotations

import math

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile

from specbranch.core.arms import Arm, ArmRound
from specbranch.core.drift import Drift
from specbranch.core.draft_gain import draft_gain
from specbranch.core.experience import Experience, Pace
from specbranch.core.goodput import Way
from specbranch.core.lookup import Ngrams
from specbranch.core.market import ONCE, LaneGrant, LaneOffer, RowGrant, RowOffer, pays_alone, profit_price, step_prices
from specbranch.core.orders import Following, Follows, Orders, Reports
from specbranch.core.sending import Sending, SendingLater, likeliest_nodes
from specbranch.core.slots import ROOT
from specbranch.core.trees import (
    NO_TREE,
    NOT_SCORED,
    GrowingTree,
    Growth,
    Node,
    Tree,
    class_of,
    look_class,
    match_class,
    standing,
)

# Share of a draft step's price, split among the sessions that share the step. It bounds what a node is worth that the
# draft computes during a verify: the draft could compute that node later, too.
SPARED = 0.7
# Share of the gain of all draft steps during a verify that the first step brings. The planner compares the first step
# with this share of what launching ahead would save: drafting during a verify rules that out.
AT_FIRST = 0.5
GAIN_DEPTH = 8
CATCH_UP_TOKENS = float(__import__('os').environ.get('CU','4'))
import os
MIX=float(os.environ.get('MIX','0.0'))
LOOKED = 15  # tokens that lookup proposes behind a match, at most
BEYOND_PACE = float(__import__('os').environ.get('BP','0.05'))  # weight of a round in what drafts bring beyond what their first step promises
BEYOND_KEPT = 0.99  # of that, after a round without a draft
MOST_BEYOND = 4.0  # tokens: a round counts at most that much
LOOKED_PACE = 0.05  # weight of a round in the mean number of tokens that lookup brings
MODELLED_CHAIN = 6  # tokens of the longest chain by which the goodput of drafting in a batch is expected
SURE = 4  # candidates: computing a node was useful if the target's token is among this many; few others are verified
IN_A_ROW = 4  # steps of one width that have to fit into a verify for this width to be used, …
LIGHT = 1.25  # … unless a step costs at most this many times the price of a step of width 1
# Weight of the present rate (tokens a second) in the price of the draft's first step; the rate of plain decoding has
# the rest. The first step may cost less because further steps depend on it.
FIRST = 0.5
GAIN_DEPTH = 8
CATCH_UP_TOKENS = float(__import__('os').environ.get('CU','4'))
import os
MIX=float(os.environ.get('MIX','0.0'))
PLANNED_ROWS = 16  # rows that one verify of a session may have, the root's included
# Within a request: how fast acceptance follows the text (log-odds for each wrong expectation), and how much of that
# stays after a token.
DRIFT_PACE = 0.15
DRIFT_FADE = 0.98
MUTE = 8  # unanswered orders in a row after which the draft counts as gone: the text may exceed its context


LookedUp = tuple[int, int]  # class of the match, first token behind it


@dataclass(frozen=True, slots=True)
class Breadth:
    """Bounds of a draft tree; within them prices and probabilities decide."""

    candidates: int  # children that a node may get from the draft
    lanes: int  # rows of a draft step
    least: float  # reach below which a candidate is not added


ONE = Breadth(1, 1, 0.01)
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
        ngrams: Ngrams | None = None,
        overlap: bool = True,
        trees: bool = True,
        branches: bool = True,
        learns: bool = True,
        most_rows: int = PLANNED_ROWS,
    ) -> None:
        """Plan by `experience`; the other parameters leave parts of the method out.

        `overlap`: draft during a verify. `trees`: verify several children of a node. `branches`: extend several of
        them during a verify. `learns`: learn from verdicts. `most_rows`: rows that one verify may have, the root's
        included.
        """
        self.experience, self.insight, self.costs = experience, experience.insight, experience.costs
        self.overlap = overlap and self.costs.overlap
        self._ngrams = ngrams
        self._trees, self._branches, self._learns = trees, branches, learns
        self._most_rows = most_rows
        self._breadth = WIDE if self.overlap and branches else NARROW if trees or branches else ONE
        self._unanswered = 0  # draft orders in a row
        self._context, self._batch_size = 0, 1  # tokens before this round, sessions in it
        self._slowdown = 1.0  # seconds of a plain round in this batch, by those of a lone session's
        self._seconds: dict[int, float] = {}  # of a target forward by its rows, since this round began
        self._room = 1_000_000
        self._rate = 0.0  # tokens a second of this session
        self._last_rows = 0  # rows of the last verify, those of all sessions
        self._pace = Pace()
        self._drifts = Drift(), Drift()  # of drafted and of looked-up tokens
        self._drift = self._look_drift = 0.0
        self._gain: tuple[tuple[int, ...], float] = ((), 0.0)
        self._promised: float | None = None  # tokens beyond its price that the first draft step of this round promised
        self._expected=0.0
        self._accepted = 0  # drafted tokens that the target accepted in this round
        self._probed = 0.0  # seconds that a probe of this round was expected to take
        self._chances = self.insight.chances()
        self._row = 0.0  # price of one more row to verify, in tokens
        self._made_growth: Growth | None = None
        self.looked_up: LookedUp | None = None  # what lookup would have proposed in a plain round of a lone session

    @property
    def _can_draft(self) -> bool:
        return self.experience.has_draft and self._unanswered < MUTE

    @property
    def _knows_draft(self) -> bool:
        """True if the draft can be asked, and the cost of that is known."""
        return self._can_draft and self.costs.knows_target and self.costs.knows_draft

    def choose(self, context: int, batch_size: int, tree: Tree, uncomputed: int, room: int) -> Way:
        """Choose how to decode the next round, after `context` tokens; a planned one starts with that.

        In a batch the choice goes by goodput. A lone session plans unless a plan would do nothing.
        """
        self._room = room
        if batch_size > 1 and not self.costs.prices_all:
            way = self.experience.goodput.choose(batch_size, partial(self._expected_rates, batch_size))
            if way == "plain":
                return way
        self.begin(context, batch_size)
        return "plain" if batch_size == 1 and tree == NO_TREE and self._nothing_pays(uncomputed) else "planned"

    def record_round(self, batch_size: int, way: Way, tokens: int, seconds: float) -> None:
        """Learn from a whole round: its goodput in a batch; of a lone session, what drafting brought."""
        if self._promised is not None:
            plain = self._target_seconds(1) + self.costs.gap("plain")
            brought = MIX * self._accepted + (1.0 - MIX) * self._expected - self._rate * (seconds - plain)
            beyond = min(max(brought - self._promised, -MOST_BEYOND), MOST_BEYOND)
            self.insight.beyond += BEYOND_PACE * (beyond - self.insight.beyond)
        elif batch_size == 1:
            self.insight.beyond *= BEYOND_KEPT
        if self._probed and self._accepted and batch_size == 1:
            self.experience.return_probe(min(self._probed, self._accepted / self._rate))
        self._promised, self._accepted, self._probed = None, 0, 0.0
        if batch_size > 1 and not self.costs.prices_all:
            expected = partial(self._expected_rates, batch_size)
            self.experience.goodput.record(batch_size, way, tokens, seconds / self.costs.factor, expected)

    def _expected_rates(self, batch_size: int) -> dict[Way, float]:
        """Return the tokens a second that the model expects of one session, plain and planned, on a machine as fast
        as at load."""
        costs, insight = self.costs, self.insight
        plain = costs.target_seconds(batch_size) + costs.gap("plain", batch_size)
        if not costs.knows_target:
            return {"plain": 1.0, "planned": 1.0 if self.experience.has_draft else 0.0}
        looked = insight.looked_tokens
        rows = round(batch_size * (1.0 + 2.0 * looked))
        found = (1.0 + looked) / (costs.target_seconds(rows) + costs.gap("lookup", batch_size))
        right = min(insight.hits.shares()[0], 0.99)
        for length in range(1, MODELLED_CHAIN + 1) if self._knows_draft else ():
            seconds = costs.draft_setup + length * costs.draft_seconds(batch_size)
            seconds += costs.target_seconds(batch_size * (1 + length)) + costs.host_of_drafting(batch_size)
            found = max(found, (1.0 - right ** (length + 1)) / (1.0 - right) / seconds)
        return {"plain": costs.factor / max(plain, 1e-12), "planned": costs.factor * found}

    def drafts_first(self, context: int) -> bool:
        """True if a lone session is likely to draft behind its prompt; so the draft prefills the prompt at once."""
        self.begin(context)
        return not self._knows_draft or pays_alone(self._first_offer(1.0, 1))

    def _nothing_pays(self, uncomputed: int) -> bool:
        """True if a plan of a lone session would neither draft nor verify looked-up tokens."""
        costs = self.costs
        words, tokens = self._ngrams.find(LOOKED) if self._ngrams else (0, ())
        self.looked_up = (match_class(words), tokens[0]) if tokens else None
        if not costs.knows_target or (self._can_draft and not costs.knows_draft):
            return False
        if costs.plain_due:
            return True
        chance = self._chances.looked[look_class(match_class(words), NOT_SCORED)] if tokens else 0.0
        if chance > self._rate * (self._target_seconds(2) - self._target_seconds(1)):
            return False
        if not self._can_draft:
            return True
        if pays_alone(self._first_offer(1.0 - chance, uncomputed)):
            return False
        return not self.experience.has_credit(self._probe_seconds(uncomputed))

    def begin(self, context: int, batch_size: int = 1) -> None:
        """Compute rate, prices and probabilities anew for a round after `context` tokens.

        All sessions of the batch are assumed to do the same. If each of n sessions has w rows, they share a forward of
        w·n rows. It costs the batch n·rate·seconds(w·n) tokens, so one session's share is rate·seconds(w·n).
        """
        costs, self._context, self._seconds, self._batch_size = self.costs, context, {}, batch_size
        # Seconds of a plain round in this batch, and of a lone session.
        shared, alone = (self._target_seconds(rows) + costs.host for rows in (batch_size, 1))
        self._slowdown = shared / max(alone, 1e-12) if costs.knows_target else 1.0
        # The rate is learned as that of a lone session (`record_forwards`), and scaled to this batch.
        self._rate = self._pace.rate(shared / self._slowdown) / self._slowdown
        self._row = self._row_price()
        self._made_growth = None

    @property
    def _growth(self) -> Growth:
        """The bounds and prices of this round's drafts; made when they are first needed."""
        if self._made_growth is None:
            self._made_growth = Growth(
                self._step_prices(),
                self._chances,
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
        seconds = self._target_seconds(most) - self._target_seconds(batch_size)
        return max(self._rate * seconds * batch_size / (most - batch_size), 0.0)

    def _target_seconds(self, rows: int) -> float:
        """Return the seconds of a target forward at the present context length."""
        if rows not in self._seconds:
            self._seconds[rows] = self.costs.target_seconds(rows, self._context)
        return self._seconds[rows]

    def with_lookup(self, tree: Tree) -> Tree:
        """Return the tree with the tokens that followed the same words earlier in the text, as one more path."""
        words, tokens = self._ngrams.find(LOOKED) if self._ngrams else (0, ())
        if not tokens:
            return tree
        growing = GrowingTree(tree)
        growing.graft(tokens, words, self._chances)
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
        return self._batch_size == 1 and self.costs.launches_ahead

    def _next_after(self, tree: Tree, uncomputed: int, behind: tuple[int, ...]) -> Following:
        """Return what the next round does first once a verdict adds the tokens `behind`.

        Looked-up tokens (perhaps none): the next round verifies these. "draft": drafting pays first. None: unknown,
        because the draft has computed this node already, so the tree goes on from it.
        """
        node: int | None = ROOT
        for token in behind:
            node = None if node is None else tree.child(node, token)
        if node is not None and tree.nodes[node].scored:
            return None
        words, tokens = self._ngrams.find(LOOKED, behind) if self._ngrams else (0, ())
        chance = self._chances.looked[look_class(match_class(words), NOT_SCORED)] if tokens else 0.0
        offer = self._first_offer(1.0 - chance, uncomputed + len(behind)) if self._knows_draft else None
        return "draft" if offer is not None and pays_alone(offer) else tokens

    def lane_offer(self, tree: Tree, uncomputed: int) -> LaneOffer | None:
        """Offer to draft before the verify; None: there is nothing to offer.

        `uncomputed`: committed tokens that the draft has to compute first.
        """
        if not self._knows_draft:
            return None
        growth = self._growth
        gains = self._gains(tree, growth)
        if not tree.root_scored:
            return self._first_offer(gains[0], uncomputed)
        values = [max(growth.worth * gain - growth.row_price, 0.0) for gain in gains if gain >= growth.least]
        return self._lane_offer(values[: growth.lanes], 0, self._rate) if values else None

    def _first_offer(self, gain: float, uncomputed: int) -> LaneOffer:
        """Offer the draft's first step: its candidates after the committed text.

        `gain`: the probability that lookup has not found the target's token already.
        """
        gain *= self._draft_gain()
        if self._batch_size == 1:
            gain = max(gain + self.insight.beyond, 0.0)
        return self._lane_offer([gain], max(uncomputed, 1), self._rate)

    def _draft_gain(self) -> float:
        at = self.insight.observations // 8, self._batch_size, round(20.0*math.log(self._rate)), round(4*self._drift)
        if self._gain[0] != at:
            n = self._batch_size
            times = [self._target_seconds(n * (1 + depth)) for depth in range(GAIN_DEPTH + 1)]
            rows = [max(self._rate * (b - a), 0.0) for a, b in pairwise(times)]
            step = self._rate * self.costs.draft_seconds(n, self._context)
            self._gain = at, draft_gain(*self.insight.kinds(self._chances, self._drift), step, rows)
        return self._gain[1]

    def _lane_offer(self, gains: list[float], uncomputed: int, first_rate: float) -> LaneOffer:
        return LaneOffer(
            tuple(gains),
            uncomputed,
            rate=self._rate,
            first_rate=first_rate,
            costs=self.costs,
            context=self._context,
            once=min(max(ONCE, CATCH_UP_TOKENS / max(self._room,1)), 1.0),
        )

    def plan_draft_before_verify(self, tree: Tree, uncomputed: int, grant: LaneGrant) -> Growth | None:
        """Plan how the draft extends the tree while the target waits; None: verify the tree as it is."""
        growth, costs = self._growth, self.costs
        if not self._can_draft or not costs.knows_target:
            return None
        if not costs.knows_draft:
            return replace(growth, step=(0.0,), most=2)  # a price of 0 forces two steps, so that they are timed
        if grant.may:
            self._note_draft(tree, uncomputed)
            self.experience.reset_probe_credit()
            return replace(growth, step=grant.steps) if grant.steps else growth
        probe = self._probe_seconds(uncomputed)
        if not tree.root_scored and self.experience.pay_probe(probe):
            self._probed = probe
            return replace(growth, step=(0.0,), most=0)  # a probe: candidates after the committed text, no further step
        return None

    def _note_draft(self, tree: Tree, uncomputed: int) -> None:
        """Note what the first step of a lone session promises, to compare it with what the round brings."""
        if self._batch_size == 1 and not tree.root_scored:
            offer = self._first_offer(self._gains(tree, self._growth)[0], uncomputed)
            self._promised = offer.gains[0] - profit_price(offer) - self.insight.beyond

    def _probe_seconds(self, uncomputed: int) -> float:
        """Return the seconds of asking the draft once.

        A setup that was measured too long must not rule that out for good.
        """
        once = min(self.costs.draft_setup + self.costs.host, 2.0 * self._target_seconds(1))
        return once + self.costs.draft_seconds(max(uncomputed, 1), self._context)

    def _step_prices(self) -> tuple[float, ...]:
        """Return the prices of draft steps by their rows, for a lone session; in a batch the grant has them."""
        lanes = self._breadth.lanes if self._batch_size == 1 else 1
        return step_prices(self.costs, self._rate, self._context, lanes)

    def candidates(self, tree: Tree, room: int) -> list[int]:
        """Return the nodes that may be verified, by falling reach; parents come before their children."""
        return likeliest_nodes(tree, room - 1, self._most_rows - 1, self._trees)

    def sending(self, room: int) -> SendingLater | None:
        """Return by which prices a device chooses the rows to verify, right behind its draft steps.

        None in a batch: the market grants the rows.
        """
        return partial(self._sending, room) if self._batch_size == 1 and self._trees else None

    def _sending(self, room: int) -> Sending:
        plain = self._target_seconds(1)
        prices = [self._rate * (self._target_seconds(1 + count) - plain) for count in range(1, self._most_rows)]
        return Sending(tuple(prices), room - 1)

    def row_offer(self, tree: Tree, numbers: list[int]) -> RowOffer:
        """Offer nodes to be verified."""
        return RowOffer(tuple(tree.nodes[n].reach for n in numbers), self._rate, self.costs, self._context)

    def plan_draft_during_verify(self, tree: Tree, grant: RowGrant) -> Growth | None:
        """Plan how the draft extends the tree while the target verifies the granted rows; None: it does not draft."""
        self._last_rows = grant.rows
        if not (self.overlap and self._knows_draft):
            return None
        free_time = grant.rate * (self._target_seconds(grant.rows) - self.costs.draft_setup)  # in tokens
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

    def expect(self, planned: ArmRound) -> None:
        """Note the seconds that the model expects of a round.

        In a batch all sessions are assumed to draft as this one does.
        """
        costs, sessions = self.costs, planned.sessions
        if planned.before:
            planned.draft_seconds = self._modelled_draft(planned, planned.before)
            planned.host_seconds = costs.host_of_drafting(sessions)
        else:
            planned.host_seconds = costs.gap("lookup" if planned.verified else "plain", sessions)
        planned.target_seconds = costs.target_seconds(planned.rows, planned.context)

    def count_arm(self, planned: ArmRound, tokens: int, seconds: float) -> Arm:
        """Count a round that has ended for its arm, and return it."""
        beside = self._seconds_beside(planned) if planned.during else 0.0
        expected = planned.expected_seconds(beside) if self.costs.knows_target else 0.0
        counted = Arm(1, tokens, seconds, planned.expected_tokens, expected)
        self.experience.arms.add(planned.name, counted)
        return counted

    def _seconds_beside(self, planned: ArmRound) -> float:
        """Return the seconds of a verify with draft steps beside it: each slows the other down."""
        costs, count = self.costs, len(planned.during)
        drafting = self._modelled_draft(planned, planned.during) + count * costs.draft_slow_down
        return max(planned.target_seconds + count * costs.slow_down, drafting)

    def _modelled_draft(self, planned: ArmRound, steps: tuple[int, ...]) -> float:
        """Return the seconds of draft steps, by the rows that one session has in each."""
        costs, sessions = self.costs, planned.sessions
        return costs.draft_setup + sum([costs.draft_seconds(rows * sessions, planned.context) for rows in steps])

    def accept(self, tree: Tree, path: list[int], verified: list[int]) -> None:
        """Note which tokens the target has accepted in this round."""
        self._accepted = sum(not tree.nodes[n].look for n in path)
        self._expected = sum(tree.nodes[n].reach for n in verified if not tree.nodes[n].look)

    def record_verdict(self, tree: Tree, path: list[int], token: int) -> None:
        """Learn how good candidates are: the target accepted the nodes of `path`, then chose `token`."""
        if not self._learns:
            return
        self._record_looked(tree, path)
        if not len(tree):
            return
        for drift in self._drifts:
            drift.pass_tokens(1 + len(path))
        truth = [*(tree.nodes[n].token for n in path), token]
        for parent, true_token in zip((ROOT, *path), truth, strict=True):
            children = [tree.nodes[n] for n in tree.children(parent)]
            scored = tree.nodes[parent].scored if parent != ROOT else tree.root_scored
            for node in children:
                self._record_candidate(node, scored, node.token == true_token)
            if scored:
                covered = any(node.token == true_token and node.rank < SURE for node in children)
                self.insight.learn("cover", 0, covered)  # 0: the only class of this tally
                hit = any(node.token == true_token and node.rank == 0 and node.said > 0.0 for node in children)
                self.insight.learn("hits", 0, hit)
        self._update_chances()

    def _update_chances(self) -> None:
        insight = self.insight
        self._drift = self._drifts[0].against(insight.first.shares())
        self._look_drift = self._drifts[1].against(insight.looked.shares())
        self._chances = insight.chances(self._drift, self._look_drift)

    def record_plain(self, looked_up: LookedUp | None, token: int) -> None:
        """Learn from a plain round how good lookup is, at no cost: the target chose `token`."""
        for drift in self._drifts:
            drift.pass_tokens(1)
        if self._learns and looked_up is not None:
            look, proposed = looked_up
            chance = self._chances.looked[look_class(look, NOT_SCORED)]
            self._record_candidate(Node(proposed, ROOT, chance, chance, 1, 1, 0.0, look), False, proposed == token)
            self._update_chances()

    def _record_looked(self, tree: Tree, path: list[int]) -> None:
        """Learn how many tokens lookup alone would have brought in this round."""
        looked = sum(bool(tree.nodes[n].look) for n in path)
        self.insight.looked_tokens += LOOKED_PACE * (looked - self.insight.looked_tokens)

    def _record_candidate(self, node: Node, parent_scored: bool, right: bool) -> None:
        """Learn from one candidate, by the draft's probability and by the class of its lookup."""
        insight, from_draft = self.insight, node.said > 0.0
        if from_draft:
            if not node.rank and not node.look:
                self._drifts[0].observe(class_of(node.said), right)
            insight.learn("other" if node.rank else "first", class_of(node.said), right)
        if not node.look:
            return
        at = look_class(node.look, standing(node, parent_scored))
        if from_draft:
            insight.learn("shift", at, right - node.chance)  # the error of the probability that was expected
        else:
            self._drifts[1].observe(at, right)
            insight.learn("looked", at, right)


def _affordable_widths(steps: tuple[float, ...], free_time: float) -> tuple[float, ...]:
    """Return the step prices up to the last width that is cheap, or fits IN_A_ROW times into the free time."""
    bound = max(free_time / IN_A_ROW, LIGHT * steps[0])
    return tuple(takewhile(lambda step: step <= bound, steps))
