"""A request as frames, one for each round: what was drafted, what the target accepted, and when both worked.

Owns the tree of drafted tokens from round to round, for methods over chains, branches and trees alike. Statistics only
count drafted tokens; a frame shows each one in its tree. Invariant: the tokens that the frames of a request add, one
after the other, are its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from specbranch.core.grammar import Allowed, Mask, allowed_by
from specbranch.core.orders import Branch, Grow, Orders, Reports, Span, TokenLogprobs, Verdict, Verify
from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree

FramePath = tuple[int, ...]  # tokens behind the committed text
# What a grammar did to a token: nothing, it left no other token, or it forbade the one that the target found likeliest.
Guided = Literal["free", "forced", "masked"]
SpellOne = Callable[[int], str]  # a token as text
LOOKED_UP_CHANCE = 0.5  # the probability assumed for a looked-up token, of which the draft said nothing


class DrawnNode(NamedTuple):
    """A drafted token of a frame. From frame to frame it is identified by its path behind the committed text."""

    token: int
    parent: int
    said: float  # the draft's probability; 0: it was looked up
    given: int  # the frame that first showed it
    sent: bool  # the target judges it in this frame


class InBatch(NamedTuple):
    """A request's share of a target forward that served several."""

    requests: int  # itself included
    own_rows: int
    rows: int


