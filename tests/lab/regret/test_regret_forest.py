"""Rounds of the forest in the regret lab: texts, and the time they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_cases import calm

from specbranch.core.experience import Experience
from specbranch.core.methods import MethodRounds
from specbranch.core.session import Session
from specbranch.lab.regret.case import Case
from specbranch.lab.regret.forest_machine import padded
from specbranch.lab.regret.runs import ARMS, CaseRun, Contender, contender, judged, run
from specbranch.lab.regret.toy_pair import make_scripts

MOST_BEHIND_PLAIN = 1.05
OURS = judged(("specbranch",))[0]


def draft_that_is_right() -> Case:
    return calm(agreement=0.9)


def draft_that_is_wrong() -> Case:
    return calm(agreement=0.3, lookup=0.0)


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_forest_emits_the_script_alone_and_in_a_batch(at_once: int) -> None:
    in_forest: list[Session] = []

    def start(session: Session, experience: Experience) -> MethodRounds:
        in_forest.append(session)
        return OURS.start(session, experience)

    one = CaseRun(make_scripts(calm(3, at_once=at_once)), Contender("watched", start), forest=True)
    found = one.run()  # any other text raises Diverged
    assert sum(batch.tokens for batch in found.batches) == 3 * 128
    assert in_forest and all(session.in_forest for session in in_forest)
    assert sum(batch.forwards for batch in found.batches) < 128 * len(found.batches)


@pytest.mark.parametrize("case", [draft_that_is_right(), draft_that_is_wrong()])
def test_the_forest_is_not_slower_than_plain_decoding(case: Case) -> None:
    scripts = make_scripts(case)
    plain, ours = (run(scripts, one, forest=True).seconds for one in (contender("plain", ARMS["plain"]), OURS))
    assert ours < MOST_BEHIND_PLAIN * plain


def test_a_draft_that_is_right_pays_in_the_forest() -> None:
    scripts = make_scripts(draft_that_is_right())
    plain, ours = (run(scripts, one, forest=True) for one in (contender("plain", ARMS["plain"]), OURS))
    assert ours.warm < 0.6 * plain.warm and sum(batch.draft_steps for batch in ours.batches) > 0


def test_two_devices_make_no_rounds_of_the_forest() -> None:
    scripts = make_scripts(replace(calm(), overlap=True))
    assert not CaseRun(scripts, OURS, forest=True).clock.grows_forests
    assert CaseRun(make_scripts(calm()), OURS, forest=True).clock.grows_forests


def test_a_verify_is_padded_to_a_power_of_two() -> None:
    assert [padded(rows) for rows in (1, 2, 3, 5, 16, 17)] == [1, 2, 4, 8, 16, 32]
