"""Kernels of a warm-up are compiled in threads before they are captured; a step that only compiles launches nothing."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbranch.models.gpu.compiling import Compilation, begin_compilation, load_triton_early, mark_of, ready_kernels
from specbranch.models.gpu.layout import SMALLEST_BUCKET
from specbranch.models.gpu.step import WARM_UPS, GpuStep, Graphs, Ran, StepKind
from specbranch.models.loading import load_native
from tiny_models import saved, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

ACTIVE: ContextVar[Any] = ContextVar("active", default=None)


class Awaited:
    """A kernel that is being compiled, as Triton has it."""

    def __init__(self, future: Future[Any], finish: Callable[[Any], None]) -> None:
        self.future, self.finish, self.kernel = future, finish, None

    def result(self) -> Any:
        if self.kernel is None and self.future.exception() is None:
            self.kernel = self.future.result()
            self.finish(self.kernel)
        return self.kernel


class Mode:
    """Compiles in threads, as Triton's mode does."""

    def __init__(self, executor: Executor, *, ignore_errors: bool) -> None:
        assert ignore_errors
        self.executor, self.awaited = executor, dict[str, Awaited]()

    def submit(self, key: str, compile_: Callable[[], Any], finish: Callable[[Any], None]) -> Awaited:
        if key not in self.awaited:
            self.awaited[key] = Awaited(self.executor.submit(compile_), finish)
        return self.awaited[key]

    def __exit__(self, *error: object) -> None:
        for awaited in self.awaited.values():
            awaited.result()


class Made:
    """A compiled kernel."""

    src, metadata = SimpleNamespace(signature="same"), SimpleNamespace()


class Jit:
    """A Triton function: `launched` has its launches, `compiled` its compilations with their threads."""

    def __init__(self, broken: bool = False) -> None:
        self.fn, self.broken = self, broken
        self.cache: dict[str, Any] = {}
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[str, str]] = []
        self.calls = 0

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.calls += 1
        key = str([arg.dtype if isinstance(arg, torch.Tensor) else arg > 1 for arg in args]) + str(kwargs)
        kernel = self.cache.get(key)
        if kernel is None:
            mode = ACTIVE.get()
            made = lambda: self._made(key)  # noqa: E731
            if mode is not None:
                return mode.submit(key, made, lambda kernel: self.cache.__setitem__(key, kernel))
            kernel = self.cache[key] = made()
        if not warmup:
            self.launched.append(args)
        return kernel

    def _made(self, key: str) -> Any:
        if self.broken:
            raise RuntimeError("it does not compile")
        self.compiled.append((key, threading.current_thread().name))
        return Made()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, grid=(1,), warmup=False, **kwargs)


def started(launchers: list[Any] | None = None) -> Compilation:
    kept = [] if launchers is None else launchers
    return Compilation(Jit, Mode, ACTIVE, lambda src, metadata: kept.append(src))


def test_a_collected_step_compiles_in_threads_and_launches_nothing() -> None:
    launchers: list[Any] = []
    compilation, kernel, x = started(launchers), Jit(), torch.zeros(4)
    with compilation.collecting() as found:
        kernel(x, 4, WIDE=True)
        kernel(x, 1, WIDE=True)
        kernel(torch.ones(4), 4, WIDE=True)
    compilation.finish()
    assert kernel.launched == [] and len(kernel.compiled) == 2
    assert all(name.startswith("compile") for _, name in kernel.compiled)
    assert len(launchers) == 1  # both kernels share the code that launches them
    kernels = ready_kernels(found)
    assert kernels is not None and kernels == set(kernel.cache.values()) and len(kernels) == 2
    kernel(x, 4, WIDE=True)
    assert len(kernel.launched) == 1 and len(kernel.compiled) == 2


def test_launches_that_differ_in_their_addresses_only_ask_triton_once() -> None:
    compilation, kernel = started(), Jit()
    with compilation.collecting() as found:
        for _ in range(30):
            kernel(torch.zeros(4), 4, torch.zeros(8))
    compilation.finish()
    assert (kernel.calls, len(found)) == (1, 30)


