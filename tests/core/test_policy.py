"""Policies: numbers in, a plan out."""

from __future__ import annotations

from typing import get_args

import pytest

from specbranch.config import Part, PolicyName, SpeculativeConfig
from specbranch.core.forecast import ALL, NONE, SOME, Signal
from specbranch.core.hrad_policy import LastLength, Paper
from specbranch.core.methods import METHODS, find_method
from specbranch.core.orders import NOTHING, Branch, Plan, Reports, Sparse, Verdict
from specbranch.core.policies import POLICIES, make_policy
from specbranch.core.policy import Confidence, Entropy, Fixed
from specbranch.errors import BadParameter


def branch(*confidence: float, tokens: int | None = None) -> Branch:
    count = len(confidence) if tokens is None else tokens
    return Branch(0, tuple(range(count)), confidence)


def test_a_fixed_policy_always_plans_the_same_and_keeps_all() -> None:
    policy = Fixed(5)
    policy.observe(branch(0.1), Verdict((), 0))
    assert policy.chain() == Plan(5)
    assert policy.fork(branch(0.1, 0.2)) == Plan(5, ((2, 1),))
    assert policy.trim(branch(0.1, 0.2)) == branch(0.1, 0.2)


def test_a_confident_policy_cuts_before_the_first_unsure_token() -> None:
    policy = Confidence(5, stop_below=0.4, width=6)
    assert policy.trim(branch(0.9, 0.5, 0.3, 0.9)).tokens == (0, 1)
    assert policy.trim(branch(0.9, 0.4)).tokens == (0, 1), "the threshold itself is sure enough"
    assert policy.trim(branch(0.1, 0.9)).tokens == ()


def test_trimming_a_branch_that_stopped_early_keeps_its_tokens() -> None:
    stopped = branch(0.9, 0.8, 0.1, tokens=2)
    assert Confidence(5, 0.4).trim(stopped).tokens == (0, 1)


def test_trimming_keeps_the_laws_in_step_with_the_tokens() -> None:
    laws = tuple(Sparse((i,), (1.0,)) for i in range(3))
    kept = Confidence(5, 0.4).trim(Branch(2, (0, 1, 2), (0.9, 0.3, 0.9), laws))
    assert (kept.after, kept.tokens, kept.q) == (2, (0,), laws[:1])


def test_a_confident_policy_forks_after_the_pending_chain_and_lets_the_worker_narrow() -> None:
    policy = Confidence(5, 0.4, width=6, heads="sampled", until="target")
    assert policy.chain() == Plan(5, stop_below=0.4)
    assert policy.fork(branch(0.9, 0.9, 0.9)) == Plan(5, ((3, 6),), narrow=True, heads="sampled", until="target")
    assert policy.fork(NOTHING).forks == ((0, 6),)


def test_entropys_threshold_moves_as_published() -> None:
    """Two updates of AdaEDL's rule by hand: acceptance .9 → .5·.9 + .5·1 = .95 lowers λ, then → .475 raises it."""
    policy = Entropy(4, threshold=0.3)
    policy.observe(branch(0.9, 0.9), Verdict((0, 1), 5))
    assert policy.acceptance == pytest.approx(0.95)
    assert policy.threshold == pytest.approx(0.9 * 0.3 + 0.1 * 0.29)
    policy.observe(branch(0.9, 0.9), Verdict((), 5))
    assert policy.acceptance == pytest.approx(0.475)
    assert policy.threshold == pytest.approx(0.9 * 0.299 + 0.1 * 0.309)
    assert policy.chain() == Plan(4, stop_below=policy.threshold, keep_unsure=True, measure="entropy")


def test_entropy_learns_nothing_from_a_round_without_a_proposal() -> None:
    policy = Entropy(4, threshold=0.0015)
    policy.observe(NOTHING, Verdict((), 5))
    assert (policy.threshold, policy.acceptance) == (0.0015, Entropy.goal)


@pytest.mark.parametrize(
    ("method", "asked", "kind"),
    [
        ("speculative", None, Fixed),
        ("adaptive", None, Entropy),
        ("specbranch", "confidence", Confidence),
        ("pearl", "confidence", Confidence),
    ],
)
def test_a_method_brings_its_own_policy_unless_another_is_asked_for(
    method: str, asked: str | None, kind: type[Fixed]
) -> None:
    config = SpeculativeConfig.from_dict({"method": method, "policy": asked, "num_speculative_tokens": 7})
    policy = make_policy(config, METHODS[method].policy, METHODS[method].heads)
    assert type(policy) is kind
    assert policy.chain().length == 7


def test_settings_reach_the_plan() -> None:
    config = SpeculativeConfig(method="specbranch", max_branches=9, stop_below=0.2, until_target=True, heads="top")
    plan = make_policy(config, "confidence", "sampled").fork(NOTHING)
    assert plan == Plan(5, ((0, 9),), narrow=True, heads="top", until="target")
    assert make_policy(SpeculativeConfig(), "fixed", "sampled").fork(NOTHING).heads == "sampled"


def test_only_the_branch_that_presumed_the_very_outcome_matches() -> None:
    branches = (Branch(2, (5, 6), ()), Branch(2, (7, 8), ()), Branch(1, (5,), ()))
    assert Reports(branches, Verdict((0, 1), 7)).kept is branches[1]
    assert Reports(branches, Verdict((0,), 5)).kept is branches[2]
    assert Reports(branches, Verdict((0,), 7)).kept is None
    assert Reports((), Verdict((), 7)).kept is None


