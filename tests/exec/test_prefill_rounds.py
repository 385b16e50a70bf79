"""Prefill orders beside verify orders: decoding sessions get memory first, and one forward takes the chunks along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from paged_toys import PagedToyRunner
from specbranch.config import SamplingParams
from specbranch.core.loop import Executor
from specbranch.core.orders import Context, Orders, Prefill, Reports, Verify
from specbranch.core.request import Request
from specbranch.core.runner import Feed, Trial, Verdicts
from specbranch.errors import PoolFull
from specbranch.exec.drafter import Drafter
from specbranch.exec.messages import Recipe
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from tiers import tiered
from toybench import law

PROMPTS = {0: (1, 2, 3), 1: (4, 5, 1, 2, 3, 4), 2: (5, 5, 2, 1, 3, 1, 2)}


class PutsOff(PagedToyRunner):
    """A toy that notes its calls, and which chunks each forward takes along."""

    def __init__(self, pages: int = 64) -> None:
        super().__init__(law(0.0), pages, page=2, prefill_chunk=2, context_length=400)
        self.calls: list[tuple[str, Any]] = []
        self.chunks: list[int] = []

    def demand(self, seq: int, count: int) -> None:
        super().demand(seq, count)
        self.calls.append(("demand", seq))

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        super().extend(seq, tokens)
        self.calls.append(("extend", seq))
        self.chunks.append(seq)

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        self._forward([feed.seq for feed in work])
        return super().verify(work, trials)

    def flush(self) -> None:
        if self.chunks:
            self._forward([])

    def _forward(self, rows: list[int]) -> None:
        self.calls.append(("forward", (tuple(rows), tuple(self.chunks))))
        self.chunks.clear()


def toy_draft() -> Drafter:
    return Drafter(PagedToyRunner(law(0.0), 64, 2, 2, 400))


def in_two(target: Verifier) -> Process:
    return Process(target, Recipe("test_prefill_rounds:toy_draft", {}))


EXECUTORS: dict[str, Callable[[Verifier], Executor]] = {
    "serial": partial(Serial),
    "streams": partial(Streams),
    "process": in_two,
}


@pytest.fixture(params=tiered(EXECUTORS, "process".__ne__))
def made(request: pytest.FixtureRequest) -> Any:
    """A function that makes an executor over a target with a decoding session, 0, and two with unread prompts."""
    opened: list[Executor] = []

    def make(runner: PutsOff) -> Executor:
        executor = EXECUTORS[request.param](Verifier(runner))
        opened.append(executor)
        for session, prompt in PROMPTS.items():
            executor.open(session, Request(SamplingParams(ignore_eos=True), 3, len(prompt)))
        executor.run({0: Orders(verify=Verify(Context(0, PROMPTS[0])))})
        runner.calls.clear()
        return executor

    yield make
    for executor in opened:
        executor.close()


def prefill(session: int, most: int = 4) -> Orders:
    return Orders(prefill=Prefill(Context(0, PROMPTS[session][:-1]), most))


def next_token(tokens: int = 0) -> Orders:
    return Orders(verify=Verify(Context(3, (2,)), (1,) * tokens))


def test_verify_orders_reserve_memory_and_their_forward_takes_the_chunks_along(made: Any) -> None:
    runner = PutsOff()
    reports: dict[int, Reports] = made(runner).run({1: prefill(1), 2: prefill(2), 0: next_token(2)})
    assert runner.calls == [("demand", 0), ("extend", 1), ("extend", 2), ("forward", ((0,), (1, 2)))]
    assert [reports[seq].reached for seq in (1, 2)] == [4, 4] and reports[0].verdict is not None


def test_a_round_of_prefill_alone_ends_with_one_forward(made: Any) -> None:
    runner = PutsOff()
    made(runner).run({1: prefill(1), 2: prefill(2)})
    assert runner.calls == [("extend", 1), ("extend", 2), ("forward", ((), (1, 2)))]


def test_the_last_row_of_a_prompt_is_in_the_forward_of_its_last_chunk(made: Any) -> None:
    runner = PutsOff()
    orders = {0: next_token(), 1: Orders(verify=Verify(Context(0, PROMPTS[1]))), 2: prefill(2)}
    reports: dict[int, Reports] = made(runner).run(orders)
    assert runner.calls[-1] == ("forward", ((0, 1), (1, 2))) and len(runner.slots(1)) == 6
    assert reports[1].verdict is not None and reports[2].reached == 4


@pytest.mark.parametrize(("pages", "reached"), [(7, {1: 4, 2: 4}), (5, {1: 4, 2: None}), (4, {1: None, 2: None})])
def test_prompts_get_what_decoding_leaves_and_the_others_chunks_are_computed(
    pages: int, reached: dict[int, int | None], made: Any
) -> None:
    """Session 0 holds three tokens, and verifies three more: it needs three pages of two."""
    runner = PutsOff(pages)
    reports: dict[int, Reports] = made(runner).run({1: prefill(1), 2: prefill(2), 0: next_token(2)})
    assert reports[0].verdict is not None and reports[0].error is None
    for seq, tokens in reached.items():
        assert reports[seq].reached == tokens
        assert isinstance(reports[seq].error, PoolFull) == (tokens is None)
    runner.check()
    computed = tuple(seq for seq, tokens in reached.items() if tokens)
    assert ("forward", ((0,), computed)) in runner.calls


def test_draft_prefill_of_several_sessions_ends_with_one_forward() -> None:
    runner = PutsOff()
    drafter = Drafter(runner)
    for session, prompt in PROMPTS.items():
        drafter.open(session, Request(SamplingParams(), 3, len(prompt)))
    orders = {session: Prefill(Context(0, PROMPTS[session][:-1]), 4) for session in PROMPTS}
    made = drafter.draft(orders)
    assert [reached.tokens for reached in made.values()] == [2, 4, 4]  # type: ignore[union-attr]
    assert runner.calls == [("extend", 0), ("extend", 1), ("extend", 2), ("forward", ((), (0, 1, 2)))]
