"""Chains and branches on a GPU's runner: steps launched ahead draft what steps ordered one by one draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specbranch.config import SamplingParams
from specbranch.core.orders import Branch, Context, Draft, Plan
from specbranch.core.request import Request
from specbranch.exec.drafter import Drafter, NoNumber
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from tiers import each_value
from tiny_models import saved, some_tokens, tiny

torch.set_num_threads(1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLANS = {
    "chain": Plan(6),
    "unsure": Plan(8, stop_below=0.05),
    "kept unsure": Plan(8, stop_below=0.05, keep_unsure=True),
    "entropy": Plan(8, stop_below=0.02, keep_unsure=True, measure="entropy"),
    "behind what is pending": Plan(5, ((3, 1),)),
    "branches": Plan(5, ((3, 4),), heads="top"),
    "branches at two places": Plan(4, ((1, 2), (3, 3)), heads="top"),
    "as long as the target works": Plan(8, ((3, 2),), heads="top", until="target"),
}


class StepByStep(Drafter):
    """A drafter whose every step is ordered."""

    lets_grow = False


class Counting(GpuRunner):
    """Counts the steps that were taken ahead."""

    ahead = 0

    def run_ahead(self, *given: Any) -> int:
        steps = super().run_ahead(*given)
        self.ahead += steps
        return steps


@pytest.fixture(scope="module", params=DEVICES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = saved(tiny("llama"), tmp_path_factory.mktemp("llama"))
    return load_native(folder, context_length=600, device=request.param).decoder


def after(count: int) -> Callable[[], bool]:
    """The target is done once it was asked so often."""
    left = [count]

    def done() -> bool:
        left[0] -= 1
        return left[0] < 0

    return done


def drafted(drafter: Drafter, plan: Plan, prefix: int, params: SamplingParams) -> list[tuple[Branch, ...]]:
    """Draft twice: behind a text, and behind what the first draft made of it."""
    text = some_tokens(prefix, seed=prefix)
    drafter.open(0, Request(params, 3, prefix - 2))
    pending = 3 if plan.forks else 0
    found: list[tuple[Branch, ...]] = []
    for turn in range(2):
        order = Draft(Context(0, tuple(text)), plan, pending, number=turn)
        (branches,) = drafter.draft({0: order}, after(4)).values()
        found.append(branches)  # type: ignore[arg-type]
        text = [*text, *found[-1][0].tokens[: 3 + turn], 5]
    slots = drafter.slots(0)
    found.append((Branch(0, tuple(slots.tokens), tuple(map(float, slots.parents))),))
    drafter.runner.check()  # type: ignore[attr-defined]
    drafter.free(0)
    return found


def tokens_of(found: list[tuple[Branch, ...]]) -> list[list[tuple[int, ...]]]:
    return [[branch.tokens for branch in branches] for branches in found]


@each_value
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("prefix", [20, 252, 256])
@pytest.mark.parametrize("name", PLANS)
def test_what_is_drafted_ahead_is_what_is_drafted_step_by_step(
    name: str, prefix: int, temperature: float, decoder: Any
) -> None:
    plan, params = PLANS[name], SamplingParams(temperature=temperature)
    ahead = Counting(decoder, 600)
    drafters = [Drafter(ahead), StepByStep(GpuRunner(decoder, 600))]
    one, other = (drafted(drafter, plan, prefix, params) for drafter in drafters)
    assert tokens_of(one) == tokens_of(other)
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.confidence == pytest.approx(b.confidence, rel=1e-3)
    assert ahead.ahead > 0
    if not plan.forks:  # what is pending is read again: of what was read ahead nothing is held to be asked about
        assert drafters[0].rows_fed == drafters[1].rows_fed


def test_lanes_without_room_or_with_shaped_tokens_are_asked_for_step_by_step(decoder: Any) -> None:
    for params, tail in ((SamplingParams(temperature=0.9, top_p=0.8), 128), (SamplingParams(), 8)):
        ahead = Counting(decoder, 600, tail)
        one, other = (
            drafted(drafter, PLANS["branches"], 20, params)
            for drafter in (Drafter(ahead), StepByStep(GpuRunner(decoder, 600, tail)))
        )
        assert [[b.tokens for b in branches] for branches in one] == [
            [b.tokens for b in branches] for branches in other
        ]
        assert ahead.ahead == 0


def test_a_draft_that_makes_no_sense_is_found_out_ahead_too(decoder: Any) -> None:
    drafter = Drafter(runner := GpuRunner(decoder, 600))
    drafter.open(0, Request(SamplingParams(), 3, 18))
    heard = [0]

    def spoilt(line: Any) -> Any:
        heard[0] += 1
        found = line()
        if heard[0] == 2:
            found[:, 2] = float("nan")
        return found

    plain = runner.launcher.chosen
    runner.launcher.chosen = lambda *given: (lambda ran, line: (ran, lambda: spoilt(line)))(*plain(*given))  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(NoNumber):
        drafter.draft({0: Draft(Context(0, tuple(some_tokens(20, seed=20))), Plan(6))})
    assert heard == [2]
    drafter.free(0)
    runner.check()
