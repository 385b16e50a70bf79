"""Provenance of results: versions, hardware, models, commit, and the request.

Owns how these are found out, once, at the start of a run. Invariant: nothing is guessed; what cannot be found out is
left out.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from specbranch import __version__
from specbranch.errors import BadParameter, unknown

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "llvmlite")
_SOURCE = Path(__file__).parents[2]  # of a checkout: where .git lies


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a reader needs to repeat a run, or to doubt it."""

    made: str = ""  # ISO 8601, UTC
    commit: str | None = None
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    # the identity of a pair's models: names, fingerprints
    pairs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # what decides the text: max_tokens, seed, chat template or not …
    workload: Mapping[str, Any] = field(default_factory=dict)
    # what does not: repeats, warm-up, threads …
    settings: Mapping[str, Any] = field(default_factory=dict)
    suites: Mapping[str, str] = field(default_factory=dict)  # name to source
    command: str | None = None

    @classmethod
    def here(
        cls,
        *,
        pairs: Mapping[str, Mapping[str, Any]],
        workload: Mapping[str, Any],
        settings: Mapping[str, Any],
        suites: Mapping[str, str],
        command: str | None = None,
    ) -> Self:
        """Describe this machine and this moment, and what the caller says of the run."""
        return cls(
            made=datetime.now(UTC).replace(microsecond=0).isoformat(),
            commit=source_commit(),
            python=platform.python_version(),
            versions=_versions(),
            hardware=_hardware(),
            pairs=pairs,
            workload=workload,
            settings=settings,
            suites=suites,
            command=command,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values, refusing keys that do not exist."""
        names = [f.name for f in fields(cls)]
        if not isinstance(values, Mapping):
            raise BadParameter(f"The provenance is {values!r}; expected an object.")
        for key in values:
            if key not in names:
                raise unknown("key of the provenance", key, names)
        return cls(**values)


def _versions() -> dict[str, str]:
    found = {"specbranch": __version__}  # a tree that was not installed has no metadata
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def source_commit() -> str | None:
    """Return the commit of the checkout this code runs from, with a plus if files differ from it; None outside of
    one."""
    if not (_SOURCE / ".git").exists():
        return None
    commit, changed = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit or None


def trained_with(device: str) -> dict[str, Any]:
    """Describe what something was trained with, and when, for the card that travels with it."""
    return {**build(), "hardware": hardware(device), "date": datetime.now(UTC).date().isoformat()}


def build() -> dict[str, str]:
    """Describe the code that runs here."""
    import torch

    commit = source_commit() or os.environ.get("SPECBRANCH_COMMIT", "unknown")
    return {"specbranch": __version__, "commit": commit, "torch": torch.__version__}


def hardware(device: str) -> str:
    """Name what a torch device stands for."""
    import torch

    gpu = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(device) if gpu else f"CPU ({platform.machine()})"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_SOURCE), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _hardware() -> dict[str, Any]:
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }
    found["memory_gib"] = _memory()
    if gpus := _gpus():
        found["gpus"] = gpus
    return {name: value for name, value in found.items() if value}


def _processor() -> str:
    """Return the processor's name as Linux knows it, else what Python does; ARM machines often tell none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "cpu model"))]
    return named[0] if named else platform.processor()


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _gpus() -> list[str]:
    """Name the GPUs if torch is in use already: it is not loaded for this."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
