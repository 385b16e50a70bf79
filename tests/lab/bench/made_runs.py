"""Runs to make results of: plain ones with given seconds, and real ones of toy models on a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from specbranch.config import SpeculativeConfig
from specbranch.lab.bench.run_store import PromptRun, output_digest
from specbranch.provenance import Provenance
from toybench import PROFILE, Case, Ending, decode, virtual_clock

PROVENANCE = Provenance(
    made="2026-03-01T12:00:00+00:00",
    commit="0123456789ab",
    python="3.11.2",
    versions={"specbranch": "0.1.0", "torch": "2.13.0"},
    hardware={"processor": "Toy Processor & Sons", "cores": 2},
    pairs={"toy": {"target": "law of 6 tokens", "draft": "the same, drifted"}},
    workload={"max_tokens": 48, "seed": 7},
    settings={"repeats": 1, "warm_up": 1},
    suites={"own-code": "shipped", "own-chat": "shipped"},
)
METHODS = ("autoregressive", "speculative", "adaptive", "pearl", "specbranch", "lookup")
DRIFTS = {"own-code": 0.2, "own-math": 0.5, "own-chat": 0.7, "own-summary": 0.35}


def run(
    method: str, prompt: str = "p1", repeat: int = 0, *, tokens: int = 101, seconds: float = 1.0, **others: Any
) -> PromptRun:
    """A run of one turn, of which only tokens and seconds matter."""
    turn = {"tokens": tokens, "ttft_seconds": 0.5, "decode_seconds": seconds, **others.pop("turn", {})}
    given: dict[str, Any] = {
        "pair": "toy",
        "suite": "own-code",
        "temperature": 0.0,
        "digest": f"words of {prompt}",
        "output": f"text of {prompt}",
    }
    return PromptRun(method=method, prompt=prompt, repeat=repeat, turns=(turn,), **{**given, **others})


def slowed(one: PromptRun, factor: float, **others: Any) -> PromptRun:
    """The same run with its decoding stretched."""
    times = ("decode_seconds", "draft_idle_seconds", "target_idle_seconds")
    turns = tuple(
        {**turn, **{name: turn[name] * factor for name in times if turn.get(name) is not None}} for turn in one.turns
    )
    return replace(one, turns=turns, **others)


@cache
def toy_runs(
    prompts: int = 4, suites: tuple[str, ...] = ("own-code", "own-chat"), clock: str = "toy-profile"
) -> tuple[PromptRun, ...]:
    """Every method on toy models, decided and counted by the real thing, timed by a profile."""
    return tuple(
        _toy_run(method, suite, number, clock) for suite in suites for number in range(prompts) for method in METHODS
    )


def _toy_run(method: str, suite: str, number: int, clock: str) -> PromptRun:
    setting: Mapping[str, Any] = {} if method == "autoregressive" else {"num_speculative_tokens": 4}
    turns, outputs = [], []
    for turn in range(2):
        case = Case((1, 2, number % 6, turn), 1.0, seed=100 * number + turn, ending=Ending("length", max_tokens=48))
        session = decode(
            virtual_clock(DRIFTS[suite], profile=PROFILE), case, SpeculativeConfig(method=method, **setting)
        )
        turns.append(session.stats.summary())
        outputs.append(session.output)
    return PromptRun(
        pair="toy",
        suite=suite,
        method=method,
        temperature=1.0,
        prompt=f"{suite}/{number}",
        digest=f"{number}",
        repeat=0,
        turns=tuple(turns),
        output=output_digest(outputs),
        clock=clock,
        setting=setting,
    )
