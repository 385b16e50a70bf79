"""The accuracy of a profile: the same requests on this machine's clock and on the profile's.

Owns the choice of methods to compare. Invariant: both clocks see the same requests, without prefill.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import dataclass

from specbranch.clock.profile import CostProfile
from specbranch.core.loop import Executor
from specbranch.lab.measure.loaded_pair import LoadedPair
from specbranch.lab.measure.one_request import decode, greedy_session
from specbranch.lab.measure.probes import Effort, spread_of
from specbranch.progress import StepsDone, silent

CHECKED = ("autoregressive", "speculative", "adaptive", "specbranch")


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds of the same requests on both clocks."""

    method: str
    measured: float
    modelled: float
    spread: float | None  # of the measured ones between repeats, as a share; None: measured once

    @property
    def off(self) -> float:
        """The relative error of the modelled time."""
        return self.modelled / self.measured - 1.0

    def gain_off(self, plain: Compared) -> float:
        """The relative error of the modelled speedup over plain decoding."""
        return (1 + plain.off) / (1 + self.off) - 1.0


def check(
    profile: CostProfile, pair: LoadedPair, effort: Effort | None = None, progress: StepsDone = silent
) -> list[Compared]:
    """Decode the same requests on both clocks; return both times, by method."""
    effort = effort or Effort()
    modelled, started = pair.modelled(profile), time.perf_counter()
    times: dict[str, list[float]] = {method: [] for method in CHECKED}
    done, total = 0, len(CHECKED) * (effort.check_repeats + 1)
    with closing(pair.real()) as real:
        for turn in range(effort.check_repeats + 1):  # the modelled one first, which warms up
            if turn > 1 and time.perf_counter() - started > effort.seconds:
                break
            for method in CHECKED:
                times[method].append(_seconds(pair, real if turn else modelled, method, effort.check_tokens))
                progress("Checking against the clock", done := done + 1, total)
    return [_compared(method, *found) for method, found in times.items()]


def _compared(method: str, modelled: float, *measured: float) -> Compared:
    spread = spread_of(measured) if len(measured) > 1 else None
    return Compared(method, statistics.median(measured), modelled, spread)


def _seconds(pair: LoadedPair, executor: Executor, method: str, tokens: int) -> float:
    """Return the decode seconds of all prompts with a method."""
    sessions = [greedy_session(prompt, tokens, pair.tokenizer.eos_ids) for prompt in pair.prompts()]
    return sum(decode(executor, session, method).stats.decode_seconds for session in sessions)
