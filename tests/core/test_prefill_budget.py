"""The prefill budget: it follows from measured times, spikes do not change it, and prompts take turns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from specbranch.config import LoadOptions, Rule, SamplingParams, SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.members import Member
from specbranch.core.methods import find_method
from specbranch.core.orders import Context, Draft, Orders, Plan, Prefill, PrefillCount, Reports, Span, Verify
from specbranch.core.prefill_budget import (
    LONGEST_ROUND,
    MOST_PROMPT_TOKENS,
    PrefillBudget,
    Prefills,
    PromptCosts,
    RoundLimits,
)
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import ToyRunner
from toybench import law


class Table:
    """Times of forwards up to a size: flat, then a slope."""

    def __init__(self, most: int = 10_000) -> None:
        self.most = most

    def forward_seconds(self, rows: int, prompt_tokens: int = 0) -> float | None:
        rows += prompt_tokens
        return None if rows > self.most else 0.004 + max(rows - 64, 0) * 1e-5


class PaddedTable:
    """Times of a large model on a GPU: a forward is padded to a power of two, its decode rows before that."""

    def forward_seconds(self, rows: int, prompt_tokens: int = 0) -> float | None:
        if prompt_tokens:
            rows = next(padded for padded in (16, 64, 256, 512) if padded >= rows)
        sizes = {64: 0.0058, 128: 0.0058, 256: 0.0073, 512: 0.0128, 1024: 0.0234, 2048: 0.0487}
        return next((seconds for size, seconds in sizes.items() if size >= rows + prompt_tokens), None)


class LongContext:
    """A device that pads forwards to powers of two; its table was timed without context.

    Each prompt token costs its share of the table's slope once more for every `doubles` tokens of context.
    """

    def __init__(self, doubles: float, slope: float) -> None:
        self.doubles, self.slope = doubles, slope

    def forward_seconds(self, rows: int, prompt_tokens: int = 0) -> float | None:
        padded = 1 << (rows - 1).bit_length()
        size = 1 << (padded + prompt_tokens - 1).bit_length()
        return 0.004 + max(size - 64, 0) * self.slope

    def gap(self, tokens: int, context: int) -> float:
        """Return the seconds between two tokens of 16 decoding sessions; 0.3 ms are the host's."""
        forward = self.forward_seconds(16, tokens) or 0.0
        return 0.0003 + forward + tokens * self.slope * context / self.doubles


def gaps_while_read(device: LongContext, prompt: int, ahead: bool, hiccup: int = -1) -> list[tuple[int, float]]:
    """Read a prompt beside 16 decoding sessions; returns the prompt tokens and the seconds of each gap.

    `ahead`: prompt tokens go with a step that was launched ahead, so with the next gap. Gap number `hiccup` takes 50 ms
    more.
    """
    costs, gaps, now, read, before = PromptCosts(table=device), list[tuple[int, float]](), 0.0, 0, (0, 0)
    while read < prompt or (ahead and before[0]):
        budget = 0 if len(gaps) < 5 else max(costs.most_tokens(16, [prompt - read]) or 0, 16)
        taken = min(budget, prompt - read)
        read += taken
        tokens, context = before if ahead else (taken, read)
        before, seconds = (taken, read), device.gap(tokens, context) + 0.05 * (len(gaps) == hiccup)
        gaps.append((tokens, seconds))
        now += seconds
        span = Span(now - seconds, now, 16 + taken, {1: PrefillCount(taken)} if taken else {})
        costs.observe(span, True, now, ahead)
    return [gap for gap in gaps if gap[0]]


def observed(costs: PromptCosts, rows: int, tokens: int, seconds: float) -> None:
    """Have the costs see a round of one decoding session and one that prefills, just behind another round."""
    now = 10.0 if costs._ended is None else costs._ended
    costs._ended = now
    span = Span(now, now + seconds, rows + tokens, {1: PrefillCount(tokens)} if tokens else {})
    costs.observe(span, True, now + seconds)


def timed(rows: int, seconds: float) -> PromptCosts:
    """Costs that have seen rounds of so many rows, without prompt tokens."""
    costs = PromptCosts()
    for _ in range(3):
        observed(costs, rows, 0, seconds)
    return costs


