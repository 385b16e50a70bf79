"""The draft's worker: drafts for several sessions in step, one forward a step for all their lanes.

Owns how lanes fork and extend; trees are in `grower`. A drafting is a generator, so that several of them can share
their forwards (`draft_batch`). Invariant under the ratio rule: what a lane keeps never depends on a token drawn after
it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from specbranch.core.costs import MOST_UNCOMPUTED
from specbranch.core.grammar import State
from specbranch.core.orders import Branch, Context, Draft, Drafted, DraftOrder, Grow, Prefill, Reached, Sparse
from specbranch.core.runner import Ask, Done, Feed, Lanes, NoNumber, Proposal, RunsAhead
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, Tree
from specbranch.errors import CacheFull
from specbranch.exec.draft_steps import ALONE, Chunk, Drafting, Ends, Forward
from specbranch.exec.grower import grow
from specbranch.exec.worker import Worker, chain_after, never

PREFILL_BESIDE = 64  # tokens of prefill in a step that other targets share, about …
PREFILL_BEFORE = 256  # … and in one that others may have to wait for

# called with the sessions' first heads as soon as they are sampled
Announce = Callable[[dict[int, Branch]], None]


@dataclass(slots=True)
class Lane:
    """A branch being drafted; its last token is not computed yet."""

    session: int
    order: Draft
    after: int
    node: int  # the computed node it continues from
    state: State | None = None  # of its request's grammar, behind its last token; None: there is no grammar
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    q: list[Sparse | None] = field(default_factory=list)
    open: bool = True

    def take(self, token: int, proposal: Proposal, q: Sparse | None) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.confidence.append(proposal.confidence)
        self.q.append(q)
        self.open = len(self.tokens) < self.order.plan.length
        if self.state is not None:
            self.state = self.state.advance(token)
            self.open = self.open and self.state is not None and not self.state.ended

    def extend(self, proposal: Proposal) -> None:
        """Take the next token, or end before or after an unsure one, as the plan says; its confidence is kept in any
        case."""
        plan = self.order.plan
        unsure = proposal.confidence < plan.stop_below or not proposal.tokens  # nothing that is allowed has a score
        if not proposal.tokens or (unsure and not plan.keep_unsure):
            self.confidence.append(proposal.confidence)
        else:
            self.take(proposal.tokens[0], proposal, proposal.q)
        self.open = self.open and not unsure

    def branch(self) -> Branch:
        """Return what was drafted."""
        q = tuple(self.q) if any(law is not None for law in self.q) else None
        return Branch(self.after, tuple(self.tokens), tuple(self.confidence), q)


class Drafter(Worker):
    """The draft model at work."""

    _grew = False  # the last orders extended a tree

    def draft(
        self, orders: Mapping[int, DraftOrder], done: Done = never, announce: Announce | None = None
    ) -> dict[int, Drafted]:
        """Carry out the orders; `done` ends those that draft only until the target is done."""
        return self.carry_out(self.drafting(orders, Ends(done, self.enough), announce))

    def carry_out(self, drafting: Drafting[dict[int, Drafted]]) -> dict[int, Drafted]:
        """Take all steps of a drafting; returns what was drafted."""
        try:
            step = next(drafting)
            while True:
                step = drafting.send(self._taken(step))
        except StopIteration as ended:
            drafted: dict[int, Drafted] = ended.value
            return drafted

    def drafting(
        self, orders: Mapping[int, DraftOrder], ends: Ends = ALONE, announce: Announce | None = None
    ) -> Drafting[dict[int, Drafted]]:
        """Carry out the orders step by step; returns what was drafted."""
        late = yield from self._catching_up(orders, ends)
        trees = {session: order for session, order in orders.items() if isinstance(order, Grow) and session not in late}
        chains = {
            session: order for session, order in orders.items() if isinstance(order, Draft) and session not in late
        }
        drafted: dict[int, Drafted] = {session: _nothing(orders[session]) for session in late}
        self._grew = False
        if chains:
            drafted |= yield from self._branches(chains, ends, announce)
        if trees:
            drafted |= yield from self._trees(trees, ends)
        # Last, so that drafting gets memory first. The chunks of all sessions go into common forwards.
        for session, order in orders.items():
            if isinstance(order, Prefill):
                drafted[session] = yield from self._prefilling(session, order, ends)
        if any(isinstance(order, Prefill) for order in orders.values()):
            yield Forward()
        self.runner.flush()
        return drafted

    def take(self, steps: Sequence[Forward]) -> list[list[Proposal]]:
        """Take steps of several draftings in one forward; numbers are not checked."""
        work, asks = [feed for step in steps for feed in step.work], [ask for step in steps for ask in step.asks]
        if not work and not asks:
            self.runner.flush()
            return [[] for _ in steps]
        found = iter(super().propose(work, asks))
        return [list(islice(found, len(step.asks))) for step in steps]

    def _taken(self, step: Forward | Chunk) -> list[Proposal] | int:
        """Take a step of a drafting that has the model for itself."""
        if isinstance(step, Chunk):
            return self.prefill_further(step.session, step.order).tokens
        if not step.work and not step.asks:
            self.runner.flush()
            return []
        return self.propose(step.work, step.asks)

    def _catching_up(self, orders: Mapping[int, DraftOrder], ends: Ends) -> Drafting[set[int]]:
        """Prefill long texts in chunks if other targets may wait; returns the sessions that are not drafted for: the
        target wants its answer first, or memory is full."""
        late = set[int]()
        for session, order in orders.items():
            if ends.shared() and not isinstance(order, Prefill) and len(order.on.tail) > PREFILL_BESIDE:
                pending = order.pending if isinstance(order, Draft) else 0
                text = self._whole(session, order.on)[: -(pending + 1)]
                yield from self._prefilling(session, Prefill(Context(0, text), len(text)), ends)
                if ends.enough() or self.stale(session, order.on):
                    late.add(session)
        return late

    def _prefilling(self, session: int, order: Prefill, ends: Ends) -> Drafting[Reached]:
        """Prefill further, in chunks if other targets may wait."""
        if not ends.shared():
            return Reached((yield Chunk(session, order)))
        order, left = replace(order, on=Context(0, self._whole(session, order.on))), order.most
        while True:
            most = min(left, PREFILL_BESIDE if ends.crowded() else PREFILL_BEFORE)
            reached = yield Chunk(session, replace(order, most=most))
            left -= most
            if left <= 0 or reached >= len(order.on) or ends.enough():
                return Reached(reached)

    def _whole(self, session: int, on: Context) -> tuple[int, ...]:
        """Return all tokens of a sequence, of which the worker holds the first `base`."""
        return (*self.slots(session).prefix[: on.base], *on.tail)

    def make_ready(self, session: int, done: Done) -> None:
        """Prepare to compute tokens ahead of the next order, until `done`."""
        if self.grows_trees is not None and self.lets_grow and session in self._held:
            self.grows_trees.make_ready(session, done)

    def read_ahead(self, session: int, on: Context) -> None:
        """Compute committed tokens ahead of the next Grow order, without waiting."""
        if self.grows_trees is None or not self.lets_grow or len(on.tail) > MOST_UNCOMPUTED:
            return
        with suppress(CacheFull), self.releasing(session):
            if not self._out_of_reach(session, on, 1):
                rest, _ = self.settle(session, on, NO_TREE)
                self.runner.demand(session, len(rest))
                if self.grows_trees.read_ahead(Feed(session, tuple(rest), chain_after(ROOT, 0, len(rest)))):
                    self.commit_path(session, range(len(rest)))

    @property
    def begun(self) -> Callable[[], float] | None:
        """When the last tree was started, if that was before it was ordered."""
        return self.grows_trees.begun if self.grows_trees and self._grew else None

    @property
    def grown_at(self) -> Callable[[], float] | None:
        """When the last tree was complete, on a device that works by itself."""
        return self.grows_trees.grown_at if self.grows_trees and self._grew else None

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Compute nodes and ask about some; raises NoNumber if an answer is NaN."""
        return checked(super().propose(work, asks))

    def prefill_further(self, session: int, order: Prefill) -> Reached:
        """Prefill further; a sequence that the draft cannot compute or hold counts as prefilled.

        One that reads features does so, too: its target comes after it in a round. It reads the prompt when it first
        drafts, which takes little: keys and values of one layer.
        """
        if self.reads_features is not None:
            return Reached(len(order.on))
        with suppress(CacheFull), self.releasing(session):
            if not self._out_of_reach(session, order.on, 0):
                return Reached(self.continue_prefill(session, order))
        return Reached(len(order.on))

    def _trees(self, orders: Mapping[int, Grow], ends: Ends) -> Drafting[dict[int, Tree]]:
        """Extend trees; one that the draft cannot compute any more stays as it is."""
        within = {session: order for session, order in orders.items() if self._can_draft(session, order.on, 1)}
        grown = yield from grow(self, within, ends)
        self._grew = bool(grown)
        # a tree from a device did not go through `propose`
        _check(node.said for tree in grown.values() for node in tree.nodes)
        return {session: order.tree for session, order in orders.items()} | grown

    def _branches(
        self, orders: Mapping[int, Draft], ends: Ends, announce: Announce | None
    ) -> Drafting[dict[int, tuple[Branch, ...]]]:
        lanes = yield from self._forked(orders)
        if announce:
            announce(_heads(lanes))
        constrained = any(order.state is not None for order in orders.values())  # each step needs its masks
        alone = len(orders) == 1 and not ends.crowded()
        if self.runs_ahead is not None and self.lets_grow and alone and not constrained:
            self._run_ahead(self.runs_ahead, self._growing(lanes, ends), ends)
        while growing := self._growing(lanes, ends):
            proposals = yield self._next_step(growing)
            for lane, proposal in zip(growing, proposals, strict=True):
                lane.extend(proposal)
        return {
            session: tuple(lane.branch() for lane in lanes if lane.session == session and lane.tokens)
            for session in orders
        }

    def _forked(self, orders: Mapping[int, Draft]) -> Drafting[list[Lane]]:
        """Compute the rest of each context and open the ordered lanes, all in one forward.

        Sequences that the draft cannot compute or hold are left out.
        """
        work: list[Feed] = []
        asks: list[Ask] = []
        paths: dict[int, list[int]] = {}
        for session, order in orders.items():
            with (
                suppress(CacheFull),
                self.releasing(session),
            ):  # without memory for it a session decodes without a draft
                if self._can_draft(session, order.on, order.plan.length, order.pending):
                    feed, path = self._aligned(session, order)
                    work.append(feed)
                    paths[session] = path
                    asks += _asks(session, order, path)
        answers = iter((yield Forward(work, asks)))
        # all but the pending tokens join the prefix, so that the next order can build on them
        for session, path in paths.items():
            self.runner.keep(session, path[1:], len(path) - 1 - orders[session].pending)
        return [lane for session in paths for lane in self._opened(session, orders[session], answers)]

    def _aligned(self, session: int, order: Draft) -> tuple[Feed, list[int]]:
        """Return the uncomputed part of an order's context, and the nodes of its path after that, ROOT first."""
        end, rest = self.align(session, order.on, order.pending)
        tail = len(self.slots(session).tokens)
        self.runner.demand(session, len(rest))
        path = [ROOT, *self.slots(session).path(end), *range(tail, tail + len(rest))]
        return Feed(session, tuple(rest), chain_after(end, tail, len(rest))), path

    def is_within_reach(self, session: int, on: Context) -> bool:
        """True if the draft can compute a sequence and one token more."""
        return not self._out_of_reach(session, on, 1)

    def _can_draft(self, session: int, on: Context, length: int, pending: int = 0) -> bool:
        """True if the draft can compute a sequence and `length` tokens more, and has the features that it reads.

        In a session's first round the target has not computed the prompt yet: nothing is drafted then.
        """
        if self._out_of_reach(session, on, length):
            return False
        return self.reads_features is None or self.reads_features.reads(session, len(on) - pending)

    def _out_of_reach(self, session: int, on: Context, length: int) -> bool:
        """True if a sequence exceeds the draft's context or vocabulary; it decodes without a draft from then on."""
        held = self._held[session]
        too_long = len(on) + length > self.runner.context_length
        held.out_of_reach |= too_long or max(on.tail, default=0) >= self.runner.vocabulary
        return held.out_of_reach

    def _opened(self, session: int, order: Draft, answers: Iterator[Proposal]) -> list[Lane]:
        """Open the ordered lanes, each with its head; a plan without forks has one, which may end before its first
        token."""
        if order.plan.length < 1:
            return []
        if not order.plan.forks:
            lane = Lane(session, order, order.pending, order.pending - 1, _state_behind(order, order.pending))
            lane.extend(next(answers))
            return [lane]
        lanes: list[Lane] = []
        for (after, width), proposal in zip(order.plan.forks, answers, strict=False):
            lanes += [
                _lane(session, order, after, rank, proposal) for rank in range(self._width(order, width, proposal))
            ]
        return lanes

    def _width(self, order: Draft, width: int, proposal: Proposal) -> int:
        if order.plan.narrow:
            width = max(1, int(width * (1.0 - proposal.confidence)))
        return min(width, len(proposal.tokens))

    def _growing(self, lanes: list[Lane], ends: Ends) -> list[Lane]:
        growing = [lane for lane in lanes if lane.open]
        if growing and ends.enough():
            return []
        if growing and ends.done():
            growing = [lane for lane in growing if lane.order.plan.until == "length"]
        return self._that_fit(growing)

    def _that_fit(self, lanes: list[Lane]) -> list[Lane]:
        """Leave out the lanes for which the tail has no KV slot left; they end there."""
        room = {lane.session: self.slots(lane.session).room for lane in lanes}
        fitting: list[Lane] = []
        for lane in lanes:
            room[lane.session] -= 1
            if room[lane.session] >= 0:
                fitting.append(lane)
        counts = Counter(lane.session for lane in fitting)
        full = {session for session, count in counts.items() if not self.make_room(session, count)}
        return [lane for lane in fitting if lane.session not in full]

    def _run_ahead(self, runner: RunsAhead, lanes: list[Lane], ends: Ends) -> None:
        """Let the model draft by itself, if it can: all lanes of a session, as long as all of them go on."""
        if not lanes or (len(lanes) > 1 and lanes[0].order.plan.stop_below > 0.0):
            return
        plan = lanes[0].order.plan
        node = len(self.slots(lanes[0].session).tokens)

        def hear(proposals: list[Proposal]) -> bool:
            nonlocal node
            _check(proposal.confidence for proposal in proposals)
            for lane, proposal in zip(lanes, proposals, strict=True):
                lane.node, node = node, node + 1
                lane.extend(proposal)
            over = (plan.until == "target" and ends.done()) or ends.enough()
            return lanes[0].open and not over and not ends.crowded()

        asked = Lanes(_next_of(lanes), plan.length - len(lanes[0].tokens), plan.measure)
        self.rows_fed += runner.run_ahead(asked, hear) * len(lanes)

    def _next_step(self, lanes: list[Lane]) -> Forward:
        """Return the step that computes each lane's last token, and asks for the next one."""
        by_session: dict[int, list[Lane]] = {}
        for lane in lanes:
            by_session.setdefault(lane.session, []).append(lane)
        work = [_next_of(group) for group in by_session.values()]
        for session, group in by_session.items():
            for node, lane in enumerate(group, len(self.slots(session).tokens)):
                lane.node = node
        asks = [
            Ask(
                lane.session,
                lane.node,
                measure=lane.order.plan.measure,
                attempt=lane.order.number,
                allowed=lane.state,
            )
            for lane in lanes
        ]
        return Forward(work, asks)


