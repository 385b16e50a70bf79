"""Compiles the Triton kernels of many steps at once, in threads, before the steps are captured.

Owns the threads, and how a step is run without its launches. Does not own which steps these are (`warm_up.py`), or
captures (`step.py`). Invariants: within `Compilation.collecting` the calling thread launches no Triton kernel; other
threads launch as ever. A failed compilation is not reported here: the first launch compiles the kernel again, and
raises.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("specbranch")

MOST_THREADS = 16
POINTER_ALIGNMENT = 16  # a kernel is compiled anew if a pointer is not aligned so
PLAIN_TYPES = (bool, int, float, str, type(None))

Kernel = Any  # Triton's `CompiledKernel`, or its `FutureKernel` while it is being compiled
_one_at_a_time = threading.Lock()  # `JITFunction.run` is replaced while steps are collected


class Compilation:
    """Kernels of some steps, which threads compile while the caller goes on."""

    def __init__(self, jit: Any, mode: Any, active: Any, launcher: Callable[[Any, Any], Any]) -> None:
        """Take parts of Triton: `JITFunction`, `AsyncCompileMode`, the variable with the active one, and the class that
        launches a compiled kernel."""
        self._jit, self._active, self._launcher = jit, active, launcher
        self._threads = ThreadPoolExecutor(compiler_threads(), thread_name_prefix="compile")
        self._mode = mode(self._threads, ignore_errors=True)
        submit = self._mode.submit
        self._mode.submit = lambda key, compile_, finish: submit(key, partial(self._compiled, compile_), finish)
        self._known: dict[tuple[Any, ...], Kernel] = {}  # by a launch's arguments, as far as they decide the kernel
        self._launchers: dict[str, threading.Lock] = {}
        self._built: set[str] = set()

    @contextmanager
    def collecting(self) -> Iterator[list[Kernel]]:
        """Within this context each launch of this thread only compiles; gives the list that takes the kernels."""
        thread, found = threading.get_ident(), list[Kernel]()
        with _one_at_a_time:
            run, before = self._jit.run, self._active.get()

            def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
                if threading.get_ident() != thread:
                    return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
                found.append(self._kernel(run, kernel, args, grid, kwargs))
                return found[-1]

            self._jit.run = compiled
            self._active.set(self._mode)
            try:
                yield found
            finally:
                self._active.set(before)
                self._jit.run = run

    def finish(self) -> None:
        """Wait for all kernels; those that were compiled are ready to be launched."""
        try:
            self._mode.__exit__(None, None, None)  # it calls Triton's hooks in this thread
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def cancel(self) -> None:
        """Compile no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _kernel(self, run: Any, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Kernel:
        """Return the kernel of a launch; most launches differ from an earlier one in their addresses only."""
        marks = tuple([mark_of(value) for value in (*args, *kwargs.values())])
        known = None if None in marks else (kernel.fn, tuple(kwargs), marks)
        if known is None or known not in self._known:
            made = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            if known is None:
                return made
            self._known[known] = made
        return self._known[known]

    def _compiled(self, compile_: Callable[[], Kernel]) -> Kernel:
        """Compile a kernel, and the C code that launches it: many kernels share that, and the disk caches it."""
        kernel = compile_()
        with suppress(Exception):  # the first launch reports it
            about = f"{kernel.src.signature}{getattr(kernel.metadata, 'tensordesc_meta', None)}"
            with self._launchers.setdefault(about, threading.Lock()):
                if about not in self._built:
                    self._launcher(kernel.src, kernel.metadata)
                    self._built.add(about)
        return kernel


def begin_compilation() -> Compilation | None:
    """Return a `Compilation`; None if this Triton cannot compile without launching, so that launches compile."""
    try:
        from triton import knobs
        from triton.runtime import driver
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction

        wanted, given = {"grid", "warmup"}, set(inspect.signature(JITFunction.run).parameters)
        if knobs.runtime.interpret or not wanted <= given or torch.version.hip is not None:
            raise NotImplementedError("an interpreter, or another interface")
        return Compilation(JITFunction, AsyncCompileMode, active_mode, driver.active.launcher_cls)
    except Exception as reason:  # of all kinds: none of this is Triton's documented interface
        log.debug("Kernels are compiled one by one, as they are launched (%s: %s).", type(reason).__name__, reason)
        return None


def load_triton_early() -> threading.Thread:
    """Import Triton and our kernels, and hash Triton's own files, in a thread, while weights are read.

    Triton hashes them before it looks up the first cached kernel; its library alone has 0.4 GB.
    """

    def load() -> None:
        with suppress(Exception):  # without Triton, or with another one, there is nothing to do early
            from triton.runtime.cache import triton_key

            from specbranch.models.gpu import (  # noqa: F401 (parses the kernels' sources)
                attention_kernels,
                choice_kernels,
                product_kernels,
                send_kernels,
            )

            triton_key()

    thread = threading.Thread(target=load, daemon=True, name="load triton")
    thread.start()
    return thread


def ready_kernels(collected: Iterable[Kernel]) -> set[Kernel] | None:
    """Return the compiled kernels after `Compilation.finish`; None if one of them could not be compiled."""
    kernels = {kernel.kernel if hasattr(kernel, "result") else kernel for kernel in collected}
    return None if None in kernels else kernels


def compiler_threads() -> int:
    """Return how many kernels are compiled at once: as many as this process has cores, up to a limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def mark_of(value: Any) -> tuple[Any, ...] | None:
    """Return what of an argument may decide which kernel is compiled; None: nobody knows.

    Triton tells fewer numbers apart than this does.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % POINTER_ALIGNMENT
    if isinstance(value, PLAIN_TYPES):
        return type(value), value  # True equals 1, but makes another kernel
    if type(value).__name__ == "TensorDescriptor":
        base = mark_of(value.base)
        return "descriptor", base, tuple(value.shape), tuple(value.strides), tuple(value.block_shape), value.padding
    return None
