"""Warm-up: times a pair before its first request, target forwards by rows and draft steps by width.

Owns which sizes are tried and when warm-up ends. Invariant: it goes through the executor as any round does, so it times
what a round takes; it leaves nothing behind but the times.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import product, zip_longest
from statistics import median

from specbranch.config import SamplingParams
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Insight
from specbranch.core.loop import Executor
from specbranch.core.orders import Context, Draft, Grow, Orders, Plan, Reports, Verify
from specbranch.core.planner import PLANNED_ROWS
from specbranch.core.request import Request
from specbranch.core.runner import TimesForwards
from specbranch.core.sending import Sending
from specbranch.core.trees import NO_TREE, Growth
from specbranch.errors import SpecBranchError

NUMBER = -1  # the session of the warm-up; no request has it
REHEARSAL_PROMPT = tuple(range(1, 66))  # as long as the most rows, because its own tokens are verified
REHEARSED_ROWS = (1, 16, 4, 8, 2, 32, 64)  # the most informative first: time may run out
REHEARSED_WIDTHS = (1, 8, 4, 2)
REHEARSED_LENGTHS = (2, 6)  # steps of a draft: two lengths, to separate the steps from the setup
REHEARSAL_TURNS = 5  # repetitions; the shortest time counts
LEAST_STEP = 0.4  # share of a step in its part of a draft's seconds, at least: noise may show less
WARM_UP_SECONDS = 60.0  # that a draft in another process has for its first round, beyond the round's own wait
LOOK_EVERY = 0.05  # seconds


def rehearsed(costs: MeasuredCosts, has_draft: bool) -> bool:
    """True if few and many rows have been timed already, and draft steps if there is a draft."""
    return costs.covers(2) and costs.covers(8) and (costs.knows_draft or not has_draft)


def rehearse(
    executor: Executor,
    costs: MeasuredCosts,
    vocabulary: int,
    has_draft: bool,
    seconds: float,
    set_up: bool = False,
    turns: int | None = None,
) -> None:
    """Time rounds of chosen sizes for about `seconds` at most; slow or small models get fewer of them.

    `set_up`: the first round of each size captures a graph or the like. These rounds run before, untimed. `turns`:
    repetitions, REHEARSAL_TURNS by default.
    """
    on = Context(0, tuple(token % vocabulary for token in REHEARSAL_PROMPT))
    try:
        executor.open(NUMBER, Request(SamplingParams(), 0, len(on)))
        prefill = Orders(Draft(on, Plan(0)) if has_draft else None, Verify(on))
        _warm_up(executor, prefill, on)
        for orders in (*_received(on, has_draft), *_trials(on, has_draft)) if set_up else ():
            _warm_up(executor, orders, on)
        times = RehearsedTimes()
        over, longest = executor.now() + seconds, 0.0
        for orders in _trials(on, has_draft) * (turns or REHEARSAL_TURNS):
            start = executor.now()
            if start + longest > over:
                break
            report = executor.run({NUMBER: orders})[NUMBER]
            longest = max(longest, executor.now() - start)
            times.take(report)
        times.give(costs)
    except SpecBranchError:  # such as a context that is too short: what is not timed now is learned later
        pass
    finally:
        executor.free(NUMBER)


def take_table(costs: MeasuredCosts, table: TimesForwards) -> None:
    """Set the seconds of target forwards that were timed on the device; more rows never take less."""
    times = {rows: seconds for rows in REHEARSED_ROWS if (seconds := table.forward_seconds(rows)) is not None}
    least = math.inf
    for rows, seconds in sorted(times.items(), reverse=True):
        least = min(least, seconds)
        costs.target.set(rows, least)


def _warm_up(executor: Executor, orders: Orders, on: Context) -> None:
    """Run a round without timing it, and wait until a draft in another process has answered.

    A first round may take long, because kernels are compiled.
    """
    executor.run({NUMBER: orders})
    over = executor.now() + WARM_UP_SECONDS
    while executor.draft_state == "busy" and executor.now() < over:
        time.sleep(LOOK_EVERY)  # a busy target would take the draft's cores
        executor.run({NUMBER: Orders(verify=Verify(on))})


def _trials(on: Context, has_draft: bool) -> list[Orders]:
    """Return the rounds of one repetition.

    Their sequences differ in the last token alone, so only that is computed again.
    """
    others = [Context(0, (*on.tail[:-1], on.tail[at])) for at in range(len(REHEARSED_ROWS))]
    verifies = [
        Orders(verify=Verify(other, on.tail[: rows - 1])) for other, rows in zip(others, REHEARSED_ROWS, strict=True)
    ]
    sizes = product(REHEARSED_WIDTHS, REHEARSED_LENGTHS) if has_draft else ()
    drafts = [Orders(_grow(others[at % 2], *size)) for at, size in enumerate(sizes)]
    return [trial for both in zip_longest(verifies, drafts) for trial in both if trial is not None]


def _received(on: Context, has_draft: bool) -> list[Orders]:
    """Return a tree behind the target's latest token, which the target may start to verify on its device."""
    sending = Sending((0.0,) * (PLANNED_ROWS - 1), PLANNED_ROWS - 1)
    said = Context(0, (*on.tail, on.tail[0]))
    return [Orders(replace(_grow(said, 1, 2), sending=lambda: sending))] if has_draft else []


def _grow(on: Context, width: int, steps: int) -> Grow:
    """Order a tree of so many steps of one width; at price 0 the draft takes every step."""
    growth = Growth(
        (0.0,) * width, Insight().chances(), worth=1.0, children=8, least=0.0, lanes=width, most=steps * width
    )
    return Grow(on, NO_TREE, growth)


class RehearsedTimes:
    """The times of one rehearsal."""

    def __init__(self) -> None:
        self._targets: dict[int, list[float]] = {}  # by rows
        self._drafts: dict[int, dict[int, list[float]]] = {}  # by width, then by number of steps
        self._links: list[float] = []

    def take(self, report: Reports) -> None:
        """Note the times of a round."""
        if report.verifying is not None and report.verdict is not None:
            self._targets.setdefault(report.verifying.tokens, []).append(report.verifying.seconds)
        if report.drafting is not None and report.tree is not None and (steps := report.tree.steps):
            by_steps = self._drafts.setdefault(max(steps), {})
            by_steps.setdefault(len(steps), []).append(report.drafting.work_seconds)
            if report.drafting.link:
                self._links.append(report.drafting.link)

    def give(self, costs: MeasuredCosts) -> None:
        """Set what was timed: forwards by rows, and draft steps by width. What steps do not explain is setup.

        Of several times the shortest counts: others are longer because something else ran. For the same reason more
        rows never take less time.
        """
        least = math.inf
        for rows, times in sorted(self._targets.items(), reverse=True):
            least = min(least, *times)
            costs.target.set(rows, least)
        setups, least = list[float](), math.inf
        for width, by_steps in sorted(self._drafts.items(), reverse=True):
            (few, shorter), (many, longer) = ((n, min(by_steps[n])) for n in (min(by_steps), max(by_steps)))
            step = (longer - shorter) / (many - few) if many > few else longer / many
            least = min(least, max(step, LEAST_STEP * longer / many))
            costs.step.set(width, least)
            setups.append(max(shorter - few * least, 0.0))
        costs.setup = median(setups) if setups else 0.0
        for seconds in self._links:
            costs.link.add(seconds)
