"""What happened when: spans of drafting and verifying, round by round; written as JSON lines or as a Chrome trace.

Owns the record of a run, not its timing: spans come from the executor's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specbranch.core.orders import Orders, Reports, Span

Who = Literal["draft", "target"]


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


class Trace:
    """The events of a run, in the order they were reported."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._rounds: dict[int, int] = {}

    def record(self, session: int, orders: Orders, reports: Reports) -> None:
        """Add a round."""
        number = self._rounds[session] = self._rounds.get(session, -1) + 1
        pending = len(orders.verify.tokens) if orders.verify else 0
        verdict = reports.verdict
        if reports.drafting:
            lengths = tuple(len(b.tokens) for b in reports.branches)
            self.events.append(_event(session, number, "draft", reports.drafting, pending, branches=lengths, kept=_kept(reports)))
        if reports.verifying:
            accepted = len(verdict.path) if verdict else None
            self.events.append(_event(session, number, "target", reports.verifying, pending, accepted=accepted))

    def write_jsonl(self, path: Path) -> None:
        """Write one JSON object an event."""
        path.write_text("".join(json.dumps(asdict(event)) + "\n" for event in self.events))

    def write_chrome(self, path: Path) -> None:
        """Write a file for chrome://tracing or Perfetto: a process a session, a row each for draft and target."""
        path.write_text(json.dumps({"traceEvents": list(_chrome(self.events)), "displayTimeUnit": "ms"}))


def _kept(reports: Reports) -> int | None:
    kept = reports.kept
    return next((i for i, branch in enumerate(reports.branches) if branch is kept), None)


def _event(session: int, number: int, who: Who, span: Span, pending: int, **more: Any) -> Event:
    return Event(session, number, who, span.start, span.end, span.tokens, pending, **more)


def _chrome(events: Iterable[Event]) -> Iterable[dict[str, Any]]:
    for event in events:
        yield {
            "name": f"{'draft' if event.who == 'draft' else 'verify'} {event.round}",
            "ph": "X",
            "pid": event.session,
            "tid": event.who,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": asdict(event),
        }
