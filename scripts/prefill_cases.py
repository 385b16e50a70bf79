"""What prefill costs on a loaded pair, case by case: short prompts, a long one, many requests, a long one among others.

Owns the measurements and their bars; `measure_prefill.py` chooses and prints them. Each case returns `Figure`s. The
models are called as a user calls them: `LLM`, `AsyncLLM`, and the functions of `bench load`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from fresh_process import FreshOrder, ask_fresh, knows_warm_up
from prefill_prompts import long_prompt, short_prompts, short_suite

from specbranch import AsyncLLM, SamplingParams
from specbranch.engine import LLM, LLMView
from specbranch.errors import RequestCancelled, SpecBranchError
from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
from specbranch.lab.bench.results import BASELINE
from specbranch.lab.bench.under_load import Arrivals, LoadRow, run_by_wall
from specbranch.lab.suites.suite import ALL_SHIPPED, Suite, load_suites

METHODS = (BASELINE, "specbranch")
READ_BAR, FIRST_BAR, LONG_BAR = 130.0, 8.0, 1.15  # ms of 64 prompts, ms of one, times transformers' time
STEP_BARS = {64: 5.5, 128: 6.5, 256: 9.5}  # ms by rows; 64 took 5.3
FEW_ROWS_BARS = {"1 row": 4.23, "16 rows": 4.45, "64 rows": 5.5}  # ms of one sequence: as before
LOAD_BAR, LOAD_FIRST_BAR, GAP_BAR = 6000.0, 200.0, 2.0  # tokens/s, ms of TTFT, p99 over p50 of the gaps
FRESH_BAR = 0.95  # the first request's tokens/s over the tenth's
WARM_BAR, COLD_BAR, SMALL_LOAD_BAR = 5.0, 25.0, 6.0  # seconds
CONTEXT = 100  # tokens before the rows of a decode step
CHAINS = {128: 8, 256: 16}  # rows: chains of 16 rows, as when several sequences verify


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number, and the bar it has to meet."""

    case: str
    what: str
    value: float | None  # None: not known on this build or machine
    unit: str
    bar: float | None = None
    at_least: bool = False  # the bar is a lower bound
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """True if the bar is met; None without a bar or a number."""
        if self.value is None or self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a case does."""

    prompts: int = 64  # short prompts read at once
    repeats: int = 7  # of figures that take little time; their median counts
    tokens: int = 96  # of an answer
    at_once: int = 64  # requests under load
    turns: int = 2  # measured turns under load
    read: int = 8192  # tokens of the prompt that transformers reads, too
    arriving: int = 8000  # tokens of the prompt that arrives among others
    arriving_long: int = 30_000  # the same for a model with a context of LONG_CONTEXT
    decoding: int = 16  # requests it arrives among
    before: int = 80  # rounds of each of these before it arrives
    arrivals: int = 3
    batches: tuple[int, ...] = (1, 12)  # prompts of a request to a fresh process
    shape: str = "8b"  # of decode steps


LONG_CONTEXT = 32_768
SMALL = Sizes(
    prompts=3, repeats=1, tokens=6, at_once=2, turns=1, read=120, arriving=200, arriving_long=200, decoding=2,
    before=12, arrivals=1, batches=(1, 2), shape="tiny",
)  # fmt: skip


def methods_of(llm: LLM) -> tuple[str, ...]:
    """Return the methods to measure: a target alone is measured with plain decoding."""
    return METHODS if llm.drafter is not None else METHODS[:1]


def short_figures(recorded: RecordedPair, sizes: Sizes) -> Iterator[Figure]:
    """Measure how long many short prompts take until each has its first token, and how long one takes."""
    prompts = short_prompts(recorded.llm.tokenizer, sizes.prompts)
    length = f"{fmean(map(len, prompts)):.0f} tokens each"
    for method in methods_of(recorded.llm):
        llm, plain = recorded.llm.using(method), method == BASELINE
        read = [milliseconds(lambda llm=llm: _read_all(llm, prompts)) for _ in range(1 + sizes.repeats)]
        one = [milliseconds(lambda llm=llm: first_token(llm, prompts[0])) for _ in range(1 + 3 * sizes.repeats)]
        many = f"{len(prompts)} prompts read, {method}"
        note = f"{length}; the first time {read[0]:.1f}"
        yield Figure("prompts", many, median(read[1:]), "ms", READ_BAR if plain else None, note=note)
        bar = FIRST_BAR if plain else None
        yield Figure("prompts", f"TTFT of one, {method}", median(one[1:]), "ms", bar, note=f"the first {one[0]:.1f}")


def _read_all(llm: LLMView, prompts: Sequence[list[int]]) -> None:
    for output in llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True)):
        if output.error is not None:
            raise output.error


def first_token(llm: LLMView, prompt: list[int]) -> int:
    """Prefill a prompt and return its first token."""
    for chunk in llm.stream(prompt, SamplingParams(max_tokens=1, ignore_eos=True)):
        if chunk.pieces:
            return chunk.pieces[0].token
    raise SystemExit("An answer ended without a token, expected one.")


def milliseconds(call: Callable[[], object]) -> float:
    """Return the duration of a call that waits for its result."""
    started = time.perf_counter()
    call()
    return 1000.0 * (time.perf_counter() - started)


def transformers_figures(recorded: RecordedPair, sizes: Sizes) -> Iterator[Figure]:
    """Measure a long prompt up to its first token, by turns with transformers on the same weights."""
    try:
        from compare_transformers import check, forward_prompt, settle

        from specbranch.lab.bench.other_engines.transformers_weights import as_transformers

        runner: Any = recorded.llm.target_runner
        model = as_transformers(runner.decoder)
    except (ImportError, SpecBranchError, AttributeError, TypeError) as reason:
        yield Figure("transformers", "a long prompt", None, "times", LONG_BAR, note=f"transformers cannot: {reason}")
        return
    plain = recorded.llm.using(BASELINE)
    prompt = long_prompt(plain.tokenizer, min(sizes.read, plain.context_length - 1))
    check(runner, model, prompt[:60])
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: first_token(plain, prompt),
        "transformers": lambda: forward_prompt(model, prompt),
    }
    turns = []
    for _ in range(1 + sizes.repeats):
        settle(runner.device)
        turns.append({way: milliseconds(call) for way, call in ways.items()})
    ratio = median(turn["ours"] / turn["transformers"] for turn in turns[1:])
    yield Figure("transformers", f"{len(prompt)} tokens, ours over transformers", ratio, "times", LONG_BAR)
    for way in ways:
        yield Figure("transformers", f"{len(prompt)} tokens, {way}", median(turn[way] for turn in turns[1:]), "ms")


def step_figures(device: str, sizes: Sizes) -> Iterator[Figure]:
    """Measure decode steps of many rows: one row of each of many sequences, and chains of 16 rows of several."""
    import torch
    from measure_gpu import WORKS, Case, bandwidth, measure

    wanted = dict.fromkeys(STEP_BARS) if sizes.shape != SMALL.shape else {4: None}
    given = argparse.Namespace(device=device, replays=40, sequences=list(wanted), chains=[], plain=False)
    long = argparse.Namespace(**vars(given) | {"sequences": [], "chains": [CHAINS[n] for n in wanted if n in CHAINS]})
    with torch.inference_mode():
        peak = bandwidth(device)
        found = measure(Case.of(f"{sizes.shape}@{CONTEXT}"), given, peak)
        found += measure(Case.of(sizes.shape), long, peak) if long.chains else []
    bars = FEW_ROWS_BARS | {f"{rows} sequences": bar for rows, bar in STEP_BARS.items()}
    bars |= {f"{chains} chains": STEP_BARS[rows] for rows, chains in CHAINS.items()}
    for entry in found:
        bar, named = bars.get(entry["work"]), f"{sizes.shape}, {entry['work']}"
        note = f"floor {entry['floor_ms']:.2f}, without attention {entry['no_attention_ms']:.2f}"
        if entry["case"] != sizes.shape or entry["work"] not in WORKS:  # these were timed behind the short context
            yield Figure("steps", named, entry["ms"], "ms", bar, note=note)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the pair of other cases comes next


def load_figures(recorded: RecordedPair, sizes: Sizes) -> Iterator[Figure]:
    """Measure many requests at once as `bench load` does: short prompts, then those of the shipped suites."""
    short = _loaded(recorded, [short_suite()], sizes, sizes.turns)
    for row in short:
        plain, speed = row.method == BASELINE, f"tokens/s, {row.at_once} at once, {row.method}"
        bars = (LOAD_BAR, LOAD_FIRST_BAR) if plain else (None, None)
        note = f"{row.over_plain:.2f} × plain decoding; {row.differing} texts differ"
        yield Figure("load", speed, row.tokens_per_second, "tokens/s", bars[0], at_least=True, note=note)
        yield Figure("load", f"TTFT p50, {row.method}", row.ms_to_first[0], "ms", bars[1])
        middle, _, slow = row.ms_between
        yield Figure("load", f"gaps p50, {row.method}", middle, "ms")
        yield Figure("load", f"gaps p99, {row.method}", slow, "ms")
        yield Figure("load", f"gaps p99 over p50, {row.method}", slow / max(middle, 1e-9), "times", GAP_BAR)
        yield Figure("load", f"texts that differ, {row.method}", row.differing, "texts", 0.0)
    if sizes is not SMALL:
        for row in _loaded(recorded, load_suites([ALL_SHIPPED], limit=4), sizes, 1):
            note = (
                f"TTFT p50 {row.ms_to_first[0]:.0f} ms, gaps p50 {row.ms_between[0]:.2f}, p99 {row.ms_between[2]:.2f}"
            )
            yield Figure("load", f"shipped suites, {row.method}", row.tokens_per_second, "tokens/s", note=note)


def _loaded(recorded: RecordedPair, suites: Sequence[Suite], sizes: Sizes, turns: int) -> list[LoadRow]:
    workload, methods = Workload(max_tokens=sizes.tokens), methods_of(recorded.llm)[1:]
    return run_by_wall(recorded, suites, workload, methods, [sizes.at_once], turns, lambda *_: None)


def arriving_figures(llm: LLM, sizes: Sizes) -> Iterator[Figure]:
    """Measure the gaps of decoding requests before a long prompt arrives, and until it is read. Closes the LLM."""
    length = sizes.arriving_long if llm.context_length >= LONG_CONTEXT else sizes.arriving
    prompt = long_prompt(llm.tokenizer, length)
    others = short_prompts(llm.tokenizer, sizes.decoding)
    yield from asyncio.run(arrivals_among(llm, sizes, prompt, others))


async def arrivals_among(llm: LLM, sizes: Sizes, prompt: list[int], others: list[list[int]]) -> list[Figure]:
    """Measure the gaps of `others` before a prompt arrives, and until it is read. Closes the LLM."""
    figures = []
    async with AsyncLLM(llm) as engine:
        for method in methods_of(llm):
            found = [await _arrival(engine, method, sizes, prompt, others) for _ in range(sizes.arrivals)]
            ratios = [slow / middle for middle, slow, _ in found]
            middle, slow, read = (median(values) for values in zip(*found, strict=True))
            what = f"{len(prompt)} tokens among {len(others)}, {method}"
            note = f"read in {read:.0f} ms; the first time {ratios[0]:.2f}"
            figures += [
                Figure(
                    "arrival", f"{what}: gaps p99 during over p50 before", median(ratios), "times", GAP_BAR, note=note
                ),
                Figure("arrival", f"{what}: gaps p50 before", middle, "ms"),
                Figure("arrival", f"{what}: gaps p99 during", slow, "ms"),
            ]
        late = getattr(engine.stats(), "late_captures", None)
        figures.append(Figure("arrival", "late captures since the load", late, "captures", 0.0))
    return figures


async def _arrival(
    engine: AsyncLLM, method: str, sizes: Sizes, prompt: list[int], others: list[list[int]]
) -> tuple[float, float, float]:
    """Return p50 of the gaps before a prompt arrives, p99 until it is read, and how long that takes, in ms."""
    arrived = [Arrivals() for _ in others]
    running = []
    for one, ids in zip(arrived, others, strict=True):
        params = SamplingParams(max_tokens=engine.context_length - len(ids), ignore_eos=True)
        running.append(engine.submit(ids, params, {"method": method, "on_round": one.note}))
    while min(len(one.times) for one in arrived) < sizes.before:
        await asyncio.sleep(0.005)
    sent = time.perf_counter()
    await engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True), {"method": method})
    read = time.perf_counter()
    for submission in running:
        submission.cancel()
    for submission in running:
        with suppress(RequestCancelled):
            await submission.output()
            raise SystemExit("A request ended before the long prompt was read, expected it to decode all the time.")
    gaps = [pair for one in arrived for pair in pairwise(one.times[sizes.before // 4 :])]  # less the prefill's rounds
    before = [later - earlier for earlier, later in gaps if later <= sent]
    during = [later - earlier for earlier, later in gaps if later > sent and earlier < read]
    return 1000.0 * median(before), 1000.0 * percentile(during, 99), 1000.0 * (read - sent)


def percentile(values: Sequence[float], part: int) -> float:
    """Return the value below which `part` percent lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * part // 100, len(ordered) - 1)]


