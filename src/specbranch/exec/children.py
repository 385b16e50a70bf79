"""Where a draft worker comes from: a process that is started here.

Owns `Child`, a draft worker and our end of the link to it, and `Spawn`, which starts one on a socket pair. A worker
that listens on a network is `dialling`'s. Invariant: a started process ends when its link is closed.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from specbranch.core.draft_evaluation import DraftEvaluation
from specbranch.exec.child_speed import ChildLimits
from specbranch.exec.link import Link, StreamLink
from specbranch.exec.messages import Hello, Recipe, Served
from specbranch.exec.wire import to_bytes

MOST_MESSAGE = 1 << 26  # bytes of a message between target and draft; many lanes with distributions need a tenth of it
DYING = 0.2  # seconds of waiting for a killed process


@dataclass(slots=True)
class Child:
    """A draft worker and our end of the link to it."""

    link: Link
    process: subprocess.Popen[bytes] | None = None  # None: it was not started here
    ready: bool = False
    again: bool = False  # it replaces a lost one
    answered: bool = False  # it has answered at least one order

    @property
    def has_exited(self) -> bool:
        """True if its process was started here and has ended."""
        return self.process is not None and self.process.poll() is not None

    def stop(self, seconds: float) -> None:
        """Close the link, and kill the process unless it ends within `seconds`."""
        self.link.close()
        if self.process is None:
            return
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may block it; do not wait for that
                self.process.wait(DYING)


class DraftSource(Protocol):
    """Where draft workers come from, the first one and its successors."""

    name: str  # of such a worker, in a sentence
    unavailable: str  # the beginning of the sentence that says why there is no first one
    limits: ChildLimits
    longest_wait: float  # seconds before a lost worker is replaced, at most
    eager: bool  # a lost worker is replaced also while nobody orders drafts: that costs nothing

    @property
    def served(self) -> Served | None:
        """What the worker has said of its draft, if it was not started here."""
        ...

    @property
    def evaluation(self) -> DraftEvaluation | None:
        """The draft's evaluation, if the worker has sent it."""
        ...

    def start(self, again: bool = False) -> Child:
        """Start one; it sends Ready once it can draft. `again`: it replaces a lost one."""
        ...


class Spawn:
    """Starts a process that makes its worker by a recipe."""

    name = "the draft process"
    unavailable = "The draft worker could not start"
    longest_wait = 60.0
    eager = False
    served: Served | None = None
    evaluation: DraftEvaluation | None = None

    def __init__(self, recipe: Recipe, limits: ChildLimits | None = None) -> None:
        self.limits = limits or ChildLimits()
        self._recipe = recipe

    def start(self, again: bool = False) -> Child:
        """Start a process; it sends Ready after it has made its worker."""
        hello = to_bytes(Hello(tuple(sys.path), self._recipe))  # first: it raises if the recipe cannot be sent
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "specbranch.exec.child", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        child = Child(StreamLink(ours, MOST_MESSAGE), process, again=again)
        child.link.post(hello)
        return child
