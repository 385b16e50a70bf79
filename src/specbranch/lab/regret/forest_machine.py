"""Rounds of the forest on the machine of a case: the device grows and verifies draft trees, the host is a round behind.

It does what `models/gpu/forest_rounds.py` does, with scripts instead of models, and says what each round takes. Owns
the trees, and the round in flight. Does not own the clock (`machine.py`), or what a round is planned to do
(`core/forest_plan.py`). Invariant: the plan of a call acts in the round that the next call reads. Simpler than a GPU: a
device always has memory, draft steps compute text in their own rows, a longer gap of the draft is one forward, and
a round that is launched and never read takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from specbranch.core.forest import FEW_UNCOMPUTED, ForestOrders, ForestPlan, ForestReport
from specbranch.core.lookup import Ngrams
from specbranch.core.market import LEAST
from specbranch.core.planner import LOOKED
from specbranch.core.sending import likeliest_nodes
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, GrowingTree, Growth, Tree, below, marked
from specbranch.lab.regret.toy_pair import Mark, Scripts
from specbranch.lab.regret.true_costs import Model, TrueCosts

MOST_OFFERED = 64  # rows of a session in a verify, at most
TREE_NODES = 128  # nodes of a tree, at most
QUESTION_SECONDS = 1e-4  # that the device waits if the host asks it before it launches the next draft step


def padded(rows: int) -> int:
    """Return the rows with which the device computes a verify: a power of two."""
    return 1 << (rows - 1).bit_length()


@dataclass(slots=True)
class Planted:
    """A session as the device knows it: a round further than the host."""

    text: list[int]
    limit: int  # tokens that it may have
    mark: Mark  # after its text
    known: int  # tokens that the host knows
    draft_length: int  # tokens that the draft has computed
    tree: Tree = NO_TREE
    drafts: bool = False  # the draft works for it
    ngrams: Ngrams | None = None

    @property
    def room(self) -> int:
        """How many tokens may still come."""
        return self.limit - len(self.text)


@dataclass(frozen=True, slots=True)
class ForestFlight:
    """A round that was launched."""

    reports: Mapping[int, ForestReport]
    seconds: float  # of the draft steps before its verify, and of the verify
    spiked: float  # seconds of spikes among them
    rows: int  # of the verify, padded
    steps: tuple[int, ...]  # rows of these draft steps
    ahead: bool = True  # it was launched before it was asked for


class ForestMachine:
    """The device of a case."""

    def __init__(self, scripts: Scripts, costs: TrueCosts) -> None:
        self._scripts, self._costs = scripts, costs
        self._planted: dict[int, Planted] = {}
        self._drafted: dict[int, int] = {}  # tokens that the draft holds of sessions that have left
        self._flight: ForestFlight | None = None
        self._rows = 0  # of the last verify, padded
        self._spent = self._spiked = 0.0  # seconds of the draft steps behind the last verify
        self._grown: list[int] = []  # and their rows

    def forget(self, session: int) -> None:
        """Forget a session: it is closed."""
        self._planted.pop(session, None)
        self._drafted.pop(session, None)

    def leave(self) -> None:
        """Take all sessions out."""
        for session in list(self._planted):
            self._leave(session)
        self._flight, self._grown, self._spent, self._spiked = None, [], 0.0, 0.0

    def _leave(self, session: int) -> None:
        one = self._planted.pop(session)
        self._drafted[session] = min(one.draft_length, one.known - 1)

    def decode(self, orders: ForestOrders) -> tuple[ForestFlight, frozenset[int]]:
        """Return the round in flight, or a new one; launch the next one, and return its sessions."""
        flight, self._flight = self._flight, None
        for session, one in list(self._planted.items()):
            text = orders.texts.get(session)
            if text is None or len(text) != one.known or tuple(one.text[: one.known]) != tuple(text):
                self._leave(session)
        now = {} if flight is None else {n: report for n, report in flight.reports.items() if n in self._planted}
        for session, text in orders.texts.items():
            if session not in self._planted:
                self._planted[session] = self._entering(session, text, orders.limits[session])
        if flight is None or not now:
            launched = self._launch(orders, list(self._planted))
            assert launched is not None
            flight, now = replace(launched, ahead=False), dict(launched.reports)
        going_on = [n for n in self._planted if n not in now or (n in orders.going_on and now[n].ended is None)]
        self._flight = following = self._launch(orders, going_on)
        for session in list(self._planted):
            report = now.get(session)
            self._planted[session].known += len(report.tokens) if report is not None else 0
            if session not in going_on:
                self._leave(session)
        return replace(flight, reports=now), frozenset(following.reports if following is not None else ())

    def _entering(self, session: int, text: Sequence[int], limit: int) -> Planted:
        prompt = len(self._scripts.requests[session].prompt)  # prefill takes no time
        draft_length = max(self._drafted.get(session, 0), prompt - 1)
        return Planted(list(text), limit, self._scripts.mark_of(text), len(text), draft_length)

    def _launch(self, orders: ForestOrders, sessions: Sequence[int]) -> ForestFlight | None:
        """Verify the trees as the round before has left them, commit, look up, and let the draft extend them."""
        if not sessions:
            return None
        plan, there = orders.plan, {session: self._planted[session] for session in sessions}
        for session, one in there.items():
            self._set_drafting(one, session in orders.drafting and plan.steps + plan.more > 0)
        rows = max(plan.rows, len(there), self._rows // 4)
        self._rows = padded(rows)
        chosen = _granted(there, rows)
        self._charge("target", self._rows)
        reports = {session: self._settle(one, chosen[session]) for session, one in there.items()}
        flight = ForestFlight(reports, self._spent, self._spiked, self._rows, tuple(self._grown))
        self._spent, self._spiked, self._grown = 0.0, 0.0, []
        live = {session: one for session, one in there.items() if reports[session].ended is None}
        if plan.growth is not None:
            for session in live.keys() & set(orders.looking):
                self._look(live[session], plan)
            self._grow([one for one in live.values() if one.drafts], plan, plan.growth)
        return flight

    def _set_drafting(self, one: Planted, drafts: bool) -> None:
        """Let the draft begin or cease to work for a session; what it lacks of the text is computed first."""
        if one.drafts and not drafts:
            one.tree = NO_TREE
        missing = len(one.text) - 1 - one.draft_length
        if drafts and not one.drafts and missing > FEW_UNCOMPUTED:
            self._charge("draft", missing)
            one.draft_length += missing
        one.drafts = drafts

    def _charge(self, model: Model, rows: int) -> None:
        """Charge a forward."""
        spiked = self._costs.spiked[model]
        seconds = self._costs.target_seconds if model == "target" else self._costs.draft_seconds
        self._spent += seconds(rows, 0.0)
        self._spiked += self._costs.spiked[model] - spiked

    def _settle(self, one: Planted, sent: Sequence[int]) -> ForestReport:
        """Verify nodes and commit what the target accepts; the tree below that is kept."""
        tree, here, tokens, verified = one.tree, ROOT, list[int](), set(sent)
        while not tokens or (here in verified and one.room > 0):
            tokens.append(one.mark.token)
            one.text.append(one.mark.token)
            one.mark = self._scripts.after(one.mark, one.mark.token)
            found = tree.child(here, tokens[-1])
            one.draft_length += found is not None and tree.nodes[found].scored
            here = len(tree) if found is None else found
        one.tree = below(tree, here) if here < len(tree) else NO_TREE
        return ForestReport(tuple(tokens), marked(tree, sent), "length" if one.room <= 0 else None)

    def _look(self, one: Planted, plan: ForestPlan) -> None:
        assert plan.looks is not None and plan.growth is not None
        if one.ngrams is None:
            one.ngrams = Ngrams(one.text, *plan.looks)
        words, tokens = one.ngrams.find(LOOKED)
        if tokens and len(one.tree) + LOOKED <= TREE_NODES:
            growing = GrowingTree(one.tree)
            growing.graft(tokens, words, plan.growth.chances)
            one.tree = growing.tree()

    def _grow(self, drafting: Sequence[Planted], plan: ForestPlan, growth: Growth) -> None:
        """Make the draft's steps: each has all lanes of all sessions, whatever they are used for."""
        lanes, found = min(growth.lanes, len(growth.step)), list[bool]()
        for step in range(plan.steps + plan.more if drafting else 0):
            wanted = [_wanted(one, growth) for one in drafting]
            found.append(any(wanted))
            asked = step - plan.lead
            if asked >= plan.steps:
                self._spent += 0.0 if plan.lead else QUESTION_SECONDS
                if not found[asked]:
                    break
            self._charge("draft", lanes * len(drafting))
            self._grown.append(lanes * len(drafting))
            for one, nodes in zip(drafting, wanted, strict=True):
                self._step(one, nodes, growth, lanes)

    def _step(self, one: Planted, nodes: Sequence[int], growth: Growth, lanes: int) -> None:
        """Compute text or nodes of a session, and add what the draft proposes there."""
        if one.draft_length < len(one.text):
            one.draft_length = min(one.draft_length + lanes, len(one.text))
            nodes = (ROOT,) if one.draft_length == len(one.text) else ()
        growing = GrowingTree(one.tree)
        growing.feed([n for n in nodes if n != ROOT])
        for n in nodes:
            found = self._scripts.proposal(self._mark_at(one, n))
            width = growth.children
            growing.add_candidates(n, growth, found.tokens[:width], found.said[:width])
        one.tree = growing.tree()

    def _mark_at(self, one: Planted, node: int) -> Mark:
        """Return what is known after a node."""
        if node == ROOT:
            return one.mark
        return self._scripts.after(self._mark_at(one, one.tree.nodes[node].parent), one.tree.nodes[node].token)


def _wanted(one: Planted, growth: Growth) -> Sequence[int]:
    """Return the nodes that the draft computes next for a session; ROOT: its text comes first."""
    if one.draft_length < len(one.text):
        return (ROOT,)
    within = replace(growth, deepest=min(growth.deepest, one.room - 1))
    found = GrowingTree(one.tree).open_nodes(within)[: max((TREE_NODES - len(one.tree)) // within.children, 0)]
    return sorted(n for n, _ in found[: within.pace(0.0, [gain for _, gain in found])])


def _granted(there: Mapping[int, Planted], rows: int) -> dict[int, list[int]]:
    """Return the nodes of each session that are verified: those of the highest reach, over all sessions."""
    offers = [
        (one.tree.nodes[n].reach, session, n)
        for session, one in there.items()
        for n in likeliest_nodes(one.tree, one.room - 1, MOST_OFFERED - 1)
    ]
    offers.sort(key=itemgetter(0), reverse=True)  # of equal ones the first stays the first
    chosen: dict[int, list[int]] = {session: [] for session in there}
    for reach, session, n in offers[: rows - len(there)]:
        if reach >= LEAST or len(there) == 1:
            chosen[session].append(n)
    return {session: sorted(numbers) for session, numbers in chosen.items()}
