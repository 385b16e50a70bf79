"""A planned method that is slower than plain decoding, for whatever reason, decodes plainly."""

from __future__ import annotations

from typing import Any

import pytest

from specbranch.config import SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.lookup import Ngrams
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.planner import Planner
from specbranch.core.session import Session
from specbranch.core.stance import BEGINNING, BELIEVED, ENOUGH, LEFT_OUT, MANY, MOST_SPAN, SPAN, TRIAL, Stance
from tiers import tiered
from toybench import PROFILE, Case, Ending, answer, law, next_number, plainly, run_out, virtual_clock


def shares(stance: Stance, rounds: int, rate: float, batch_size: int = 1) -> list[bool]:
    """Make rounds, planned ones at some rate, plain ones at 1 token a second; returns how each was made."""
    ways = []
    for _ in range(rounds):
        way = stance.plainly(batch_size)
        ways.append(way)
        stance.note(batch_size, way, 2, 2.0 if way else 2.0 / rate)
    return ways


def test_the_faster_way_is_taken_and_the_other_one_tried_ever_more_rarely() -> None:
    for rate, best in ((0.6, True), (1.7, False)):
        ways = shares(Stance(), 20_000, rate)
        assert not any(ways[:BEGINNING]), "nothing is known yet"
        others = [at for at, way in enumerate(ways) if way is not best and at > BEGINNING + 2 * SPAN]
        assert 0 < len(others) < 0.05 * len(ways)
        assert len(others) <= 9 * (max(TRIAL.values()) + LEFT_OUT), "it is tried again after twice as long"


def test_plain_decoding_is_not_tried_where_it_cannot_be_faster() -> None:
    assert not any(shares(Stance(lambda batch_size: 1.0), 5000, 1.7))
    assert any(shares(Stance(lambda batch_size: 1.0), 5000, 0.9)), "a bound above what is planned leaves it open"
    stance = Stance(lambda batch_size: 4.0 / batch_size)
    assert not any(shares(stance, 400, 1.7, 4)) and any(shares(stance, 400, 1.7, 1)), "it is that of the load"


def test_a_trial_that_is_far_behind_ends_early_and_a_close_one_does_not() -> None:
    for rate, rounds in ((0.6, ENOUGH), (0.95, TRIAL[False])):
        ways = shares(Stance(), 3000, rate)
        settled = BEGINNING + TRIAL[True] + SPAN  # planned, then plain on trial, then plain as it was better
        again = settled + ways[settled:].index(False)
        assert ways[again:].index(True) == rounds + LEFT_OUT


def test_rounds_in_which_something_is_set_up_do_not_decide() -> None:
    """Planned decoding is three times as fast, but for one round in eight that takes a hundred times as long."""
    stance, planned = Stance(), 0
    for at in range(4000):
        way = stance.plainly(1)
        planned += not way
        seconds = 1.0 if way else 1.0 / 3.0
        stance.note(1, way, 1, seconds if way or at % 8 or at > 400 else 100 * seconds)
    assert planned > 0.9 * 4000


def test_what_has_become_faster_is_found_out() -> None:
    stance = Stance()
    assert shares(stance, 3000, 0.5)[-1] is True
    later = shares(stance, 2 * MOST_SPAN, 3.0)
    assert later[:LEFT_OUT] == [True] * LEFT_OUT and later[-500:].count(False) > 450


def test_each_load_has_its_own() -> None:
    stance = Stance()
    shares(stance, 2000, 2.0, batch_size=1)
    shares(stance, 20_000, 0.5, batch_size=16)
    assert [stance.plainly(batch_size) for batch_size in (1, 16, 20, 64)] == [False, True, True, True]


def test_a_new_load_begins_as_the_others_let_expect() -> None:
    few, many, new = Stance(), Stance(), Stance()
    shares(few, 2000, 0.5, batch_size=2)
    shares(many, 40_000, 3.0, batch_size=32)
    assert [stance.plainly(4) for stance in (few, many, new)] == [True, False, False]
    assert [stance.plainly(16) for stance in (few, many, new)] == [True, False, True]


