"""What happened when: spans of drafting and verifying, round by round; written as JSON lines or as a Chrome trace.

Owns the record of a run, not its timing: spans come from the executor's clock. What became of a drafted token is told by the rounds after
it; `bench.rounds` reads that off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specbranch.core.orders import Orders, Reports, Span, Verdict, Verify

Who = Literal["draft", "target"]
THREADS: dict[Who, int] = {"target": 1, "draft": 2}  # of a Chrome trace, where 0 stands for an idle processor


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


class Trace:
    """The events of a run, in the order they were reported."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._rounds: dict[int, int] = {}

    def record(self, session: int, orders: Orders, reports: Reports) -> None:
        """Add a round."""
        number = self._rounds[session] = self._rounds.get(session, -1) + 1
        pending = len(orders.verify.tokens) if orders.verify else 0
        if reports.drafting:
            told = {"branches": tuple(len(b.tokens) for b in reports.branches), "kept": _kept(reports)}
            heads = tuple(b.tokens[0] for b in reports.branches)
            self.events.append(_event(session, number, "draft", reports.drafting, pending, **told, tokens=heads))
        if reports.verifying:
            judged = _judged(orders.verify, reports.verdict) if orders.verify and reports.verdict else {}
            self.events.append(_event(session, number, "target", reports.verifying, pending, **judged))

    def write_jsonl(self, path: Path) -> None:
        """Write one JSON object an event."""
        path.write_text("".join(json.dumps(asdict(event)) + "\n" for event in self.events), encoding="utf-8")

    def write_chrome(self, path: Path) -> None:
        """Write a file for Perfetto or chrome://tracing: a process a session, a thread each for target and draft, time from 0."""
        events = [*_names(self.events), *_chrome(self.events)]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


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
