"""Atomic writes: a reader sees the old file or the new one, never half of it.

Owns the temporary file beside the final one, and the sentences for errors of the disk. Invariant: the final file is
replaced by one rename, or stays as it was.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specbranch.errors import BadParameter


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file; at the end it replaces `path`, unless something was raised.

    `durable`: flush it to the disk first, so that not even a crash of the machine leaves half of it.
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
    """Write a text atomically; an error of the disk becomes a BadParameter."""
    try:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadParameter(f"{path} cannot be written ({error}). Name another folder, or make room.") from error


@contextmanager
def spoken(path: Path, advice: str) -> Iterator[None]:
    """Turn errors of the disk into a sentence that ends with advice."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "The disk is full" if full else f"Cannot write ({error.strerror or error})"
        raise BadParameter(f"{what}: {path}. {advice}") from None


@contextmanager
def making_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; at the end it becomes `path`, which must not exist, unless something was raised."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        yield part
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
