"""Reaches a draft worker that listens on a network.

Owns `Dialling`, a link that a thread is still making: it looks the name up, connects, greets and agrees on the
vocabulary, all of which may wait; and `Dial`, the source of such workers. Invariant: no round waits for any of that.
Whatever the worker does meanwhile, the link is made or lost within the limits of `greeting`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from specbranch.core.draft_evaluation import NOT_EVALUATED, DraftEvaluation
from specbranch.core.trees import EDGES
from specbranch.errors import ModelError, SpecBranchError
from specbranch.exec.address import CA_VARIABLE, LinkAddress
from specbranch.exec.child_speed import ChildLimits
from specbranch.exec.children import MOST_MESSAGE, Child
from specbranch.exec.finding import Finder, Found, Listed
from specbranch.exec.greeting import GREETING_SECONDS, Refused, as_stream, connect
from specbranch.exec.link import LinkLost, StreamLink
from specbranch.exec.messages import (
    Broken,
    Evaluated,
    Join,
    Ready,
    Served,
    TellEvaluation,
    TellTokens,
    Tokens,
    WireMessage,
)
from specbranch.exec.wire import BadMessage, from_bytes, to_bytes

DIALLED_LIMITS = ChildLimits(start=30.0, grace=0.25, unmeasured=0.75)  # then a round goes on without its draft
log = logging.getLogger("specbranch")

MOST_EVALUATION = 1 << 16  # bytes
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
    """A draft worker at an address, or wherever it is found."""

    longest_wait = LONGEST_REDIAL_WAIT
    eager = True

    def __init__(
        self, where: LinkAddress | Finder, target: TargetVocabulary, limits: ChildLimits | None = None
    ) -> None:
        self._finder = Listed((where,)) if isinstance(where, LinkAddress) else where
        self.limits = limits or DIALLED_LIMITS
        self.name = f"the draft worker at {self._finder.name}"
        self.unavailable = f"There is no draft from {self._finder.name}"
        self.served: Served | None = None
        self.evaluation: DraftEvaluation | None = None
        self._target = target
        self._trusted = os.environ.get(CA_VARIABLE)

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
        """Look for workers, and make a link to the first one that answers; raises what the last one said."""
        *others, last = self._finder.find()
        for found in others:
            with suppress(*MAY_HAPPEN):
                return self._linked(found, seconds)
        return self._linked(last, seconds)

    def _linked(self, found: Found, seconds: float) -> StreamLink:
        stream, round_trip = connect(found.address, found.key, self._trusted)
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
        shared = self._shared(link, served, end)
        if self.served is None:
            self.evaluation = self._told_evaluation(link, end)
        link.post(to_bytes(Join(shared)))
        answer = _heard(link, end, keep=True)
        if isinstance(answer, Broken):
            raise Refused(answer.reason[:500])
        if not isinstance(answer, Ready):
            raise Refused(f"it said {type(answer).__name__} where Ready was expected")
        self.served = served

    def _told_evaluation(self, link: StreamLink, end: float) -> DraftEvaluation | None:
        """Return the draft's evaluation, None if it has none; one that makes no sense is ignored."""
        link.post(to_bytes(TellEvaluation()))
        data = _bytes_heard(link, end)
        try:
            return _evaluation(data)
        except BadMessage as bad:
            log.warning(
                "The evaluation of the draft at %s is ignored (%s); the planner starts with built-in figures.",
                self._finder.name,
                str(bad)[:200].rstrip("."),
            )
            return None

    def _shared(self, link: StreamLink, served: Served, end: float) -> int:
        """Return how many ids from 0 on both models share, or raise VocabularyMismatch."""
        if served.fingerprint == self._target.fingerprint:
            return self._target.size
        link.post(to_bytes(TellTokens()))
        answer = _heard(link, end)
        if not isinstance(answer, Tokens):
            raise Refused(f"it said {type(answer).__name__} instead of its tokens")
        return self._target.compare(answer.size, answer.tokens)


def _evaluation(data: bytes) -> DraftEvaluation | None:
    """Read an evaluation, None if there is none; raises BadMessage for a bad one."""
    if len(data) > MOST_EVALUATION:
        raise BadMessage(f"it has {len(data):,} bytes; at most {MOST_EVALUATION:,} are expected")
    answer = from_bytes(data)
    if not isinstance(answer, Evaluated):
        raise BadMessage(f"the worker said {type(answer).__name__} instead of it")
    if answer.evaluation == NOT_EVALUATED:
        return None
    fault = answer.evaluation.fault if answer.edges == EDGES else "it has other classes"
    if fault is not None:
        raise BadMessage(fault)
    return answer.evaluation


def _heard(link: StreamLink, end: float, keep: bool = False) -> WireMessage:
    """Wait for a message; `keep`: it stays in the link."""
    return from_bytes(_bytes_heard(link, end, keep))


def _bytes_heard(link: StreamLink, end: float, keep: bool = False) -> bytes:
    while (data := link.peek()) is None:
        if (left := end - time.monotonic()) <= 0.0:
            raise Refused("it does not answer; it may be busy with the draft of another target")
        link.pump(left)
    if not keep:
        link.drop()
    return data
