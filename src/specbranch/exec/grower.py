"""Growing trees: carries out Grow orders of several sessions in step, a forward a step for all their nodes.

Owns which nodes are read next; what that is worth is said by the order. Invariant: a tree that comes back holds what was ordered, and every
node of it that is marked as read has its place in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from specbranch.core.orders import Grow
from specbranch.core.runner import Ask, Feed, Proposal
from specbranch.core.slots import ROOT
from specbranch.core.trees import Sapling, Tree
from specbranch.exec.worker import Worker, chain_after

Done = Callable[[], bool]


class _Plot:
    """One session's tree while it grows: `places` are the cache's nodes of those that were read."""

    def __init__(self, worker: Worker, session: int, order: Grow) -> None:
        self.worker, self.session, self.order = worker, session, order
        within = worker.runner.context_length - len(order.on)
        self.growth = order.growth if order.growth.deepest <= within else replace(order.growth, deepest=within)
        self.rest, held = worker.settle(session, order.on, order.tree)
        self.sapling = Sapling(order.tree)
        self.places: dict[int, int] = {ROOT: ROOT, **held}
        self.sapling.nodes = [node._replace(fed=n in held) for n, node in enumerate(order.tree.nodes)]
        self.spent = 0.0

    def opening(self) -> Feed | None:
        """What has to be read before anything can grow."""
        if not self.rest:
            return None
        self.spent += self.growth.seconds(self.spent, min(len(self.rest), len(self.growth.step)))
        return Feed(self.session, tuple(self.rest), chain_after(ROOT, 0, len(self.rest)))

    def opened(self, nodes: list[int]) -> None:
        """The opening was read: it is committed, and so is all of the text."""
        self.worker.commit_line(self.session, nodes)
        self.sapling.steps.append(len(nodes))

    def next_nodes(self) -> list[int]:
        """Choose what to read in the next step."""
        frontier = self.sapling.frontier(self.growth)[: self.worker.slots(self.session).room]
        width = self.growth.pace(self.spent, [self.sapling.thirst(n) for n in frontier])
        if width:
            self.spent += self.growth.seconds(self.spent, width)
        return sorted(frontier[:width])

    def feed(self, numbers: list[int]) -> Feed:
        """The work of a step."""
        nodes = self.sapling.nodes
        return Feed(self.session, tuple(nodes[n].token for n in numbers), tuple(self.places[nodes[n].parent] for n in numbers))

    def fed(self, numbers: list[int], places: list[int]) -> None:
        """A step was read."""
        self.places.update(zip(numbers, places, strict=True))
        self.sapling.feed(numbers)

    @property
    def unread(self) -> bool:
        """Whether the draft has not yet said what follows the text itself."""
        return not self.sapling.read


def grow(worker: Worker, orders: Mapping[int, Grow], done: Done) -> dict[int, Tree]:
    """Carry out the orders; `done` ends those that have the target's time to themselves."""
    plots = [_Plot(worker, session, order) for session, order in orders.items()]
    _open(worker, plots)
    _sprout(worker, [(plot, ROOT) for plot in plots if plot.unread])
    while steps := _steps(plots, done):
        for (plot, numbers), places in zip(steps, worker.feed([plot.feed(numbers) for plot, numbers in steps]), strict=True):
            plot.fed(numbers, places)
        _sprout(worker, [(plot, n) for plot, numbers in steps for n in numbers])
    return {plot.session: plot.sapling.tree() for plot in plots}


def _open(worker: Worker, plots: list[_Plot]) -> None:
    opening = [(plot, work) for plot in plots if (work := plot.opening())]
    if opening:
        for (plot, _), nodes in zip(opening, worker.feed([work for _, work in opening]), strict=True):
            plot.opened(nodes)


def _steps(plots: list[_Plot], done: Done) -> list[tuple[_Plot, list[int]]]:
    over = done()
    growing = [plot for plot in plots if not (over and plot.order.until_target)]
    return [(plot, numbers) for plot in growing if (numbers := plot.next_nodes())]


def _sprout(worker: Worker, ends: list[tuple[_Plot, int]]) -> None:
    """Ask what the draft proposes after some nodes."""
    if not ends:
        return
    rows = [worker.row(plot.session, plot.places[n]) for plot, n in ends]
    spots = [worker.spot(plot.session, plot.places[n], plot.order.number) for plot, n in ends]
    asks = [Ask(plot.growth.children, "top") for plot, _ in ends]
    for (plot, n), proposal in zip(ends, worker.sampler.propose(rows, spots, asks), strict=True):
        plot.sapling.sprout(n, plot.growth, proposal.tokens, _said(proposal))


def _said(proposal: Proposal) -> list[float]:
    """The draft's own probability of each candidate; where it does not tell them apart, the others share what the first leaves."""
    others = len(proposal.tokens) - 1
    odds = proposal.odds or (1.0, *[(1.0 / max(proposal.confidence, 1e-9) - 1.0) / max(others, 1)] * others)
    return [proposal.confidence * one for one in odds]