def test_rounds_are_counted_and_those_with_prompt_tokens_are_not_timed() -> None:
    """Also if the prompt tokens go with the step that is launched ahead: then the next round takes longer."""
    costs, now, prompt = PromptCosts(), 0.0, {7: PrefillCount(read=5)}
    for seconds, prompts, ahead in ((1.0, {}, False), (2.0, {}, True), (8.0, prompt, False), (3.0, {}, True)):
        now += seconds
        costs.observe(Span(now - seconds, now, 4 + 5 * bool(prompts), prompts), True, now, ahead)
    assert costs.clock.rounds == 4 and costs.clock.seconds_behind(0, 9) == [2.0, 3.0], "nothing came before the first"
    now += 4.0
    costs.observe(Span(now - 4.0, now, 9, prompt), True, now, ahead=True)
    now += 9.0
    costs.observe(Span(now - 9.0, now, 4), True, now, ahead=True)
    costs.observe(Span(now, now + 7.0, 5, prompt), False, now + 7.0)  # nobody decodes
    assert costs.clock.rounds == 6 and costs.clock.seconds_behind(4, 9) == [4.0]


def test_a_table_of_forwards_gives_a_budget_before_anything_is_timed() -> None:
    fitting = (LONGEST_ROUND - 1.0) * 400  # of 4 ms, at 10 µs a token, from 64 rows on
    assert PromptCosts(None, Table()).most_tokens(64) == pytest.approx(fitting, abs=1)
    assert PromptCosts(None, Table()).most_tokens(4) == pytest.approx(fitting + 60, abs=1)
    assert PromptCosts(None, Table(most=100)).most_tokens(64) == 36
    assert PromptCosts(None, Table(most=10)).most_tokens(64) is None
    assert PromptCosts().most_tokens(8) is None


def test_timed_rounds_give_a_budget_that_makes_rounds_at_most_so_much_longer() -> None:
    costs = timed(8, 0.1)
    assert costs.most_tokens(8) is None
    budget = 16
    for _ in range(60):
        observed(costs, 8, budget, 0.1 + 0.01 + 0.0002 * budget)  # a second read of the weights, and each token
        budget = costs.most_tokens(8) or 16
    expected = (0.1 * (LONGEST_ROUND - 1.0) - 0.01) / 0.0002
    assert budget == pytest.approx(expected, rel=0.02)


def test_spikes_do_not_change_the_budget() -> None:
    costs = timed(8, 0.1)
    for seconds in (3.0, 0.12, 0.12, 0.12, 5.0, 0.12):
        observed(costs, 8, 64, seconds)
    assert costs.most_tokens(8) == 128  # twice what was timed: 64 tokens take 0.02 s of 0.08


def test_seconds_of_an_earlier_process_serve_until_gaps_are_timed() -> None:
    learned = MeasuredCosts()
    learned.target.set(8, 0.1)
    costs = PromptCosts(learned)
    for _ in range(3):
        observed(costs, 8, 64, 0.12)
    assert costs.most_tokens(8) == 128 and costs.most_tokens(9) is None


def test_a_pause_is_no_gap() -> None:
    costs = timed(8, 0.1)
    for _ in range(9):
        costs.pause()
        costs.observe(Span(0.0, 50.0, 8), True, 1000.0)
    for _ in range(3):
        observed(costs, 8, 64, 0.12)
    assert costs.most_tokens(8) == 128


def test_a_budget_of_a_few_tokens_does_not_come_from_short_prompts() -> None:
    """A short prompt costs more for each token than the fixed part of a chunk spread over many."""
    costs = timed(8, 0.1)
    for _ in range(5):
        observed(costs, 8, 3, 0.12)
        observed(costs, 8, 200, 0.14)
    assert (costs.most_tokens(8) or 0) >= 390


def test_a_budget_is_bounded_and_unknown_for_sizes_that_were_not_timed() -> None:
    costs = timed(8, 0.1)
    for tokens in (100, 1000, 9000):
        for _ in range(3):
            observed(costs, 8, tokens, 0.1)
    assert costs.most_tokens(8) == MOST_PROMPT_TOKENS
    assert costs.most_tokens(64) is None and costs.most_tokens(0) is None


