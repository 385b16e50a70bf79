"""Checks of this installation, independent of the pair: versions, processor, devices, memory, the cache folder.

Owns these checks and their wording. Invariant: a check reports what it finds and never raises.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from specbranch.extras import EXTRAS, Extra
from specbranch.lab.doctor.finding import Finding, note, problem, well
from specbranch.machine_load import LoadMeter, is_busy, usable_cores

LEAST_PYTHON, LEAST_TORCH, LEAST_TRANSFORMERS = (3, 11), (2, 11), (5, 17)
GIB = 2**30
WATCHED_SECONDS = 0.3  # seconds that other programs are watched for
LEAST_DISK = 0.5 * GIB  # that a cache folder should have
CPU_FEATURES = {  # what the kernels and BLAS make use of, by LLVM's names
    "x86_64": ("avx2", "fma", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "amx-bf16"),
    "aarch64": ("neon", "dotprod", "fullfp16", "bf16", "i8mm", "sve"),
}


def installation() -> Iterator[Finding]:
    """Run the checks that do not depend on a pair."""
    yield _at_least("Python", platform.python_version(), LEAST_PYTHON)
    yield from libraries()
    yield processor()
    yield graphics()
    yield memory()
    yield cache()


def libraries() -> Iterator[Finding]:
    """Check torch, transformers and the compiler of the CPU kernels; list optional packages."""
    yield _at_least("torch", _version("torch"), LEAST_TORCH)
    yield _at_least("transformers", _version("transformers"), LEAST_TRANSFORMERS)
    if _version("llvmlite") is None:
        said = "is not installed, so that the CPU kernels are not compiled."
        yield note("llvmlite", said, "pip install llvmlite")
    for extra in EXTRAS:
        yield _optional(extra)


def processor() -> Finding:
    """Report the CPU and how much of it is used."""
    import torch

    usable, other = usable_cores(), _other_cores()
    threads = torch.get_num_threads()
    said = f"{platform.machine()}, {usable} usable cores, {threads} threads{_features()}"
    if threads < usable:
        advice = f"torch uses {threads} of {usable} cores: unset OMP_NUM_THREADS to use them all."
        return note("CPU", f"{said}.", advice)
    if threads > usable:
        return note("CPU", f"{said}.", f"More threads than cores hinder one another: set OMP_NUM_THREADS={usable}.")
    if is_busy(other):
        advice = "What is timed below will be too slow; look again when they rest."
        return note("CPU", f"{said}; other programs use {other:.1f} of them.", advice)
    return well("CPU", f"{said}.")


def graphics() -> Finding:
    """Report the GPU."""
    import torch

    if not torch.cuda.is_available():
        return well("GPU", "none that torch can use; everything runs on the CPU.")
    free, total = torch.cuda.mem_get_info()
    return well("GPU", f"{torch.cuda.get_device_name()}, {free / GIB:.1f} of {total / GIB:.1f} GiB free.")


def memory() -> Finding:
    """Check the free memory."""
    free = _free_memory()
    if free is None:
        return note("Memory", "how much is free cannot be found out on this system.")
    if free >= 1 * GIB:
        return well("Memory", f"{free / GIB:.1f} GiB are free.")
    said = f"only {free / GIB:.1f} GiB are free."
    advice = "Close other programs: the default pair needs about 0.8 GiB, larger models more."
    return (problem if free < 0.4 * GIB else note)("Memory", said, advice)


def cache() -> Finding:
    """Check that the cache folder is writable and has space."""
    from specbranch.models.files.store import CACHE_VARIABLE, cache_folder

    folder = cache_folder()
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    advice = f"Set {CACHE_VARIABLE} to a folder with room that you may write to."
    if not os.access(there, os.W_OK):
        return problem("Cache folder", f"{folder} cannot be written.", advice)
    free = shutil.disk_usage(there).free
    if free < LEAST_DISK:
        return problem("Cache folder", f"{folder} has {free / GIB:.1f} GiB of room left.", advice)
    return well("Cache folder", f"{folder}, {free / GIB:.1f} GiB of room.")


def _other_cores() -> float:
    meter = LoadMeter()
    time.sleep(WATCHED_SECONDS)
    return meter.other_cores()


def _at_least(name: str, version: str | None, least: tuple[int, int]) -> Finding:
    wanted = f"{name} {least[0]}.{least[1]} or newer is needed."
    if version is None:
        return problem(name, "is not installed.", wanted)
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return well(name, f"{version}.") if parts >= least else problem(name, f"{version} is too old.", wanted)


def _optional(extra: Extra) -> Finding:
    """Report an optional package; a missing one is no problem."""
    version = _version(extra.package)
    if version is not None:
        return well(extra.package, f"{version}.")
    use = f"{extra.purpose[0].lower()}{extra.purpose[1:]}"
    return well(extra.package, f"is not installed; only {use} needs it.", f"To have it: {extra.command}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _features() -> str:
    from specbranch.models.cpu.machine_code import CannotCompile, host_features

    try:
        found = host_features()
    except CannotCompile:
        return ""
    there = [name for name in CPU_FEATURES.get(platform.machine(), ()) if found.get(name)]
    return f", {' '.join(there)}" if there else ""


def _free_memory() -> float | None:
    """Return the bytes available to a new program, as Linux estimates them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
