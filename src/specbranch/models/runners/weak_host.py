"""How the parts of a runner refer back to it.

Owns that reference. Invariant: no part keeps its runner alive. A model that is dropped is gone at once, without the
garbage collector: it is large, and another one may be about to be loaded.
"""

from __future__ import annotations

import weakref
from typing import TypeVar

Host = TypeVar("Host")


def weakly(host: Host) -> Host:
    """Return a runner for its own parts, which do not keep it alive."""
    held: Host = weakref.proxy(host)
    return held
