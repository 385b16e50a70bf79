"""Orders of several targets share the draft's forwards; each is answered as if it were alone, by its own end."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from test_law_ratio import CASES, DRAFT, ENOUGH, LENGTH, TARGET
from test_remote_draft import Relay, Weather

from exact import CAUGHT, SOUND, draw_with, requests
from specbranch.config import Rule, SamplingParams
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Draft, Drafted, DraftOrder, Grow, Plan, Prefill, Reached
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Done, Feed, Proposal
from specbranch.core.session import Session
from specbranch.core.trees import NO_TREE, Growth, Tree
from specbranch.exec.draft_batch import DraftBatch
from specbranch.exec.draft_round import DraftRound, Others
from specbranch.exec.draft_service import DraftService
from specbranch.exec.drafter import PREFILL_BEFORE, Announce, Drafter
from specbranch.exec.messages import Enough, HeadsDrawn, Open, RoundDrafted, TargetDone, WireMessage, Work
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import never
from specbranch.lab.toys.toys import ToyRunner
from tiers import tiered
from toy_worker import DRIFT, reach, serving
from toybench import (
    PROFILE,
    SHARED,
    VOCABULARY,
    Case,
    Ending,
    SlowRunner,
    Timeless,
    answer,
    config_of,
    law,
    next_number,
    plainly,
    run_out,
    wandering,
)

GROWTH = Growth((0.0,) * 3, Experience(PROFILE).insight.chances(), most=8, worth=1.0, deepest=6)
CROWD = Others(connected=lambda: True, waiting=lambda: True)
HANG = 60.0  # seconds: a guard against hangs


class Counted(SlowRunner):
    """Notes the sequences of each forward, and the tokens of each prefill."""

    def __init__(self, drift: float = DRIFT, seconds: float = 0.0) -> None:
        super().__init__(law(drift), seconds, context_length=20_000)
        self.forwards: list[set[int]] = []
        self.prefilled: list[int] = []
        self.poison: int | None = None  # forwards with this sequence fail

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        if self.poison in {feed.seq for feed in work}:
            raise RuntimeError("poisoned")
        self.forwards.append({feed.seq for feed in work})
        return super().propose(work, asks)

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        self.prefilled.append(len(tokens))
        super()._extend(seq, tokens)

    def steps(self, seqs: Sequence[int]) -> int:
        return sum(1 for forward in self.forwards if forward & set(seqs))


class Wire:
    """A target's link: it notes what it is sent, and speaks when its sessions have taken so many forwards."""

    def __init__(self, runner: Counted, done_after: int = 1000, enough_after: int = 1000) -> None:
        self.runner, self.after = runner, {TargetDone: done_after, Enough: enough_after}
        self.sent: list[WireMessage] = []
        self.numbers: list[int] = []

    def send(self, message: WireMessage) -> None:
        self.sent.append(message)

    def look(self) -> WireMessage | None:
        for kind, steps in list(self.after.items()):
            if self.runner.steps(self.numbers) >= steps:
                del self.after[kind]
                return kind(1)
        return None

    @property
    def made(self) -> object:
        """What was drafted, without times."""
        return [_drafted(m.heads if isinstance(m, HeadsDrawn) else m.made) for m in self.sent]  # type: ignore[union-attr]


def _drafted(made: Mapping[int, object]) -> dict[int, object]:
    """What was drafted. How far a prompt is prefilled, and in which steps, may depend on who else is there."""
    return {session: _draft_of(one) for session, one in made.items()}


def _draft_of(made: object) -> object:
    if isinstance(made, Reached):
        return None
    return replace(made, steps=()) if isinstance(made, Tree) else made