def test_other_threads_launch_as_ever() -> None:
    compilation, kernel = started(), Jit()
    with compilation.collecting() as found:
        other = threading.Thread(target=kernel, args=(torch.zeros(4), 4))
        other.start()
        other.join()
    compilation.finish()
    assert len(kernel.launched) == 1 and found == []


def test_after_an_error_kernels_are_launched_again() -> None:
    compilation, kernel, run = started(), Jit(), Jit.run
    with pytest.raises(KeyboardInterrupt), compilation.collecting():
        raise KeyboardInterrupt
    compilation.cancel()
    assert Jit.run is run and ACTIVE.get() is None
    kernel(torch.zeros(4), 4)
    assert len(kernel.launched) == 1


def test_a_kernel_that_does_not_compile_raises_when_it_is_launched() -> None:
    compilation, kernel = started(), Jit(broken=True)
    with compilation.collecting() as found:
        kernel(torch.zeros(4), 4)
    compilation.finish()
    assert ready_kernels(found) is None
    with pytest.raises(RuntimeError, match="does not compile"):
        kernel(torch.zeros(4), 4)


def test_marks_tell_apart_what_triton_tells_apart() -> None:
    x = torch.zeros(64)
    assert mark_of(x) == mark_of(torch.ones(3)) != mark_of(x[1:])
    assert mark_of(x) != mark_of(x.half())
    assert mark_of(True) != mark_of(1) != mark_of(16)
    assert mark_of(object()) is None


def test_without_triton_kernels_are_compiled_as_they_are_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.DEBUG, logger="specbranch"):
        assert begin_compilation() is None
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "one by one" in caplog.text


def test_without_triton_there_is_nothing_to_load_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    thread = load_triton_early()
    thread.join()
    assert thread.daemon  # a process that ends early does not wait for it


@pytest.fixture
def graphs(tmp_path: Path) -> Graphs:
    runner = load_native(saved(tiny("llama"), tmp_path), context_length=64)
    return Graphs(GpuStep(runner.decoder, runner.memory), 1)


def test_a_step_runs_before_its_capture_only_if_a_kernel_is_new(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, first, second, failed = Ran(torch.zeros(1), None, None), object(), object(), Awaited(Future(), lambda _: None)
    kinds: list[StepKind] = [(SMALLEST_BUCKET._replace(rows=rows), 0, 1, False) for rows in (1, 4, 16, 32, 64)]
    needs: list[list[Any]] = [[first], [first, second], [second, first], [first, failed]]
    graphs._collected.update({kind: (ran, kernels) for kind, kernels in zip(kinds, needs, strict=False)})
    runs: list[tuple[int, int]] = []

    def run(kind: StepKind, times: int) -> Ran:
        runs.append((kind[0].rows, times))
        return Ran(torch.ones(1), None, None)

    monkeypatch.setattr(graphs, "_run_directly", run)
    assert [graphs._warmed_up(kind) is ran for kind in kinds] == [True, True, True, False, False]
    assert runs == [(1, 1), (4, 1), (32, WARM_UPS), (64, WARM_UPS)]


def test_a_step_in_torch_is_not_run_without_its_launches(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin() -> None:
        raise AssertionError("it computes with what kernels would have written")

    monkeypatch.setattr("specbranch.models.gpu.step.begin_compilation", begin)
    monkeypatch.setattr(graphs, "captures", True)
    graphs.compile([(SMALLEST_BUCKET, 0, 1, False)])


def test_if_steps_cannot_be_collected_captures_compile(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = []
    monkeypatch.setattr(graphs, "captures", True)
    monkeypatch.setattr(graphs._step, "only_kernels", True)
    monkeypatch.setattr(
        "specbranch.models.gpu.step.begin_compilation", lambda: SimpleNamespace(cancel=lambda: ended.append(1))
    )

    def collect(*given: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(graphs, "_collect", collect)
    with caplog.at_level(logging.DEBUG, logger="specbranch"):
        graphs.compile([(SMALLEST_BUCKET, 0, 1, False)])
    assert ended == [1] and graphs._compilation is None and not graphs._collected
    assert "no memory is left" in caplog.text
