"""Safe files of training: durable writes, and tensors read back.

Owns the error sentences of both. Invariant: whenever the process is killed, the old file or the new one is there, never
a part of it.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from specbranch.files import replacing, spoken

RESUME = "Make room or name another folder with --out; --resume goes on from the last checkpoint."


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a file atomically; if the disk refuses it, the error says what to do."""
    with spoken(path, RESUME), replacing(path, durable=True) as part:
        part.write_bytes(data)


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file of this format; returns its tensors and metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != kind:
            raise ValueError(f"its format is {metadata.get('format')!r}, expected {kind!r}")
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