class Script:
    """A target's order of one or two sessions, at random, and when it ends."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.rule: Rule = rng.choice(("match", "ratio"))
        self.decoded = rng.choice((3, 4, 50))  # tokens behind the prompt
        self.ends = (rng.choice((1, 2, 4, 1000)), rng.choice((1, 3, 1000, 1000)))
        self.orders = {session: self._order(rng) for session in range(rng.choice((1, 2)))}

    def _order(self, rng: random.Random) -> DraftOrder:
        tokens = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((3, 5, 20, 300))))
        plan = Plan(
            rng.randint(1, 8),
            rng.choice(((), ((0, 1),), ((0, 2), (1, 1), (2, 3)))),
            rng.choice((0.0, 0.4)),
            heads=rng.choice(("top", "sampled")),
            until=rng.choice(("length", "target")),
        )
        growth = replace(GROWTH, free_time=rng.choice((0.0, 1e9)), children=rng.randint(1, 4))
        on = Context(0, tokens)
        return rng.choice((Draft(on, plan, pending=2), Grow(on, NO_TREE, growth), Prefill(on, rng.choice((2, 100)))))

    def begin(self, drafter: Drafter, numbers: list[int], others: Others) -> tuple[Wire, DraftRound]:
        runner = drafter.runner
        assert isinstance(runner, Counted)
        wire = Wire(runner, *self.ends)
        wire.numbers = numbers
        service = DraftService(drafter, wire, iter(numbers), others)
        for session, order in self.orders.items():
            length = max(len(order.on) - self.decoded, 1)
            request = Request(SamplingParams(temperature=1.0), 7, length, rule=self.rule)
            service.answer(Open(session, request))
        round_ = service.begin(Work(1, self.orders))
        assert round_ is not None
        return wire, round_


def numbers_of(target: int) -> list[int]:
    return [10 * target, 10 * target + 1]


def alone(seed: int) -> object:
    drafter = Drafter(Counted())
    wire, round_ = Script(seed).begin(drafter, numbers_of(0), Others())
    batch = DraftBatch(drafter)
    batch.join(round_)
    assert all(ended.error is None for ended in steps(batch))
    return wire.made


def steps(batch: DraftBatch) -> list[object]:
    """Step until all rounds are over."""
    ended = []
    for _ in range(10_000):
        if not len(batch):
            return ended
        ended += batch.step()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("block", tiered(range(12), range(2).__contains__))
def test_a_target_gets_what_it_would_get_alone_whoever_else_is_served(block: int) -> None:
    rng, shared = random.Random(block), 0
    for case in range(10):
        runner = Counted()
        drafter = Drafter(runner)
        batch, wires = DraftBatch(drafter), dict[int, Wire]()
        seeds = [1000 * block + 10 * case + at for at in range(6)]
        for target, seed in enumerate(seeds):
            wires[seed], round_ = Script(seed).begin(drafter, numbers_of(target), CROWD)
            batch.join(round_)
            for _ in range(rng.randrange(4)):  # the next one joins a few steps later
                assert all(ended.error is None for ended in batch.step())
        assert all(ended.error is None for ended in steps(batch))
        assert {seed: wire.made for seed, wire in wires.items()} == {seed: alone(seed) for seed in seeds}
        shared += sum(len({number // 10 for number in forward}) > 1 for forward in runner.forwards)
    assert shared > 10


def chain(length: int, tokens: int = 4, until: str = "length") -> Draft:
    return Draft(Context(0, tuple(at % VOCABULARY for at in range(tokens))), Plan(length, until=until))  # type: ignore[arg-type]


def begun(drafter: Drafter, target: int, order: DraftOrder, others: Others = CROWD) -> tuple[Wire, DraftRound]:
    script = Script(0)
    script.decoded, script.rule, script.ends, script.orders = 0, "match", (1000, 1000), {0: order}
    return script.begin(drafter, numbers_of(target), others)


def test_orders_of_four_targets_take_no_more_forwards_than_the_longest_of_them() -> None:
    runner = Counted()
    drafter = Drafter(runner)
    batch = DraftBatch(drafter)
    wires = []
    for target, length in enumerate((3, 8, 5, 6)):
        wire, round_ = begun(drafter, target, chain(length))
        wires.append(wire)
        batch.join(round_)
    steps(batch)
    assert len(runner.forwards) == 8
    assert [len(forward) for forward in runner.forwards] == [4, 4, 4, 3, 3, 2, 1, 1]
    assert all(len(wire.sent) == 1 for wire in wires)


def test_a_short_order_is_answered_while_a_long_one_and_a_long_prompt_are_at_work() -> None:
    runner = Counted()
    drafter = Drafter(runner)
    batch = DraftBatch(drafter)
    for target, order in enumerate((chain(60), chain(4, tokens=3000), Prefill(chain(1, 3000).on, 3000))):
        batch.join(begun(drafter, target, order)[1])
    for _ in range(3):
        batch.step()
    wire, round_ = begun(drafter, 3, chain(4))
    batch.join(round_)
    for _ in range(4):
        assert not wire.sent
        batch.step()
    assert wire.sent and len(batch) == 3
    assert max(runner.prefilled) <= PREFILL_BEFORE
    steps(batch)


def test_prompts_take_turns() -> None:
    runner = Counted()
    drafter = Drafter(runner)
    batch = DraftBatch(drafter)
    for target in range(3):
        batch.join(begun(drafter, target, Prefill(chain(1, 1000).on, 1000))[1])
    for _ in range(9):
        batch.step()
    held = [len(runner.slots(numbers_of(target)[0]).prefix) for target in range(3)]
    assert len(set(held)) == 1 and 0 < held[0] < 999
    steps(batch)


def test_a_target_that_wants_its_answer_ends_its_own_lanes_alone() -> None:
    runner = Counted()
    drafter = Drafter(runner)
    batch = DraftBatch(drafter)
    wires = []
    for target, ends in enumerate(((1000, 2), (2, 1000), (1000, 1000))):
        script = Script(0)
        script.decoded, script.rule, script.ends, script.orders = 0, "match", ends, {0: chain(6, until="target")}
        wire, round_ = script.begin(drafter, numbers_of(target), CROWD)
        wires.append(wire)
        batch.join(round_)
    steps(batch)
    lengths = [len(message.made[0][0].tokens) for wire in wires for message in wire.sent]  # type: ignore[union-attr]
    assert lengths == [2, 2, 6]


def test_a_worker_that_stops_sends_what_is_drafted() -> None:
    runner, stops = Counted(), [False]
    drafter = Drafter(runner)
    batch = DraftBatch(drafter)
    others = replace(CROWD, stopping=lambda: stops[0])
    wires = []
    for target, order in enumerate((chain(60), Prefill(chain(1, 5000).on, 5000))):
        wire, round_ = begun(drafter, target, order, others)
        wires.append(wire)
        batch.join(round_)
    for _ in range(3):
        batch.step()
    stops[0] = True
    batch.step()
    assert not len(batch) and all(isinstance(wire.sent[-1], RoundDrafted) for wire in wires)


def test_a_forward_that_fails_costs_only_the_target_whose_rows_made_it_fail() -> None:
    runner = Counted()
    drafter = Drafter(runner)
    batch = DraftBatch(drafter)
    wires = []
    for target, length in enumerate((5, 5, 5)):
        wire, round_ = begun(drafter, target, chain(length))
        wires.append(wire)
        batch.join(round_)
    batch.step()
    runner.poison = numbers_of(1)[0]
    ended = steps(batch)
    assert sorted(str(one.error) for one in ended) == ["None", "None", "poisoned"]  # type: ignore[attr-defined]
    assert [len(wire.sent) for wire in wires] == [1, 0, 1]
    fresh = Drafter(Counted())
    expected, round_ = begun(fresh, 0, chain(5))
    only = DraftBatch(fresh)
    only.join(round_)
    steps(only)
    assert wires[0].made == wires[2].made == expected.made


class Unsure(Counted):
    """Its numbers for one sequence are NaN."""

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        found = super().propose(work, asks)
        return [
            replace(one, confidence=math.nan) if ask.seq == numbers_of(0)[0] else one
            for one, ask in zip(found, asks, strict=True)
        ]


def test_a_number_that_is_none_costs_only_its_own_target() -> None:
    drafter = Drafter(Unsure())
    batch = DraftBatch(drafter)
    for target in range(2):
        batch.join(begun(drafter, target, chain(3))[1])
    assert sorted(type(one.error).__name__ for one in steps(batch)) == ["NoNumber", "NoneType"]  # type: ignore[attr-defined]


def test_rounds_with_more_rows_than_a_forward_takes_are_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.exec.draft_batch.MOST_ROWS", 2)
    runner = Counted()
    drafter = Drafter(runner)
    batch = DraftBatch(drafter)
    for target in range(5):
        batch.join(begun(drafter, target, chain(2))[1])
    steps(batch)
    assert [len(forward) for forward in runner.forwards] == [2, 2, 1] * 2


class InCompany(Drafter):
    """A draft worker whose orders are drafted beside those of another target, which come and go."""

    def __init__(self) -> None:
        super().__init__(ToyRunner(DRAFT, 64))
        self.spent, self.cuts, self.others, self.shared = 0.0, 0, 0, 0
        self._rng = random.Random(3)

    def take(self, forwards: Sequence[object]) -> list[list[Proposal]]:
        """A step takes as long as the tokens say that it draws, those of the other target, too."""
        found = super().take(forwards)  # type: ignore[arg-type]
        self.spent += sum(one.tokens[0] for step in found for one in step if one.tokens)
        self.shared += len(forwards) > 1
        return found

    def draft(
        self, orders: Mapping[int, DraftOrder], done: Done = never, announce: Announce | None = None
    ) -> dict[int, Drafted]:
        self.spent, made, batch = 0.0, dict[int, Drafted](), DraftBatch(self)

        class Here:
            """The link of the target under test."""

            def __init__(self, drafter: InCompany) -> None:
                self.drafter = drafter

            def send(self, message: WireMessage) -> None:
                if isinstance(message, RoundDrafted):
                    made.update(message.made)

            def look(self) -> WireMessage | None:
                late = self.drafter.spent > self.drafter.patience()
                self.drafter.cuts += late
                return Enough(1) if late else None

        names = {session: session for session in orders}
        mine = DraftRound(self, Here(self), 1, orders, names, deque(), CROWD)
        batch.join(mine)
        while not mine.answered:
            if self._rng.random() < 0.6:
                self._another(batch)
            batch.step()
        steps(batch)
        return self.answered(made)

    def _another(self, batch: DraftBatch) -> None:
        self.others += 1
        number = -self.others
        self.open(number, Request(SamplingParams(temperature=1.0), self.others, 2, rule="ratio"))
        order = Draft(Context(0, (1, 2)), Plan(self._rng.randint(1, 4)), number=self.others)

        class Nobody:
            """A link to which nothing matters."""

            def send(self, message: WireMessage) -> None:
                pass

            def look(self) -> WireMessage | None:
                return None

        batch.join(DraftRound(self, Nobody(), 1, {number: order}, {number: 0}, deque(), CROWD))

    def patience(self) -> float:
        return 4.0

    def answered(self, made: dict[int, Drafted]) -> dict[int, Drafted]:
        return made


class LateIsDropped(InCompany):
    """Fault: the whole of an answer is dropped if it takes too long."""

    def patience(self) -> float:
        return math.inf

    def answered(self, made: dict[int, Drafted]) -> dict[int, Drafted]:
        own = sum(token for branches in made.values() for branch in branches for token in branch.tokens)  # type: ignore[union-attr]
        self.cuts += own > 2
        return dict.fromkeys(made, ()) if own > 2 else made


@pytest.mark.slow
@pytest.mark.parametrize("worker", [InCompany, LateIsDropped])
def test_the_ratio_rule_keeps_its_law_beside_orders_that_come_and_go(worker: type[InCompany]) -> None:
    case, drafter = CASES["speculative"], worker()
    executor = Serial(Verifier(ToyRunner(TARGET, 64)), drafter)
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH)
    drawn = draw_with(executor, case.start, requests(params, "ratio", range(78_000_000, 78_001_500)), batch=1)
    assert drafter.cuts > ENOUGH and drafter.shared > ENOUGH
    value = case.p_value(drawn)
    assert value < CAUGHT if worker is LateIsDropped else value > SOUND


class TargetThread(threading.Thread):
    """A target that decodes requests by itself, with its draft at a port."""

    def __init__(self, port: int, method: str, seeds: Sequence[int]) -> None:
        super().__init__()
        self.executor: Process = reach(port)
        self.method, self.cases = (
            method,
            [Case((seed % VOCABULARY, 1), 0.7, seed, Ending("long", max_tokens=40)) for seed in seeds],
        )
        self.sessions: list[Session] = []

    def run(self) -> None:
        for case in self.cases:
            loop, session = Loop(self.executor), case.session(next_number())
            config = config_of("pearl" if self.method == "wandering" else self.method, "match")
            started = wandering(session) if self.method == "wandering" else None
            loop.join(session, started or METHODS[config.method].start(session, config, Timeless(SHARED)))
            run_out(loop)
            self.sessions.append(session)

    @property
    def is_right(self) -> bool:
        """True if its texts are those of plain decoding."""
        return [answer(session) for session in self.sessions] == [plainly(case, law()) for case in self.cases]


def test_targets_at_once_share_forwards_and_keep_their_texts() -> None:
    runner = Counted(seconds=0.001)
    with serving(drafter=Drafter(runner)) as port, ExitStack() as stack:
        methods = ("pearl", "wandering", "confidence", "wandering")
        targets = [TargetThread(port, method, range(2 * at, 2 * at + 2)) for at, method in enumerate(methods)]
        for target in targets:
            stack.enter_context(closing(target.executor))
            target.start()
        for target in targets:
            target.join(HANG)
        assert all(target.is_right for target in targets)
        assert all("draft" in session.origins for target in targets for session in target.sessions)
    sizes = Counter(map(len, runner.forwards))
    assert sum(count for size, count in sizes.items() if size > 1) > 20, sizes


@pytest.mark.slow
def test_targets_at_once_keep_their_texts_over_a_bad_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.exec.process.LONGEST_RESTART_WAIT", 0.05)
    bad = Weather(0.0005, held=0.01, hold=0.2, cut_every=100)
    with (
        serving(drafter=Drafter(Counted(seconds=0.001))) as port,
        Relay(port, replace(bad, cut_every=0)) as relay,
        ExitStack() as stack,
    ):
        methods = ("pearl", "wandering", "confidence")
        targets = [TargetThread(relay.port, method, range(5 * at, 5 * at + 5)) for at, method in enumerate(methods)]
        relay.weather = bad
        for target in targets:
            stack.enter_context(closing(target.executor))
            target.start()
        for target in targets:
            target.join(HANG)
        assert all(target.is_right for target in targets) and relay.cuts
        assert any("draft" in session.origins for target in targets for session in target.sessions)