def test_trials_that_lose_take_a_small_share_of_the_time() -> None:
    """Planned rounds, and what a draft has to read first, take thirty times as long."""
    stance, lost, whole = Stance(), 0.0, 0.0
    for at in range(400_000):
        way = stance.plainly(MANY)
        seconds = 1.0 if way else 30.0
        stance.note(MANY, way, 1, seconds)
        if at > 2000:
            whole, lost = whole + seconds, lost + seconds - 1.0
    assert 0 < lost < 0.02 * whole


def test_what_was_found_is_believed_for_a_while_and_looked_at_again() -> None:
    before, after = Stance(), Stance()
    shares(before, 20_000, 0.5, batch_size=4)
    shares(before, BEGINNING, 0.5, batch_size=1)  # nothing was compared yet
    after.believe(before.found())
    ways = shares(after, 4 * BELIEVED + 4 * TRIAL[False] + 100, 3.0, batch_size=4)
    assert all(ways[: 4 * BELIEVED]) and not ways[-1], "planning has become faster since"
    assert not after.plainly(1)


def decoded(sessions: int, planning: float, monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Decode toys on a modelled clock, some at once, with a host that takes so long to plan a round of each."""
    executor, costs = virtual_clock(0.1, profile=PROFILE), MeasuredCosts()
    real = Planner.begin

    def begin(self: Planner, *given: Any) -> None:
        executor._now += planning
        real(self, *given)

    monkeypatch.setattr(Planner, "begin", begin)
    experience, done = Experience(costs), []
    for batch in range(48):
        loop = Loop(executor, costs=costs)
        for number in range(sessions):
            case = Case((batch % 6, number % 6, 2), 0.7, batch, Ending("long", max_tokens=60))
            session = case.session(next_number())
            config = SpeculativeConfig(method="specbranch")
            loop.join(session, METHODS["specbranch"].start(session, config, experience))
            done.append((case, session))
        run_out(loop)
    for case, session in done:
        assert answer(session) == plainly(case, law())
        session.stats.check()
    return [session for _, session in done]


def share_of_plain(sessions: list[Session]) -> float:
    return sum(one.stats.by_method.get("plain", 0) for one in sessions) / sum(one.stats.emitted for one in sessions)


@pytest.mark.slow
@pytest.mark.parametrize("sessions", tiered((1, 4), (1).__eq__))
def test_where_planning_takes_long_nothing_is_planned(sessions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = decoded(sessions, 50.0, monkeypatch)
    assert share_of_plain(slow[len(slow) // 2 :]) > 0.8
    monkeypatch.undo()
    quick = decoded(sessions, 0.0, monkeypatch)
    assert share_of_plain(quick[len(quick) // 2 :]) < 0.5


def test_free_text_on_which_plain_decoding_is_faster_does_not_keep_copied_text_from_lookup() -> None:
    experience, free, copied = Experience(), list(range(40)), [*range(30), 3, 4, 5, 6]
    planners = {
        name: Planner(experience, ngrams=Ngrams(text, 4)) for name, text in (("free", free), ("copied", copied))
    }
    for _ in range(3000):  # planning gives twice the tokens on copied text, half of them on free text
        for name, planner in planners.items():
            way = planner.choose_plain(1)
            planner.record_round(1, way, 2, 2.0 if way else 1.0 if name == "copied" else 4.0)
    assert planners["free"].choose_plain(1) is True and planners["copied"].choose_plain(1) is False
    assert Planner(experience).choose_plain(1) is True, "nothing is looked up"
    assert Planner(experience, ngrams=Ngrams([*range(30), 7, 3, 4, 5], 4)).choose_plain(1) is True, "three tokens alike"