class _Drafted(NamedTuple):
    said: float
    given: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What both models did in one round, and the result."""

    number: int
    draft: tuple[float, float] | None  # seconds, on the executor's clock
    target: tuple[float, float] | None
    nodes: tuple[DrawnNode, ...]  # parents before their children
    drafted: int  # tokens that joined the tree in this round, also those that a trimmed frame does not show
    path: tuple[int, ...] = ()  # the nodes that the target accepted
    token: int | None = None  # its own token behind them; None if it verified nothing
    hit: int | None = None  # the node that had foreseen that token
    added: int = 0  # tokens of path and `token` that the answer got: it may end among them
    checked: int = (
        0  # drafted or looked-up tokens that the target judged, also those that a trimmed frame does not show
    )
    guided: tuple[Guided, ...] = ()  # of each added token; without a grammar none
    batch: InBatch | None = None  # None: the round was not planned

    @property
    def rolled_back(self) -> int:
        """How many judged tokens the target rejected. In a round within whose path the answer ended, none counts."""
        return self.checked - len(self.path) if self.added > len(self.path) else 0

    @property
    def end(self) -> float:
        """The time at which the round was over, on the executor's clock."""
        return max(span[1] for span in (self.draft, self.target) if span)

    def trimmed(self, most: int) -> Frame:
        """Return the frame with about `most` nodes at most.

        The accepted ones come first, then some of their siblings, those that the target judged, and the likeliest.
        """
        if len(self.nodes) <= most:
            return self
        taken = {*self.path, *(() if self.hit is None else (self.hit,))}
        parents = {self.nodes[node].parent for node in taken} | {self.path[-1] if self.path else ROOT}
        reach: list[float] = []
        for node in self.nodes:
            reach.append((node.said or LOOKED_UP_CHANCE) * (1.0 if node.parent == ROOT else reach[node.parent]))
        rivals = [at for at, node in enumerate(self.nodes) if node.parent in parents]
        rivals.sort(key=lambda at: reach[at], reverse=True)
        kept = taken.copy()
        judged = [at for at, node in enumerate(self.nodes) if node.sent]
        likeliest = sorted(range(len(reach)), key=lambda at: reach[at], reverse=True)
        for at in (*rivals[: most // 2], *judged, *likeliest):
            if len(kept) >= most:
                break
            if self.nodes[at].parent == ROOT or self.nodes[at].parent in kept:
                kept.add(at)
        return self._only(sorted(kept))

    def _only(self, kept: Sequence[int]) -> Frame:
        renumbered = {ROOT: ROOT, **{old: new for new, old in enumerate(kept)}}
        nodes = tuple(self.nodes[at]._replace(parent=renumbered[self.nodes[at].parent]) for at in kept)
        hit = None if self.hit is None else renumbered[self.hit]
        return replace(self, nodes=nodes, path=tuple(renumbered[node] for node in self.path), hit=hit)

    def to_dict(self, spell: SpellOne) -> dict[str, Any]:
        """Return plain values for the page. A node is a list: text, token, parent, the draft's probability in percent
        (None: it was looked up), frame, sent."""
        nodes = [
            [spell(one.token), one.token, one.parent, _percent(one.said), one.given, int(one.sent)]
            for one in self.nodes
        ]
        return {
            "number": self.number,
            "draft": self.draft and [round(time, 6) for time in self.draft],
            "target": self.target and [round(time, 6) for time in self.target],
            "nodes": nodes,
            "drafted": self.drafted,
            "path": list(self.path),
            "token": self.token,
            "text": None if self.token is None else spell(self.token),
            "hit": self.hit,
            "added": self.added,
            "checked": self.checked,
            "rolled_back": self.rolled_back,
            "guided": list(self.guided),
            "batch": self.batch and self.batch._asdict(),
        }


class Film:
    """Makes the frames of one request, round by round."""

    def __init__(self) -> None:
        self._paths: dict[FramePath, _Drafted] = {}
        self._number = -1

    def see(self, orders: Orders, reports: Reports, added: int) -> Frame | None:
        """Return a round as a frame; None for a round in which no model worked."""
        spans = _times(reports.drafting), _times(reports.verifying, reports.verdict is not None)
        if not any(spans):
            return None
        self._number += 1
        self._take_in(orders, reports)
        verify, verdict = orders.verify, reports.verdict
        if _is_plain(orders):
            self._paths = {}
        if verify is None or verdict is None:
            return Frame(self._number, *spans, self._nodes(()), self._drafted())
        paths = _verified(verify)
        self._add((path, 0.0) for path in paths)
        nodes, drafted = self._nodes(paths), self._drafted()
        index_of = {path: at for at, path in enumerate(self._paths)}
        path = tuple(index_of[paths[node]] for node in verdict.path)
        top = (*(verify.tokens[node] for node in verdict.path), verdict.token)
        hit = index_of.get(top)
        self._paths = {path[len(top) :]: one for path, one in self._paths.items() if _is_below(path, top)}
        told = _guided(verify, verdict, added), _in_batch(orders, len(paths))
        return Frame(self._number, *spans, nodes, drafted, path, verdict.token, hit, added, len(paths), *told)

    def _take_in(self, orders: Orders, reports: Reports) -> None:
        if isinstance(orders.draft, Grow):
            tree, known = reports.tree or orders.draft.tree, self._paths
            self._paths = {}
            for path, said in _grown(tree):
                self._paths[path] = _Drafted(said, known[path].given if path in known else self._number)
        pending = orders.verify.tokens if orders.verify else ()
        for branch in reports.branches:
            self._add(_branch(branch, pending))

    def _add(self, paths: Iterable[tuple[FramePath, float]]) -> None:
        """Add new nodes. A parent that is missing was looked up."""
        for path, said in paths:
            for end in range(1, len(path)):
                self._paths.setdefault(path[:end], _Drafted(0.0, self._number))
            self._paths.setdefault(path, _Drafted(said, self._number))

    def _drafted(self) -> int:
        return sum(one.given == self._number for one in self._paths.values())

    def _nodes(self, sent: Iterable[FramePath]) -> tuple[DrawnNode, ...]:
        index_of, judged = {path: at for at, path in enumerate(self._paths)}, set(sent)
        return tuple(
            DrawnNode(path[-1], index_of.get(path[:-1], ROOT), one.said, one.given, path in judged)
            for path, one in self._paths.items()
        )


def _percent(said: float) -> int | None:
    return round(said * 100) if said else None


def _times(span: Span | None, counts: bool = False) -> tuple[float, float] | None:
    """Return the time span of a model. A span without length is None, unless it had a result."""
    return (span.start, span.end) if span and (counts or span.end > span.start) else None


def _guided(verify: Verify, verdict: Verdict, added: int) -> tuple[Guided, ...]:
    """Return what a grammar did to each token that a verdict added."""
    if verify.allowed is None:
        return ()
    tokens, scores = verify.taken(verdict.path, verdict.token), verdict.logprobs or ()
    allowed = [allowed_by(verify.allowed[above + 1]) for above in (ROOT, *verdict.path)]
    return tuple(
        _guide(token, allowed[nth], scores[nth] if nth < len(scores) else None)
        for nth, token in enumerate(tokens[:added])
    )


def _guide(token: int, allowed: Allowed | None, scores: TokenLogprobs | None) -> Guided:
    if allowed is None:
        return "free"
    if (allowed.only == token) if isinstance(allowed, Mask) else len(allowed) == 1:
        return "forced"
    return "masked" if scores and scores.top and scores.top[0][0] not in allowed else "free"


def _in_batch(orders: Orders, checked: int) -> InBatch | None:
    planned = orders.planned
    return InBatch(planned.sessions, 1 + checked, planned.rows) if planned else None


def _is_plain(orders: Orders) -> bool:
    """Return True if the target only computes its next token; then the earlier tree is dropped."""
    verify = orders.verify
    return verify is not None and verify.parents is None and not verify.tokens and orders.draft is None


def _verified(verify: Verify) -> list[FramePath]:
    paths: list[FramePath] = []
    for node, token in enumerate(verify.tokens):
        parent = verify.parent(node)
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    return paths


def _grown(tree: Tree) -> list[tuple[FramePath, float]]:
    paths: list[FramePath] = []
    for node in tree.nodes:
        paths.append((*(() if node.parent == ROOT else paths[node.parent]), node.token))
    return [(path, node.said) for path, node in zip(paths, tree.nodes, strict=True)]


def _branch(branch: Branch, pending: tuple[int, ...]) -> list[tuple[FramePath, float]]:
    before = pending[: branch.after]
    return [
        ((*before, *branch.tokens[: at + 1]), said) for at, said in enumerate(branch.confidence[: len(branch.tokens)])
    ]


def _is_below(path: FramePath, top: FramePath) -> bool:
    return len(path) > len(top) and path[: len(top)] == top
