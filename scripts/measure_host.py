"""Measure the engine's own Python in rounds of a whole batch: µs of CPU for each session and round, part by part.

The classes of a GPU's runner decode a tiny random model on the CPU. Once all sessions decode, its forward is left out.
What remains is what the host does while a GPU computes. `--forest` does the same for rounds of draft trees on the
device: they are made once with a forward and the twins of the kernels, and then again by what these have answered.
`--text` adds what the text of a token takes, with the tokenizer of that model. Prints a table, or JSON; `--profile` the
functions that take longest.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from shapes import architecture, random_weights

from specbranch.clock.profile import CostProfile
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.forest import FOREST_VARIABLE
from specbranch.core.forest_loop import ForestLoop
from specbranch.core.loop import Loop
from specbranch.core.members import Member
from specbranch.core.methods import METHODS
from specbranch.core.orders import Deferred, Orders, Reports
from specbranch.core.plain_loop import PlainLoop
from specbranch.core.plain_rounds import PlainRounds
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.request import Request
from specbranch.core.scheduler import Scheduler
from specbranch.core.session import Session
from specbranch.exec.drafter import Drafter
from specbranch.exec.halves import DecodesWithTarget
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.transfer import Reading, Transfer
from specbranch.models.gpu import forest_rounds
from specbranch.models.gpu.decode_rows import DecodeRows
from specbranch.models.gpu.forest_rounds import ForestDecoder
from specbranch.models.gpu.layout import CONFIDENCE
from specbranch.models.gpu.plain_decode import PlainDecoder
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.gpu.step import Graphs, Ran

CONTEXT = 2048
VOCABULARY = 1000
COSTS = CostProfile(target=((1, 10.0), (512, 12.0)), draft=((1, 0.5), (512, 1.0)), slow_down=0.3, host=0.1)
BLOCK = 24  # rounds of a figure; the table has medians of figures
ALL = "all, without a clock for each part"
TOKENS = "tokens of a session and round"
DEVICE = "device"  # what the device does, and what waits for it: it counts for nobody
PLAIN_PARTS = [
    (Scheduler, "step", "queue, deadlines"),
    (Loop, "step", "loop"),
    (PlainLoop, "round", "loop"),
    (PlainRounds, "batch", "who takes part"),
    (PlainLoop, "_run", "orders"),
    (DecodesWithTarget, "decode", "executor"),
    (PlainDecoder, "decode", "which rows"),
    (DecodeRows, "pack", "packing"),
    (GpuRunner, "launch_decode", "launch"),
    (Graphs, "run_brought", DEVICE),
    (PlainDecoder, "_read", "read"),
    (PlainLoop, "_learn", "costs"),
    (PlainLoop, "_deliver_tokens", "tokens, statistics"),
]
FOREST_PARTS = [
    (Scheduler, "step", "queue, deadlines"),
    (Loop, "step", "loop"),
    (ForestLoop, "round", "who takes part"),
    (ForestLoop, "_run", "orders"),
    (ForestLoop, "_planned", "plan of the batch"),
    (Serial, "decode_forest", "executor"),
    (ForestDecoder, "decode", "which rows"),
    (ForestDecoder, "_keep_up", "changes of rows"),
    (ForestDecoder, "_bring", "launch"),
    (ForestDecoder, "_verify", "launch"),
    (ForestDecoder, "_draft_steps", "launch"),
    (ForestDecoder, "_read", "read"),
    (forest_rounds, "read_tree", "read trees"),
    (ForestLoop, "_deliver", "tokens, statistics"),
    (Member, "commit_forest", "tokens, statistics"),
    (Loop, "_resume_method", "methods"),
    (Deferred, "attempt", "methods, put off"),
]


@dataclass(slots=True)
class Clock:
    """Adds up CPU seconds by part; a part within another one counts for itself alone."""

    seconds: defaultdict[str, float]
    part: str = ALL
    since: float = 0.0
    parts: bool = False  # False: only the device is told apart, as the clock itself takes time

    def turn_to(self, part: str) -> str:
        """Let another part's time begin; returns the part before."""
        now, before = time.thread_time(), self.part
        self.seconds[before] += now - self.since
        self.part, self.since = part, now
        return before

    def time(self, owner: Any, name: str, part: str) -> None:
        """Have every call of a function count for a part."""
        inner = getattr(owner, name)

        @wraps(inner)
        def timed(*given: Any, **named: Any) -> Any:
            if not self.parts and part != DEVICE:
                return inner(*given, **named)
            before = self.turn_to(part)
            try:
                return inner(*given, **named)
            finally:
                self.turn_to(before)

        setattr(owner, name, timed)


