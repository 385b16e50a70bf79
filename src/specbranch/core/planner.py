"""How far to grow a tree, what of it to verify and when, by expected tokens a second: the policy behind `tree`,
`specbranch` and `auto`.

Owns the economics. A token is worth the time in which one is emitted at the present rate; with that every draft step
and every row has a price in tokens, and is bought only if it promises more. Where nothing pays, nothing is drafted:
that is plain decoding. Invariant: a plan depends on committed tokens, past verdicts and times alone, and on what the
draft said where it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile

from specbranch.core.experience import Experience
from specbranch.core.lookup import Ngrams
from specbranch.core.market import LaneGrant, LaneOffer, RowGrant, RowOffer, pays_alone, step_prices
from specbranch.core.orders import Following, Follows, Orders, Reports
from specbranch.core.sending import Sending, SendingLater, candidates
from specbranch.core.slots import ROOT
from specbranch.core.stance import Stance
from specbranch.core.trees import (
    NO_PREFILL,
    GrowingTree,
    Growth,
    Node,
    Tree,
    class_of,
    look_class,
    match_class,
    standing,
)

# A node read while the target works is worth at most this share of what it costs to read it later: of its part of a
# step that all sessions share.
SPARED = 0.7
AT_FIRST = 0.5  # of what the steps beside the target promise, the first one does
LOOKED = 15  # tokens looked up at a time
COPIED = 4  # tokens in a row that stood in the text before: it is being copied
SURE = 4  # reading a node is worth something if the target's token is among so many candidates: few others are sent
IN_A_ROW = 4  # a wide step is made beside the target only if so many of them fit in: wide reading is not deep
LIGHT = 1.25  # a wide step may always cost this much of a narrow one
# The draft's first step opens the way to further ones: this share of it is priced by the present rate, the rest by
# plain decoding's.
FIRST = 0.5
MUTE = 8  # the draft counts as gone after so many unanswered orders: the text may have outgrown it


@dataclass(frozen=True, slots=True)
class Breadth:
    """The most that is taken in of what a draft says, and read at once; prices and chances decide within that."""

    candidates: int  # of a place
    lanes: int  # of a step
    least: float  # reach


ONE = Breadth(1, 1, 0.01)
NARROW = Breadth(4, 8, 0.01)  # while the target waits: more would hardly be sent
WIDE = Breadth(8, 16, 0.001)  # beside the target: three verdicts in five refuse all that was sent at a place


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
        most_rows: int = 16,
    ) -> None:
        """`trees`: alternatives are verified, too; `branches`: they are drafted on beside the target, too; each can
        be left out."""
        self.experience, self.insight, self.costs = experience, experience.insight, experience.costs
        self.overlap = overlap and self.costs.overlap
        self._ngrams = ngrams
        self._trees, self._branches, self._learns = trees, branches, learns
        self._most_rows = most_rows
        self._breadth = WIDE if self.overlap and branches else NARROW if trees or branches else ONE
        self._silent = 0
        self._copies = False  # the text repeats what it said before, since this round began
        self._context, self._batch_size, self._slowed = 0, 1, 1.0
        self._seconds: dict[int, float] = {}  # of the target by rows, since this round began
        self._rate = 0.0  # tokens a second
        self._last_rows = 0  # of the last forward, those of all sessions
        self._chances = self.insight.chances()
        self._growth = Growth((1.0,), self._chances)

    @property
    def _can_draft(self) -> bool:
        return self.experience.has_draft and self._silent < MUTE

    @property
    def _knows_draft(self) -> bool:
        """Whether the draft can be asked, and it is known what that costs."""
        return self._can_draft and self.costs.knows_target and self.costs.knows_draft

    def plainly(self, batch_size: int) -> bool:
        """Whether nothing is to be planned at all: plain decoding has been faster among so many sessions, for text
        like this."""
        self._copies = batch_size == 1 and self._ngrams is not None and self._ngrams.find(1)[0] >= COPIED
        stance = self._stance
        return stance is not None and stance.plainly(batch_size)

    @property
    def _stance(self) -> Stance | None:
        return self.experience.copying if self._copies else self.experience.stance

    def passed(self, batch_size: int, plainly: bool, tokens: int, seconds: float) -> None:
        """Take in how long a round took from end to end, and what it gave."""
        if (stance := self._stance) is not None:
            stance.note(batch_size, plainly, tokens, seconds)

    def begin(self, context: int, batch_size: int = 1) -> None:
        """Look at rate, prices and chances anew, at so many tokens of text, among so many sessions that do alike.

        Forwards are shared, so a session that reads w nodes takes part in one of w times as many, and its share of
        that costs what the whole costs at its own rate.
        """
        costs, self._context, self._seconds, self._batch_size = self.costs, context, {}, batch_size
        plain = self._target_seconds(batch_size) + costs.host
        self._slowed = plain / max(self._target_seconds(1) + costs.host, 1e-12) if costs.knows_target else 1.0
        self._rate = self.insight.rate(plain / self._slowed) / self._slowed
        self._growth = Growth(
            self._step_prices(),
            self._chances,
            worth=self.insight.cover.shares()[0],
            children=self._breadth.candidates,
            least=self._breadth.least,
            rows=self._most_rows - 1,
            row_price=self._row_price(),
            lanes=self._breadth.lanes,
        )

    def _row_price(self) -> float:
        """What it costs to verify one node more, on average over the rows that a forward may have: in a batch up to
        twice as many as the last one had, and one of each session."""
        batch_size = self._batch_size
        most = self._most_rows if batch_size == 1 else 2 * max(self._last_rows, batch_size) + batch_size
        seconds = self._target_seconds(most) - self._target_seconds(batch_size)
        return max(self._rate * seconds * batch_size / (most - batch_size), 0.0)

    def _target_seconds(self, rows: int) -> float:
        """What a forward of the target takes, at the present length of the text."""
        if rows not in self._seconds:
            self._seconds[rows] = self.costs.target_seconds(rows, self._context)
        return self._seconds[rows]

    def looked_up(self, tree: Tree) -> Tree:
        """The tree with what followed the same words earlier in the text."""
        words, tokens = self._ngrams.find(LOOKED) if self._ngrams else (0, ())
        if not tokens:
            return tree
        growing = GrowingTree(tree)
        growing.graft(tokens, words, self._growth.chances)
        return growing.tree()

    def looks_up(self, tree: Tree, sent: list[int]) -> bool:
        """Whether what is sent is nothing but one path of looked-up text, and something is begun with its verdict."""
        is_path = all(tree.nodes[n].look and tree.nodes[n].parent == above for above, n in pairwise((ROOT, *sent)))
        return bool(sent) and is_path and self._begins_ahead

    def follows(self, tree: Tree, uncomputed: int) -> Follows | None:
        """What comes after a round, and is begun with its verdict; None: nothing is begun like this."""
        return partial(self._following, tree, uncomputed) if self._begins_ahead else None

    @property
    def _begins_ahead(self) -> bool:
        return self._batch_size == 1 and self.costs.begins_ahead

    def _following(self, tree: Tree, uncomputed: int, behind: tuple[int, ...]) -> Following:
        """What is looked up behind a verdict, if anything, unless the draft will be asked before; not known where that
        has something to say already."""
        node: int | None = ROOT
        for token in behind:
            node = None if node is None else tree.child(node, token)
        if node is not None and tree.nodes[node].fed:
            return None
        words, tokens = self._ngrams.find(LOOKED, behind) if self._ngrams else (0, ())
        chance = self._chances.looked[look_class(match_class(words), NO_PREFILL)] if tokens else 0.0
        offer = self._first_offer(1.0 - chance, uncomputed + len(behind)) if self._knows_draft else None
        return "draft" if offer is not None and pays_alone(offer) else tokens

    def lane_offer(self, tree: Tree, uncomputed: int) -> LaneOffer | None:
        """What the draft might read while the target waits; None: nothing. `uncomputed`: tokens it has to read
        first."""
        growth = self._growth
        if not self._knows_draft:
            return None
        gains = self._gains(tree, growth)
        if tree.read:
            worth = [max(growth.worth * gain - growth.row_price, 0.0) for gain in gains if gain >= growth.least]
            return (
                LaneOffer(tuple(worth[: growth.lanes]), 0, self._rate, self._rate, self.costs, self._context)
                if worth
                else None
            )
        return self._first_offer(gains[0], uncomputed)

    def _first_offer(self, gain: float, uncomputed: int) -> LaneOffer:
        """Have the draft say what follows the text; `gain`: how likely that is not known."""
        growth, plain = self._growth, 1.0 / self._target_seconds(self._batch_size)
        first_rate = FIRST * self._rate + (1.0 - FIRST) * plain
        gain *= growth.worth * (self.insight.promise(growth.row_price) if self._batch_size > 1 else 1.0)
        return LaneOffer((gain,), max(uncomputed, 1), self._rate, first_rate, self.costs, self._context)

    def while_waiting(self, tree: Tree, uncomputed: int, grant: LaneGrant) -> Growth | None:
        """How to grow a tree while the target waits; None: go on with what there is."""
        growth, costs = self._growth, self.costs
        if not self._can_draft or not costs.knows_target:
            return None
        if not costs.knows_draft:
            return replace(growth, step=(0.0,), most=2)  # to be timed
        if grant.may:
            self.experience.spend()
            return replace(growth, step=grant.steps) if grant.steps else growth
        # a setup that was measured too long once must not keep a draft from ever being asked again
        once = min(costs.draft_setup + costs.host, 2.0 * self._target_seconds(1))
        if not tree.read and self.experience.affords(once + costs.draft_seconds(max(uncomputed, 1), self._context)):
            return replace(growth, step=(0.0,), most=0)
        return None

    def _step_prices(self) -> tuple[float, ...]:
        """What steps cost a session that is alone; in a batch that is known with the grant."""
        lanes = self._breadth.lanes if self._batch_size == 1 else 1
        return step_prices(self.costs, self._rate, self._context, lanes)

    def candidates(self, tree: Tree, room: int) -> list[int]:
        """Which nodes could be verified, by their reach; parents come before children."""
        return candidates(tree, room - 1, self._most_rows - 1, self._trees)

    def sending(self, room: int) -> SendingLater | None:
        """How to choose what is sent, for a device that has just grown a tree; None: where others have a say, too."""
        return partial(self._sending, room) if self._batch_size == 1 and self._trees else None

    def _sending(self, room: int) -> Sending:
        plain = self._target_seconds(1)
        prices = [self._rate * (self._target_seconds(1 + count) - plain) for count in range(1, self._most_rows)]
        return Sending(tuple(prices), room - 1)

    def row_offer(self, tree: Tree, numbers: list[int]) -> RowOffer:
        """Offer nodes to be verified."""
        return RowOffer(tuple(tree.nodes[n].reach for n in numbers), self._rate, self.costs, self._context)

    def while_verifying(self, tree: Tree, grant: RowGrant) -> Growth | None:
        """How to grow the tree while the target verifies what was granted; None: it is not to be disturbed."""
        costs, waiting, self._last_rows = self.costs, self._growth, grant.rows
        if not (self.overlap and self._knows_draft):
            return None
        rate, steps = grant.rate, grant.steps or waiting.step
        free = rate * (self._target_seconds(grant.rows) - costs.draft_setup)
        if free <= 0.0:
            return None
        sharing = min(self._batch_size, len(steps))
        growth = replace(
            waiting,
            step=_in_a_row(steps, free) if self._branches else steps[: self._batch_size],
            free_time=free,
            target_delay=rate * costs.slow_down,
            draft_delay=rate * costs.draft_slow_down,
            worth=min(waiting.worth, SPARED * steps[sharing - 1] / sharing),
            row_price=0.0,
            children=waiting.children if self._branches else 1,
        )
        # after a round in which the draft is at work, nothing is begun with the verdict
        lost = AT_FIRST * rate * costs.ahead_saves if self._begins_ahead else 0.0
        return growth if growth.best_step(0.0, self._gains(tree, growth))[1] > lost else None

    def _gains(self, tree: Tree, growth: Growth) -> list[float]:
        """What may be read next, by how much it promises; the end of the text itself if that was not read."""
        growing = GrowingTree(tree)
        if tree.read:
            return [gain for _, gain in growing.readable(growth)]
        return [max(1.0 - sum(node.chance for node in tree.nodes if node.parent == ROOT), 0.0)]

    def note(self, orders: Orders, reports: Reports, emitted: int, waited: float = 0.0) -> None:
        """Take in what a round took and gave, and what passed while the session waited for others."""
        if orders.draft is not None and not reports.draft_lost:  # one that was lost comes back
            self._silent = 0 if reports.tree is not None and reports.tree.read else self._silent + 1
        self.experience.note(orders, reports, emitted, waited, self._slowed, self._batch_size)

    def observe(self, tree: Tree, path: list[int], token: int) -> None:
        """Learn from what the target said: `path` are the nodes of `tree` that were taken, then came `token`."""
        if not self._learns:
            return
        truth = [*(tree.nodes[n].token for n in path), token]
        for parent, said in zip((ROOT, *path), truth, strict=True):
            children = [tree.nodes[n] for n in tree.children(parent)]
            read = tree.nodes[parent].fed if parent != ROOT else tree.read
            for node in children:
                self._judged(node, read, node.token == said)
            if read:
                self.insight.learn("cover", 0, any(node.token == said and node.rank < SURE for node in children))
        self._chances = self.insight.chances()

    def _judged(self, node: Node, read: bool, true: bool) -> None:
        insight = self.insight
        if node.said > 0.0:
            insight.learn("other" if node.rank else "first", class_of(node.said), true)
        if node.look:
            at = look_class(node.look, standing(node, read))
            if node.said > 0.0:
                insight.learn("shift", at, true - node.chance)
            else:
                insight.learn("looked", at, true)


def _in_a_row(steps: tuple[float, ...], free: float) -> tuple[float, ...]:
    """Leave out the widths of which too few steps fit into the time that is free."""
    bound = max(free / IN_A_ROW, LIGHT * steps[0])
    return tuple(takewhile(lambda step: step <= bound, steps))
