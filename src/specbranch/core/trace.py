"""Traces: spans of drafting and verifying, round by round, written as JSON lines or as a Chrome trace.

Owns the record of a run, not its timing: spans come from the executor's clock. What became of a drafted token follows
from later rounds; `traces.rounds` works that out. A tree's tokens are followed here, from the round that added them to
the verdict that settles them. Invariant: recording changes nothing in a run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specbranch.core.fates import Settled, branch_points, tree_standings
from specbranch.core.orders import Grow, Orders, Reports, Span, Verdict, Verify
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, Node, Tree, below, marked

Who = Literal["draft", "target"]
TracePath = tuple[int, ...]  # tokens behind the committed text
THREADS: dict[Who, int] = {
    "target": 1,
    "draft": 2,
}  # thread numbers of a Chrome trace; it reserves 0 for an idle processor


@dataclass(frozen=True, slots=True)
class Event:
    """One model's work in one round of one session."""

    session: int
    round: int
    who: Who
    start: float
    end: float
    rows: int  # that the model computed
    pending: int  # tokens under verification in this round
    accepted: int | None = None  # of them, if this is a verification
    branches: tuple[int, ...] = ()  # drafted tokens of each branch
    kept: int | None = None  # the index of the branch that the verdict hit
    tokens: tuple[int, ...] = ()  # target: the accepted ones, then the bonus token; draft: the head of each branch
    refused: tuple[int, ...] = ()  # rejected pending tokens
    # Of a tree: the rounds that added the accepted tokens, then the one that added the bonus token, if it was drafted.
    used: tuple[int, ...] = ()
    settled: tuple[Settled, ...] | None = None  # of a tree: the other tokens, by the round that added them
    arm: str = ""  # of a verification by a method that plans, see `arms`

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Trace:
    """The events of a run, in the order they were reported."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._rounds: dict[int, int] = {}
        self._trees: dict[int, _Followed] = defaultdict(_Followed)

    def record(self, session: int, orders: Orders, reports: Reports) -> None:
        """Add a round."""
        number = self._rounds[session] = self._rounds.get(session, -1) + 1
        pending = len(orders.verify.tokens) if orders.verify else 0
        if isinstance(orders.draft, Grow):
            self._trees[session].see(reports.tree or orders.draft.tree, number)
        if reports.drafting:
            notes = _grown(orders, reports) if isinstance(orders.draft, Grow) else _branched(reports)
            self.events.append(_event(session, number, "draft", reports.drafting, pending, **notes))
        if reports.verifying:
            notes = self._judged(session, number, orders.verify, reports.verdict)
            notes["arm"] = orders.planned.name if orders.planned else ""
            self.events.append(_event(session, number, "target", reports.verifying, pending, **notes))

    def _judged(self, session: int, number: int, order: Verify | None, verdict: Verdict | None) -> dict[str, Any]:
        if order is None or verdict is None:
            return {}
        notes: dict[str, Any] = {
            "accepted": len(verdict.path),
            "tokens": order.taken(verdict.path, verdict.token),
            "refused": tuple(token for node, token in enumerate(order.tokens) if node not in verdict.path),
        }
        if order.parents is not None:
            notes["used"], notes["settled"] = self._trees[session].judge(order, verdict, number)
        return notes

    def write_jsonl(self, path: Path) -> None:
        """Write one JSON object an event."""
        path.write_text("".join(json.dumps(asdict(event)) + "\n" for event in self.events), encoding="utf-8")

    def write_chrome(self, path: Path) -> None:
        """Write a file for Perfetto or chrome://tracing: a process a session, a thread each for target and draft,
        time from 0."""
        events = [*_names(self.events), *_chrome(self.events)]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


class _Followed:
    """A session's tree from round to round, and the round that added each of its nodes.

    Looked-up tokens that no draft order contained count from the round that verifies them.
    """

    def __init__(self) -> None:
        self._tree = NO_TREE
        self._given: dict[TracePath, int] = {}  # by the tokens that lead to a node

    def see(self, tree: Tree, number: int) -> None:
        """Note the tree after a round."""
        self._tree = tree
        self._given = {path: self._given.get(path, number) for path in _paths(tree)}

    def judge(self, order: Verify, verdict: Verdict, number: int) -> tuple[tuple[int, ...], tuple[Settled, ...]]:
        """Return what a verdict decides, and keep the tree that it leaves."""
        sent = self._send(order, number)
        tree, given = self._tree, list(self._given.values())
        path = [sent[node] for node in verdict.path]
        hit = tree.child(path[-1] if path else ROOT, verdict.token)
        used = tuple(given[node] for node in (*path, hit) if node is not None)
        notes = tree_standings(tree, sent, tree.main_path(sent), path, hit)
        rounds = sorted({given[node] for nodes in notes for node in nodes})
        settled = [Settled(at, *(sum(given[node] == at for node in nodes) for nodes in notes)) for at in rounds]
        top = () if hit is None else list(self._given)[hit]
        self._tree = NO_TREE if hit is None else below(tree, hit)
        self._given = {path: self._given[top + path] for path in _paths(self._tree)}
        return used, tuple(settled)

    def _send(self, order: Verify, number: int) -> list[int]:
        """Mark the verified nodes; returns their numbers."""
        nodes, numbers = list(self._tree.nodes), {path: number for number, path in enumerate(self._given)}
        part = Tree(tuple(Node(token, order.parent(at), 0.0, 0.0, 0) for at, token in enumerate(order.tokens)))
        paths = _paths(part)
        for path in paths:
            if path not in numbers:
                numbers[path] = len(nodes)
                nodes.append(Node(path[-1], numbers.get(path[:-1], ROOT), 0.0, 0.0, len(path)))
                self._given[path] = number
        sent = [numbers[path] for path in paths]
        self._tree = marked(Tree(tuple(nodes)), sent)
        return sent


def _paths(tree: Tree) -> list[TracePath]:
    """Return the tokens that lead to each node, itself included."""
    paths: list[TracePath] = []
    for node in tree.nodes:
        paths.append((*(() if node.parent == ROOT else paths[node.parent]), node.token))
    return paths


def _branched(reports: Reports) -> dict[str, Any]:
    branches, kept = reports.branches, reports.kept
    return {
        "branches": tuple(len(branch.tokens) for branch in branches),
        "kept": next((at for at, branch in enumerate(branches) if branch is kept), None),
        "tokens": tuple(branch.tokens[0] for branch in branches),
    }


def _grown(orders: Orders, reports: Reports) -> dict[str, Any]:
    """Describe a tree as branches: each open end of the verified nodes with the drafted nodes behind it.

    The kept branch is the one that the verdict hit.
    """
    tree = reports.tree or NO_TREE
    points = branch_points(tree)
    heads = [n for n, node in enumerate(tree.nodes) if not node.sent and node.parent in points]
    top, sizes = {head: head for head in heads}, dict.fromkeys(heads, 1)
    for n, node in enumerate(tree.nodes):
        if n not in top and node.parent in top:
            top[n] = top[node.parent]
            sizes[top[n]] += node.scored
    kept = _hit(orders, reports, tree)
    grown = [head for head in heads if tree.nodes[head].scored]
    if kept is not None and kept not in grown:
        grown.append(kept)
    return {
        "branches": tuple(sizes[head] for head in grown),
        "kept": None if kept is None else grown.index(kept),
        "tokens": tuple(tree.nodes[head].token for head in grown),
    }


def _hit(orders: Orders, reports: Reports, tree: Tree) -> int | None:
    """Return the node of the bonus token, or None."""
    if reports.verdict is None or orders.verify is None:
        return None
    here = ROOT
    for token in (*(orders.verify.tokens[node] for node in reports.verdict.path), reports.verdict.token):
        found = tree.child(here, token)
        if found is None:
            return None
        here = found
    return here


def _event(session: int, number: int, who: Who, span: Span, pending: int, **more: Any) -> Event:
    return Event(session, number, who, span.start, span.end, span.tokens, pending, **more)


def _names(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Name the processes and threads, the target's above the draft's."""
    for session in dict.fromkeys(event.session for event in events):
        yield _metadata("process_name", session, 0, {"name": f"request {session}"})
        for who, thread in THREADS.items():
            yield _metadata("thread_name", session, thread, {"name": who})
            yield _metadata("thread_sort_index", session, thread, {"sort_index": thread})


def _metadata(name: str, session: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": session + 1, "tid": thread, "args": args}


def _chrome(events: list[Event]) -> Iterator[dict[str, Any]]:
    begin = min((event.start for event in events), default=0.0)
    for event in events:
        yield {
            "name": _title(event),
            "cat": event.who,
            "ph": "X",
            "pid": event.session + 1,
            "tid": THREADS[event.who],
            "ts": (event.start - begin) * 1e6,  # microseconds
            "dur": event.seconds * 1e6,
            "args": asdict(event),
        }


def _title(event: Event) -> str:
    if event.round == 0:
        return "read the prompt"
    if event.who == "target":
        return f"verify {event.pending}" + ("" if event.accepted is None else f", {event.accepted} accepted")
    lengths = " + ".join(map(str, event.branches)) or "nothing"
    return f"draft {lengths}" + ("" if event.kept is None else f", kept number {event.kept + 1}")
