"""Which replica answers a request: the one that has its prompt's beginning in its prefix cache, unless it is busier
than the others.

Owns the order in which replicas are tried. Each key has a home by rendezvous hashing (Thaler and Ravishankar, 1998), so
several front processes agree without talking, and a replica that comes or goes moves only its own keys. Loads are
bounded as in consistent hashing with bounded loads (Mirrokni et al., 2018). A key that was placed elsewhere because of
load stays there. Invariant: all replicas are in every order, so a request is never without one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Literal

NEW_LOAD = 1.25  # times the mean load: so much may the home of a new key have
KNOWN_LOAD, KNOWN_SLACK = 1.5, 2.0  # times the mean, and requests more: a prefill saved is worth some waiting
MOST_KEYS = 2**16  # keys whose last replica is remembered
Way = Literal["cached", "home", "load", "any"]  # known here; by hash; elsewhere because of load; no key
WAYS: tuple[Way, ...] = ("cached", "home", "load", "any")


class Placement:
    """Orders replicas for each request, and remembers where keys went."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()
        self.ways: Counter[str] = Counter()  # how requests were placed

    def order(self, key: str | None, loads: Mapping[str, int], avoid: Collection[str] = ()) -> list[str]:
        """Return all replicas, the best first. `loads`: running requests of each; `avoid`: those that failed it."""
        ranked = by_rendezvous(key or "", loads)
        usable = [one for one in ranked if one not in avoid] or ranked
        way, first = self._first(key, usable, loads)
        self.ways[way] += 1
        if key is not None:
            self._remember(key, first)
        others = sorted((one for one in usable if one != first), key=lambda one: loads[one])
        return [first, *others, *(one for one in ranked if one not in usable)]

    def _first(self, key: str | None, usable: list[str], loads: Mapping[str, int]) -> tuple[Way, str]:
        least = min(usable, key=lambda one: loads[one])
        if key is None:
            return "any", least
        mean = (sum(loads[one] for one in usable) + 1) / len(usable)
        known = self._known.get(key)
        if known in usable and loads[known] + 1 <= KNOWN_LOAD * mean + KNOWN_SLACK:
            return "cached", known
        bound = max(1.0, NEW_LOAD * mean)
        free = next((one for one in usable if loads[one] + 1 <= bound), least)
        return "home" if free == usable[0] else "load", free

    def _remember(self, key: str, replica: str) -> None:
        self._known[key] = replica
        self._known.move_to_end(key)
        if len(self._known) > MOST_KEYS:
            self._known.popitem(last=False)


def by_rendezvous(key: str, replicas: Collection[str]) -> list[str]:
    """Return replicas in the order that belongs to a key: everybody who knows them finds the same."""
    return sorted(replicas, key=lambda one: blake2b(f"{key}\0{one}".encode(), digest_size=8).digest())
