"""Writing a file whole: whoever reads it sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from specbranch.errors import BadParameter


def write_whole(path: Path, text: str) -> None:
    """Write beside the file, then put the new one in its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise BadParameter(f"{path} cannot be written ({error}). Name another folder, or make room.") from error
    finally:
        with suppress(OSError):
            beside.unlink()