def fresh_figures(order: FreshOrder, sizes: Sizes, folder: str) -> Iterator[Figure]:
    """Measure the first request of a fresh process against its tenth, by batch size.

    `specbranch` has the experience of an earlier process.
    """
    environment = {"SPECBRANCH_EXPERIENCE": f"{folder}/experience-{order.method}"}
    if order.method == "specbranch":
        ask_fresh(replace(order, at_once=sizes.batches), environment)
    for count in sizes.batches:
        found = ask_fresh(replace(order, at_once=(count,)), environment)
        (asked,) = found.asked
        case, what = f"fresh-{order.method}", f"{count} at once, first over tenth"
        note = f"{asked.first:.0f} and {asked.tenth:.0f} tokens/s, loaded in {found.load_seconds:.1f} s"
        yield Figure(case, what, asked.first / asked.tenth, "times", FRESH_BAR, at_least=True, note=note)
        yield Figure(case, f"{count} at once, late captures", found.late_captures, "captures", 0.0)


def warm_up_figures(order: FreshOrder, small: FreshOrder, folder: str) -> Iterator[Figure]:
    """Measure loading in fresh processes: with an empty and with a filled cache of kernels, and without a warm-up.

    `small`: the same pair in its own shape.
    """
    environment = {"TRITON_CACHE_DIR": f"{folder}/kernels", "SPECBRANCH_EXPERIENCE": f"{folder}/experience-load"}
    cold, warm = ask_fresh(order, environment), ask_fresh(order, environment)
    lazy = ask_fresh(replace(order, warm_up="lazy"), environment)
    known = knows_warm_up()
    for what, found, bar in (("empty", cold, COLD_BAR), ("filled", warm, WARM_BAR)):
        told = found.warm_up_seconds
        seconds = told if told is not None else found.load_seconds - lazy.load_seconds if known else None
        note = f"loaded in {found.load_seconds:.1f} s, without a warm-up in {lazy.load_seconds:.1f} s"
        yield Figure("warm-up", f"warm-up, {what} kernel cache", seconds, "s", bar, note=note)
    ask_fresh(small, environment)
    found = ask_fresh(small, environment)
    yield Figure("warm-up", "own shape loaded, second process", found.load_seconds, "s", SMALL_LOAD_BAR)
