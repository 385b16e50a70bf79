"""Virtual time for actors: it passes while all wait, in one order, and nothing is left behind."""

from __future__ import annotations

import threading

import pytest

from specbranch.lab.scale.channel import Mailbox
from specbranch.lab.scale.simulation import Signal, Simulation


def test_actors_run_one_at_a_time_in_the_order_of_their_moments() -> None:
    simulation, seen = Simulation(), list[tuple[float, str]]()

    def actor(name: str, *moments: float) -> None:
        for moment in moments:
            simulation.sleep_until(moment)
            seen.append((simulation.now(), name))

    simulation.add(lambda: actor("a", 1.0, 3.0, 3.0))
    simulation.add(lambda: actor("b", 2.0, 3.0))
    simulation.run()
    assert seen == [(1.0, "a"), (2.0, "b"), (3.0, "a"), (3.0, "b"), (3.0, "a")]


def test_a_signal_wakes_who_waits_and_a_wait_ends_in_time() -> None:
    simulation, seen = Simulation(), list[tuple[float, str]]()
    signal = Signal(simulation)

    def waiter(name: str, until: float) -> None:
        simulation.wait(signal, until)
        seen.append((simulation.now(), name))
        simulation.sleep(10.0)  # a wake that came too late must not end this wait
        seen.append((simulation.now(), name))

    simulation.add(lambda: waiter("early", 1.0))
    simulation.add(lambda: waiter("heard", 9.0))
    simulation.add(lambda: (simulation.sleep(4.0), signal.send()))
    simulation.run()
    assert seen == [(1.0, "early"), (4.0, "heard"), (11.0, "early"), (14.0, "heard")]


def test_an_error_of_an_actor_is_raised_and_no_thread_is_left() -> None:
    simulation, before = Simulation(), threading.active_count()

    def fail() -> None:
        simulation.sleep(1.0)
        raise ValueError("a mistake")

    simulation.add(fail)
    simulation.add(lambda: simulation.sleep(9.0))
    simulation.add(lambda: simulation.wait(Signal(simulation)), servant=True)
    with pytest.raises(ValueError, match="a mistake"):
        simulation.run()
    assert simulation.now() == 1.0 and threading.active_count() == before


def test_actors_that_wait_for_each_other_are_an_error() -> None:
    simulation = Simulation()
    simulation.add(lambda: simulation.wait(Signal(simulation)))
    with pytest.raises(RuntimeError, match="waits for another one"):
        simulation.run()


def test_messages_arrive_whole_in_order_and_after_their_way() -> None:
    simulation, seen = Simulation(), list[tuple[float, bytes]]()
    box = Mailbox(simulation, 0.25)

    def send() -> None:
        for number in range(3):
            box.post(bytes([number]))
            simulation.sleep(0.1)

    def receive() -> None:
        box.wait(until=0.2)
        assert box.first() is None and simulation.now() == 0.2
        while len(seen) < 3:
            box.wait()
            seen.append((simulation.now(), box.first() or b""))
            box.drop()

    simulation.add(send)
    simulation.add(receive)
    simulation.run()
    assert seen == [(pytest.approx(0.25 + 0.1 * number), bytes([number])) for number in range(3)]
