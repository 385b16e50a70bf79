"""Orders may be carried out again: at once, in part, or after later ones; the text stays the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from specbranch.config import SpeculativeConfig
from specbranch.core.loop import DraftState, Executor, Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Orders, Reports, Verify
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.exec.serial import Serial
from tiers import each_value, tiered
from toybench import (
    SHARED,
    Case,
    Ending,
    Timeless,
    answer,
    law,
    make_drafter,
    make_verifier,
    next_number,
    plainly,
    process,
    run_out,
    serial,
    streams,
    virtual_clock,
    wandering,
)

DRIFT = 0.3
ENDING = Ending("some", max_tokens=40)
METHODS_TRIED = (
    "autoregressive",
    "speculative",
    "adaptive",
    "pearl",
    "specbranch",
    "tree",
    "lookup",
    "lookahead",
    "wandering",
)
EXECUTORS: dict[str, Callable[[], Executor]] = {
    "serial": lambda: serial(DRIFT),
    "process": lambda: process(DRIFT),
    "streams": lambda: streams(DRIFT),
    "clock": lambda: virtual_clock(DRIFT),
}


class Repeating:
    """An executor that at random repeats a round's orders, or some of them, or runs earlier ones first. It returns the
    last reports of the round's own orders."""

    def __init__(self, inner: Executor, seed: int) -> None:
        self.inner, self.now, self.open, self.free, self.close = inner, inner.now, inner.open, inner.free, inner.close
        self.repeated = {"all": 0, "some": 0, "earlier": 0}
        self._random = random.Random(seed)
        self._earlier: dict[int, list[Orders]] = {}

    @property
    def restarts(self) -> int:
        return self.inner.restarts

    @property
    def late_captures(self) -> int:
        return self.inner.late_captures

    @property
    def draft_state(self) -> DraftState:
        return self.inner.draft_state

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        what = self._random.choice(("once", "all", "some", "earlier"))
        if what == "all":
            self.inner.run(orders)
        elif what == "some":
            self.inner.run({session: order for session, order in orders.items() if self._random.random() < 0.5})
        elif what == "earlier":
            self.inner.run(
                {session: self._random.choice(self._earlier.get(session, [order])) for session, order in orders.items()}
            )
        if what != "once":
            self.repeated[what] += 1
        for session, order in orders.items():
            self._earlier.setdefault(session, []).append(order)
        return self.inner.run(orders)


@pytest.fixture(scope="module", params=EXECUTORS)
def inner(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made = EXECUTORS[request.param]()
    yield made
    made.close()


def joined(loop: Loop, case: Case, method: str) -> Session:
    session = case.session(next_number())
    config = (
        SpeculativeConfig(method=method, num_speculative_tokens=4, rule=case.rule, stop_below=0.2)
        if method != "wandering"
        else None
    )
    loop.join(session, METHODS[method].start(session, config, Timeless(SHARED)) if config else wandering(session))
    return session


@each_value
@pytest.mark.parametrize("method", tiered(METHODS_TRIED, ("pearl", "specbranch", "lookahead").__contains__))
def test_repeated_orders_change_no_token(inner: Executor, method: str) -> None:
    executor, drafted = Repeating(inner, seed=7), 0
    for seed in range(4):
        loop = Loop(executor)
        cases = [Case((seed, 1, 2) * (1 + 9 * at), (0.0, 0.7, 1.3)[at], 10 * seed + at, ENDING) for at in range(3)]
        sessions = [joined(loop, case, method) for case in cases]
        run_out(loop)
        assert [answer(session) for session in sessions] == [plainly(case, law()) for case in cases]
        drafted += sum(session.stats.drafted for session in sessions)
    assert min(executor.repeated.values()) > 3 and (drafted > 100 or method == "autoregressive")


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("method", ["speculative", "pearl", "lookup", "lookahead"])
def test_repeated_orders_change_no_token_under_the_ratio_rule(inner: Executor, method: str) -> None:
    for seed in range(4):
        case = Case((seed, 3), 1.0, seed, ENDING, "ratio")
        alone, repeated = Loop(inner), Loop(Repeating(inner, seed))
        first, second = joined(alone, case, method), joined(repeated, case, method)
        run_out(alone)
        run_out(repeated)
        assert answer(first) == answer(second)


class Twice(Serial):
    """Carries out every round twice, and compares."""

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        first, second = super().run(orders), super().run(orders)
        assert {s: timeless(r) for s, r in first.items()} == {s: timeless(r) for s, r in second.items()}
        return second


def timeless(report: Reports) -> Reports:
    tree = None if report.tree is None else replace(report.tree, steps=())  # what is held need not be read again
    return replace(report, drafting=None, verifying=None, tree=tree)


# it has more time where less is to be read
@pytest.mark.parametrize("method", [name for name in METHODS_TRIED if name != "specbranch"])
def test_an_order_that_is_repeated_is_answered_alike(method: str) -> None:
    for seed in range(2):
        loop = Loop(Twice(make_verifier(), make_drafter(DRIFT)))
        session = joined(loop, Case((seed, 5), 0.7, seed, ENDING), method)
        run_out(loop)
        assert session.finished == "length"


def test_a_verdict_survives_an_interrupt_at_any_call_of_the_runner() -> None:
    """Whatever was done of an order when an interrupt came, doing it again gives the same."""
    case = Case((1, 2, 3), 0.0, 0, ENDING)
    reference = plainly(case, law()).tokens
    for calls in range(1, 40):
        target = make_verifier()
        target.open(0, Request(case.params, case.seed, len(case.prompt)))
        interrupted = Interrupted(target.runner, calls)
        target.runner = interrupted  # type: ignore[assignment]
        executor, session = Serial(target), case.session(0)
        session.number = 0
        while not session.finished:
            order = session.verify()
            try:
                verdict = executor.run({0: Orders(verify=order)})[0].verdict
            except KeyboardInterrupt:
                verdict = executor.run({0: Orders(verify=order)})[0].verdict
            assert verdict is not None
            session.commit((), verdict)
        assert interrupted.struck and tuple(session.output) == reference


class Interrupted:
    """A runner that is interrupted once, right after its n-th call has done its work."""

    def __init__(self, inner: object, calls: int) -> None:
        self._inner, self._calls, self.struck = inner, calls, False

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if name not in ("extend", "feed", "keep", "rewind"):
            return found

        def call(*arguments: object) -> object:
            result = found(*arguments)
            self._calls -= 1
            if self._calls == 0:
                self.struck = True
                raise KeyboardInterrupt
            return result

        return call


def test_a_verify_order_for_a_shorter_text_than_is_held_is_judged_by_that_text() -> None:
    target = make_verifier()
    target.open(0, Request(Case((1,), 0.0, 0, ENDING).params, 0, 1))
    executor = Serial(target)
    whole = executor.run({0: Orders(verify=Verify(Context(0, (1, 2, 3, 4, 5))))})[0].verdict
    short = executor.run({0: Orders(verify=Verify(Context(0, (1, 2))))})[0].verdict
    other = executor.run({0: Orders(verify=Verify(Context(2, (4,))))})[0].verdict
    rows = [law().logits_of(text) for text in ((1, 2, 3, 4, 5), (1, 2), (1, 2, 4))]
    expected = [row.index(max(row)) for row in rows]
    assert [verdict and verdict.token for verdict in (whole, short, other)] == expected
