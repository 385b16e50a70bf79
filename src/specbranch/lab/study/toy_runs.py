"""The charged latency of the real methods on toy models with known agreement, next to the formulas' prediction.

Owns the comparison behind "the model is within 10 %". Invariant: no formula is used here. Tokens come from
`core.methods` on a pair of toy models, time from the virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Branch, Plan
from specbranch.core.policy import Fixed
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.exec.verifier import Verifier
from specbranch.lab.study import formulas
from specbranch.lab.toys.ranked import ranked_pair
from specbranch.lab.toys.toys import ToyRunner

MethodName = Literal["speculative", "pearl", "specbranch"]
TOY_TOKENS = 1000
TOY_PROMPT = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Case:
    """A method with fixed lengths on a pair with known agreement."""

    method: MethodName
    rates: tuple[float, ...]  # by the draft's choice
    c: float
    gamma: int  # as the formulas count it
    width: int = 1

    @property
    def alpha(self) -> float:
        """The probability that a drafted token is accepted."""
        return self.rates[0]

    @property
    def hit(self) -> float:
        """The probability that the target's token is among the heads."""
        return sum(self.rates[: self.width])


@dataclass(frozen=True, slots=True)
class PredictedSteps:
    """Draft steps per token: predicted and charged."""

    case: Case
    predicted: float
    on_toys: float

    @property
    def off(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.on_toys - 1.0


class FixedLengths(Fixed):
    """Chains of one length and branches of another, always with the same number of heads, as the formulas assume."""

    def __init__(self, chain: int, branch: int, width: int) -> None:
        super().__init__(chain)
        self.branch = branch
        self.width = width

    def fork(self, pending: Branch) -> Plan:
        """Plan branches after the whole of the pending chain."""
        return Plan(self.branch, ((len(pending.tokens), self.width),))


def plain_ratio(c: float) -> CostProfile:
    """Return the costs that the formulas assume: a draft step costs 1, a target forward c for up to 16 tokens."""
    target, draft = ((1, c), (16, c), (32, 2 * c)), ((1, 1.0), (4, 1.0), (14, 2.0))
    return CostProfile(target, draft, note="a plain ratio of costs")


def predict(case: Case) -> float:
    """Return draft steps per token by the model of the mechanism."""
    if case.method == "speculative":
        return formulas.serial_latency(case.alpha, case.c, case.gamma)
    latency = formulas.pearl_latency if case.method == "pearl" else formulas.two_stage_latency
    return latency(case.alpha, case.c, case.gamma, case.hit)


def charge(case: Case, tokens: int = TOY_TOKENS, seed: int = 0) -> float:
    """Return draft steps per token of the real method on the virtual clock."""
    target, draft = (ToyRunner(law, context_length=tokens + 128) for law in ranked_pair(case.rates, seed))
    loop = Loop(VirtualClock(Verifier(target), MeteredDrafter(draft), plain_ratio(case.c)))
    request = Request(SamplingParams(max_tokens=tokens), seed, len(TOY_PROMPT))
    session = Session(0, TOY_PROMPT, request, tokens + 64)
    # A branch of the two-stage method is a head and a chain; PEARL counts its head among the γ.
    branch = case.gamma + 1 if case.method == "specbranch" else case.gamma
    policy = FixedLengths(case.gamma, branch, case.width)
    loop.join(session, METHODS[case.method].run(session, SpeculativeConfig(method=case.method), policy))
    while loop.live:
        loop.step()
    session.stats.check()
    return session.stats.decode_seconds / (session.stats.emitted - 1)


def compare(case: Case, tokens: int = TOY_TOKENS, seed: int = 0) -> PredictedSteps:
    """Predict and charge one case."""
    return PredictedSteps(case, predict(case), charge(case, tokens, seed))
