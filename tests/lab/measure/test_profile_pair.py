"""A profile is measured from what the models really take, says where it comes from, and is refused for another pair."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from measured_toys import BRIEF, toys

from specbranch import LLM
from specbranch.assembly import ModelChoice
from specbranch.clock.profile import CostProfile
from specbranch.clock.shipped import load_profile
from specbranch.core.runner import Verdicts
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.lab.measure.check_profile import CHECKED, Compared, check
from specbranch.lab.measure.host_time import ModelTimer
from specbranch.lab.measure.loaded_pair import load_pair, pair_name
from specbranch.lab.measure.probes import WARM_UP_RUNS, Effort, MedianTiming, Probe, take_turns
from specbranch.lab.measure.profile_pair import measure


@pytest.fixture(scope="module")
def measured() -> CostProfile:
    return measure(toys(), BRIEF)


def test_what_is_measured_is_at_least_what_the_models_take(measured: CostProfile) -> None:
    for curve in (measured.target, measured.draft):
        assert [rows for rows, _ in curve] == [1, 2, 4, 256]
    assert all(seconds >= 0.004 for _, seconds in measured.target)
    assert all(seconds >= 0.001 for _, seconds in measured.draft)
    assert measured.host > 0


def test_a_pair_that_takes_turns_does_not_overlap(measured: CostProfile) -> None:
    assert not measured.overlap and measured.slow_down == 0.0 and "take turns" in measured.note


def test_a_profile_says_where_it_comes_from(measured: CostProfile, tmp_path: Path) -> None:
    assert (measured.pair, measured.target_identity, measured.draft_identity) == ("toys", "t", "d")
    assert {"made", "versions", "threads", "repeats", "contexts", "spread", "executor"} <= measured.provenance.keys()
    assert measured.hardware and measured.context == measured.provenance["contexts"][0]
    measured.save(tmp_path / "toys.json")
    assert load_profile(tmp_path / "toys.json") == measured


class Lazy:
    """A model whose verdicts have to be waited for, and which extends trees by itself."""

    launched_at = grown_at = None

    def verify(self, work: object, trials: object) -> Verdicts:
        return Verdicts(lambda: time.sleep(0.01) or [], lambda: False)

    def grow(self, growing: object, done: object) -> None:
        time.sleep(0.01)

    def read_ahead(self, feed: object) -> bool:
        return False

    def make_ready(self, seq: int, done: object) -> None: ...

    def slots(self, seq: int) -> None:
        time.sleep(0.1)


def test_waiting_for_verdicts_is_the_models_time_and_bookkeeping_is_not() -> None:
    watch, worker = ModelTimer(), Drafter(runner := cast(Any, Lazy()))
    with watch.on(worker):
        verdicts = worker.runner.verify((), ())
        assert not verdicts.ready() and verdicts() == []
        worker.slots(0)
        assert 0.01 <= watch.seconds < 0.1
        worker.runner.grow(cast(Any, None), lambda: True)
        assert 0.02 <= watch.seconds < 0.1
    assert worker.runner is runner


def test_medians_count_the_first_turns_do_not_and_the_order_changes() -> None:
    order: list[str] = []

    def timed(name: str, seconds: Iterator[float]) -> float:
        order.append(name)
        return next(seconds)

    turns = {"a": [9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 90.0], "b": [9.0] * 7, "c": [9.0] * 7}
    probes = [Probe(name, 1, functools.partial(timed, name, iter(seconds))) for name, seconds in turns.items()]
    figures = take_turns(probes, Effort(repeats=5, seconds=60.0), lambda what: None)
    assert figures["a", 1] == MedianTiming(3.0, pytest.approx(1 / 3)) and figures["b", 1] == MedianTiming(9.0, 0.0)
    thirds = [tuple(order[at : at + 3]) for at in range(0, len(order), 3)]
    assert all(sorted(third) == ["a", "b", "c"] for third in thirds) and len(set(thirds)) > 1


def test_probes_are_repeated_no_more_once_time_is_up_but_often_enough() -> None:
    calls: list[int] = []
    probe = Probe("a", 1, lambda: float(len(calls)) if calls.append(1) is None else 0.0)
    take_turns([probe], Effort(repeats=50, least=3, seconds=0.0), lambda what: None)
    assert len(calls) == WARM_UP_RUNS + 3


def test_the_check_gives_both_times_of_the_same_requests(measured: CostProfile) -> None:
    found = check(measured, toys(), BRIEF)
    assert [one.method for one in found] == list(CHECKED)
    for one in found:
        assert one.measured > 0.004 and one.modelled > 0.004
    assert Compared("m", 2.0, 3.0, 0.0).off == 0.5


def test_the_check_charges_what_the_profile_says() -> None:
    dear = CostProfile(target=((1, 100.0),), draft=((1, 1.0),), overlap=False)
    plain = next(one for one in check(dear, toys(0.0, 0.0), BRIEF) if one.method == "autoregressive")
    prompts = len(toys().prompts())
    assert plain.modelled == pytest.approx(100.0 * (BRIEF.check_tokens - 1) * prompts) and plain.off > 100


def test_progress_counts_up_to_its_end() -> None:
    reported: list[tuple[int, int]] = []
    measure(toys(), replace(BRIEF, seconds=60.0), lambda what, done, total: reported.append((done, total)))
    assert [done for done, _ in reported] == list(range(1, len(reported) + 1)) and reported[-1][0] == reported[-1][1]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("p", "t", "d"), "p"),
        ((None, "t", "smollm2-weak"), "smollm2-weak"),
        ((None, "/a/big", "/b/small"), "small & big"),
    ],
)
def test_a_pair_is_named(given: tuple[str | None, str, str], name: str) -> None:
    assert pair_name(*given) == name


@pytest.fixture(scope="module")
def real(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    loaded = load_pair(ModelChoice(pair[0], device="cpu"), ModelChoice(pair[1], device="cpu"), "tiny")
    file = tmp_path_factory.mktemp("profile") / "tiny.json"
    measure(loaded, BRIEF).save(file)
    return file


def test_a_measured_profile_drives_the_clock_of_its_own_pair(pair: tuple[str, str], real: Path) -> None:
    with LLM(*pair, device="cpu", options={"clock": str(real)}) as llm:
        assert llm.method == "specbranch"
        assert llm.generate("A branch", {"max_tokens": 8}).stats["decode_seconds"] > 0


def test_a_profile_of_another_pair_is_refused_unless_forced(pair: tuple[str, str], real: Path) -> None:
    with pytest.raises(BadParameter, match=r"measured with tiny, whose draft differs.*force_profile=True"):
        LLM(pair[0], pair[0], device="cpu", options={"clock": str(real)})
    with pytest.raises(BadParameter, match="whose target and draft differ"):
        LLM(pair[1], pair[0], device="cpu", options={"clock": str(real)})
    with LLM(pair[0], pair[0], device="cpu", options={"clock": str(real), "force_profile": True}) as llm:
        assert llm.generate("A branch", {"max_tokens": 4}).stats["tokens"] == 4


def test_a_target_alone_may_use_the_profile_of_a_pair(pair: tuple[str, str], real: Path) -> None:
    with LLM(pair[0], device="cpu", options={"clock": str(real)}, method="autoregressive") as llm:
        assert llm.generate("A branch", {"max_tokens": 4}).stats["tokens"] == 4


@pytest.mark.default_model
@pytest.mark.slow
def test_the_default_pair_can_be_measured(default_model: Path) -> None:
    loaded = load_pair(
        ModelChoice("smollm2-135m", device="cpu"), ModelChoice("smollm2-default", device="cpu"), "smollm2-default"
    )
    profile = measure(loaded, replace(BRIEF, repeats=1))
    assert profile.pair == "smollm2-default" and profile.target_identity != profile.draft_identity
    assert {one.method for one in check(profile, loaded, BRIEF)} == set(CHECKED)
