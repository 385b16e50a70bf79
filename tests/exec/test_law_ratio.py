"""Under the ratio rule every method emits the target's own joint law, against exact enumeration; planted faults are
caught.

Each case also counts the events it exists for: a law test in which nothing was rejected or branched would show nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from exact import CAUGHT, PROMPT, SOUND, Drawn, Pair, draw, draw_with, joint_law, requests
from specbranch.config import HeadKind, PolicyName, SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.methods import METHODS, MethodRounds
from specbranch.core.noise import Purpose
from specbranch.core.orders import Branch, Drafted, DraftOrder, Plan, Sparse, Verdict
from specbranch.core.policy import Confidence, Entropy, Policy
from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Done, Feed, Proposal, Trial
from specbranch.core.session import Session
from specbranch.core.verify import Uniform
from specbranch.exec.drafter import Announce, Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import never
from specbranch.lab.toys.toys import ListLaw, Logits, State, ToyLaw, ToyRunner, ToySampler
from tiers import tiered
from toybench import SHARED, wandering

LENGTH = 5  # tokens of the joint window: several rounds of every method
SEEDS = 3000
QUICK_SEEDS = 900  # of cases in the quick tier
ENOUGH = 100  # times each event must happen
TARGET = ToyLaw(vocabulary=4, seed=4, sharpness=1.3)
DRAFT = ToyLaw(vocabulary=4, seed=4, sharpness=1.3, drift=0.6)


@dataclass(frozen=True, slots=True)
class ReducedLaw(ToyLaw):
    """A draft whose output head knows only the first three tokens."""

    def logits(self, state: State) -> Logits:
        return DRAFT.logits(state)[:3]


PAIR = Pair(TARGET, DRAFT)
REDUCED = Pair(TARGET, ReducedLaw(vocabulary=3))


@dataclass(frozen=True, slots=True)
class Case:
    method: str
    needs: tuple[str, ...] = ()  # counters that must reach ENOUGH
    policy: PolicyName | None = None
    heads: HeadKind | None = None
    temperature: float = 1.0
    pair: Pair = PAIR
    seeds: int = SEEDS
    length: int = 3
    stop_below: float = 0.55
    make: Callable[[], Policy] | None = field(default=None, compare=False)

    @property
    def config(self) -> SpeculativeConfig:
        return SpeculativeConfig(
            method="auto" if self.method == "wandering" else self.method,
            rule="ratio",
            num_speculative_tokens=self.length,
            policy=self.policy,
            heads=self.heads,
            stop_below=self.stop_below,
            ngram_max=2,
            lookahead_window=6,
            lookahead_ngram=3,
            lookahead_candidates=6,
        )

    def start(self, session: Session) -> MethodRounds:
        method = METHODS["auto" if self.method == "wandering" else self.method]
        if self.method == "wandering":
            return wandering(session)
        if method.plans(self.config) and not self.make:
            return method.start(session, self.config, Experience(SHARED))
        return (
            method.run(session, self.config, self.make())
            if self.make
            else method.start(session, self.config, Experience())
        )

    def draw(self, seeds: int | None = None, first: int = 0) -> Drawn:
        params = SamplingParams(temperature=self.temperature, max_tokens=LENGTH)
        return draw(self.pair, self.start, requests(params, "ratio", range(first, first + (seeds or self.seeds))))

    def p_value(self, drawn: Drawn) -> float:
        return drawn.p_value(joint_law(self.pair.target, PROMPT, LENGTH, self.temperature))


INSIDE, ALL, TRIMMED = "rounds_rejected_inside", "rounds_all_accepted", "dropped"
HIT, OTHER, SIBLING = "branch_hits", "branch_hits_other", "siblings"
CHAIN, FORK, HEDGE = (INSIDE, ALL), (INSIDE, ALL, HIT), (INSIDE, ALL, HIT, OTHER, TRIMMED)


def strict_entropy() -> Entropy:
    """AdaEDL with a threshold that four tokens can fall under: 1 − sqrt(0.2·log 4) is 0.47."""
    return Entropy(3, threshold=0.55)


CASES = {
    "autoregressive": Case("autoregressive"),
    "speculative": Case("speculative", CHAIN),
    "speculative-confidence": Case("speculative", CHAIN, policy="confidence"),
    "adaptive": Case("adaptive", CHAIN, make=strict_entropy),
    "lookup": Case("lookup", CHAIN),
    "lookahead": Case("lookahead", (ALL, SIBLING)),  # its pool is filled too late for more of a window of five tokens
    "pearl-sampled": Case("pearl", FORK, heads="sampled"),
    "pearl-top": Case("pearl", FORK, heads="top"),
    "pearl-confidence": Case("pearl", (ALL, HIT, OTHER, TRIMMED), policy="confidence"),
    "specbranch-sampled": Case("specbranch", HEDGE, policy="confidence", heads="sampled", seeds=8000),
    "specbranch-top": Case("specbranch", HEDGE, policy="confidence", heads="top", seeds=8000),
    "specbranch-fixed": Case("specbranch", FORK, policy="fixed", length=2),
    "specbranch-entropy": Case("specbranch", FORK, make=strict_entropy),
    "paper-sampled": Case("specbranch", HEDGE, policy="paper", heads="sampled", seeds=8000),
    "paper-top": Case("specbranch", HEDGE, policy="paper", heads="top", seeds=8000),
    "last-sampled": Case("specbranch", HEDGE, policy="last", heads="sampled", seeds=8000),
    "specbranch-cool": Case("specbranch", (ALL, HIT, OTHER, TRIMMED), policy="confidence", temperature=0.6),
    "specbranch-hot": Case("specbranch", (ALL, HIT, OTHER, TRIMMED), policy="confidence", heads="top", temperature=1.5),
    "speculative-reduced": Case("speculative", CHAIN, pair=REDUCED),
    "specbranch-reduced": Case("specbranch", (INSIDE, ALL, HIT, TRIMMED), policy="confidence", pair=REDUCED),
    "tree": Case("tree", (INSIDE, ALL, SIBLING), seeds=5000),
    "tree-reduced": Case("tree", (INSIDE, ALL, SIBLING), pair=REDUCED, seeds=5000),
    "specbranch": Case("specbranch", (INSIDE, ALL, HIT, SIBLING), seeds=5000),
    "wandering": Case("wandering", (INSIDE, ALL, HIT, OTHER, SIBLING), seeds=10000),
    "auto": Case("auto", (INSIDE, ALL, HIT, SIBLING), seeds=500),
    "few-trees": Case("tree", (INSIDE, ALL, SIBLING), seeds=500),
}
# the quick tier's, which would miss smaller faults than the whole cases
CASES |= {f"few-{name}": replace(CASES[name], seeds=QUICK_SEEDS) for name in ("adaptive", "pearl-sampled")}
CASES |= {"few-lookahead": replace(CASES["lookahead"], seeds=2000)}
QUICK = ("few-adaptive", "few-lookahead", "few-pearl-sampled", "auto", "few-trees")


@pytest.mark.parametrize("name", tiered(CASES, QUICK.__contains__))
def test_every_method_emits_the_targets_joint_law(name: str) -> None:
    case = CASES[name]
    drawn = case.draw(first=1_000_000 * list(CASES).index(name))  # no two cases share their variates
    too_few = {event: drawn.totals[event] for event in case.needs if drawn.totals[event] < ENOUGH}
    assert not too_few, f"the case shows nothing of {too_few}"
    assert case.p_value(drawn) > SOUND


@pytest.mark.parametrize(("name", "plain"), [("speculative-confidence", "speculative"), ("adaptive", "speculative")])
def test_the_stopping_policies_of_the_law_test_do_stop_early(name: str, plain: str) -> None:
    assert CASES[name].draw(100).totals["drafted"] < 0.9 * CASES[plain].draw(100).totals["drafted"]


class GreedyResidual(ListLaw):
    """Fault: after a rejection the likeliest remaining token is taken instead of drawing one."""

    def residual(self, q: Sparse) -> ListLaw:
        rest = super().residual(q).probs
        return ListLaw([float(p == max(rest)) for p in rest])


class GreedyResidualSampler(ToySampler):
    def law(self, row: Logits, spot: Spot) -> ListLaw:
        return GreedyResidual(super().law(row, spot).probs)


class OneUniform(ToyRunner):
    """Fault: the residual is drawn with the variate that decided the rejection."""

    def _uniform(self, trial: Trial) -> Uniform:
        right = super()._uniform(trial)

        def uniform(depth: int, purpose: Purpose, attempt: int) -> float:
            return right(depth, "accept" if purpose == "residual" else purpose, attempt)

        return uniform


class OneForABlock(ToyRunner):
    """Fault: all tokens of a block are drawn with the variate of its first."""

    def _uniform(self, trial: Trial) -> Uniform:
        right = super()._uniform(trial)
        return lambda depth, purpose, attempt: right(0, purpose, attempt)


class CutAtOwnProbability(Confidence):
    """Fault: a token is kept or not by its own q(x), so unlikely draws are never tested."""

    def trim(self, branch: Branch) -> Branch:
        laws = branch.q or ()
        unsure = (
            i for i, (t, q) in enumerate(zip(branch.tokens, laws, strict=True)) if q and q.prob(t) < self.stop_below
        )
        return branch.cut(0, next(unsure, len(branch.tokens)))


class CutByNextConfidence(Confidence):
    """Fault: a token is kept only if the draft is sure of the one after it."""

    def trim(self, branch: Branch) -> Branch:
        sure = [c > 0.5 for c in branch.confidence[1 : len(branch.tokens)]]
        return branch.cut(0, next((i for i, ok in enumerate(sure) if not ok), len(branch.tokens)))


FAULTS = {
    "argmax residual": Case("speculative", pair=Pair(TARGET, DRAFT, GreedyResidualSampler()), seeds=4000),
    "argmax residual at a branch point": Case(
        "specbranch", policy="confidence", pair=Pair(TARGET, DRAFT, GreedyResidualSampler()), seeds=4000
    ),
    "one uniform used twice": Case("speculative", pair=Pair(TARGET, DRAFT, runner=OneUniform), seeds=2500),
    "one variate for a block of looked-ahead tokens": Case(
        "lookahead", pair=Pair(TARGET, DRAFT, runner=OneForABlock), seeds=4000
    ),
    "cut at the token's own probability": Case("speculative", make=lambda: CutAtOwnProbability(3, 0.5), seeds=1000),
    "cut a surviving branch at the token's own probability": Case(
        "specbranch", make=lambda: CutAtOwnProbability(3, 0.5, 6, "top"), seeds=1000
    ),
    "the same with a sampled head": Case(
        "specbranch", make=lambda: CutAtOwnProbability(3, 0.5, 6, "sampled"), seeds=1000
    ),
    "cut by the next token's confidence": Case("speculative", make=lambda: CutByNextConfidence(3, 0.0)),
}


@pytest.mark.parametrize("fault", tiered(FAULTS, "cut at the token's own probability".__eq__))
def test_planted_fault_is_caught(fault: str) -> None:
    case = FAULTS[fault]
    assert case.p_value(case.draw()) < CAUGHT


@dataclass(frozen=True, slots=True)
class ScriptedLaw(ToyLaw):
    """A law over two tokens written down by hand: the probability of token 0 after each output so far, 0.5 where
    nothing is said."""

    zero_after: tuple[tuple[tuple[int, ...], float], ...] = ()

    def step(self, state: State, token: int) -> State:
        return state * 3 + token + 1  # base 3 with digits 1 and 2: the state spells the tokens

    def logits(self, state: State) -> Logits:
        zero = dict(self.zero_after).get(_spelt(state)[len(PROMPT) + 1 :], 0.5)
        return (math.log(zero), math.log(1 - zero))


def _spelt(state: State) -> tuple[int, ...]:
    return () if state == 0 else (*_spelt((state - 1) // 3), (state - 1) % 3)


class ShyAfterLongLoss(Confidence):
    """Propose nothing for a round after three tokens were thrown away at once: what a policy may well learn from
    `observe`."""

    shy = False

    def chain(self) -> Plan:
        return Plan(0) if self.shy else super().chain()

    def observe(self, pending: Branch, verdict: Verdict) -> None:
        self.shy = len(pending.tokens) == 3 and not verdict.path


@pytest.mark.slow
def test_policy_may_learn_from_how_many_tokens_were_voided() -> None:
    # The draft's first token is 0 and mostly rejected. Its second token, and if a third follows, depend on the variate
    # of that position. The same variate draws again after the correction to 1, so shyness would go with the token.
    target = ScriptedLaw(vocabulary=2, zero_after=(((), 0.1), ((1,), 0.7)))
    draft = ScriptedLaw(vocabulary=2, zero_after=(((), 0.9), ((0,), 0.7), ((0, 0), 0.99), ((1,), 0.7)))
    case = Case("speculative", pair=Pair(target, draft), make=lambda: ShyAfterLongLoss(3, 0.6))
    assert case.p_value(case.draw(2000)) > SOUND


class CutByTime(Drafter):
    """A draft whose steps take as long as the tokens say that they draw; what takes too long is cut between two
    steps."""

    def __init__(self) -> None:
        super().__init__(ToyRunner(DRAFT, 64))
        self.spent, self.cuts, self.enough = 0, 0, self._too_long

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        found = super().propose(work, asks)
        self.spent += sum(proposal.tokens[0] for proposal in found)
        return found

    def draft(
        self, orders: Mapping[int, DraftOrder], done: Done = never, announce: Announce | None = None
    ) -> dict[int, Drafted]:
        self.spent = 0
        return super().draft(orders, done, announce)

    def _too_long(self) -> bool:
        self.cuts += self.spent > 2
        return self.spent > 2


class DroppedByTime(CutByTime):
    """Fault: the whole of an answer that takes too long is dropped."""

    def draft(
        self, orders: Mapping[int, DraftOrder], done: Done = never, announce: Announce | None = None
    ) -> dict[int, Drafted]:
        self.enough = never
        made = super().draft(orders, done, announce)
        return dict.fromkeys(made, ()) if self._too_long() else made


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [CutByTime, DroppedByTime])
def test_lanes_may_be_cut_by_time_but_no_answer_may_be_dropped_by_it(drafter: type[CutByTime]) -> None:
    case, worker = CASES["speculative"], drafter()
    executor = Serial(Verifier(ToyRunner(TARGET, 64)), worker)
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH)
    drawn = draw_with(executor, case.start, requests(params, "ratio", range(77_000_000, 77_002_500)), batch=1)
    assert worker.cuts > ENOUGH
    value = case.p_value(drawn)
    assert value < CAUGHT if drafter is DroppedByTime else value > SOUND
