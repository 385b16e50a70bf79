"""What happened when: spans of drafting and verifying, round by round; written as JSON lines or as a Chrome trace.

Owns the record of a run, not its timing: spans come from the executor's clock. What became of a drafted token is told
by the rounds after it; `bench.rounds` reads that off. A tree's tokens are followed here, from the round that gave them
to the verdict that settles them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specbranch.core.orders import Grow, Orders, Reports, Span, Verdict, Verify
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, Tree

Who = Literal["draft", "target"]
TraceLine = tuple[int, ...]  # tokens behind the committed text
THREADS: dict[Who, int] = {"target": 1, "draft": 2}  # of a Chrome trace, where 0 stands for an idle processor


class Settled(NamedTuple):
    """What a verdict decided of the tokens that a tree was given in one round, but for those the target took."""

    round: int
    rejected: int = 0  # on the main line
    siblings: int = 0  # verified beside it
    lost: int = 0  # read, never sent, and left behind
    left: int = 0  # read, and below the token that was foreseen: still to be judged
    head: int = 0  # that token, if it was read, too


@dataclass(frozen=True, slots=True)
class Event:
    """One model's work in one round of one session."""

    session: int
    round: int
    who: Who
    start: float
    end: float
    rows: int  # fed to the model
    pending: int  # tokens under verification in this round
    accepted: int | None = None  # of them, if this is a verification
    branches: tuple[int, ...] = ()  # drafted tokens of each branch
    kept: int | None = None  # which branch the verdict hit
    tokens: tuple[int, ...] = ()  # target: those accepted, then its own; draft: the head of each branch
    refused: tuple[int, ...] = ()  # pending tokens that the target did not take
    used: tuple[
        int, ...
    ] = ()  # of a tree: the rounds that gave the tokens accepted, then that of the target's own if it was foreseen
    settled: tuple[Settled, ...] | None = None  # of a tree: the others by the round that gave them


