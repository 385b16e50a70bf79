"""How what was trained goes to the disk: killed at any moment, the old file or the new one is there, never a half."""

from __future__ import annotations

from pathlib import Path

from specbranch.files import replacing, spoken

RESUME = "Make room or name another folder with --out; --resume goes on from the last checkpoint."


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a file, or say what to do where the disk refuses it."""
    with spoken(path, RESUME), replacing(path, durable=True) as part:
        part.write_bytes(data)
