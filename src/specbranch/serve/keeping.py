"""Keeping what was served, for the training of a draft (`serve --keep-text DIR`); off unless asked for.

Owns the folder, its limits and the thread that writes. The format is that of `kept_text.py`. Invariants: an answer
never waits for the disk: what a full queue cannot take is dropped and counted. Token ids are all that is written, no
key, no header, no name. Only the server's own user can read the files. The folder never exceeds its limit by more than
one text.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from specbranch.errors import BadParameter
from specbranch.kept_text import KeptHead, KeptText, fitted, kept_files, kept_name, kept_number

log = logging.getLogger("specbranch.serve")
DropReason = Literal["queue", "disk"]
DROP_REASONS: tuple[DropReason, ...] = ("queue", "disk")
MOST_QUEUED = 256  # texts that wait for the disk
KEPT_PARTS = 8  # files that the limit is split into: rotation drops an eighth at a time
SYNC_SECONDS = 1.0  # seconds between two flushes to the disk
RETRY_SECONDS = 10.0  # seconds without a try after the disk has refused a text
KEEPER_CLOSE = 5.0  # seconds that closing waits for the last texts
WARNING = (
    "--keep-text: prompts and answers of all clients are written to %s, as token ids that anybody with the model can "
    'turn back into text. Tell your users. A request with "store": false is not kept.'
)


@dataclass(frozen=True, slots=True)
class Kept:
    """What was kept so far."""

    texts: int
    bytes: int  # of all files now
    dropped: dict[DropReason, int]


class KeptFolder:
    """The files, written by one thread of one process."""

    def __init__(self, path: Path, limit: int, head: KeptHead) -> None:
        self._path, self._limit, self._head = path, limit, head
        self._lock = claimed(path)
        files = kept_files(path)
        self._sizes = {file: file.stat().st_size for file in files}
        self._number = max(map(kept_number, files), default=0)
        self._file: int | None = None  # open for writing; never one that an earlier server has left

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(self._sizes.values())

    def append(self, text: KeptText) -> None:
        """Write a text with one call, behind which a kill of the process loses nothing; rotate first if it is time."""
        line = text.line()
        if self._file is not None and (self._is_deleted() or self._is_full(len(line))):
            self.close_file()
        if self._file is None:
            self._open_file()
        self._make_room(len(line))
        self._write(line)

    def sync(self) -> None:
        """Have what was written survive a crash of the machine."""
        if self._file is not None:
            os.fsync(self._file)

    def close_file(self) -> None:
        """End the current file; the next text starts another one."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def close(self) -> None:
        """End the current file, and let another server use the folder."""
        try:
            self.close_file()
        finally:
            self._lock.release()

    @property
    def _current(self) -> Path:
        return self._path / kept_name(self._number)

    def _is_deleted(self) -> bool:
        """True if somebody has deleted the current file; what is written there would be lost."""
        return self._file is not None and not os.fstat(self._file).st_nlink

    def _is_full(self, count: int) -> bool:
        return self._sizes[self._current] + count > self._limit // KEPT_PARTS

    def _open_file(self) -> None:
        self._sizes = {file: file.stat().st_size for file in kept_files(self._path)}
        self._number += 1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = os.open(self._current, flags, 0o600)
        self._sizes[self._current] = 0
        try:
            self._write(self._head.line())
        except OSError:  # texts behind no head could not be read
            with suppress(OSError):
                self.close_file()
            self._current.unlink(missing_ok=True)
            raise

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        written = os.write(self._file, line)
        self._sizes[self._current] += written
        if written < len(line):  # the disk is full: what follows the half line goes into another file
            self.close_file()
            raise OSError(28, "the disk took half a line")

    def _make_room(self, count: int) -> None:
        """Delete the oldest files until `count` more bytes keep to the limit."""
        while self.size + count > self._limit and (old := [one for one in self._sizes if one != self._current]):
            oldest = min(old, key=kept_number)
            with suppress(FileNotFoundError):
                oldest.unlink()
            del self._sizes[oldest]


class Keeper:
    """Takes answers that are finished, and has a thread of its own write them."""

    def __init__(self, path: Path, limit: int, head: KeptHead, most_queued: int = MOST_QUEUED) -> None:
        self._folder = KeptFolder(path, limit, head)
        self._queue: queue.Queue[KeptText | None] = queue.Queue(most_queued)
        self._counting = threading.Lock()
        self._texts, self._bytes, self._dropped = 0, self._folder.size, Counter[DropReason]()
        self._refused_until = 0.0  # the disk refused a text; no new try before
        log.warning(WARNING, path)
        self._thread = threading.Thread(target=self._work, name="specbranch-keep-text", daemon=True)
        self._thread.start()

    def keep(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Hand over a finished answer, without waiting; one without tokens is nothing to learn from."""
        if not prompt or not answer:
            return
        try:
            self._queue.put_nowait(fitted(prompt, answer))
        except queue.Full:
            self._drop("queue")

    def kept(self) -> Kept:
        """Return the counts, for metrics."""
        with self._counting:
            return Kept(self._texts, self._bytes, {reason: self._dropped[reason] for reason in DROP_REASONS})

    def close(self) -> None:
        """Write what waits, for some seconds at most, and end."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=KEEPER_CLOSE)
        self._thread.join(KEEPER_CLOSE)

    def _work(self) -> None:
        synced = time.monotonic()
        try:
            while (text := self._next()) is not None:
                if text is not _NOTHING:
                    self._append(text)
                if time.monotonic() > synced + SYNC_SECONDS:
                    with suppress(OSError):
                        self._folder.sync()
                    synced = time.monotonic()
        finally:
            with suppress(OSError):
                self._folder.close()

    def _next(self) -> KeptText | None:
        try:
            return self._queue.get(timeout=SYNC_SECONDS)
        except queue.Empty:
            return _NOTHING

    def _append(self, text: KeptText) -> None:
        if time.monotonic() < self._refused_until:
            self._drop("disk")
            return
        try:
            self._folder.append(text)
            with self._counting:  # not while the disk works: `keep` must not wait for it
                self._texts, self._bytes = self._texts + 1, self._folder.size
        except OSError as error:
            self._refused_until = time.monotonic() + RETRY_SECONDS
            self._drop("disk")
            log.warning("Served text is not kept for %.0f s: %s.", RETRY_SECONDS, error.strerror or error)

    def _drop(self, reason: DropReason) -> None:
        with self._counting:
            self._dropped[reason] += 1


_NOTHING = KeptText((), ())


def claimed(path: Path) -> FileLock:
    """Make the folder if it is missing, and lock it; refuse one that others can read, or that a server uses."""
    check_private(path)
    lock = FileLock(path / "lock", timeout=0, mode=0o600, thread_local=False)  # the writing thread releases it
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise BadParameter(f"Another server keeps its texts in {path}. Name another folder with --keep-text.") from None
    except OSError as error:
        raise BadParameter(f"{path} cannot be written ({error.strerror}). Name another folder, --keep-text.") from None
    return lock


def check_private(path: Path) -> None:
    """Refuse a folder that other users of the machine can open."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadParameter(f"{path} cannot be used ({error.strerror}). Name another folder with --keep-text.") from None
    if not stat.S_ISDIR(mode):
        raise BadParameter(f"{path} is no folder. Name a folder with --keep-text.")
    if mode & 0o077:
        said = f"Others on this machine can open {path} (mode {stat.S_IMODE(mode):03o}), and texts of clients go there."
        raise BadParameter(f"{said} Take that away with chmod 700, or name a folder that does not exist yet.")
