"""The map of strategies: how much each way of speculating gains over plain decoding, for given costs and a given draft.

Owns a model of a round in which everything but time is random. The target's token is the draft's first choice, its
second … with fixed probabilities, independently at each position. Then all strategies are one machine. A *pending tree*
is verified while the draft prepares for some *outcomes* (a node, and the target's token after it). A prepared outcome
leads straight to the next verification; any other leads to a serial draft stage. The pending tree is the state of a
Markov chain, so speeds are computed, not sampled. Invariant: a round is charged by the same rule as on the virtual
clock (`clock.virtual_clock.Charge`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import Charge
from specbranch.errors import BadParameter, unknown

Rates = tuple[float, ...]
StrategyName = Literal["serial SD", "PEARL", "two-stage", "hedge", "serial tree", "tree + hedge"]

STUDY_LANES = 8
STUDY_TOKENS = 16
RANKS = 8
DECAY = 0.5  # each choice of the draft beyond its second is this much less likely than the one before it
PADDED = 8  # rows: a target whose shapes are pinned pays for these also when it verifies fewer


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The maximum size of a tree; `lanes` is the number of nodes that the draft may feed per step."""

    tokens: int
    depth: int
    choices: int = 1  # children of a node; 1: a chain
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy with its setting: the tree of a serial stage, and what is drafted during a verification (`heads` 0:
    nothing)."""

    stage: TreeShape
    ahead: TreeShape = TreeShape(0, 0)
    heads: int = 0
    everywhere: bool = False  # outcomes at every node, or only those after the whole chain


class MapNode(NamedTuple):
    """A token of a tree: the draft's choice number `rank` (0: its first) after `parent` (-1: the root)."""

    parent: int
    rank: int
    depth: int
    chance: float  # that the target accepts it


class MapOutcome(NamedTuple):
    """A possible end of a verification: after a node, with a token that is not in the tree."""

    chance: float
    node: int
    read: bool  # the draft has computed that node, and so knows its choices after it


MapTree = tuple[MapNode, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """A strategy with its best setting: speedup over plain decoding, tokens per target forward, and the setting."""

    speedup: float
    tokens_per_forward: float
    setting: Strategy


class MapRound(NamedTuple):
    """The yield and time of verifying one pending tree, and how often it leads to each kind of next tree."""

    tokens: float
    seconds: float
    onward: tuple[float, float, float]  # to a serial stage, to the tree after a read node, to that after an unread one


def rates_of(top1: float, top3: float, decay: float = DECAY) -> Rates:
    """Return the probabilities of the draft's choices from the two measured ones; further ones fall geometrically."""
    if not 0.0 < top1 <= top3 <= 1.0:
        raise BadParameter(f"Agreement is top-1 {top1!r}, top-3 {top3!r}; expected 0 < top-1 ≤ top-3 ≤ 1.")
    second = (top3 - top1) / (1.0 + decay)
    room, rates = 1.0, []
    for rate in (top1, *(second * decay**number for number in range(RANKS - 1))):
        rates.append(min(rate, room))
        room -= rates[-1]
    return tuple(rates)


STUDY_PAIRS: Mapping[str, Rates] = {
    "weak": rates_of(0.55, 0.72),
    "default": rates_of(0.70, 0.85),
    "strong": rates_of(0.82, 0.93),
}


@lru_cache(maxsize=4096)
def likeliest_tree(rates: Rates, shape: TreeShape) -> MapTree:
    """Return the tree of that shape with the most expected accepted tokens: the likeliest nodes first."""
    tree: list[MapNode] = []
    feeding: dict[int, set[int]] = {}  # by depth: the nodes that have children, and so have to be fed
    queue: list[tuple[float, int, int, int]] = []  # minus chance, parent, rank, depth

    def offer(parent: int, rank: int, depth: int, above: float) -> None:
        if rank < shape.choices and rates[rank] > 0 and depth <= shape.depth:
            heappush(queue, (-above * rates[rank], parent, rank, depth))

    offer(-1, 0, 1, 1.0)
    while queue and len(tree) < shape.tokens:
        negative, parent, rank, depth = heappop(queue)
        fed = feeding.setdefault(depth, set())
        if parent not in fed and len(fed) >= shape.lanes:
            continue
        fed.add(parent)
        tree.append(MapNode(parent, rank, depth, -negative))
        offer(parent, rank + 1, depth, tree[parent].chance if parent >= 0 else 1.0)
        offer(len(tree) - 1, 0, depth + 1, -negative)
    return tuple(tree)


@lru_cache(maxsize=4096)
def likeliest_outcomes(rates: Rates, shape: TreeShape, everywhere: bool) -> tuple[MapOutcome, ...]:
    """Return the possible ends of a verification, likeliest first; unless `everywhere`, only after a wholly accepted
    chain."""
    tree = likeliest_tree(rates, shape)
    children = Counter(node.parent for node in tree)  # n children are the draft's first n choices
    found = [
        MapOutcome((tree[node].chance if node >= 0 else 1.0) * rate, node, children[node] > 0)
        for node in range(-1, len(tree))
        if everywhere or node == len(tree) - 1
        for rate in rates[children[node] :]
    ]
    return tuple(sorted(found, reverse=True))


@dataclass(frozen=True, slots=True)
class PaddedCosts:
    """A cost profile, with the rows to which a verification is padded."""

    profile: CostProfile
    padded: int = PADDED

    @property
    def plain(self) -> float:
        """Return the seconds per token of plain decoding."""
        return self.profile.target_seconds(1) + self.profile.host

    def drafting(self, tree: MapTree) -> float:
        """Return the seconds of a serial stage that drafts this tree, one step per level."""
        return sum(map(self.profile.draft_seconds, _widths(tree))) + (self.profile.host if tree else 0.0)

    def together(self, rows: int, widths: Sequence[int]) -> float:
        """Return the seconds of a verification with parallel draft steps of these widths."""
        charge = Charge(self.profile)
        charge.verified(max(rows, self.padded) if rows > 1 else rows)
        for width in widths:
            charge.stepped(width)
        return charge.seconds + self.profile.host


def evaluate(costs: PaddedCosts, rates: Rates, setting: Strategy) -> Gain:
    """Return the long-run gain of a setting."""
    shorter = replace(setting.ahead, depth=max(setting.ahead.depth - 1, 0))  # after a node that had to be read first
    rounds = [_round(costs, rates, setting, shape) for shape in (setting.stage, setting.ahead, shorter)]
    drafting = costs.drafting(likeliest_tree(rates, setting.stage))
    rounds[0] = rounds[0]._replace(seconds=rounds[0].seconds + drafting)
    shares = _long_run([one.onward for one in rounds])
    tokens = sum(share * one.tokens for share, one in zip(shares, rounds, strict=True))
    seconds = sum(share * one.seconds for share, one in zip(shares, rounds, strict=True))
    return Gain(tokens * costs.plain / seconds, tokens, setting)


def best(costs: PaddedCosts, rates: Rates, strategy: StrategyName) -> Gain:
    """Return a strategy with its best setting for these costs."""
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    # A search comes by the same setting again and again.
    return STRATEGIES[strategy](lru_cache(maxsize=None)(lambda setting: evaluate(costs, rates, setting)))


def _round(costs: PaddedCosts, rates: Rates, setting: Strategy, pending: TreeShape) -> MapRound:
    tree = likeliest_tree(rates, pending)
    prepared = likeliest_outcomes(rates, pending, setting.everywhere)[: setting.heads]
    known, uncomputed = (sum(o.chance for o in prepared if o.read is read) for read in (True, False))
    onward = (1.0 - known - uncomputed, known, uncomputed)
    seconds = costs.together(len(tree) + 1, _steps(prepared, setting.ahead))
    return MapRound(1.0 + sum(node.chance for node in tree), seconds, onward)


def _steps(prepared: Sequence[MapOutcome], ahead: TreeShape) -> list[int]:
    """Return the widths of the draft's steps during a verification; the first feeds known heads and pending nodes."""
    if not prepared or ahead.depth < 1:
        return []
    first = sum(o.read for o in prepared) + len({o.node for o in prepared if not o.read})
    return [first] + [len(prepared) * ahead.lanes] * (ahead.depth - 1)


def _widths(tree: MapTree) -> list[int]:
    """Return how many nodes a serial stage feeds at each step: those with children."""
    by_depth: dict[int, set[int]] = {}
    for node in tree:
        by_depth.setdefault(node.depth, set()).add(node.parent)
    return [len(nodes) for nodes in by_depth.values()]


def _long_run(onward: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return the share of rounds in each of three states, from the balance of transitions."""
    (_, a1, a2), (_, b1, b2), (_, c1, c2) = onward
    # For one round of the first state there are x of the second and y of the third.
    # Balance: x = a1 + b1·x + c1·y and y = a2 + b2·x + c2·y.
    determinant = (1 - b1) * (1 - c2) - c1 * b2
    x = (a1 * (1 - c2) + c1 * a2) / determinant
    y = (a2 * (1 - b1) + b2 * a1) / determinant
    total = 1 + x + y
    return 1 / total, x / total, y / total


def _chain(length: int) -> TreeShape:
    return TreeShape(length, length)


# Settings of which all are tried. The serial stage of the two-stage method is as long as a branch beyond its head.
DRAFT_LENGTHS = range(1, STUDY_TOKENS + 1)
LANE_COUNTS = range(1, STUDY_LANES + 1)
CHAINS = [Strategy(_chain(length)) for length in DRAFT_LENGTHS]
PEARLS = [Strategy(_chain(0), _chain(length), 1) for length in range(1, STUDY_TOKENS + 2)]
TWO_STAGES = [Strategy(_chain(length), _chain(length + 1), heads) for length in DRAFT_LENGTHS for heads in LANE_COUNTS]
TREES = [
    Strategy(TreeShape(tokens, depth, RANKS, STUDY_LANES))
    for depth in DRAFT_LENGTHS
    for tokens in range(depth, STUDY_TOKENS + 1)
]
Try = Callable[[Strategy], Gain]


def _best_of(settings: Iterable[Strategy], attempt: Try) -> Gain:
    return max(map(attempt, settings), key=lambda gain: gain.speedup)


def _hedge(attempt: Try) -> Gain:
    starts = [Strategy(_chain(stage), _chain(steps), 8, everywhere=True) for stage in (0, 1, 4) for steps in (2, 5, 10)]
    return _climb(attempt, starts, _chain_moves)


def _tree_hedge(attempt: Try) -> Gain:
    """Start from the best serial tree too, so that the result is never worse."""
    serial = _best_of(TREES, attempt).setting
    hedged = [
        Strategy(stage, TreeShape(15, steps, RANKS, lanes), STUDY_LANES // lanes, everywhere=True)
        for stage in (serial.stage, TreeShape(4, 1, RANKS, STUDY_LANES))
        for steps in (2, 5, 8)
        for lanes in (1, 2)
    ]
    return _climb(attempt, (serial, *hedged), _tree_moves)


STRATEGIES: Mapping[StrategyName, Callable[[Try], Gain]] = {
    "serial SD": partial(_best_of, CHAINS),
    "PEARL": partial(_best_of, PEARLS),
    "two-stage": partial(_best_of, TWO_STAGES),
    "hedge": _hedge,
    "serial tree": partial(_best_of, TREES),
    "tree + hedge": _tree_hedge,
}


def _climb(attempt: Try, starts: Iterable[Strategy], moves: Callable[[Strategy], Iterator[Strategy]]) -> Gain:
    """From each start, change one number at a time while that helps; return the best end."""
    ends = []
    for start in starts:
        here, ahead = attempt(start), _best_of(moves(start), attempt)
        while ahead.speedup > here.speedup * (1 + 1e-9):
            here, ahead = ahead, _best_of(moves(ahead.setting), attempt)
        ends.append(here)
    return max(ends, key=lambda gain: gain.speedup)


def _chain_moves(setting: Strategy) -> Iterator[Strategy]:
    for length in range(STUDY_TOKENS + 1):
        yield replace(setting, stage=_chain(length))
        yield replace(setting, ahead=_chain(length + 1))
    for heads in LANE_COUNTS:
        yield replace(setting, heads=heads)


def _tree_moves(setting: Strategy) -> Iterator[Strategy]:
    for number in range(STUDY_TOKENS + 1):
        yield replace(setting, stage=replace(setting.stage, tokens=number))
        yield replace(setting, stage=replace(setting.stage, depth=number))
        yield replace(setting, ahead=replace(setting.ahead, tokens=number))
        yield replace(setting, ahead=replace(setting.ahead, depth=number + 1))
    for lanes in LANE_COUNTS:
        for heads in range(1, STUDY_LANES // lanes + 1):
            yield replace(setting, ahead=replace(setting.ahead, lanes=lanes), heads=heads)
