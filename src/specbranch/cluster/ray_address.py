"""The address of a Ray cluster that runs: is anybody there?

Owns that one look. Ray itself would try for a quarter of an hour before it says that nobody is.
"""

from __future__ import annotations

import os
import socket

from specbranch.errors import BadParameter

LOOK_FOR_RAY_SECONDS = 5.0
FEWER_TRIES = "RAY_NUM_REDIS_GET_RETRIES", "2"  # by default 20, of 40 seconds each


def check_reachable(address: str) -> None:
    """Raise unless somebody listens at HOST:PORT; other addresses, such as auto, are found or refused by Ray at once.

    Called before Ray is imported: it reads then how often it tries.
    """
    os.environ.setdefault(*FEWER_TRIES)
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), LOOK_FOR_RAY_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        said = getattr(error, "strerror", None) or error
        raise BadParameter(
            f"No Ray cluster answers at {address!r} ({said}). Give HOST:PORT of its head, as `ray start --head` prints "
            "it, or auto for the one of this machine."
        ) from None