def main() -> None:
    """Measure, and print."""
    given = _options()
    torch.set_num_threads(1)
    os.environ[FOREST_VARIABLE] = "1" if given.forest else "0"
    device = Answers() if given.forest else None
    if device is not None:
        device.tokens = _recorded(given, device)
    scheduler = _batch(given)
    _start(scheduler)
    if device is None:
        _leave_forward_out()
    else:
        device.play()
    clock = Clock(defaultdict(float))
    profile = cProfile.Profile(time.thread_time) if given.profile else None
    for owner, name, part in () if profile else FOREST_PARTS if given.forest else PLAIN_PARTS:
        clock.time(owner, name, part)
    gc.collect()
    gc.freeze()  # as an engine does
    blocks = list(_blocks(scheduler, clock, given.rounds // BLOCK, profile))
    if device is not None and scheduler.snapshot().tokens != device.tokens:
        raise RuntimeError("The rounds of draft trees were not the same when they were made again; measure anew.")
    names = sorted(set().union(*blocks))
    found = {name: statistics.median(block[name] for block in blocks if name in block) for name in names}
    if given.text:
        found["text of a token"] = _text(given.text)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    print(json.dumps(found) if given.json else _table(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=480, help="rounds that are measured [480]")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--method", help="[autoregressive; with --forest specbranch]")
    parser.add_argument("--forest", action="store_true", help="rounds of draft trees on the device")
    parser.add_argument("--text", help="a model whose tokenizer makes text")
    parser.add_argument("--profile", action="store_true", help="functions that take longest; slows all")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


class Priced(Experience):
    """Goes by the costs of a GPU: a draft that takes as long as the target here would not be asked."""

    def __init__(self) -> None:
        super().__init__(COSTS)

    def record_forwards(self, orders: Orders, reports: Reports, *given: float) -> float:
        """Learn nothing from the times here; return the seconds in which plain decoding brings the tokens of a run."""
        emitted = len(reports.verdict.path) + 1 if reports.verdict is not None else 0
        return emitted * self.costs.target_seconds(1)


@dataclass(slots=True)
class Answers:
    """What the device answers in rounds of draft trees: recorded first, and then played without it."""

    readings: deque[np.ndarray] = field(default_factory=deque)
    rows: deque[int] = field(default_factory=deque)  # of draft steps that the host asks about
    tokens: int = 0  # of all sessions at the end

    def record(self) -> None:
        """Record all answers from now on."""
        later, wait_for = Transfer.later, forest_rounds.wait_for

        def reading(transfer: Transfer, found: torch.Tensor, *given: Any) -> Reading:
            self.readings.append(found.clone().numpy())
            return later(transfer, found, *given)

        def waiting(*given: Any) -> int:
            self.rows.append(wait_for(*given))
            return self.rows[-1]

        Transfer.later, forest_rounds.wait_for = reading, waiting  # type: ignore[method-assign]

    def play(self) -> None:
        """Give these answers from now on."""
        ran = Ran(torch.zeros(1), None, torch.zeros(1, 1))

        def reading(*given: Any) -> Reading:
            numbers = self.readings.popleft()
            return Reading(lambda: numbers, lambda: True)

        Transfer.later = reading  # type: ignore[method-assign,assignment]
        ForestDecoder._run = lambda *_: ran  # type: ignore[method-assign]
        forest_rounds.wait_for = lambda *_: self.rows.popleft()
        for kernel in ("send", "settle", "look", "grow"):
            setattr(forest_rounds, kernel, lambda *_: None)


class Counter:
    """A clock that goes by how often it is read, so that the same rounds can be made again."""

    seconds = 0.0

    def __call__(self) -> float:
        """Return the time, a millisecond after that of the call before."""
        self.seconds += 1e-3
        return self.seconds


def _recorded(given: argparse.Namespace, device: Answers) -> int:
    """Make the rounds with a device, and record its answers; returns the tokens of all sessions."""
    later, wait_for = Transfer.later, forest_rounds.wait_for
    scheduler = _batch(given)
    _start(scheduler)
    device.record()
    for _ in range(given.rounds // BLOCK * BLOCK):
        scheduler.step()
    Transfer.later, forest_rounds.wait_for = later, wait_for  # type: ignore[method-assign]
    return scheduler.snapshot().tokens


def _batch(given: argparse.Namespace) -> Scheduler:
    """Return a scheduler with all sessions in its queue."""
    target = _decoder(0.0)
    verifier = Verifier(GpuRunner(target, CONTEXT))
    drafter = Drafter(GpuRunner(_decoder(0.3), CONTEXT)) if given.forest else None
    executor, runner = Serial(verifier, drafter, Counter() if given.forest else time.perf_counter), verifier.runner
    costs = MeasuredCosts(False, getattr(runner, "padded", None), launches_ahead=True)
    limits = RoundLimits(prefill_chunk=runner.prefill_chunk, prompt_tokens=4096)
    scheduler = Scheduler(Loop(executor, costs=costs, limits=limits), most=given.sessions)
    name = given.method or ("specbranch" if given.forest else "autoregressive")
    method, config, experience = METHODS[name], SpeculativeConfig(method=name), Priced()
    params = SamplingParams(max_tokens=CONTEXT, temperature=given.temperature, ignore_eos=True)
    for at in range(given.sessions):
        session = Session(at, _prompt(at), Request(params, at, len(_prompt(at)), eos_ids=(0,)), CONTEXT)
        scheduler.submit(session, partial(method.start, session, config, experience))
    return scheduler


def _decoder(disturbed: float) -> Decoder:
    """Return a tiny random model; `disturbed`: by how much its weights differ from the target's."""
    small = replace(architecture("8b"), layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32)
    torch.manual_seed(0)
    weights = random_weights(replace(small, vocabulary=VOCABULARY), torch.device("cpu"))
    torch.manual_seed(1)
    weights.embedding.add_(torch.randn_like(weights.embedding) * disturbed * weights.embedding.std())
    return Decoder(replace(small, vocabulary=VOCABULARY), weights, CONTEXT + 256)


def _prompt(number: int) -> list[int]:
    """Return a prompt; lengths differ, so sessions do not begin new pages in the same round."""
    return [1 + (number * 31 + at * 7) % (VOCABULARY - 1) for at in range(20 + 5 * number % 250)]


def _start(scheduler: Scheduler) -> None:
    """Make rounds until all sessions decode."""
    while not all(ticket.session.stats.emitted > 8 for ticket in scheduler.tickets):
        scheduler.step()


def _leave_forward_out() -> None:
    """Have all steps of plain decoding sample the same token at once."""
    results = torch.full((1024, CONFIDENCE + 4), 7.0)
    nothing = torch.zeros(1024, 1)

    def run_brought(graphs: Graphs, bucket: Any, *given: Any) -> Ran:
        return Ran(nothing[: bucket.rows], None, results[: bucket.rows])

    Graphs.run_brought = run_brought  # type: ignore[method-assign,assignment]


def _blocks(
    scheduler: Scheduler, clock: Clock, count: int, profile: cProfile.Profile | None
) -> Iterator[dict[str, float]]:
    """Yield the µs for a session and round: of all, and in every second block of each part."""
    for number in range(count):
        taken, before, clock.parts = 0, scheduler.snapshot().tokens, bool(number % 2)
        clock.seconds.clear()
        clock.since = time.thread_time()
        if profile is not None:
            profile.enable()
        for _ in range(BLOCK):
            taken += len(scheduler.step())
        if profile is not None:
            profile.disable()
        clock.turn_to(ALL)
        found = {part: seconds / taken * 1e6 for part, seconds in clock.seconds.items() if part != DEVICE}
        if clock.parts:
            del found[ALL]
        yield {**found, TOKENS: (scheduler.snapshot().tokens - before) / taken}


def _text(model: str) -> float:
    """Return the µs that a token's text takes."""
    from specbranch.assembly import ModelChoice, load_tokenizer
    from specbranch.text.detokenizer import Detokenizer

    tokenizer = load_tokenizer(ModelChoice(model))
    ids = tokenizer.encode(_TEXT * 8, add_special=False)
    times = list[float]()
    for _ in range(21):
        decoder, start = Detokenizer(tokenizer), time.thread_time()
        for token in ids:
            decoder.feed_one(token)
        times.append((time.thread_time() - start) / len(ids) * 1e6)
    return statistics.median(times)


_TEXT = "def measure(rounds: int) -> float:\n    return sum(range(rounds)) / rounds\n\nZwölf Boxkämpfer. 🙂\n"


def _table(found: dict[str, float]) -> str:
    widest = max(map(len, found))
    lines = sorted(found.items(), key=lambda pair: (pair[0] in (ALL, TOKENS), -pair[1]))
    return "\n".join(f"{name:{widest}}{value:8.2f}" for name, value in lines)


if __name__ == "__main__":
    main()
