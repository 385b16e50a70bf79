"""Compilation of LLVM text to machine code in this process, and access to torch's threads to run it on.

Owns the use of llvmlite and of torch's OpenMP; knows nothing of what the code does. Invariant: compiled code runs on
torch's own threads, never on a second pool.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

Team = Callable[[int, Any, int, int], None]  # address of a function, its argument, threads, 0


class CannotCompile(Exception):
    """LLVM is missing, or too old for the text."""


def compile_text(text: str, optimise: bool, more: str = "") -> Any:
    """Compile LLVM text for this machine; returns the engine that owns the code.

    `more`: features that LLVM does not detect itself. Call it before weights are loaded: the compiler's memory is
    released at the end, and does not add to the peak.
    """
    try:
        engine = _compiled(text, optimise, more)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise CannotCompile(str(error)) from error
    _forget_pages("libllvmlite")
    return engine


def loaded(fields: Sequence[tuple[str, str]]) -> str:
    """Write the loads of a function's arguments, given by types and names; they lie behind the count of taken items."""
    return "\n".join(
        f"  %{name}.p = getelementptr i64, ptr %arguments, i64 {at}\n  %{name} = load {kind}, ptr %{name}.p, align 8"
        for at, (kind, name) in enumerate(fields, start=1)
    )


def host_features() -> dict[str, bool]:
    """Return the features of this processor, by LLVM's names."""
    try:
        import llvmlite.binding as llvm

        return dict(llvm.get_host_cpu_features())
    except (ImportError, OSError, RuntimeError) as error:
        raise CannotCompile(str(error)) from error


def processor_name() -> str:
    """Return the name of this processor from LLVM, else from Python."""
    try:
        import llvmlite.binding as llvm

        return str(llvm.get_host_cpu_name())
    except (ImportError, OSError, RuntimeError):
        return platform.processor() or platform.machine()


def _compiled(text: str, optimise: bool, more: str) -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = ",".join(filter(None, (llvm.get_host_cpu_features().flatten(), more)))
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3 if optimise else 2
    )
    module = llvm.parse_assembly(text)
    if optimise:
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = True
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def torch_team() -> Team | None:
    """Find the entry point of the OpenMP that torch itself uses.

    A second pool would compete with torch's for the cores, as both spin while they wait. A lookup from torch's library
    finds torch's own OpenMP even if several are installed; libgomp, libomp and libiomp5 all have this symbol.
    """
    found = _torch_symbol("GOMP_parallel")
    if found is None:
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    team: Team = found
    return team


def team_size_address() -> int:
    """Return the address of the function that returns the number of threads of a team; 0 if there is none."""
    function = _torch_symbol("omp_get_num_threads")
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def _torch_symbol(symbol: str) -> Any:
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            return getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)), symbol)
        except (OSError, AttributeError):
            continue
    return None


def _forget_pages(library: str) -> None:
    """Release the resident pages of a library that is no longer needed; an access loads them from its file again."""
    if not hasattr(mmap, "MADV_DONTNEED") or not Path("/proc/self/smaps").exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, stop in _clean_mappings(Path("/proc/self/smaps").read_text(), library):
        madvise(start, stop - start, mmap.MADV_DONTNEED)


def _clean_mappings(smaps: str, library: str) -> Iterator[tuple[int, int]]:
    """Yield read-only mappings of the library without private pages, which can be released without loss."""
    span: tuple[int, int] | None = None
    for line in smaps.splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(part, 16) for part in words[0].split("-"))
            span = (low, high) if words[1] in ("r-xp", "r--p") and library in words[-1] else None
        elif span and words[0] == "Anonymous:" and words[1] == "0":
            yield span