def test_a_budget_gives_the_rest_of_a_prompt_or_whole_chunks() -> None:
    budget = PrefillBudget(100, 16)
    assert [budget.take(20), budget.take(500), budget.take(17), budget.take(16), budget.take(1)] == [20, 80, 0, 0, 0]
    assert budget.used == 100


class OneForward(Serial):
    """A round takes as long as one forward over its rows; notes the prompt tokens and the seconds of each."""

    def __init__(self, runner: ToyRunner, seconds: Callable[[int], float], draft: ToyRunner | None = None) -> None:
        self.clock = 0.0
        super().__init__(Verifier(runner), Drafter(draft) if draft else None, lambda: self.clock)
        self.seconds = seconds
        self.rounds: list[tuple[int, int, float]] = []  # decode rows, prompt tokens, seconds

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        reports = super().run(orders)
        span = next((report.verifying for report in reports.values() if report.verifying), None)
        if span is None:
            return reports
        started, tokens = self.clock, sum(count.read for count in span.prompts.values())
        self.clock += self.seconds(span.tokens)
        self.rounds.append((span.tokens - tokens, tokens, self.clock - started))
        span = replace(span, start=started, end=self.clock)
        return {number: replace(report, verifying=span) for number, report in reports.items()}


def toy(chunk: int, drift: float = 0.0) -> ToyRunner:
    runner = ToyRunner(law(drift), 20_000)
    runner.prefill_chunk = chunk
    return runner


def joined(loop: Loop, number: int, prompt: int, tokens: int = 400, method: str = "autoregressive") -> Session:
    request = Request(SamplingParams(temperature=0.7, max_tokens=tokens, ignore_eos=True), number, prompt)
    session = Session(number, [at % 6 for at in range(number, number + prompt)], request, 20_000)
    config = SpeculativeConfig(method=method)
    loop.join(session, find_method(method, method != "autoregressive").start(session, config, Experience()))
    return session


def gpu_like(rows: int) -> float:
    return 0.004 + 0.00001 * rows


def warmed(chunk: int = 1, decoding: int = 8, limits: RoundLimits | None = None) -> tuple[Loop, OneForward]:
    """A loop in which some sessions decode, whose rounds have been timed."""
    executor = OneForward(toy(chunk), gpu_like)
    limits = limits or RoundLimits(prefill_chunk=chunk, prompt_tokens=max(chunk, 64))
    loop = Loop(executor, costs=MeasuredCosts(), limits=limits)
    for number in range(decoding):
        joined(loop, number, 3)
    for _ in range(30):
        loop.step()
    executor.rounds.clear()
    return loop, executor


