"""What draft and target cost each other is measured by rounds of the executor itself, by processes and by streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from measured_toys import BRIEF, toys

from specbranch import LLM
from specbranch.assembly import ModelChoice
from specbranch.core.orders import Span
from specbranch.core.runner import Feed, Trial, Verdicts
from specbranch.errors import BadParameter, ModelError
from specbranch.exec.drafter import Drafter
from specbranch.exec.messages import Recipe
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.lab.measure.check_profile import CHECKED, check
from specbranch.lab.measure.loaded_pair import load_pair
from specbranch.lab.measure.overlap import OVERLAP_ROWS, OVERLAP_SHARES, TrialRounds, measure_slowing
from specbranch.lab.measure.profile_pair import measure
from specbranch.lab.toys.toys import Logits, ToyRunner
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from toybench import Deferred, law

TEXT = [1, 2, 3, 4, 5, 1, 2, 3]


class Hindered:
    """Two models by a clock of their own: a draft step beside the target slows both by fixed amounts, the first time by
    much more."""

    def __init__(self, target: float, draft: float) -> None:
        self.target, self.step = target, draft
        self.tried: list[int] = []

    def forward(self) -> float:
        return 0.021

    def draft(self, steps: int) -> Span:
        return Span(0.0, steps * 0.002, steps)

    def both(self, steps: int) -> tuple[float, Span]:
        self.tried.append(steps)
        setting_up = 1.0 if len(self.tried) == 1 else 0.0
        return 0.021 + setting_up + steps * self.target, Span(0.0, steps * (0.002 + self.step), steps)


@pytest.mark.parametrize(("target", "draft"), [(0.004, 0.001), (0.0, 0.003), (-0.001, -0.001)])
def test_what_each_costs_the_other_is_measured_by_the_step_and_never_below_zero(target: float, draft: float) -> None:
    models: Any = Hindered(target, draft)
    ticks: list[int] = []
    found = measure_slowing(models, 1, lambda: ticks.append(1))
    assert models.tried == [8, 8] and len(ticks) == 2  # 8 steps of 2 ms fill four fifths of 21 ms
    assert found.steps == 8
    assert (found.target, found.draft) == (pytest.approx(max(target, 0.0)), pytest.approx(max(draft, 0.0)))


def test_on_streams_several_numbers_of_steps_are_tried_by_turns() -> None:
    models: Any = Hindered(0.004, 0.001)
    found = measure_slowing(models, 8, lambda: None, OVERLAP_SHARES["streams"])
    assert models.tried == [2, 4, 6, 8, 2, 4, 6, 8, 2] and found.steps == 8
    assert (found.target, found.draft) == (pytest.approx(0.004), pytest.approx(0.001))


@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("text", [TEXT, [0] * 20], ids=["words", "zeros"])
def test_a_round_can_be_tried_again_and_costs_the_same_rows_each_time(kind: type[Serial], text: list[int]) -> None:
    executor = kind(Verifier(Deferred(law(), lambda: 2)), Drafter(ToyRunner(law(0.2))))
    with TrialRounds(executor, text) as rounds:
        rounds.both(1)
        for steps in (1, 5, 5, 3):
            before = executor.target.rows_fed
            assert rounds.draft(steps).tokens == steps and executor.target.rows_fed == before
            rounds.forward()
            assert executor.target.rows_fed == before + OVERLAP_ROWS
            assert rounds.both(steps)[1].tokens == steps and executor.target.rows_fed == before + 2 * OVERLAP_ROWS


# --- a device that works by itself, and a draft beside it, on one clock ---


class Machine:
    """When the target is done, and what time it is; every draft step until then delays the target, and takes longer."""

    target, step = 0.105, 0.01  # seconds alone

    def __init__(self, slow_down: float, draft_slow_down: float) -> None:
        self.slow_down, self.draft_slow_down = slow_down, draft_slow_down
        self.now = self.done = 0.0

    def start_target(self) -> None:
        self.done = self.now + self.target

    def make_step(self) -> None:
        if self.now < self.done:
            self.done += self.slow_down
            self.now += self.draft_slow_down
        self.now += self.step


class OnStream(Deferred):
    """A target on that machine, which notes moments as a GPU's stream does."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(law(), lambda: 1000)
        self.machine = machine

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        self.machine.start_target()
        verdicts = super().verify(work, trials)

        def found() -> list[Any]:
            self.machine.now = max(self.machine.now, self.machine.done)
            return verdicts()

        return Verdicts(found, verdicts.ready)

    def note(self) -> Callable[[], float]:
        now, machine = self.machine.now, self.machine
        return (lambda: machine.done) if machine.done > now else (lambda: now)


