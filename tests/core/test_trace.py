"""A trace records what each model did in each round, and can be read back from both kinds of file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from specbranch.config import SpeculativeConfig
from specbranch.core.orders import Branch, Context, Draft, Orders, Plan, Reports, Span, Verdict, Verify
from specbranch.core.trace import Event, Trace
from toybench import PROFILE, Case, Ending, decode, virtual_clock

DRAFT = Draft(Context(0, (1,)), Plan(3), 2)
VERIFY = Verify(Context(0, (1,)), (4, 5))
BRANCHES = (Branch(2, (7, 8), ()), Branch(2, (9,), ()))


def test_a_round_becomes_an_event_a_model() -> None:
    trace = Trace()
    trace.record(3, Orders(DRAFT, VERIFY), Reports(BRANCHES, Verdict((0, 1), 9), Span(0.0, 1.0, 6), Span(0.0, 2.0, 3)))
    assert trace.events == [
        Event(3, 0, "draft", 0.0, 1.0, 6, 2, branches=(2, 1), kept=1, tokens=(7, 9)),
        Event(3, 0, "target", 0.0, 2.0, 3, 2, accepted=2, tokens=(4, 5, 9)),
    ]


def test_rounds_are_numbered_for_each_session() -> None:
    trace = Trace()
    for session in (1, 2, 1):
        trace.record(session, Orders(verify=VERIFY), Reports(verdict=Verdict((), 9), verifying=Span(0.0, 1.0)))
    assert [(e.session, e.round) for e in trace.events] == [(1, 0), (2, 0), (1, 1)]


def test_a_round_in_which_nothing_ran_leaves_no_event() -> None:
    trace = Trace()
    trace.record(1, Orders(), Reports())
    assert trace.events == []


def test_no_branch_is_kept_where_none_presumed_the_outcome() -> None:
    trace = Trace()
    trace.record(1, Orders(DRAFT, VERIFY), Reports(BRANCHES, Verdict((0,), 9), Span(0.0, 1.0), Span(0.0, 1.0)))
    assert [e.kept for e in trace.events] == [None, None]
    assert (trace.events[1].accepted, trace.events[1].tokens, trace.events[1].refused) == (1, (4, 9), (5,))


def run() -> tuple[Trace, int]:
    """A real run; returns its trace and how many branches were hit in it."""
    trace = Trace()
    config = SpeculativeConfig(method="specbranch", num_speculative_tokens=4, max_branches=12)
    session = decode(virtual_clock(0.2, profile=PROFILE), Case((1, 2), 0.7, 1, Ending("long")), config, trace=trace)
    return trace, session.stats.branch_hits


def test_a_run_and_its_trace_agree() -> None:
    trace, hits = run()
    foreseen = [e for e in trace.events if e.accepted is not None and len(e.used) > e.accepted]
    drafting = [e for e in trace.events if e.who == "draft"]
    meanwhile = [e for e in foreseen if e.round in {draft.round for draft in drafting}]
    assert len(foreseen) == hits > 0
    assert sum(e.kept is not None for e in drafting) == len(meanwhile) > 0
    for before, after in zip(trace.events, trace.events[1:], strict=False):
        assert after.round in (before.round, before.round + 1)
        assert after.start >= before.start


def test_a_trace_names_the_arm_of_each_round_that_was_planned() -> None:
    for method, plans in (("specbranch", True), ("pearl", False)):
        trace, case = Trace(), Case((1, 2), 0.7, 1, Ending("long"))
        config = SpeculativeConfig(method=method)
        stats = decode(virtual_clock(0.2, profile=PROFILE), case, config, trace=trace).stats
        named = Counter(event.arm for event in trace.events if event.arm)
        assert named == {name: arm.rounds for name, arm in stats.arms.by_name.items()}
        assert bool(named) == plans


def test_the_lines_file_holds_every_event(tmp_path: Path) -> None:
    trace, _ = run()
    trace.write_jsonl(tmp_path / "trace.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert any(event.settled for event in trace.events)
    assert [Event(**{name: _tuples(value) for name, value in line.items()}) for line in lines] == trace.events


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def test_the_chrome_file_holds_every_span_in_microseconds(tmp_path: Path) -> None:
    trace, _ = run()
    trace.write_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(trace.events) and {event["ph"] for event in events} == {"M", "X"}
    begin = min(event.start for event in trace.events)
    for shown, event in zip(spans, trace.events, strict=True):
        assert isinstance(shown["tid"], int) and shown["pid"] == event.session + 1
        assert named[shown["pid"], shown["tid"]] == event.who
        assert shown["ts"] == (event.start - begin) * 1e6 >= 0
        assert shown["dur"] == (event.end - event.start) * 1e6