@pytest.mark.parametrize("chunk", [1, 16])
def test_a_long_prompt_among_decoding_sessions_makes_no_round_much_longer(chunk: int) -> None:
    loop, executor = warmed(chunk)
    usual = gpu_like(8)
    long = joined(loop, 99, 8000)
    while not long.output:
        loop.step()
    seconds = [one for *_, one in executor.rounds]
    assert max(seconds) <= LONGEST_ROUND * usual * 1.05
    # Once a few rounds are timed, rounds are as long as they may be.
    assert sorted(seconds)[len(seconds) // 2] >= LONGEST_ROUND * usual * 0.9
    assert len(executor.rounds) < 40 and sum(tokens for _, tokens, _ in executor.rounds) == 7999
    assert all(rows >= 8 for rows, *_ in executor.rounds)


def test_a_measured_budget_is_at_most_that_of_a_round_in_which_nobody_decodes() -> None:
    loop, executor = warmed(limits=RoundLimits(prefill_chunk=1, prompt_tokens=64, prompt_tokens_alone=100))
    long = joined(loop, 99, 2000)
    while not long.output:
        loop.step()
    assert max(tokens for _, tokens, _ in executor.rounds) == 100


def test_a_prompt_that_fits_gives_its_first_token_in_that_round() -> None:
    loop, executor = warmed()
    shorts = [joined(loop, number, 20) for number in (20, 21)]
    loop.step()
    assert all(len(session.output) == 1 for session in shorts)
    assert executor.rounds == [(10, 38, pytest.approx(gpu_like(48)))]


def waiting(number: int, prefilled: int, rule: Rule = "match") -> Member:
    """A session of 60 tokens that wants a draft and a verify; the target has computed some of them, the draft none."""
    request = Request(SamplingParams(temperature=0.7), number, 60, rule=rule)
    session = Session(number, [1] * 60, request, 100)
    draft = Draft(Context(0, (1,) * 60), Plan(3))
    wants = Orders(draft, Verify(Context(0, (1,) * 60)))
    return Member(session, (one for one in ()), number, wants, prefilled=prefilled)


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_a_prompt_that_fits_waits_for_its_draft_only_if_its_tokens_depend_on_that(rule: Rule) -> None:
    prefills = Prefills(PromptCosts(), RoundLimits(prefill_chunk=4, prompt_tokens=80, prompt_tokens_alone=80))
    first, second = waiting(0, 50, rule), waiting(1, 50, rule)
    batch = prefills.add({}, [first, second])
    assert batch[0] is first.wants
    late = batch[1]
    assert isinstance(late.draft, Prefill) and late.draft.most == 20  # what the first leaves of the draft's budget
    if rule == "match":
        assert late.verify is second.wants.verify and late.prefill is None and second.draft_behind
    else:
        assert late.verify is None and late.prefill is not None and late.prefill.most == 9


def test_a_session_alone_waits_for_its_draft() -> None:
    prefills = Prefills(PromptCosts(), RoundLimits(prefill_chunk=4, prompt_tokens=40, prompt_tokens_alone=40))
    (orders,) = prefills.add({}, [waiting(0, 50)]).values()
    assert orders.verify is None and orders.prefill is not None and isinstance(orders.draft, Prefill)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("decoding", range(1, 64, 3))
def test_with_a_table_no_forward_with_prompts_takes_twice_as_long_from_the_first_round_on(
    decoding: int, learned: bool
) -> None:
    table, limits = PaddedTable(), RoundLimits(prefill_chunk=1, prompt_tokens=256, prompt_tokens_alone=1984)
    prefills = Prefills(PromptCosts(table=table), limits)
    for _ in range(3 * learned):
        observed(prefills.costs, decoding, 0, 0.006)
        observed(prefills.costs, decoding, 300, 0.006)  # as if 300 tokens had cost nothing
    tokens = prefills._prompt_tokens(decoding, decoding, [39] * (64 - decoding))
    ending = min(tokens // 39, 64 - decoding)
    seconds, usual = table.forward_seconds(decoding + ending, tokens), table.forward_seconds(decoding)
    assert tokens >= 128 and seconds is not None and usual is not None and seconds <= 2 * usual


def test_prompts_take_turns() -> None:
    loop, executor = warmed(16, limits=RoundLimits(prefill_chunk=16, prompt_tokens=16, batched_tokens=24))
    prompts = [joined(loop, number, 16 * 4 + 1) for number in (20, 21, 22)]
    for _ in range(3):
        loop.step()
    assert [loop.uncomputed(session) for session in prompts] == [48, 48, 48]
    loop.step()
    assert [loop.uncomputed(session) for session in prompts] == [32, 48, 48]
    while not all(session.output for session in prompts):
        loop.step()
    # the last row of the third prompt does not fit beside its last chunk
    assert [tokens for _, tokens, _ in executor.rounds] == [*[16] * 12, 0]


@pytest.mark.parametrize(("most", "expected"), [(8 + 30, 30), (9, 1), (8, 1), (3, 1), (5000, 299)])
def test_max_num_batched_tokens_bounds_rows_and_prompt_tokens_and_something_always_advances(
    most: int, expected: int
) -> None:
    loop, executor = warmed(limits=RoundLimits(prefill_chunk=1, prompt_tokens=64, batched_tokens=most))
    session = joined(loop, 99, 300)
    loop.step()
    assert executor.rounds[0][:2] == (8 + (expected == 299), expected)
    while not session.output:
        loop.step()
    assert all(rows + tokens <= max(most, 9) for rows, tokens, _ in executor.rounds)


def test_max_num_batched_tokens_bounds_rounds_in_which_nobody_decodes() -> None:
    executor = OneForward(toy(16), gpu_like)
    loop = Loop(executor, limits=RoundLimits(prefill_chunk=16, prompt_tokens=16, batched_tokens=64))
    session = joined(loop, 0, 200)
    while not session.output:
        loop.step()
    assert [tokens for _, tokens, _ in executor.rounds] == [64, 64, 64, 7]


@pytest.mark.parametrize("wrong", [0, -5, 1.5, True, "many"])
def test_a_budget_that_is_no_count_is_refused(wrong: object) -> None:
    with pytest.raises(BadParameter, match=r"max_num_batched_tokens is .*; expected a whole number ≥ 1"):
        LoadOptions(max_num_batched_tokens=wrong)  # type: ignore[arg-type]


def test_texts_do_not_depend_on_the_budget() -> None:
    texts = []
    for most in (None, 9, 40, 500):
        rng = random.Random(5)
        loop, _ = warmed(4, limits=RoundLimits(prefill_chunk=4, prompt_tokens=8, batched_tokens=most))
        sessions = []
        for number in range(20, 30):
            sessions.append(joined(loop, number, rng.randint(1, 90), tokens=12))
            for _ in range(rng.randint(0, 3)):
                loop.step()
        while not all(session.finished for session in sessions):
            loop.step()
        texts.append([session.output for session in sessions])
    assert all(one == texts[0] for one in texts)


def test_prompt_tokens_that_go_with_the_next_step_count_for_the_next_gap() -> None:
    costs = timed(8, 0.005)
    now = costs._ended or 0.0
    for seconds, tokens in ((0.005, 100), (0.009, 100), (0.009, 100), (0.009, 0), (0.005, 0)):
        span = Span(now, now + seconds, 8 + tokens, {1: PrefillCount(tokens)} if tokens else {})
        now += seconds
        costs.observe(span, True, now, ahead=tokens > 0)
    assert costs.tokens_ahead == 0
    assert costs._added.points() == [(100, pytest.approx(0.004))]
    assert costs._gaps.points() == [(8, pytest.approx(0.005))]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("slope", [5e-6, 7e-6, 1e-5, 1.7e-5])
@pytest.mark.parametrize(("prompt", "doubles"), [(8_000, 16_000), (30_000, 6_000)])
def test_gaps_at_p99_are_at_most_twice_as_long_while_a_context_grows(
    prompt: int, doubles: float, slope: float, ahead: bool
) -> None:
    device = LongContext(doubles, slope)
    gaps, usual = gaps_while_read(device, prompt, ahead), device.gap(0, 0)
    assert sum(tokens for tokens, _ in gaps) == prompt
    assert sorted(seconds for _, seconds in gaps)[math.ceil(0.99 * len(gaps)) - 1] <= 2 * usual


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("hiccup", [6, 12, 20])
def test_one_slow_round_shrinks_the_budget_for_two_rounds_at_most(hiccup: int, ahead: bool) -> None:
    device = LongContext(16_000, 1e-5)
    usual, slow = (gaps_while_read(device, 8_000, ahead, at) for at in (-1, hiccup))
    smaller = sum(after[0] < before[0] for before, after in zip(usual, slow, strict=False))
    assert max(seconds for _, seconds in slow) > 0.05 and smaller <= 2
    assert len(slow) <= len(usual) + 1


def test_an_order_behind_a_prompts_beginning_carries_only_what_the_target_computes() -> None:
    """The first one carries all, as the prefix cache may know it; a later one costs no more behind a long context."""
    member = waiting(0, 0, "match")
    assert len(member.prefill_order(8).on.tail) == 59
    member.prefilled, member.draft_prefilled = 16, 20
    later = member.prefill_order(8).on
    assert (later.base, len(later.tail), later.whole().tail) == (16, 8, (1,) * 24)
    assert len(member.draft_prefill_order(8).on.tail) == 39, "a draft may have larger chunks"
    member.prefilled = 56
    assert len(member.prefill_order(8).on.tail) == 3


def test_an_order_of_which_more_is_done_already_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that failed may have prefilled more than the order that comes instead of it wants."""
    monkeypatch.setattr(ToyRunner, "prefill_chunk", 8)
    text, worker = (3, 1, 2, 4, 0) * 12, Verifier(ToyRunner(law(), 1000))
    worker.open(0, Request(SamplingParams(), 0, len(text)))
    assert worker.continue_prefill(0, Prefill(Context(0, text[:-1], text), 48)) == 48
    rows = worker.rows_fed
    assert worker.continue_prefill(0, Prefill(Context(16, text[16:32], text), 16)) == 48
    assert worker.rows_fed == rows and list(worker.slots(0).prefix) == list(text[:48])