def checked(proposals: list[Proposal]) -> list[Proposal]:
    """Return the proposals; raises NoNumber if one is NaN."""
    _check(proposal.confidence for proposal in proposals)
    return proposals


def _nothing(order: DraftOrder) -> Drafted:
    """Return the answer to an order for which nothing was drafted."""
    return order.tree if isinstance(order, Grow) else ()


def _next_of(lanes: list[Lane]) -> Feed:
    """Return what the lanes of a session compute next."""
    return Feed(lanes[0].session, tuple(lane.tokens[-1] for lane in lanes), tuple(lane.node for lane in lanes))


def _check(numbers: Iterable[float]) -> None:
    if math.isnan(sum(numbers)):
        raise NoNumber("it is sure of its tokens to a degree that is no number")


def _asks(session: int, order: Draft, path: list[int]) -> list[Ask]:
    """Return the questions at the nodes where an order's lanes begin."""
    plan, start = order.plan, len(path) - 1 - order.pending
    if plan.length < 1:
        return []
    if not plan.forks:
        allowed = _state_behind(order, order.pending)
        node = path[start + order.pending]
        return [Ask(session, node, measure=plan.measure, attempt=order.number, allowed=allowed)]
    return [
        Ask(session, path[start + after], width, plan.heads, plan.measure, order.number, _state_behind(order, after))
        for after, width in plan.forks
    ]


def _state_behind(order: Draft, after: int) -> State | None:
    """Return the state of the request's grammar behind some of the pending tokens; None: there is none."""
    pending = order.on.tail[len(order.on.tail) - order.pending :]
    return None if order.state is None else order.state.walk(pending[:after])


def _lane(session: int, order: Draft, after: int, rank: int, proposal: Proposal) -> Lane:
    lane = Lane(
        session, order, after, after - 1, _state_behind(order, after)
    )  # the pending tokens are nodes 0, 1, … behind the prefix
    lane.take(proposal.tokens[rank], proposal, proposal.q if rank == 0 else None)
    return lane


def _heads(lanes: list[Lane]) -> dict[int, Branch]:
    """Return the first branch of each session that continues the whole of its pending chain."""
    heads: dict[int, Branch] = {}
    for lane in lanes:
        if lane.tokens and lane.after == lane.order.pending and lane.session not in heads:
            heads[lane.session] = lane.branch()
    return heads
