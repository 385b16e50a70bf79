"""How long a draft worker is waited for: by its measured speed, bounded for those who wait, long for a long text."""

from __future__ import annotations

from specbranch.core.orders import Branch, Context, Draft, Effort, Plan, Prefill, PrefillCount, Reached
from specbranch.exec.child_speed import PREFILL_WAIT, TIMES, TIMES_LOST, Amount, ChildLimits, ChildSpeed, amount_of

LIMITS = ChildLimits()
CHAIN = (Branch(0, (1,) * 10, (0.5,) * 10),)


def measured(step: float, token: float | None = None) -> ChildSpeed:
    pace = ChildSpeed()
    pace.learn({0: CHAIN}, Effort(10 * step, 10))
    if token is not None:
        pace.learn({0: Reached(1000)}, Effort(1000 * token, 1000, {0: PrefillCount(1000)}))
    return pace


def test_what_is_ordered_is_counted_in_tokens_to_read_and_steps() -> None:
    text = Context(0, (1,) * 5000)
    assert amount_of({0: Draft(text, Plan(8)), 1: Draft(Context(9, (1, 2)), Plan(3))}) == Amount(5002, 8)
    assert amount_of({0: Prefill(text, 1024)}) == Amount(1024, 0)


def test_a_round_waits_for_a_few_times_what_its_steps_take() -> None:
    assert measured(0.5).patience(Amount(0, 4), LIMITS) == TIMES * 4 * 0.5
    assert measured(0.0001).patience(Amount(0, 4), LIMITS) == LIMITS.grace
    assert ChildSpeed().patience(Amount(10**6, 4), LIMITS) == LIMITS.unmeasured


def test_however_long_a_text_is_a_round_does_not_wait_for_its_reading() -> None:
    assert measured(0.001, 0.01).patience(Amount(30_000, 1), LIMITS) == TIMES * (PREFILL_WAIT + 0.001)


def test_a_long_text_takes_long_before_the_worker_is_lost_and_a_short_one_does_not() -> None:
    pace = measured(0.01, 0.002)
    assert pace.limit(Amount(10, 8), LIMITS, first=False) == LIMITS.hung
    assert pace.limit(Amount(30_000, 0), LIMITS, first=False) == TIMES_LOST * 0.002 * 30_000
    assert pace.limit(Amount(10, 8), LIMITS, first=True) == LIMITS.first


def test_a_worker_that_becomes_slow_is_believed_sooner_than_one_that_becomes_fast() -> None:
    slow, fast = measured(0.1), measured(0.1)
    slow.learn({0: CHAIN}, Effort(10.0, 10))
    fast.learn({0: CHAIN}, Effort(0.0, 10))
    assert slow.step is not None and fast.step is not None
    assert slow.step > 0.5 and fast.step > 0.08
