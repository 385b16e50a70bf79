"""Checks a draft worker on a network: whether it answers, how far away it is, and whether its drafts pay.

Owns these checks and their wording. Invariant: gains are measured, on the same prompts with and without the worker, in
turns; nothing is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from specbranch.assembly import ModelChoice, assemble
from specbranch.config import SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import PLAIN, find_method
from specbranch.core.rehearsal import rehearse
from specbranch.exec.process import Process
from specbranch.lab.doctor.finding import Finding, note, well
from specbranch.lab.doctor.gains import GAIN
from specbranch.lab.measure.loaded_pair import suite_prompts
from specbranch.lab.measure.one_request import greedy_session
from specbranch.progress import StepsDone

LINK_TOKENS = 64  # of each answer
LINK_TURNS = 2  # repetitions; the first also warms up, so the shorter time of each prompt counts
TIMING_SECONDS = 2.0  # of forwards, draft steps and the round trip
METHODS_TRIED = (PLAIN, "auto", "specbranch")  # plain decoding, the best without a draft, with the worker's drafts


def link(target: ModelChoice, draft: ModelChoice, progress: StepsDone) -> Iterator[Finding]:
    """Reach the worker, time its drafts, and say whether they pay; raises SpecBranchError if it cannot be reached."""
    progress("Loading the target", 0, 3)
    parts = assemble(target, draft, "process")
    executor = parts.executor
    assert isinstance(executor, Process) and executor.served
    with closing(executor):
        served, costs = executor.served, MeasuredCosts(overlap=True)
        yield well("Link", f"{draft.name} serves {served.name} on {served.device}, with the target's vocabulary.")
        progress("Timing both", 1, 3)
        rehearse(executor, costs, parts.verifier.runner.vocabulary, True, TIMING_SECONDS)
        progress("Trying three prompts", 2, 3)
        prompts = suite_prompts(parts.tokenizer)
        seconds = _decoded(executor, costs, prompts, parts.tokenizer.eos_ids)
        yield _verdict(executor, costs, seconds)
    progress("Done", 3, 3)


def _decoded(
    executor: Process, costs: MeasuredCosts, prompts: list[list[int]], eos: tuple[int, ...]
) -> dict[str, float]:
    """Return the seconds of decoding the prompts, by method: of several turns the shortest."""
    experience = Experience(costs)
    shortest: dict[tuple[str, int], float] = {}
    for turn in range(LINK_TURNS * len(prompts)):
        at = turn % len(prompts)
        for method in METHODS_TRIED:
            taken = _one(executor, experience, method, prompts[at], eos)
            shortest[method, at] = min(shortest.get((method, at), taken), taken)
    return {method: sum(shortest[method, at] for at in range(len(prompts))) for method in METHODS_TRIED}


def _one(executor: Process, experience: Experience, method: str, prompt: list[int], eos: tuple[int, ...]) -> float:
    session = greedy_session(prompt, LINK_TOKENS, eos)
    loop = Loop(executor, costs=experience.costs if isinstance(experience.costs, MeasuredCosts) else None)
    config = SpeculativeConfig(method=method)
    loop.join(session, find_method(method, method == "specbranch").start(session, config, experience))
    try:
        while loop.live:
            loop.step()
    finally:
        loop.remove(session)
    if session.error is not None:
        raise session.error
    return session.stats.decode_seconds


def _verdict(executor: Process, costs: MeasuredCosts, seconds: dict[str, float]) -> Finding:
    plain, without, linked = (seconds[method] for method in METHODS_TRIED)
    ms = 1e3
    parts = (
        f"a round trip takes {executor.round_trip * ms:.2f} ms, a draft step {costs.draft_seconds(1) * ms:.2f} ms, a "
        f"target forward {costs.target_seconds(1) * ms:.2f} ms"
    )
    gains = f"{plain / linked:.2f} times as fast as plain decoding, and {without / linked:.2f} times as fast as without"
    if without / linked >= GAIN:
        return well("Link", f"it pays: with it, answers come {gains} a draft; {parts}.")
    advice = "Decode without it (leave --draft out), or bring the worker nearer: a closer machine, a faster draft."
    return note("Link", f"it does not pay: with it, answers come {gains} a draft; {parts}.", advice)
