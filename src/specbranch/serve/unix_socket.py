"""A unix socket: the file at which a server listens instead of at a port.

Owns that file: who may open it, and when it is removed. Invariant: only two files are removed: a socket at which
nobody listens, before a new one is made, and the server's own, at its end.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from specbranch.errors import BadParameter
from specbranch.serve.settings import ServerSettings

OWNER_ONLY = 0o177  # the umask while the file is made; its own mode is set at once
LONGEST_PATH = 103  # bytes that every system takes: Linux 107, others 103
LOOK_SECONDS = 1.0  # for another server to take a connection
WAITING = 128  # connections that the system holds until the server takes them


@dataclass(slots=True)
class UnixSocket:
    """The socket at a path."""

    path: Path
    mode: int
    _made: tuple[int, int, int] | None = None  # device, inode and time of our file; an inode may be used again

    @classmethod
    def of(cls, settings: ServerSettings) -> UnixSocket | None:
        """Return the socket of the settings, if they name one."""
        return None if settings.uds is None else cls(settings.uds, int(settings.uds_mode, 8))

    def check(self) -> bool:
        """Refuse a path at which no socket can be made. Return True if there is one at which nobody listens."""
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            raise BadParameter(f"uds is {self.path}, which is longer than {LONGEST_PATH} bytes. Choose a shorter path.")
        folder = self.path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise BadParameter(f"uds is {self.path}, but {folder} is no folder that this user can write to.")
        return self._is_stale()

    def bind(self) -> socket.socket:
        """Make the socket, and listen. A socket at which nobody listens is replaced."""
        if self.check():
            self.path.unlink(missing_ok=True)
        one, before = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), os.umask(OWNER_ONLY)
        try:
            one.bind(str(self.path))
            self.path.chmod(self.mode)
            one.listen(WAITING)
        except OSError as error:
            one.close()
            if error.errno == errno.EADDRINUSE:  # another server was quicker
                raise self._taken() from None
            raise BadParameter(f"uds is {self.path}, where no socket can be made ({error.strerror}).") from None
        finally:
            os.umask(before)
        self._made = self._identity()
        return one

    def remove(self) -> None:
        """Remove the file, unless it is another server's by now."""
        if self._made is not None and self._identity() == self._made:
            self.path.unlink(missing_ok=True)

    def _is_stale(self) -> bool:
        """Return True if there is a socket at which nobody listens; refuse any other file."""
        try:
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise BadParameter(f"uds is {self.path}, which is a file and no socket. Choose another path.")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                other.settimeout(LOOK_SECONDS)
                other.connect(str(self.path))
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:
            return True
        except OSError:  # it may not be opened, or its queue is full
            pass
        raise self._taken()

    def _taken(self) -> BadParameter:
        return BadParameter(f"uds is {self.path}, where another server listens. End that one, or choose another path.")

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.lstat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns
