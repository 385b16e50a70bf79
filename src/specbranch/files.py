"""Writing a file whole: whoever reads it sees the old one or the new one, never half of it.

Owns the way there, beside the file and then into its place, and the sentence for what a disk refuses.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specbranch.errors import BadParameter


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield where to write; what lies there takes the file's place at the end, unless something was raised.

    `durable`: it is on the disk by then, so that not even a crash of the machine leaves half of it.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        if durable:
            with part.open("r+b") as file:
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a text, or say why that cannot be."""
    try:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadParameter(f"{path} cannot be written ({error}). Name another folder, or make room.") from error


@contextmanager
def spoken(path: Path, advice: str) -> Iterator[None]:
    """Turn what the disk refuses into a sentence that ends with advice."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "The disk is full" if full else f"Cannot write ({error.strerror or error})"
        raise BadParameter(f"{what}: {path}. {advice}") from None
