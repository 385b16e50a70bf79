"""A batch that decodes plainly is asked as one, and whoever joins it decodes plainly at once, without a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from plain_toys import PlainToyRunner
from specbranch.config import SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.goodput import BLOCK_ROUNDS, LEFT_OUT, Way
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Orders, Prefill, Reports
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.runner import Feed, Trial, Verdicts
from specbranch.core.session import Session
from specbranch.core.trees import Tree
from specbranch.core.way_choice import WayChoice
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import ToyRunner
from toybench import Case, Ending, answer, law, next_number, plainly

CONTEXT, CHUNK, ROW_SECONDS = 400, 4, 0.001
CONFIG = SpeculativeConfig(method="specbranch")


class TimedToy(PlainToyRunner):
    """Each row takes a while, on a clock of its own."""

    time, prefill_chunk = 0.0, CHUNK

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        self.time += ROW_SECONDS * sum(len(item.tokens) for item in work)
        return super().verify(work, trials)


class Ordered(Serial):
    """Notes what was ordered session by session."""

    def __init__(self) -> None:
        target = TimedToy(law(), CONTEXT)
        super().__init__(Verifier(target), Drafter(ToyRunner(law(0.3), CONTEXT)), lambda: target.time)
        self.runs: list[Mapping[int, Orders]] = []

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        self.runs.append(orders)
        return super().run(orders)


def steep_costs() -> MeasuredCosts:
    """Costs by which no further row pays, and no draft."""
    costs = MeasuredCosts(overlap=False)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        costs.target.set(rows, ROW_SECONDS * rows)
    costs.step.set(1, 1.0)
    return costs


class Batch:
    """Sessions of the planned method on toys that decode a batch plainly."""

    def __init__(self) -> None:
        self.executor, self.experience = Ordered(), Experience(steep_costs())
        limits = RoundLimits(prefill_chunk=CHUNK, prompt_tokens=CHUNK, prompt_tokens_alone=64)
        self.loop = Loop(self.executor, costs=self.experience.learned, limits=limits)
        self.cases: list[tuple[Case, Session]] = []

    def join(self, tokens: int, prompt: int = 6) -> Session:
        number = next_number()
        seed = 40 * number  # the toy decodes few seeds session by session, this one never
        case = Case(tuple(at % 5 for at in range(number, number + prompt)), 0.0, seed, Ending("odd", max_tokens=tokens))
        session = case.session(number)
        self.cases.append((case, session))
        self.loop.join(session, METHODS[CONFIG.method].start(session, CONFIG, self.experience))  # type: ignore[index]
        return session

    def run_out(self) -> None:
        while self.loop.live:
            self.loop.step()
        for case, session in self.cases:
            assert answer(session) == plainly(case, law())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The rounds in which each session was asked how it goes on."""
    rounds: dict[int, list[int]] = {}
    choose = WayChoice.choose

    def noted(self: WayChoice, session: Session, tree: Tree) -> Way:
        if session.batch_size > 1:
            rounds.setdefault(session.number, []).append(session.clock.rounds)
        return choose(self, session, tree)

    monkeypatch.setattr(WayChoice, "choose", noted)
    return rounds


def test_all_sessions_of_a_plain_batch_are_asked_in_the_same_rounds(asked: dict[int, list[int]]) -> None:
    batch = Batch()
    first = [batch.join(80) for _ in range(8)]
    for _ in range(LEFT_OUT + BLOCK_ROUNDS + 5):
        batch.loop.step()
    late = [batch.join(20), batch.join(30)]
    batch.run_out()
    for one in first:
        rounds = asked[one.number]
        assert rounds == asked[first[0].number]
        assert max(later - before for before, later in pairwise(rounds)) == BLOCK_ROUNDS
    for one in late:
        assert set(asked[one.number][1:]) <= set(asked[first[0].number]), "it takes part in the present block"


def test_a_session_that_joins_a_plain_batch_breaks_no_round() -> None:
    batch = Batch()
    for _ in range(8):
        batch.join(60)
    for _ in range(10):
        batch.loop.step()
    before = len(batch.executor.runs)
    late, emitted = [batch.join(30, prompt=4 * CHUNK), batch.join(30)], list[tuple[int, ...]]()
    while not all(one.finished for one in late):
        batch.loop.step()
        emitted.append(tuple(one.stats.emitted for one in late))
    assert len(batch.executor.runs) == before, "prompts are prefilled beside rounds of plain decoding"
    for tokens in zip(*emitted, strict=True):
        assert [count for count in tokens if 0 < count < 30] == list(range(1, 30)), "a token in each round"
    batch.run_out()


def test_a_draft_that_is_not_asked_reads_no_prompt() -> None:
    batch = Batch()
    for at in range(12):
        batch.join(30 + 5 * at)
        batch.loop.step()
    batch.run_out()
    drafts = [order.draft for orders in batch.executor.runs for order in orders.values() if order.draft is not None]
    assert not [draft for draft in drafts if isinstance(draft, Prefill)] and not drafts
