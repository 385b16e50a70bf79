"""Runs of the regret lab: texts, charged time, and what a planner gets to see."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_cases import calm

from specbranch.core.experience import Experience
from specbranch.core.methods import MethodRounds
from specbranch.core.session import Session
from specbranch.errors import BadParameter
from specbranch.lab.regret.case import Case
from specbranch.lab.regret.figures import CaseResult
from specbranch.lab.regret.machine import prolonged
from specbranch.lab.regret.runs import ARMS, CaseRun, Contender, arms_of, contender, judged, run
from specbranch.lab.regret.toy_pair import make_scripts
from specbranch.lab.replay.decode import Diverged

OURS = ("specbranch",)


def spiked(case: Case) -> Case:
    return replace(case, spike=1.0)


def seconds(case: Case, name: str) -> float:
    return run(make_scripts(case), contender(name, ARMS[name])).seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_once", "overlap"),
    [
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        (2, True),
    ],
)
def test_every_method_emits_the_text_of_plain_decoding(at_once: int, overlap: bool) -> None:
    case = replace(spiked(calm(at_once=at_once)), overlap=overlap, slow=((0.2, 0.6),))
    scripts, texts = make_scripts(case), dict[str, list[tuple[int, ...]]]()
    for one in (*arms_of(case), *judged(OURS)):
        sessions: list[Session] = []
        run(scripts, watched(one, sessions))
        texts[one.name] = [tuple(session.output) for session in sessions]
    assert len(texts) == 7 + overlap and all(text == texts["plain"] for text in texts.values())


def watched(one: Contender, sessions: list[Session]) -> Contender:
    def start(session: Session, experience: Experience) -> MethodRounds:
        sessions.append(session)
        return one.start(session, experience)

    return replace(one, start=start)


def test_another_text_is_an_error() -> None:
    scripts = make_scripts(calm())
    first, *others = scripts.requests
    changed = replace(scripts, requests=(replace(first, answer=(first.answer[0] + 1, *first.answer[1:])), *others))
    with pytest.raises(Diverged):
        run(changed, arms_of(changed.case)[0])


def test_an_oracle_has_no_regret_and_a_planner_that_takes_the_worst_arm_has_much() -> None:
    case = calm()
    scripts = make_scripts(case)
    arms = [run(scripts, contender(name, ARMS[name])) for name in ("plain", "lookup", "speculative-5")]
    best, worst = (pick(arms, key=lambda arm: arm.seconds).name for pick in (min, max))
    oracle, loser = (run(scripts, contender(name, ARMS[arm])) for name, arm in (("oracle", best), ("loser", worst)))
    result = CaseResult(case.seed, case.describe(), tuple(arms), (oracle, loser))
    assert result.regret(oracle).cold == pytest.approx(0.0, abs=0.03)
    assert result.regret(oracle).warm == pytest.approx(0.0, abs=0.03)
    assert result.regret(loser).cold > 0.5 and result.regret(loser).warm > 0.5


def test_a_planner_that_wastes_the_first_requests_alone_has_cold_regret_alone() -> None:
    case = calm()
    scripts = make_scripts(case)

    def start(session: Session, experience: Experience) -> MethodRounds:
        arm = "plain" if session.number == 0 else "speculative-5"
        return contender(arm, ARMS[arm]).start(session, experience)

    arms = tuple(run(scripts, contender(name, ARMS[name])) for name in ("plain", "speculative-5"))
    late = run(scripts, Contender("late", start, learns_costs=False))
    regret = CaseResult(0, "", arms, (late,)).regret(late)
    assert regret.cold > 0.5 and regret.warm == pytest.approx(0.0, abs=1e-9) and regret.plain < 0.0


@pytest.mark.parametrize("name", ["plain", "lookup", "speculative-5"])
def test_a_spike_is_charged_to_no_arm(name: str) -> None:
    case = calm()
    assert seconds(spiked(case), name) == pytest.approx(seconds(case, name), rel=1e-6)


def test_a_spike_passes_on_the_clock_that_a_planner_sees() -> None:
    runs = [CaseRun(make_scripts(case), contender("plain", ARMS["plain"])) for case in (calm(), spiked(calm()))]
    for one in runs:
        one.run()
    calmly, with_spikes = runs
    assert with_spikes.clock.now() > calmly.clock.now() + 0.03
    assert with_spikes.clock.charged == pytest.approx(calmly.clock.charged)


def test_two_models_at_once_are_prolonged_by_what_exceeds_the_longer_one() -> None:
    assert prolonged(draft=5.0, target=2.0, draft_spike=4.0, target_spike=0.0, overlap=True) == 3.0
    assert prolonged(draft=1.5, target=2.0, draft_spike=1.0, target_spike=0.0, overlap=True) == 0.0
    assert prolonged(draft=5.0, target=2.0, draft_spike=4.0, target_spike=1.0, overlap=False) == 5.0


def test_a_slow_machine_takes_twice_as_long() -> None:
    case = calm()
    assert seconds(replace(case, slow=((0.0, 1.0),)), "plain") == pytest.approx(2 * seconds(case, "plain"))
    assert seconds(replace(case, slow=((0.5, 1.0),)), "plain") == pytest.approx(1.5 * seconds(case, "plain"))


def test_a_planner_starts_with_the_costs_of_a_rehearsal_and_no_other_experience() -> None:
    case = calm()
    seen: list[tuple[bool, bool, bool]] = []

    def start(session: Session, experience: Experience) -> MethodRounds:
        assert experience.learned is not None and experience.costs is experience.learned
        observed = experience.insight.observations
        seen.append((experience.costs.knows_target, experience.costs.knows_draft, observed > 0))
        return judged(OURS)[0].start(session, experience)

    one = CaseRun(make_scripts(case), Contender("watched", start))
    one.run()
    assert seen == [(True, True, False), (True, True, True)]
    assert one.experience.costs.target_seconds(1) == pytest.approx(case.target, rel=0.01)
    assert one.experience.costs.draft_seconds(1) == pytest.approx(case.target * case.draft_share, rel=0.2)


def test_only_methods_that_plan_are_judged() -> None:
    with pytest.raises(BadParameter, match="methods that plan: tree, specbranch, auto"):
        judged(("speculative",))