class BesideIt(ToyRunner):
    """A draft on the host of that machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(law(0.2))
        self.machine = machine

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        self.machine.make_step()
        return super()._score(work)


@pytest.mark.parametrize(("target", "draft"), [(0.004, 0.0), (0.0, 0.003), (0.002, 0.005)])
def test_streams_tell_what_a_step_adds_to_the_target_and_to_itself(target: float, draft: float) -> None:
    machine = Machine(target, draft)
    executor = Streams(Verifier(OnStream(machine)), Drafter(BesideIt(machine)), lambda: machine.now)
    with TrialRounds(executor, TEXT) as rounds:
        found = measure_slowing(rounds, 8, lambda: None, OVERLAP_SHARES["streams"])
    assert (found.target, found.draft) == (pytest.approx(target), pytest.approx(draft)) and found.steps == 8
    serial = Serial(Verifier(OnStream(machine)), Drafter(BesideIt(machine)), lambda: machine.now)
    with TrialRounds(serial, TEXT) as rounds:
        assert measure_slowing(rounds, 8, lambda: None).target == pytest.approx(0.0), "they take turns"


# --- whole profiles ---


def test_two_processes_side_by_side_make_a_profile_that_overlaps() -> None:
    profile = measure(toys(0.01, 0.002, "process"), BRIEF)
    assert profile.overlap and "half of the threads" in profile.note
    assert "draft steps beside a target forward over 4 tokens" in profile.note
    assert profile.slow_down < 0.02 and profile.draft_slow_down < 0.02  # they sleep: neither is in the other's way


def test_streams_make_a_profile_that_overlaps() -> None:
    reported: list[tuple[int, int]] = []
    pair = toys(executor="streams", target=Deferred(law(), lambda: 3))
    profile = measure(pair, replace(BRIEF, seconds=60.0), lambda what, done, total: reported.append((done, total)))
    assert profile.overlap and "streams executor" in profile.note and profile.provenance["executor"] == "streams"
    assert [done for done, _ in reported] == list(range(1, reported[-1][1] + 1)), "progress counts up to its end"


@pytest.mark.slow
def test_a_gpus_runner_is_measured_on_streams(pair: tuple[str, str]) -> None:
    target, draft = (GpuRunner(load_native(name, device="cpu").decoder, 600) for name in pair)  # as it runs on a CPU
    both = replace(toys(executor="streams"), verifier=Verifier(target), drafter=Drafter(draft))
    with TrialRounds(both.real(), TEXT) as rounds:
        rounds.both(1)
        assert [rounds.draft(steps).tokens for steps in (1, 4, 4)] == [1, 4, 4]
        assert [rounds.both(steps)[1].tokens for steps in (1, 4, 4)] == [1, 4, 4]
    profile = measure(both, BRIEF)
    assert profile.overlap and profile.host > 0
    assert {one.method for one in check(profile, both, BRIEF)} == set(CHECKED)


def _broken() -> Drafter:
    raise ModelError("no such draft")


@pytest.mark.slow
def test_a_draft_that_cannot_start_is_a_sentence() -> None:
    pair = replace(toys(executor="process"), recipe=Recipe(f"{__name__}:_broken"))
    with pytest.raises(ModelError, match=r"could not start: .*no such draft"):
        measure(pair, BRIEF)


class Failing(ToyRunner):
    """A draft that fails once a text was read."""

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        raise RuntimeError("CUDA out of memory.")


def test_a_draft_that_fails_while_it_is_timed_is_a_sentence() -> None:
    executor = Streams(Verifier(Deferred(law(), lambda: 2)), Drafter(Failing(law())))
    with (
        TrialRounds(executor, TEXT) as rounds,
        pytest.raises(ModelError, match="draft process ended while it was timed"),
    ):
        rounds.both(1)


def test_streams_without_a_gpu_are_refused_as_the_engine_does(pair: tuple[str, str]) -> None:
    with pytest.raises(BadParameter) as engine:
        LLM(*pair, device="cpu", executor="streams")
    target, draft = (ModelChoice(name, device="cpu") for name in pair)
    with pytest.raises(BadParameter) as found:
        load_pair(target, draft, "tiny", "streams")
    assert str(found.value) == str(engine.value) and "on a GPU" in str(found.value)
