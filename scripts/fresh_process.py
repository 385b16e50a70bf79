"""Load a pair in a process of its own and ask it some prompts: how fast the first answer is, and what loading takes.

Owns both sides: `ask_fresh` starts the process; run as a script, this file is the process. Invariant: what a process
has learned or compiled reaches another one only through the folders in its environment.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OTHERS = 8  # requests between the first and the last, which ask the same
CHILD_SECONDS = 400.0  # a process that takes longer is ended


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshOrder:
    """What a fresh process does: which pair it loads, and what it asks."""

    target: str
    draft: str | None
    device: str | None
    method: str
    at_once: tuple[int, ...] = ()  # prompts of a request; of each number one request, eight others, the first again
    tokens: int = 96
    warm_up: str | None = None  # None: the engine's default


@dataclass(frozen=True, slots=True)
class Asked:
    """The tokens/s of the first request and of the tenth, which are the same prompts."""

    at_once: int
    first: float
    tenth: float


@dataclass(frozen=True, slots=True)
class Fresh:
    """What a fresh process found."""

    load_seconds: float
    warm_up_seconds: float | None  # None: the engine does not tell
    late_captures: int | None
    asked: tuple[Asked, ...]


def ask_fresh(order: FreshOrder, environment: Mapping[str, str]) -> Fresh:
    """Start a process, wait for it, and return what it found."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(order))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"A fresh process ended with {done.returncode}, expected 0. It said: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Fresh(**found | {"asked": tuple(Asked(**one) for one in found["asked"])})


def late_captures(llm: Any) -> int | None:
    """Return how many graphs were captured and kernels compiled after the load; None: this engine does not count."""
    return getattr(llm.scheduler.snapshot(), "late_captures", None)


def warm_up_seconds(llm: Any) -> float | None:
    """Return how long the warm-up at load took; None: this engine does not tell."""
    return getattr(llm, "warm_up_seconds", None)


def knows_warm_up() -> bool:
    """True if this engine has the argument `warm_up`."""
    from specbranch import LLM

    return "warm_up" in inspect.signature(LLM).parameters


def run_order(order: FreshOrder) -> Fresh:
    """Load the pair and ask, in this process."""
    import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
    from specbranch import LLM

    given: dict[str, Any] = {"warm_up": order.warm_up} if order.warm_up and knows_warm_up() else {}
    started = time.perf_counter()
    with LLM(
        order.target, order.draft, order.method, device=order.device, options={"prefix_cache": False}, **given
    ) as llm:
        loaded = time.perf_counter() - started
        asked = tuple(first_and_tenth(llm, count, order.tokens) for count in order.at_once)
        return Fresh(loaded, warm_up_seconds(llm), late_captures(llm), asked)


def first_and_tenth(llm: Any, at_once: int, tokens: int) -> Asked:
    """Ask some prompts at once, then eight times others, then the first ones again."""
    from prefill_prompts import all_prompts

    prompts = all_prompts(llm.tokenizer, llm.context_length - tokens)
    first, others = prompts[:at_once], prompts[at_once:]
    between = [[others[(turn * at_once + at) % len(others)] for at in range(at_once)] for turn in range(OTHERS)]
    rates = [tokens_per_second(llm, request, tokens) for request in (first, *between, first)]
    return Asked(at_once, rates[0], rates[-1])


def tokens_per_second(llm: Any, prompts: Sequence[list[int]], tokens: int) -> float:
    """Answer prompts at once; return the tokens/s of all together, prefill included."""
    from specbranch import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(list(prompts), params)
    seconds = time.perf_counter() - started
    if failed := [output.error for output in outputs if output.error is not None]:
        raise SystemExit(f"A request failed, expected an answer: {failed[0]}")
    return sum(len(output.token_ids) for output in outputs) / seconds


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    print(json.dumps(asdict(run_order(FreshOrder(**values | {"at_once": tuple(values["at_once"])})))))