def test_an_unknown_method_is_a_sentence_with_the_nearest_name() -> None:
    with pytest.raises(
        BadParameter,
        match=r"Unknown method 'specbranc'\. Did you mean 'specbranch'\? Known: adaptive, auto, autoregressive",
    ):
        find_method("specbranc", has_draft=True)


def test_a_method_without_its_draft_says_what_to_do() -> None:
    with pytest.raises(BadParameter, match="Method 'pearl' needs a draft model, and none was given"):
        find_method("pearl", has_draft=False)
    assert find_method("lookup", has_draft=False) is METHODS["lookup"]


def hears(*hard: int) -> Signal:
    """A signal that is sure of a class, for drafts of 1, 2, … tokens."""
    return Signal(tuple(tuple(float(at == one) for at in range(3)) for one in hard))  # type: ignore[arg-type]


def heard(policy: Paper, *signals: Signal | None) -> Paper:
    for signal in signals:
        policy.observe(branch(), Verdict((), 1, signal=signal))
    return policy


def test_a_paper_policy_keeps_by_hard_signals_and_by_confidence_between_them() -> None:
    drafted = branch(0.9, 0.2, 0.9)
    kept = {signal: heard(Paper(3, 0.5), hears(0, 0, signal)).trim(drafted).tokens for signal in (NONE, SOME, ALL)}
    assert [len(kept[signal]) for signal in (NONE, SOME, ALL)] == [0, 1, 3]
    assert (
        heard(Paper(3, 0.5), None).trim(drafted) == heard(Paper(3, 0.5), hears(0, 0)).trim(drafted) == drafted.cut(0, 1)
    )
    assert len(heard(Paper(3, 0.5, hrad=False), hears(0, 0, ALL)).trim(drafted).tokens) == 1


def test_a_paper_policy_drafts_nothing_where_nothing_would_be_taken_and_does_not_stop_where_all_would() -> None:
    assert [heard(Paper(3, 0.5), hears(0, 0, signal)).chain() for signal in (NONE, SOME, ALL)] == [
        Plan(0),
        Plan(3, stop_below=0.5),
        Plan(3),
    ]


def test_without_posterior_drafting_a_survivor_is_judged_by_the_signal_before_and_a_fresh_chain_is_not() -> None:
    drafted = branch(0.9, 0.2, 0.9)
    signals = hears(0, 0, ALL), hears(0, 0, NONE)
    with_it, without = (heard(Paper(3, 0.5, posterior=posterior), *signals) for posterior in (True, False))
    assert [len(policy.inherit(drafted).tokens) for policy in (with_it, without)] == [0, 3]
    assert [len(policy.trim(drafted).tokens) for policy in (with_it, without)] == [0, 0]


def test_a_survivor_is_judged_by_what_is_said_of_its_own_length() -> None:
    policy = heard(Paper(3, 0.5), hears(0, ALL, SOME))
    assert len(policy.inherit(branch(0.9, 0.2)).tokens) == 2 and len(policy.trim(branch(0.9, 0.2, 0.9)).tokens) == 1
    assert policy.inherit(branch()).tokens == ()


@pytest.mark.parametrize(("taken", "kept"), [(0, 0), (1, 1), (2, 3)])
def test_the_last_length_stands_for_the_next(taken: int, kept: int) -> None:
    policy = LastLength(3, 0.5)
    policy.observe(branch(0.9, 0.9), Verdict(tuple(range(taken)), 1))
    assert len(policy.trim(branch(0.9, 0.2, 0.9)).tokens) == kept


@pytest.mark.parametrize(
    ("method", "values", "words"),
    [
        ("specbranch", {"without": ("hrad",)}, "Policy 'planner' has no part 'hrad'"),
        ("specbranch", {"policy": "paper", "without": ("trees",)}, "it has hrad, branches, posterior"),
        ("speculative", {"without": ("trees",)}, "it has no parts"),
        ("speculative", {"policy": "paper"}, "one of method 'specbranch'"),
    ],
)
def test_parts_and_policies_that_do_not_fit_are_refused(method: str, values: dict[str, object], words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        METHODS[method].check(method, SpeculativeConfig(method=method, **values))  # type: ignore[arg-type]


def test_the_table_has_every_policy_and_every_part_that_settings_may_name() -> None:
    assert tuple(POLICIES) == get_args(PolicyName)
    assert {part for kind in POLICIES.values() for part in kind.parts} == set(get_args(Part))
    assert all(kind.signal_part in (None, *kind.parts) for kind in POLICIES.values())


def test_only_a_policy_with_its_part_for_signals_heeds_them() -> None:
    using = {name for name in POLICIES if METHODS["specbranch"].uses_signals(SpeculativeConfig(policy=name))}
    assert using == {"paper"}
    assert not METHODS["specbranch"].uses_signals(SpeculativeConfig(policy="paper", without=("hrad",)))
    assert not any(method.uses_signals(SpeculativeConfig()) for method in METHODS.values())


def test_the_planner_plans_no_chains() -> None:
    with pytest.raises(ValueError, match="'planner' grows trees"):
        make_policy(SpeculativeConfig(), "planner", "top")
