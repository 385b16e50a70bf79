"""Where a target looks for a draft worker: at an address, at several, or by a name on Ray.

Owns what users write for it, and the order in which addresses are tried. Does not connect. What is found by a name is
found by a module above this one, which is imported by name and only then (`FINDERS`). Invariant: every time a worker is
dialled it is looked for anew, so one that has moved is found.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from specbranch.exec.address import LinkAddress, link_key

# Which function makes the finder of a scheme from the rest of the text.
FINDERS = {"ray": "specbranch.cluster.draft_actors:on_ray"}


@dataclass(frozen=True, slots=True)
class Found:
    """Where a worker listens, and the secret to greet it with."""

    address: LinkAddress
    key: bytes

    def __repr__(self) -> str:
        return f"Found({self.address})"  # a secret is in no log


class Finder(Protocol):
    """Where draft workers are."""

    name: str  # of the place, in a sentence
    is_local: bool  # all of them share this machine's CPU with the target

    def find(self) -> list[Found]:
        """Return where to try, best first; it may wait, and raises a SpecBranchError or Refused if there is none."""
        ...


class Listed:
    """Workers at known addresses; the one after the last tried is tried first."""

    def __init__(self, addresses: Sequence[LinkAddress]) -> None:
        self.name = ",".join(map(str, addresses))
        self.is_local = all(address.is_local for address in addresses)
        self._found = [Found(address, link_key(address)) for address in addresses]
        self._first = random.randrange(len(addresses))  # targets that start together spread over the workers

    def find(self) -> list[Found]:
        """Return all addresses, another one first each time."""
        self._first += 1
        at = self._first % len(self._found)
        return self._found[at:] + self._found[:at]


def finder_of(draft: str) -> Finder:
    """Return the finder of what a user wrote: an address, several with commas between, or ray://NAME."""
    scheme, _, rest = draft.partition("://")
    if scheme in FINDERS:
        module, _, function = FINDERS[scheme].partition(":")
        found: Finder = getattr(import_module(module), function)(rest)
        return found
    return Listed([LinkAddress.parse(one.strip()) for one in draft.split(",")])
