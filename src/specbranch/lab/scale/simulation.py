"""Virtual time for several actors: each runs real code in a thread of its own, and exactly one runs at a time.

Owns the clock, whose turn it is, and `Signal`, by which one actor wakes others. Does not know what the actors do.
Invariants: time passes only while every actor waits. Of two actors due at the same moment, the one that began to wait
first runs first. So the same actors give the same run on every machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf

ENDING = 10.0  # real seconds that an actor has to end, once it is asked to


class Ended(BaseException):
    """The simulation is over: the actor that waited ends here."""


class Actor:
    """A thread of the simulation, and the number of its present wait."""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread, self.wait = thread, 0
        self.turn = threading.Semaphore(0)


class Signal:
    """What actors wait for."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._waiting: list[tuple[Actor, int]] = []

    def send(self, at: float | None = None) -> None:
        """Wake everybody who waits, now or at a later moment."""
        waiting, self._waiting = self._waiting, []
        for actor, wait in waiting:
            self._simulation.wake(actor, wait, at)

    def add(self, actor: Actor) -> None:
        """Note that an actor waits."""
        self._waiting.append((actor, actor.wait))


class Simulation:
    """Runs actors on one clock, which starts at 0."""

    def __init__(self) -> None:
        self._now, self._numbers = 0.0, count()
        self._due: list[tuple[float, int, Actor, int]] = []  # (moment, order, who, which of its waits)
        self._actors: dict[int, Actor] = {}  # by thread
        self._working = 0  # actors that are no servants
        self._over = threading.Event()
        self._error: BaseException | None = None

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now

    def add(self, work: Callable[[], object], servant: bool = False) -> None:
        """Add an actor that starts with `run`; a servant does not keep the simulation going."""
        actor = Actor(threading.Thread(target=lambda: self._act(actor, work, servant), daemon=True))
        self._working += not servant
        heappush(self._due, (self._now, next(self._numbers), actor, actor.wait))
        actor.thread.start()
        assert actor.thread.ident is not None
        self._actors[actor.thread.ident] = actor

    def run(self) -> None:
        """Run until all actors have ended but the servants; raises what an actor raised."""
        try:
            self._hand_on()
            self._over.wait()
        finally:
            self._over.set()
            self._end_all()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the simulation; the actor that calls it ends at its next wait."""
        self._over.set()

    def sleep(self, seconds: float) -> None:
        """Let some time pass for the actor that calls it."""
        self.sleep_until(self._now + seconds)

    def sleep_until(self, moment: float) -> None:
        """Wait until a moment; if it is past, let only others run that are due now."""
        me = self._me()
        self.wake(me, me.wait, moment)
        self._pause(me)

    def wait(self, signal: Signal, until: float = inf) -> None:
        """Wait for a signal, at most until a moment."""
        me = self._me()
        signal.add(me)
        if until < inf:
            self.wake(me, me.wait, until)
        self._pause(me)

    def wake(self, actor: Actor, wait: int, at: float | None = None) -> None:
        """Have an actor go on at a moment, unless it has ended that wait by then."""
        heappush(self._due, (max(self._now if at is None else at, self._now), next(self._numbers), actor, wait))

    def _me(self) -> Actor:
        return self._actors[threading.get_ident()]

    def _pause(self, me: Actor) -> None:
        following = self._following()
        if following is not me:
            self._give_turn(following)
            me.turn.acquire()
        if self._over.is_set():
            raise Ended
        me.wait += 1

    def _hand_on(self) -> None:
        self._give_turn(self._following())

    def _give_turn(self, actor: Actor | None) -> None:
        if actor is not None:
            actor.turn.release()
        elif not self._over.is_set():
            self._error = RuntimeError("Every actor of the simulation waits for another one.")
            self._over.set()

    def _following(self) -> Actor | None:
        """Return who is due next, and set the clock; None if nobody is, or the simulation is over."""
        while self._due and not self._over.is_set():
            moment, _, actor, wait = heappop(self._due)
            if wait == actor.wait:
                self._now = moment
                return actor
        return None

    def _act(self, actor: Actor, work: Callable[[], object], servant: bool) -> None:
        actor.turn.acquire()
        actor.wait += 1
        try:
            if not self._over.is_set():
                work()
        except Ended:
            return
        except BaseException as error:
            self._error = self._error or error
            self._over.set()
            return
        self._working -= not servant
        if not self._working:
            self._over.set()
        else:
            self._hand_on()

    def _end_all(self) -> None:
        for actor in self._actors.values():
            actor.turn.release()
        for actor in self._actors.values():
            actor.thread.join(ENDING)
