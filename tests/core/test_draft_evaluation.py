"""A draft's evaluation: what is counted, and what a planner's statistics start from."""

from __future__ import annotations

import random

import pytest

from specbranch.core.draft_evaluation import NOT_EVALUATED, ClassCounts, DraftEvaluation, JudgedPosition, evaluate
from specbranch.core.draft_gain import draft_gain
from specbranch.core.experience import EVALUATED_CLASS, EVALUATED_SHARE, Experience, Insight
from specbranch.core.trees import CLASSES, EDGES


def positions(count: int, seed: int) -> list[JudgedPosition]:
    """Positions of a draft that is right about as often as it says, or not at all."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        first = rng.random()
        said = (first, *sorted((rng.random() * (1 - first) / 3 for _ in range(rng.randrange(4))), reverse=True))
        rank = next((at for at, share in enumerate(said) if rng.random() < share), None)
        made.append(JudgedPosition(said, rank))
    return made


def class_by_edges(said: float) -> int:
    return sum(said >= edge for edge in EDGES)


def one_class(at: int, met: int, right: int) -> ClassCounts:
    return ClassCounts(
        tuple(met if one == at else 0 for one in range(CLASSES)),
        tuple(right if one == at else 0 for one in range(CLASSES)),
    )


def test_counts_are_those_of_a_count_class_by_class() -> None:
    judged = positions(400, 3)
    found = evaluate(judged, "some text")
    for at in range(CLASSES):
        firsts = [one for one in judged if class_by_edges(one.said[0]) == at]
        others = [
            rank == one.rank
            for one in judged
            for rank, said in enumerate(one.said)
            if rank and class_by_edges(said) == at
        ]
        assert (found.first.met[at], found.first.right[at]) == (len(firsts), sum(one.rank == 0 for one in firsts))
        assert (found.other.met[at], found.other.right[at]) == (len(others), sum(others))
    assert found.positions == 400 and found.text == "some text"
    assert found.hits == sum(one.rank == 0 for one in judged)
    assert found.covered == sum(one.rank is not None for one in judged) > found.hits > 0


def test_nothing_compared_is_no_evaluation() -> None:
    assert evaluate([]) == NOT_EVALUATED
    usual, started = Insight(), Insight.starting_from(NOT_EVALUATED)
    assert started.chances() == usual.chances() and started.first.seen == usual.first.seen


def test_a_class_that_was_met_often_starts_with_its_share_and_others_keep_theirs() -> None:
    prior = DraftEvaluation(one_class(8, 5000, 1000), one_class(2, 3000, 300))
    usual, insight = Insight().chances(), Experience(prior=prior).insight
    chances = insight.chances()
    assert chances.first[8] == pytest.approx(0.2, abs=0.01) and usual.first[8] == 0.6
    assert chances.other[2] == pytest.approx(0.1, abs=0.01)
    assert chances.first[:8] == usual.first[:8] and chances.first[9:] == usual.first[9:]
    assert chances.looked == usual.looked and chances.shifts == usual.shifts
    assert insight.hits.shares()[0] == pytest.approx(0.2, abs=0.01)
    assert insight.covered == pytest.approx(0.26, abs=0.01)


def test_a_class_that_was_met_twice_hardly_moves() -> None:
    chances = Insight.starting_from(DraftEvaluation(one_class(8, 2, 0))).chances()
    assert chances.first[8] == pytest.approx(0.6 * 20 / 22)


def test_an_evaluation_counts_few_observations_however_long_it_was() -> None:
    insight = Insight.starting_from(evaluate(positions(20_000, 5)))
    assert max(insight.first.seen + insight.other.seen) == EVALUATED_CLASS
    assert insight.hits.seen == insight.cover.seen == [EVALUATED_SHARE]
    assert max(insight.first.met + insight.other.met) == pytest.approx(EVALUATED_CLASS)


def test_verdicts_soon_outweigh_the_evaluation() -> None:
    insight = Insight.starting_from(DraftEvaluation(one_class(8, 5000, 0)))
    for _ in range(200):
        insight.learn("first", 8, True)
        insight.learn("hits", 0, True)
    assert insight.chances().first[8] > 0.75 and insight.hits.shares()[0] > 0.8


def test_the_gain_weighs_classes_by_how_often_the_evaluation_met_them() -> None:
    """Of candidates that are nearly always wrong, next to nothing is worth a row; of sure ones nearly all."""
    gains = []
    for at, right in ((16, 1990), (3, 100)):
        insight = Insight.starting_from(DraftEvaluation(one_class(at, 2000, right), one_class(0, 6000, 10)))
        gains.append(draft_gain(*insight.kinds(insight.chances(), 0.0), step=0.1, rows=(0.1,) * 4))
    assert gains[0] > 1.5 and gains[1] < 0.1
