"""How many threads compiled steps use while other processes take the cores, on a modelled machine; no bit of a result
depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import pytest
import torch

from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.models.cpu import row_kernels, waiting_text
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.cpu.thread_pace import PACE, StepTime, StepTimes, ThreadPace
from specbranch.models.forward import fused_step
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.sampling.logit_rows import collate
from tiny_models import GREEDY, saved, some_tokens, tiny

needs_kernel = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")
STEP = 0.006  # seconds of a step with all threads on a quiet machine
Machine = Callable[[int], tuple[float, float]]  # threads -> how often STEP a step takes, and cores that threads lack


class Driven:
    """A pace with the times of steps on a machine that changes."""

    def __init__(self, most: int, says_idle: bool = True) -> None:
        self.now, self.idle, self.most = 0.0, 0.0, most
        self.pace = ThreadPace(lambda: self.now, lambda: self.idle if says_idle else None)

    def run(self, machine: Machine, seconds: float) -> list[int]:
        """Make steps for so long; returns the threads of each."""
        used, until = [], self.now + seconds
        while self.now < until:
            used.append(self.pace.threads(self.most))
            cost, lost = machine(used[-1])
            self.now += cost * STEP
            self.idle += (self.most - used[-1]) * cost * STEP if machine is quiet else 0.0
            self.pace.note(StepTime(cost * STEP, STEP, lost * cost * STEP))
        return used


def quiet(threads: int) -> tuple[float, float]:
    return 2 / threads, 0.0


def busy(threads: int) -> tuple[float, float]:
    """One busy process on two cores."""
    return (3.4, 0.5) if threads == 2 else (1.8, 0.0)


def crowded(threads: int) -> tuple[float, float]:
    """Enough busy processes that every thread has half a core, however few there are."""
    return 2 * 16 / threads, 0.5 * threads


def test_a_quiet_machine_keeps_all_threads() -> None:
    assert set(Driven(2).run(quiet, 30)) == {2}


def test_a_short_disturbance_costs_a_few_steps() -> None:
    driven = Driven(2)
    driven.run(lambda threads: (1.5, 0.4), 0.05)
    used = driven.run(quiet, 5)
    assert used.count(1) <= 16 and set(used[-100:]) == {2}


@pytest.mark.parametrize("says_idle", [True, False])
def test_beside_a_busy_process_one_thread_is_used_nearly_always(says_idle: bool) -> None:
    driven = Driven(2, says_idle)
    first = driven.run(busy, 0.3)
    assert first[-1] == 1, "found out within a few steps"
    used = driven.run(busy, 20)
    assert used.count(2) < 0.1 * len(used)
    assert used.count(2) > 0, "more threads are tried from time to time"


@pytest.mark.parametrize("says_idle", [True, False])
def test_all_threads_are_back_soon_after_the_load_is_gone(says_idle: bool) -> None:
    driven = Driven(2, says_idle)
    driven.run(busy, 10)
    assert set(driven.run(quiet, 2)[-100:]) == {2}


def test_load_that_comes_and_goes_is_followed_both_ways() -> None:
    driven = Driven(2)
    for _ in range(10):
        assert driven.run(busy, 1).count(1) > 20
        used = driven.run(quiet, 1)
        assert used.count(2) > 0.5 * len(used)


def test_threads_are_kept_where_fewer_would_be_slower() -> None:
    used = Driven(16).run(crowded, 20)
    assert used.count(16) > 0.8 * len(used)


def test_one_taken_core_of_many_costs_one_thread() -> None:
    def one_taken(threads: int) -> tuple[float, float]:
        return (2.0, 0.5) if threads == 16 else (16 / threads, 0.0)

    driven = Driven(16)
    driven.run(one_taken, 3)
    used = driven.run(one_taken, 10)
    assert sum(used) / len(used) > 12
    assert used.count(16) < 0.2 * len(used)


def test_a_new_number_of_threads_is_taken_at_once() -> None:
    driven = Driven(2)
    driven.run(busy, 5)
    driven.most = 4
    assert driven.pace.threads(4) == 4
    assert driven.pace.threads(1) == 1


def test_engines_in_several_threads_may_share_a_pace() -> None:
    pace = ThreadPace()
    pace.threads(2)
    with ThreadPoolExecutor(4) as pool:
        noted = [pool.submit(pace.note, StepTime(0.05, 0.01, 0.03)) for _ in range(4000)]
    for one in noted:
        one.result()
    assert pace.threads(2) in (1, 2)


def test_the_least_time_of_a_step_follows_texts_that_grow() -> None:
    times = StepTimes()
    assert times.least((1, 0, 9), 2.0) is None
    assert times.least((1, 0, 9), 1.0) == 1.0
    assert times.least((1, 0, 9), 5.0) == pytest.approx(1.002)
    assert times.least((2, 0, 9), 5.0) is None


# --- bits ---


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def answered(runner: NativeRunner) -> list[torch.Tensor]:
    """The logits of a prompt that is read in chunks and of a few steps behind it, some with several rows."""
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(40))
    found = []
    for step in range(12):
        tokens = (5 + step, 9, 11)[: 1 + step % 3]
        (rows,) = runner.score([Feed(0, tokens, (ROOT, 0, 0)[: len(tokens)])])
        found.append(collate(rows).clone())
        runner.keep(0, (0,), 1)
    runner.close(0)
    return found


@needs_kernel
def test_threads_that_come_and_go_in_an_answer_change_no_bit(
    two_threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_native(saved(tiny("llama"), tmp_path), context_length=128, tail=32)
    assert runner.compiled
    found = []
    for counts in ([2], [1], [1, 2, 2, 1, 4], [3, 1, 2]):
        used = cycle(counts)
        monkeypatch.setattr(PACE, "threads", lambda most, used=used: next(used))
        found.append(answered(runner))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_kernel
def test_threads_that_yield_at_every_meeting_change_no_bit(
    two_threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_native(saved(tiny("llama"), tmp_path), context_length=128, tail=32)
    assert runner._fused is not None
    patient = answered(runner)
    monkeypatch.setattr(waiting_text, "PATIENCE", 0)
    monkeypatch.setattr(waiting_text, "BARRIER_LOOKS", 1)
    shape = fused_step._shape(runner.decoder, runner.memory)
    impatient = row_kernels.load_row_kernels.__wrapped__(shape)
    runner._fused = fused_step.FusedStep(runner.decoder, impatient, runner.memory)
    monkeypatch.setattr(PACE, "threads", lambda most: 3)  # more than there may be cores
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(patient, answered(runner), strict=True))


def test_where_cores_lose_time_but_fewer_threads_do_not_help_trials_become_rare() -> None:
    """As on a virtual machine whose host is busy."""
    driven = Driven(2)
    driven.run(lambda threads: (2.4 / threads, 0.35 * threads), 20)
    used = driven.run(lambda threads: (2.4 / threads, 0.35 * threads), 60)
    assert used.count(1) < 0.01 * len(used)
    assert driven.run(busy, 1)[-1] == 1, "what is much worse is met at once"
