"""Reaches a draft worker that listens on a network.

Owns `Dialling`, a link that a thread is still making: it looks the name up, connects, greets and agrees on the
vocabulary, all of which may wait; and `Dial`, the source of such workers. Invariant: no round waits for any of that.
Whatever the worker does meanwhile, the link is made or lost within the limits of `greeting`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specbranch.errors import ModelError, SpecBranchError
from specbranch.exec.address import CA_VARIABLE, LinkAddress, link_key
from specbranch.exec.child_speed import ChildLimits
from specbranch.exec.children import MOST_MESSAGE, Child
from specbranch.exec.greeting import GREETING_SECONDS, Refused, as_stream, connect
from specbranch.exec.link import LinkLost, StreamLink
from specbranch.exec.messages import Broken, Join, Ready, Served, TellTokens, Tokens, WireMessage
from specbranch.exec.wire import BadMessage, from_bytes, to_bytes

DIALLED_LIMITS = ChildLimits(start=30.0, grace=0.25, unmeasured=0.75)  # then a round goes on without its draft
LONGEST_REDIAL_WAIT = 5.0  # seconds; asking whether a worker is back costs nothing

MAY_HAPPEN = (Refused, LinkLost, BadMessage, SpecBranchError, OSError)  # while a worker is being reached


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """What a target knows of its tokens: a digest, and how to compare them with a draft's."""

    fingerprint: str
    size: int  # ids from 0 on that both models share, if the digests are equal
    compare: Callable[[int, Mapping[int, str]], int]  # with a vocabulary's size and tokens; how many both share


class Dialling:
    """A link that a thread is making; then it is the link that was made."""

    def __init__(self, make: Callable[[], StreamLink]) -> None:
        self._make = make
        self._link: StreamLink | None = None
        self._why: str | None = None  # there is no link
        self._posted: list[bytes] = []  # before there was one
        self._over = threading.Event()
        self._lock = threading.Lock()  # a link that is made after `close` has to be closed, too
        threading.Thread(target=self._dial, name="specbranch-dial", daemon=True).start()

    @property
    def unsent(self) -> int:
        """How many bytes wait to be written."""
        return self._link.unsent if self._link else sum(map(len, self._posted))

    @property
    def round_trip(self) -> float:
        """Seconds to the worker and back."""
        return self._link.round_trip if self._link else 0.0

    def post(self, message: bytes) -> None:
        """Queue a message."""
        if self._link:
            self._link.post(message)
        elif self._why is None:
            self._posted.append(message)

    def pump(self, seconds: float | None = 0.0) -> None:
        """Wait for the link at most `seconds`; if it is there, move bytes."""
        if not self._over.is_set():
            self._over.wait(seconds)
        elif self._link:
            while self._posted:
                self._link.post(self._posted.pop(0))
            self._link.pump(seconds)

    def peek(self) -> bytes | None:
        """Return the first whole message."""
        if self._why is not None:
            raise LinkLost(self._why)
        return self._link.peek() if self._over.is_set() and self._link else None

    def drop(self) -> None:
        """Drop the message that `peek` returned."""
        if self._link:
            self._link.drop()

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._why = self._why or "it was closed"
        if self._link:
            self._link.close()

    def _dial(self) -> None:
        made, why = None, None
        try:
            made = self._make()
        except MAY_HAPPEN as error:
            why = str(error).rstrip(".")
        except Exception as error:  # whatever it is, somebody waits for an answer
            why = f"{type(error).__name__}: {error}"
        with self._lock:
            self._why = self._why or why
            self._link = made
            if made is not None and self._why is not None:
                made.close()
            self._over.set()


class Dial:
    """A draft worker at an address."""

    longest_wait = LONGEST_REDIAL_WAIT
    eager = True

    def __init__(self, address: LinkAddress, target: TargetVocabulary, limits: ChildLimits | None = None) -> None:
        self.address, self.limits = address, limits or DIALLED_LIMITS
        self.name = f"the draft worker at {address}"
        self.unavailable = f"There is no draft from {address}"
        self.served: Served | None = None
        self._target = target
        self._key, self._trusted = link_key(address), os.environ.get(CA_VARIABLE)

    def start(self, again: bool = False) -> Child:
        """Start to dial."""
        return Child(Dialling(self._make), again=again)

    def check(self) -> None:
        """Reach the worker once, and hang up; raises ModelError if there is none, or none for this target."""
        try:
            # at the first time it may be busy with a long order of another target
            self._make(self.limits.start).close()
        except MAY_HAPPEN as error:
            raise ModelError(f"{self.unavailable}: {str(error).rstrip('.')}.") from error

    def _make(self, seconds: float = GREETING_SECONDS) -> StreamLink:
        stream, round_trip = connect(self.address, self._key, self._trusted)
        link = StreamLink(as_stream(stream), MOST_MESSAGE, round_trip)
        try:
            self._agree(link, time.monotonic() + seconds)
        except BaseException:
            link.close()
            raise
        return link

    def _agree(self, link: StreamLink, end: float) -> None:
        """Agree on a vocabulary, and join; the worker's Ready stays in the link."""
        served = _heard(link, end)
        if not isinstance(served, Served):
            raise Refused(f"it said {type(served).__name__} instead of what it serves")
        if self.served is not None and served.fingerprint != self.served.fingerprint:
            raise Refused(f"a worker with another vocabulary has taken its place (draft {served.name!r})")
        link.post(to_bytes(Join(self._shared(link, served, end))))
        answer = _heard(link, end, keep=True)
        if isinstance(answer, Broken):
            raise Refused(answer.reason[:500])
        if not isinstance(answer, Ready):
            raise Refused(f"it said {type(answer).__name__} where Ready was expected")
        self.served = served

    def _shared(self, link: StreamLink, served: Served, end: float) -> int:
        """Return how many ids from 0 on both models share, or raise VocabularyMismatch."""
        if served.fingerprint == self._target.fingerprint:
            return self._target.size
        link.post(to_bytes(TellTokens()))
        answer = _heard(link, end)
        if not isinstance(answer, Tokens):
            raise Refused(f"it said {type(answer).__name__} instead of its tokens")
        return self._target.compare(answer.size, answer.tokens)


def _heard(link: StreamLink, end: float, keep: bool = False) -> WireMessage:
    """Wait for a message; `keep`: it stays in the link."""
    while (data := link.peek()) is None:
        if (left := end - time.monotonic()) <= 0.0:
            raise Refused("it does not answer; it may be busy with the draft of another target")
        link.pump(left)
    if not keep:
        link.drop()
    return from_bytes(data)
