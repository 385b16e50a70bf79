"""What goes wrong in a task that was put off concerns the session that put it off, and no other."""

from __future__ import annotations

import pytest

from specbranch.config import SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Deferred
from specbranch.core.session import Session
from specbranch.core.stats import Stats
from toybench import PROFILE, Case, Ending, Timeless, next_number, run_out, serial


def test_a_task_that_raises_comes_up_where_it_was_put_off() -> None:
    done: list[int] = []
    deferred = Deferred()
    deferred.add(done.append, 1)
    deferred.add(int, "no number")
    deferred.attempt()
    assert done == [1]
    with pytest.raises(ValueError, match="no number"):
        deferred.run()
    deferred.run()


class Broken(Stats):
    """Counts no tree."""

    def judge_tree(self, *given: object) -> None:
        raise RuntimeError("counted wrongly")


def test_a_session_whose_counting_fails_ends_alone_and_frees_what_it_held() -> None:
    executor = serial(0.2)
    loop = Loop(executor)
    sessions: list[Session] = []
    for seed in range(3):
        session = Case((seed, 1, 2), 0.0, seed, Ending("long", max_tokens=40)).session(next_number())
        if seed == 1:
            session.stats = Broken()
        loop.join(
            session, METHODS["specbranch"].start(session, SpeculativeConfig(method="specbranch"), Timeless(PROFILE))
        )
        sessions.append(session)
    run_out(loop)
    assert [session.finished for session in sessions] == ["length", "error", "length"]
    assert "counted wrongly" in str(sessions[1].error)
    assert not executor.target._held and executor.draft is not None and not executor.draft._held