class Trace:
    """The events of a run, in the order they were reported."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._rounds: dict[int, int] = {}
        self._trees: dict[int, _Followed] = {}

    def record(self, session: int, orders: Orders, reports: Reports) -> None:
        """Add a round."""
        number = self._rounds[session] = self._rounds.get(session, -1) + 1
        pending = len(orders.verify.tokens) if orders.verify else 0
        if isinstance(orders.draft, Grow):
            self._tree(session).see(reports.tree or orders.draft.tree, number)
        if reports.drafting:
            told = _grown(orders, reports) if isinstance(orders.draft, Grow) else _branched(reports)
            self.events.append(_event(session, number, "draft", reports.drafting, pending, **told))
        if reports.verifying:
            judged = _judged(orders.verify, reports.verdict) if orders.verify and reports.verdict else {}
            settled = self._settled(session, number, orders, reports)
            self.events.append(_event(session, number, "target", reports.verifying, pending, **judged, **settled))

    def _tree(self, session: int) -> _Followed:
        return self._trees.setdefault(session, _Followed())

    def _settled(self, session: int, number: int, orders: Orders, reports: Reports) -> dict[str, Any]:
        if orders.verify is None or orders.verify.parents is None or reports.verdict is None:
            return {}
        used, settled = self._tree(session).judge(orders.verify, reports.verdict, number)
        return {"used": used, "settled": settled}

    def write_jsonl(self, path: Path) -> None:
        """Write one JSON object an event."""
        path.write_text("".join(json.dumps(asdict(event)) + "\n" for event in self.events), encoding="utf-8")

    def write_chrome(self, path: Path) -> None:
        """Write a file for Perfetto or chrome://tracing: a process a session, a thread each for target and draft,
        time from 0."""
        events = [*_names(self.events), *_chrome(self.events)]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


class _Known(NamedTuple):
    """What is known of a node: the round that gave it, how far it reaches, whether the draft has read it."""

    round: int
    reach: float
    fed: bool


class _Followed:
    """A session's tree from round to round. A node is named by the tokens that lead to it from the committed text.

    What was looked up and given to the draft in no round is met when it is verified.
    """

    def __init__(self) -> None:
        self._nodes: dict[TraceLine, _Known] = {}

    def see(self, tree: Tree, number: int) -> None:
        """Take in a tree as it is after a round."""
        lines: list[TraceLine] = []
        for node in tree.nodes:
            lines.append((*_above(lines, node.parent), node.token))
        born = {line: known.round for line, known in self._nodes.items()}
        nodes = zip(lines, tree.nodes, strict=True)
        self._nodes = {line: _Known(born.get(line, number), node.reach, node.fed) for line, node in nodes}

    def judge(self, order: Verify, verdict: Verdict, number: int) -> tuple[tuple[int, ...], tuple[Settled, ...]]:
        """Tell what a verdict decides, and go on with what it leaves."""
        sent: list[TraceLine] = []
        for node, token in enumerate(order.tokens):
            sent.append((*_above(sent, order.parent(node)), token))
            self._nodes.setdefault(sent[-1], _Known(number, 0.0, False))
        taken = [sent[node] for node in verdict.path]
        hit = (*(taken[-1] if taken else ()), verdict.token)
        settled: dict[int, Settled] = {}
        for line, kind in self._fates(sent, hit):
            if line not in taken:
                at = self._nodes[line].round
                one = settled.get(at, Settled(at))
                settled[at] = one._replace(**{kind: getattr(one, kind) + 1})
        used = tuple(self._nodes[line].round for line in (*taken, hit) if line in self._nodes)
        self._nodes = {line[len(hit) :]: known for line, known in self._nodes.items() if _is_below(line, hit)}
        return used, tuple(settled[at] for at in sorted(settled))

    def _fates(self, sent: list[TraceLine], hit: TraceLine) -> Iterator[tuple[TraceLine, str]]:
        """What becomes of each node if the target does not take it; nothing is told of one that was neither sent nor
        read."""
        judged, main = set(sent), self._main_line(sent)
        below = hit in self._nodes
        for line, known in self._nodes.items():
            if line in judged:
                yield line, "rejected" if line in main else "siblings"
            elif known.fed:
                yield line, "head" if line == hit else "left" if below and _is_below(line, hit) else "lost"

    def _main_line(self, sent: list[TraceLine]) -> set[TraceLine]:
        """At every node its likeliest child, of those sent; of equals the first."""
        line: list[TraceLine] = []
        while children := [one for one in sent if one[:-1] == (line[-1] if line else ())]:
            line.append(max(children, key=lambda one: self._nodes[one].reach))
        return set(line)


def _above(lines: list[TraceLine], parent: int) -> TraceLine:
    return () if parent == ROOT else lines[parent]


def _is_below(line: TraceLine, top: TraceLine) -> bool:
    return len(line) > len(top) and line[: len(top)] == top


def _branched(reports: Reports) -> dict[str, Any]:
    lengths = tuple(len(branch.tokens) for branch in reports.branches)
    return {
        "branches": lengths,
        "kept": _kept(reports),
        "tokens": tuple(branch.tokens[0] for branch in reports.branches),
    }


def _grown(orders: Orders, reports: Reports) -> dict[str, Any]:
    """A tree as branches: each open end of what is verified with what was read behind it. The one kept is the one
    that the verdict hit."""
    tree = reports.tree or NO_TREE
    heads = [
        n
        for n, node in enumerate(tree.nodes)
        if not node.sent and (node.parent == ROOT or tree.nodes[node.parent].sent)
    ]
    sizes = dict.fromkeys(heads, 1)
    top = {head: head for head in heads}
    for n, node in enumerate(tree.nodes):
        if n not in top and node.parent in top:
            top[n] = top[node.parent]
            sizes[top[n]] += node.fed
    grown = [head for head in heads if tree.nodes[head].fed]
    kept = _hit(orders, reports, tree)
    if kept is not None and kept not in grown:
        grown.append(kept)
    place = grown.index(kept) if kept is not None else None
    return {
        "branches": tuple(sizes[h] for h in grown),
        "kept": place,
        "tokens": tuple(tree.nodes[h].token for h in grown),
    }


def _hit(orders: Orders, reports: Reports, tree: Tree) -> int | None:
    """The node of a tree that the target's own token fell on."""
    if reports.verdict is None or orders.verify is None:
        return None
    here = ROOT
    for token in (*(orders.verify.tokens[node] for node in reports.verdict.path), reports.verdict.token):
        found = tree.child(here, token)
        if found is None:
            return None
        here = found
    return here


def _kept(reports: Reports) -> int | None:
    kept = reports.kept
    return next((i for i, branch in enumerate(reports.branches) if branch is kept), None)


def _judged(order: Verify, verdict: Verdict) -> dict[str, Any]:
    taken = set(verdict.path)
    return {
        "accepted": len(verdict.path),
        "tokens": (*(order.tokens[node] for node in verdict.path), verdict.token),
        "refused": tuple(token for node, token in enumerate(order.tokens) if node not in taken),
    }


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
            "dur": (event.end - event.start) * 1e6,
            "args": asdict(event),
        }


def _title(event: Event) -> str:
    if event.round == 0:
        return "read the prompt"
    if event.who == "target":
        return f"verify {event.pending}" + ("" if event.accepted is None else f", {event.accepted} accepted")
    lengths = " + ".join(map(str, event.branches)) or "nothing"
    return f"draft {lengths}" + ("" if event.kept is None else f", kept number {event.kept + 1}")
