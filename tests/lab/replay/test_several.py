"""Several records at once: each request says its record, and batch is charged for together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_replay import CASES, DRIFT, record_of

from specbranch.clock.profile import CostProfile
from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.lab.replay.decode import Diverged, ReplayedModel
from specbranch.lab.replay.runners import ProposalStore
from specbranch.lab.replay.several import SeveralRecords
from specbranch.lab.toys.toys import ToyRunner
from tiers import each_value
from toybench import law

COSTS = CostProfile(target=((1, 0.010), (16, 0.012), (64, 0.03)), draft=((1, 0.001), (16, 0.0012)), overlap=False)
METHODS = ("autoregressive", "speculative", "pearl", "tree", "specbranch", "lookup")


@pytest.fixture
def draft(tmp_path: Path) -> Iterator[ReplayedModel]:
    memory = ProposalStore(tmp_path / "memory.sqlite")
    yield ReplayedModel("toy", memory, ToyRunner(law(DRIFT)))
    memory.close()


@each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_each_request_says_its_record_however_many_there_are(method: str, at_once: int, draft: ReplayedModel) -> None:
    records = [record_of(case) for case in CASES[:4]] * 2
    several = SeveralRecords(records, draft)
    found = several.decode(SpeculativeConfig(method=method), COSTS, at_once, Experience(COSTS))
    several.close()
    assert [stats.emitted for stats in found.requests] == [len(record.tokens) for record in records]
    asked = sum(len(record.tokens) for record in records)
    assert found.seconds > 0 and (found.tokens == asked if at_once == 1 else found.tokens >= asked)
    assert found.seconds_per_token == sorted(found.seconds_per_token)


def test_together_they_take_less_time_than_one_after_another(draft: ReplayedModel) -> None:
    several = SeveralRecords([record_of(case) for case in CASES[:4]] * 2, draft)
    config = SpeculativeConfig(method="autoregressive")
    alone, together = (several.decode(config, COSTS, count, Experience(COSTS)).seconds for count in (1, 8))
    assert together < 0.4 * alone


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [4, 16])
def test_where_no_row_pays_asking_the_draft_costs_next_to_nothing(at_once: int, draft: ReplayedModel) -> None:
    costs = CostProfile(target=((1, 0.010), (64, 0.640)), draft=((1, 0.002),), host=0.001, overlap=False)
    several = SeveralRecords([record_of(case) for case in CASES[:4]] * 4, draft)
    experience = Experience(costs)
    plain, _, ours = (
        several.decode(SpeculativeConfig(method=method), costs, at_once, experience).tokens_per_second
        for method in ("autoregressive", "specbranch", "specbranch")
    )
    assert ours >= 0.99 * plain


def test_rows_beyond_those_that_a_forward_has_do_not_keep_a_draft_from_work(draft: ReplayedModel) -> None:
    """Up to 16 rows are free, sixteen of each session would be dear."""
    costs = CostProfile(target=((1, 0.010), (16, 0.010), (32, 0.020)), draft=((1, 0.002),), overlap=False)
    several = SeveralRecords([record_of(case) for case in CASES[:4]] * 2, draft)
    plain, ours = (
        several.decode(SpeculativeConfig(method=method), costs, 8, Experience(costs)).tokens_per_second
        for method in ("autoregressive", "tree")
    )
    assert ours > 1.08 * plain


def test_the_batch_is_full_until_the_last_request_is_done(draft: ReplayedModel) -> None:
    records = [record_of(CASES[0]), *[replace(record_of(CASES[0]), tokens=record_of(CASES[0]).tokens[:8])] * 3]
    short = [replace(one, task=replace(one.task, params=replace(one.task.params, max_tokens=8))) for one in records[1:]]
    found = SeveralRecords([records[0], *short], draft).decode(
        SpeculativeConfig(method="autoregressive"), COSTS, 4, Experience(COSTS)
    )
    longest = len(records[0].tokens)
    assert found.tokens > 0.9 * 4 * longest  # plain decoding: a token a round for each of the batch
    assert found.seconds == pytest.approx(longest * COSTS.target_seconds(4), rel=0.1)


def test_a_request_that_strays_from_its_record_is_an_error(draft: ReplayedModel) -> None:
    records = [record_of(case) for case in CASES[:2]]
    wrong = [records[0], replace(records[1], tokens=records[1].tokens[:-3])]
    with pytest.raises(Diverged, match="request 1 emitted"):
        SeveralRecords(wrong, draft).decode(SpeculativeConfig(method="autoregressive"), COSTS, 2, Experience(COSTS))
