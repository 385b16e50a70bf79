"""What the two processes say to each other in a round, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from specbranch.config import Rule, SamplingParams
from specbranch.core.experience import Experience
from specbranch.core.orders import Branch, Context, Draft, Drafted, DraftOrder, Grow, Orders, Plan, Verdict, Verify
from specbranch.core.request import Request
from specbranch.core.runner import Done, Feed
from specbranch.core.trees import NO_TREE, Growth
from specbranch.exec.drafter import Announce, Drafter, never
from specbranch.exec.messages import Open, Recipe, TargetDone, Work
from specbranch.exec.serial import draft_or_whole
from specbranch.exec.verifier import Scored, Verifier
from specbranch.lab.toys.toys import Logits, ToyRunner
from tiers import tiered
from toybench import PROFILE, Overheard, SlowRunner, drafter_recipe, law

PATIENCE = 10.0  # seconds after which something that should come is not waited for any more
LENGTH, ENOUGH = 60, 20  # tokens: as many as a lane may have, and as many as it must have to be said to go on


class NotingRunner(SlowRunner):
    """A draft that notes each of its forwards."""

    def __init__(self, notes: Path) -> None:
        super().__init__(law(0.1), 0.002)
        self.notes = notes

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        with self.notes.open("a") as file:
            file.write(".")
        return super()._score(work)


def make_noting(notes: str) -> Drafter:
    """Make a draft worker that notes its forwards."""
    return Drafter(NotingRunner(Path(notes)))


class LateTarget(Verifier):
    """A target on a device that works on after `score` has returned: its rows can be read once `arrived` says so."""

    def __init__(self, arrived: Callable[[], bool]) -> None:
        super().__init__(ToyRunner(law()))
        self.arrived = arrived
        self.when_judged: Callable[[], None] = lambda: None

    def judge(self, scored: Scored, heads: Mapping[int, Branch]) -> dict[int, Verdict]:
        end = time.monotonic() + PATIENCE
        while not self.arrived() and time.monotonic() < end:
            time.sleep(0.001)
        self.when_judged()
        return super().judge(scored, heads)


def request(rule: Rule = "match") -> Request:
    return Request(SamplingParams(temperature=0.7), 3, 2, rule=rule)


@pytest.mark.parametrize("rule", tiered(("match", "ratio"), "ratio".__eq__))
def test_lanes_go_on_until_the_verdicts_are_made_not_only_until_the_forward_is_launched(
    rule: Rule, tmp_path: Path
) -> None:
    notes = tmp_path / "forwards"
    target = LateTarget(lambda: notes.exists() and len(notes.read_text()) >= ENOUGH)
    with closing(Overheard(target, Recipe(f"{__name__}:make_noting", {"notes": str(notes)}))) as executor:
        target.when_judged = lambda: executor.sent_messages.append("judged")
        executor.open(0, request(rule))
        plan = Plan(LENGTH, ((0, 1),), heads="sampled" if rule == "ratio" else "top", until="target")
        reports = executor.run({0: Orders(Draft(Context(0, (1, 2)), plan), Verify(Context(0, (1, 2))))})[0]
    assert [what if what == "judged" else type(what) for what in executor.sent_messages] == [
        Open,
        Work,
        "judged",
        TargetDone,
    ]
    assert len(reports.branches[0].tokens) >= ENOUGH


def test_heads_are_sent_together_also_where_a_session_has_none() -> None:
    drafter = Drafter(ToyRunner(law(0.1), context_length=20))
    reported: list[dict[int, Branch]] = []
    plan = Plan(4, ((0, 1),), heads="sampled", until="target")
    for session in (0, 1):
        drafter.open(session, request("ratio"))
    made = drafter.draft(
        {0: Draft(Context(0, (1, 2)), plan), 1: Draft(Context(0, (1,) * 30), plan)}, announce=reported.append
    )
    assert [heads.keys() for heads in reported] == [{0}]
    assert made[0][0].tokens[0] == reported[0][0].tokens[0] and made[1] == ()


def whole(message: Work) -> set[int]:
    """The sessions that are sent whole."""
    return {session for session, order in message.orders.items() if order.on.base == 0}


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_only_the_session_that_the_child_has_lost_is_sent_whole(kind: str) -> None:
    texts = {session: [session, 1, 2, 3] for session in range(3)}

    def orders(base: int, number: int) -> dict[int, Orders]:
        on = {session: Context(base, tuple(text[base:]), text) for session, text in texts.items()}
        growth = Growth((0.0,), Experience(PROFILE).insight.chances(), most=2, worth=1.0)
        drafts = {
            s: Draft(c, Plan(2), 0, number) if kind == "chain" else Grow(c, NO_TREE, growth, number)
            for s, c in on.items()
        }
        return {session: Orders(draft) for session, draft in drafts.items()}

    with closing(Overheard(Verifier(ToyRunner(law())), drafter_recipe(0.1))) as executor:
        for session in texts:
            executor.open(session, request())
        executor.run(orders(0, 1))
        executor._send(Open(1, request()))  # the child begins the session anew, so it holds nothing of it
        for text in texts.values():
            text.append(4)
        reports = executor.run(orders(4, 2))
    assert [whole(message) for message in executor.sent_messages if isinstance(message, Work)] == [
        {0, 1, 2},
        set(),
        {1},
    ]
    assert all(report.tree if kind == "tree" else report.branches for report in reports.values())


class Counted(Drafter):
    """Notes which sessions it is sent whole."""

    def draft(
        self, orders: Mapping[int, DraftOrder], done: Done = never, announce: Announce | None = None
    ) -> dict[int, Drafted]:
        self.whole = whole(Work(0, dict(orders)))
        return super().draft(orders, done, announce)


def test_a_worker_beside_the_target_is_sent_whole_only_what_it_has_lost() -> None:
    drafter, text = Counted(ToyRunner(law(0.1))), [1, 2, 3, 4]
    for session in range(3):
        drafter.open(session, request())
    draft_or_whole(
        drafter, {session: Draft(Context(0, (1, 2, 3)), Plan(2)) for session in range(3)}, never, lambda heads: None
    )
    drafter.free(1)
    drafter.open(1, request())
    draft_or_whole(
        drafter, {session: Draft(Context(3, (4,), text), Plan(2)) for session in range(3)}, never, lambda heads: None
    )
    assert drafter.whole == {1}


def test_a_text_that_has_outgrown_the_draft_is_not_sent_again_and_again() -> None:
    drafter = Counted(ToyRunner(law(0.1), context_length=6))
    drafter.open(0, request())
    text = [1, 2, 3, 4, 5]
    reported = []
    for base in (0, 5, 6):
        draft_or_whole(drafter, {0: Draft(Context(base, tuple(text[base:]), text), Plan(2))}, never, lambda heads: None)
        reported.append(drafter.whole)
        text.append(1)
    assert reported == [{0}, set(), set()]
