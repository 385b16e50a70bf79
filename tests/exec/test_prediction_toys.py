"""An answer is that of plain decoding whatever its prediction says, and a right prediction saves forwards."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specbranch.config import SpeculativeConfig
from specbranch.core.loop import Executor
from specbranch.core.methods import METHODS, MethodRounds
from specbranch.core.prediction import Prediction
from specbranch.core.session import Session
from tiers import each_value
from toybench import PROFILE, Case, Ending, Timeless, answer, decode, law, plainly, serial, streams, virtual_clock

VOCABULARY = 40  # so that a text hardly repeats itself
METHOD_NAMES = ("lookup", "specbranch", "auto")
EXECUTORS: dict[str, Callable[[float, int], Executor]] = {"serial": serial, "streams": streams, "clock": virtual_clock}
LONG = Ending("long", max_tokens=48)


def case(seed: int, temperature: float, ending: Ending = LONG) -> Case:
    return Case((seed % VOCABULARY, 3, 5), temperature, seed, ending)


def edited(tokens: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Other tokens in some places, some left out, and some put in."""
    rng, made = random.Random(seed), list[int]()
    for token in tokens:
        chance = rng.random()
        made += [token] if chance > 0.12 else [] if chance > 0.08 else [rng.randrange(VOCABULARY)]
        made += [rng.randrange(VOCABULARY)] if rng.random() < 0.04 else []
    return tuple(made)


def predicted(executor: Executor, request: Case, method: str, expected: tuple[int, ...]) -> Session:
    config = SpeculativeConfig(method=method)

    def start(session: Session) -> MethodRounds:
        session.prediction = Prediction(expected) if expected else None
        return METHODS[method].start(session, config, Timeless(PROFILE))

    return decode(executor, request, config, start=start)


@each_value
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_no_prediction_changes_an_answer(method: str, kind: str, temperature: float) -> None:
    executor = EXECUTORS[kind](0.8, VOCABULARY)
    accepted = rejected = 0
    endings = (LONG, Ending("odd", max_tokens=17), Ending("end token", eos_ids=(7, 9, 11)), Ending("one", max_tokens=1))
    for seed in range(4):
        request = case(seed, temperature, endings[seed % len(endings)])
        truth = plainly(request, law(0.0, VOCABULARY))
        junk = tuple(random.Random(seed).choices(range(VOCABULARY), k=60))
        for expected in (truth.tokens, edited(truth.tokens, seed), truth.tokens[4:] + junk, junk, truth.tokens[:1]):
            session = predicted(executor, request, method, expected)
            assert answer(session) == truth, (request, expected)
            accepted += session.stats.accepted_prediction_tokens
            rejected += session.stats.rejected_prediction_tokens
    assert accepted > 90 and rejected > 8, (accepted, rejected)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_right_prediction_saves_forwards_and_is_counted(method: str) -> None:
    request = case(1, 0.0)
    truth = plainly(request, law(0.0, VOCABULARY)).tokens
    executor = virtual_clock(0.8, VOCABULARY)
    without, right, edit = (
        predicted(executor, request, method, expected).stats for expected in ((), truth, edited(truth, 3))
    )
    assert without.accepted_prediction_tokens == without.rejected_prediction_tokens == 0
    assert right.rejected_prediction_tokens == 0 and right.target_forwards <= 10 < without.target_forwards
    # all but the first token, which comes with the prompt, and one of each verify, which the target adds
    assert right.accepted_prediction_tokens == len(truth) - 1 - right.target_forwards
    assert right.target_forwards < edit.target_forwards < without.target_forwards


def test_methods_that_do_not_look_up_leave_a_prediction_alone() -> None:
    request = case(2, 0.0)
    truth = plainly(request, law(0.0, VOCABULARY))
    for method in ("autoregressive", "speculative", "pearl", "tree", "lookahead"):
        session = predicted(serial(0.3, VOCABULARY), request, method, truth.tokens)
        assert answer(session) == truth and not session.stats.accepted_prediction_tokens
