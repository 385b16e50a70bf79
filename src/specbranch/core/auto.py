"""The method `auto`: stretches of the other methods, one after the other, whichever promises most at the time.

Owns how stretches follow one another; which one is the `Pilot`'s choice. Invariant: a chain in flight is handed on and verified, so a
choice never decides whether a drafted token is judged.
"""

from __future__ import annotations

from dataclasses import replace

from specbranch.config import SpeculativeConfig
from specbranch.core import rounds
from specbranch.core.arms import Arm
from specbranch.core.pilot import Pilot
from specbranch.core.rounds import InFlight, Rounds, Stretch, Stretcher
from specbranch.core.session import Session

STRETCHERS: dict[str, Stretcher] = {
    "autoregressive": rounds.autoregressive,
    "speculative": rounds.speculative,
    "adaptive": rounds.speculative,
    "pearl": rounds.pearl,
    "specbranch": rounds.specbranch,
}


def auto(session: Session, config: SpeculativeConfig, pilot: Pilot) -> Rounds:
    """Decode a request by whatever arm the pilot chooses, stretch by stretch."""
    yield from rounds.prefill(session, pilot.opens_with_draft)
    pilot.begin()
    pending: InFlight = None
    try:
        while not session.finished:
            arm = pilot.choose(pending)
            session.stats.chose(arm.method)
            pending = yield from _watched(_stretch(session, config, pilot, arm, pending), pilot)
    finally:
        pilot.finish()
    rounds.abandon(session, pending)


def _stretch(session: Session, config: SpeculativeConfig, pilot: Pilot, arm: Arm, pending: InFlight) -> Stretch:
    settings = replace(
        config, method=arm.method, policy=None, num_speculative_tokens=max(arm.length, 1), stop_below=arm.stop_below, max_branches=arm.width
    )
    overlapped = arm.method in (
        "pearl",
        "specbranch",
    )  # for these nothing left of a branch is a state, too: the next fork is at the very next token
    chain = pending if overlapped or (pending and pending.tokens) else None
    if arm.method == "lookup":
        return rounds.looking(session, pilot.trail.ngrams, pilot.policy(arm, settings), chain, pilot.going)
    return STRETCHERS[arm.method](session, settings, pilot.policy(arm, settings), chain, pilot.going)


def _watched(stretch: Stretch, pilot: Pilot) -> Stretch:
    """Carry out a stretch, with the pilot looking on."""
    try:
        orders = next(stretch)
        while True:
            reports = yield orders
            pilot.note(orders, reports)
            orders = stretch.send(reports)
    except StopIteration as end:
        left: InFlight = end.value
        return left
