"""The bound on any choice of rows: what is named, how few rounds that leaves, and what forwards would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_replay import CASES, DRIFT, record_of

from specbranch.clock.profile import CostProfile
from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.lab.replay.bound import MOST_SENT, NamedTokens, bound, named_tokens
from specbranch.lab.replay.decode import ReplayedModel
from specbranch.lab.replay.runners import ProposalStore
from specbranch.lab.replay.several import SeveralRecords
from specbranch.lab.toys.toys import ToyRunner
from tiers import each_value
from toybench import law

CHEAP = CostProfile(target=((1, 0.010), (16, 0.012), (64, 0.03)), draft=((1, 0.001), (16, 0.0012)), overlap=False)
DEAR = CostProfile(target=((1, 0.010), (64, 0.640)), draft=((1, 0.001), (16, 0.0012)), overlap=False)
BESIDE = replace(CHEAP, overlap=True)
HALF = NamedTokens(tokens=100, looked=0, rounds=50, context=0.0)  # a token a round beyond the target's own


def drafting(folder: Path, drift: float) -> Iterator[ReplayedModel]:
    memory = ProposalStore(folder / "memory.sqlite")
    yield ReplayedModel(f"toy {drift}", memory, ToyRunner(law(drift)))
    memory.close()


@pytest.fixture
def draft(tmp_path: Path) -> Iterator[ReplayedModel]:
    yield from drafting(tmp_path, DRIFT)


@pytest.fixture
def twin(tmp_path: Path) -> Iterator[ReplayedModel]:
    """A draft that says what the target says."""
    yield from drafting(tmp_path, 0.0)


def test_a_draft_like_the_target_leaves_as_few_rounds_as_may_be_sent(twin: ReplayedModel) -> None:
    records = [record_of(case) for case in CASES if case.temperature == 0.0][:4]
    named = named_tokens(records, twin)
    assert named.tokens == sum(len(record.tokens) - 1 for record in records)
    assert named.rounds == sum(-(-(len(record.tokens) - 1) // (MOST_SENT + 1)) for record in records)


def test_without_a_draft_only_what_the_text_says_is_named(draft: ReplayedModel) -> None:
    records = [record_of(case) for case in CASES[:6]]
    alone, both = named_tokens(records, None), named_tokens(records, draft)
    assert alone.looked == both.looked and alone.tokens == both.tokens
    assert alone.tokens - alone.looked <= alone.rounds <= alone.tokens and both.rounds < alone.rounds


def test_rows_that_cost_as_much_as_a_forward_bring_nothing() -> None:
    assert bound(DEAR, 8, HALF) == pytest.approx(1.0)


def test_free_rows_bring_what_is_named_and_steps_take_their_time() -> None:
    flat = replace(CHEAP, target=((1, 0.010), (512, 0.010)))
    assert bound(flat, 4, replace(HALF, looked=100)) == pytest.approx(2.0)
    assert bound(flat, 4, HALF) == pytest.approx(2.0 * 0.010 / (0.010 + flat.draft_seconds(4)))
    assert bound(replace(flat, overlap=True, slow_down=0.0), 4, HALF) == pytest.approx(2.0)
    assert bound(replace(flat, overlap=True, slow_down=0.0005), 4, HALF) == pytest.approx(2.0 * 0.010 / 0.0105)


def test_a_step_up_in_what_rows_cost_is_gone_around_by_rounds_of_different_sizes() -> None:
    stairs = CostProfile(target=((4, 0.010), (5, 0.016), (8, 0.016), (9, 0.026)), draft=((1, 0.001),))
    looked = replace(HALF, looked=100)
    assert bound(stairs, 4, replace(looked, rounds=80)) == pytest.approx(1.25 * 0.010 / 0.0115)
    assert bound(stairs, 4, looked) == pytest.approx(2.0 * 0.010 / 0.016)


@each_value
@pytest.mark.parametrize("costs", [CHEAP, DEAR, BESIDE], ids=["cheap", "dear", "beside"])
@pytest.mark.parametrize("method", ["speculative", "tree", "specbranch", "lookup", "pearl"])
@pytest.mark.parametrize("at_once", [1, 8])
def test_no_method_exceeds_it(costs: CostProfile, method: str, at_once: int, draft: ReplayedModel) -> None:
    records = [record_of(case) for case in CASES if case.temperature == 0.0][:3] * 2
    several = SeveralRecords(records, draft)
    plain, ours = (
        several.decode(SpeculativeConfig(method=name), costs, at_once, Experience(costs)).tokens_per_second
        for name in ("autoregressive", method)
    )
    several.close()
    assert ours / plain <= 1.03 * bound(costs, at_once, named_tokens(records, draft))  # the first tokens are not in it
