"""Both lossless rules on chains and trees: the decisions one by one, and the joint law of trees against exact
enumeration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pytest

from exact import CAUGHT, SOUND, joint_law, p_value
from specbranch.core import noise
from specbranch.core.noise import Purpose
from specbranch.core.orders import Context, Sparse, Verify
from specbranch.core.slots import ROOT
from specbranch.core.verify import Head, Uniform, accept_match, accept_ratio
from specbranch.lab.toys.toys import ListLaw, ToyLaw, shaped
from tiers import tiered

ON = Context(0, (0,))
LOW = 1e-12
HIGH = 1.0 - 2.0**-53


def chain(tokens: Sequence[int], q: Sequence[Sparse | None] | None = None) -> Verify:
    return Verify(ON, tuple(tokens), None, None if q is None else tuple(q))


def tree(tokens: Sequence[int], parents: Sequence[int], q: Sequence[Sparse | None] | None = None) -> Verify:
    return Verify(ON, tuple(tokens), tuple(parents), None if q is None else tuple(q))


def always(u: float) -> Uniform:
    return lambda depth, purpose, attempt: u


def by_purpose(**values: float) -> Uniform:
    return lambda depth, purpose, attempt: values[purpose]


# The vocabulary


def test_a_chains_parent_is_the_node_before() -> None:
    assert [chain([5, 6, 7]).parent(n) for n in range(3)] == [ROOT, 0, 1]


def test_a_trees_parents_are_those_it_names() -> None:
    assert [tree([5, 6, 7], [-1, -1, 1]).parent(n) for n in range(3)] == [ROOT, ROOT, 1]


def test_sparse_law_is_zero_where_it_has_no_entry() -> None:
    law = Sparse((4, 2), (0.75, 0.25))
    assert (law.prob(2), law.prob(4), law.prob(3)) == (0.25, 0.75, 0.0)


def test_without_removes_a_tokens_mass_and_renormalises() -> None:
    rest = Sparse((4, 2, 9), (0.5, 0.3, 0.2)).without(4)
    assert rest.ids == (2, 9)
    assert rest.probs == pytest.approx((0.6, 0.4))


def test_without_a_token_it_never_had_changes_nothing() -> None:
    law = Sparse((4, 2), (0.75, 0.25))
    assert law.without(1) == law


def test_without_its_only_token_a_law_is_empty() -> None:
    assert Sparse((4,), (1.0,)).without(4) == Sparse((), ())


# Match


def test_match_of_nothing_gives_the_targets_token() -> None:
    assert accept_match(chain([]), [7]) == ((), 7)


def test_match_accepts_a_chain_up_to_the_first_difference() -> None:
    assert accept_match(chain([1, 2, 3]), [1, 2, 9, 4]) == ((0, 1), 9)
    assert accept_match(chain([1, 2, 3]), [0, 2, 3, 4]) == ((), 0)
    assert accept_match(chain([1, 2, 3]), [1, 2, 3, 4]) == ((0, 1, 2), 4)


def test_match_walks_down_the_child_that_carries_the_targets_token() -> None:
    #  root ─ 0:5 ─ 2:8
    #       └ 1:6 ─ 3:8 ─ 5:2
    #             └ 4:9
    order = tree([5, 6, 8, 8, 9, 2], [-1, -1, 0, 1, 1, 3])
    assert accept_match(order, [6, 0, 8, 0, 2, 0, 4]) == ((1, 3, 5), 4)
    assert accept_match(order, [6, 0, 9, 0, 0, 3, 0]) == ((1, 4), 3)
    assert accept_match(order, [5, 9, 0, 0, 0, 0, 0]) == ((0,), 9)


def test_match_never_takes_a_cousin_for_a_child() -> None:
    order = tree([5, 6, 8], [-1, -1, 0])
    assert accept_match(order, [6, 0, 8, 0]) == ((1,), 8)


# Ratio, one decision at a time


def law_of(*probs: float) -> Callable[[int], ListLaw]:
    return lambda node: ListLaw(probs)


def test_ratio_of_nothing_draws_from_p() -> None:
    assert accept_ratio(chain([]), law_of(0.5, 0.5), by_purpose(own=0.6)) == ((), 1)


def test_ratio_accepts_any_possible_token_at_u_zero() -> None:
    order = chain([1], [Sparse((1,), (1.0,))])
    path, _ = accept_ratio(order, law_of(1.0 - 1e-300, 1e-300), by_purpose(accept=0.0, own=0.0))
    assert path == (0,)


def test_ratio_never_accepts_an_impossible_token_even_at_u_zero() -> None:
    order = chain([1], [Sparse((1,), (1.0,))])
    assert accept_ratio(order, law_of(1.0, 0.0), always(0.0)) == ((), 0)


def test_ratio_always_accepts_where_the_target_is_at_least_as_likely() -> None:
    order = chain([0], [Sparse((0, 1), (0.5, 0.5))])
    path, _ = accept_ratio(order, law_of(0.5, 0.5), always(HIGH))
    assert path == (0,)


def test_ratio_accepts_a_certain_proposal_with_the_targets_probability() -> None:
    order = chain([0], [Sparse((0,), (1.0,))])
    assert accept_ratio(order, law_of(0.3, 0.7), by_purpose(accept=0.3 - LOW, own=0.9))[0] == (0,)
    assert accept_ratio(order, law_of(0.3, 0.7), by_purpose(accept=0.3 + LOW, residual=0.0)) == ((), 1)


def test_residual_draws_only_where_p_exceeds_q() -> None:
    q = Sparse((0, 1), (0.75, 0.25))
    rest = ListLaw([0.25, 0.25, 0.5]).residual(q)
    assert rest.probs == [0.0, 0.0, 1.0]
    assert {rest.draw(u) for u in (0.0, 0.5, HIGH)} == {2}


def test_empty_residual_falls_back_to_p() -> None:
    law = ListLaw([0.25, 0.75])
    assert law.residual(Sparse((1, 0), (0.75, 0.25))).probs == law.probs


def test_deterministic_child_is_taken_by_the_targets_own_draw() -> None:
    order = tree([0, 1], [-1, -1])
    assert accept_ratio(order, law_of(0.3, 0.3, 0.4), by_purpose(own=0.5)) == ((1,), 1)
    assert accept_ratio(order, law_of(0.3, 0.3, 0.4), by_purpose(own=0.9)) == ((), 2)


def test_after_a_rejection_a_deterministic_sibling_may_carry_the_residual() -> None:
    order = tree([0, 1], [-1, -1], [Sparse((0,), (1.0,)), None])
    uniform = by_purpose(accept=0.5, residual=0.0, own=0.0)
    assert accept_ratio(order, law_of(0.2, 0.4, 0.4), uniform)[0] == (1,)


def test_second_sampled_sibling_is_tested_against_the_residual() -> None:
    q = Sparse((0, 1, 2), (0.6, 0.2, 0.2))
    order = tree([0, 1], [-1, -1], [q, q.without(0)])
    # p = .3 .3 .4: the residual is 0, 1/3, 2/3, and the second law 0, 1/2, 1/2: accepted with 2/3.
    outcomes = []
    for second in (2 / 3 - 1e-9, 2 / 3 + 1e-9):
        tests = iter((0.9, second, 0.0))
        path, token = accept_ratio(order, law_of(0.3, 0.3, 0.4), lambda d, p, a, t=tests: next(t))  # type: ignore[misc]
        outcomes.append((path, token if not path else None))
    assert outcomes == [((1,), None), ((), 2)]


def test_accepted_head_is_the_verdicts_token_and_no_node() -> None:
    head = Head(0, 1, Sparse((1,), (1.0,)))
    order = chain([0], [Sparse((0,), (1.0,))])
    assert accept_ratio(order, law_of(0.5, 0.5), always(0.1), head) == ((0,), 1)


def test_rejected_head_is_replaced_by_a_residual_draw() -> None:
    head = Head(ROOT, 1, Sparse((1,), (1.0,)))
    assert accept_ratio(chain([]), law_of(0.5, 0.2, 0.3), by_purpose(accept=0.9, residual=HIGH), head) == ((), 2)


def test_head_after_a_rejected_chain_is_not_judged() -> None:
    head = Head(0, 1, Sparse((1,), (1.0,)))
    order = chain([0], [Sparse((0,), (1.0,))])
    assert accept_ratio(order, law_of(0.1, 0.1, 0.8), by_purpose(accept=0.5, residual=HIGH), head) == ((), 2)


# Ratio, the law of trees

TARGET = ToyLaw(vocabulary=4, seed=4, sharpness=1.3)
DRAFT = ToyLaw(vocabulary=4, seed=4, sharpness=1.3, drift=0.6)
START = (0,)
LENGTH = 3  # two levels of tree, then the target's own token
SEEDS = 6000
ENOUGH = 200


@lru_cache(maxsize=4096)
def probs(law: ToyLaw, tokens: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(shaped(law.logits_of(tokens), 1.0))


@lru_cache(maxsize=4096)
def proposal(tokens: tuple[int, ...]) -> Sparse:
    q = probs(DRAFT, tokens)
    ranked = tuple(sorted(range(len(q)), key=lambda t: -q[t]))
    return Sparse(ranked, tuple(q[t] for t in ranked))


@dataclass(frozen=True, slots=True)
class Shape:
    """Children of every inner node: some drawn without replacement, then some of the likeliest others."""

    sampled: int
    fixed: int
    renormalised: bool = True  # False is a fault: the second draw is tested against the first one's law


def children(shape: Shape, seed: int, tokens: tuple[int, ...]) -> list[tuple[int, Sparse | None]]:
    first = law = proposal(tokens)
    found: list[tuple[int, Sparse | None]] = []
    for attempt in range(shape.sampled):
        u = noise.uniform(seed, 0, len(tokens), "draft", attempt)
        token = law.ids[ListLaw(law.probs).draw(u)]
        found.append((token, law if shape.renormalised else first))
        law = law.without(token)
    return found + [(token, None) for token in law.ids[: shape.fixed]]


def grown(shape: Shape, seed: int) -> Verify:
    """A tree of two levels."""
    tokens: list[int] = []
    parents: list[int] = []
    laws: list[Sparse | None] = []
    level: list[tuple[int, tuple[int, ...]]] = [(ROOT, START)]
    for _ in range(LENGTH - 1):
        below = []
        for parent, line in level:
            for token, q in children(shape, seed, line):
                below.append((len(tokens), (*line, token)))
                tokens.append(token)
                parents.append(parent)
                laws.append(q)
        level = below
    return tree(tokens, parents, laws if shape.sampled else None)


def cached_at(order: Verify, node: int) -> tuple[int, ...]:
    return START if node == ROOT else (*cached_at(order, order.parent(node)), order.tokens[node])


def fresh(seed: int) -> Uniform:
    return lambda depth, purpose, attempt: noise.uniform(seed, 0, len(START) + depth, purpose, attempt)


def one_for_both(seed: int) -> Uniform:
    """Fault: the residual is drawn with the variate of the test before it."""

    def uniform(depth: int, purpose: Purpose, attempt: int) -> float:
        return fresh(seed)(depth, "accept" if purpose == "residual" else purpose, attempt)

    return uniform


class GreedyResidual(ListLaw):
    """Fault: after a rejection the likeliest remaining token is taken."""

    def residual(self, q: Sparse) -> ListLaw:
        rest = super().residual(q).probs
        return GreedyResidual([float(p == max(rest)) for p in rest])


@dataclass(slots=True)
class Walks:
    """The joint tokens of many walks down a tree, and how often they took which turn."""

    joint: Counter[tuple[int, ...]]
    turns: Counter[str]

    @property
    def p_value(self) -> float:
        return p_value(self.joint, joint_law(TARGET, START, LENGTH))


def walks(shape: Shape, uniform: Callable[[int], Uniform] = fresh, law: type[ListLaw] = ListLaw) -> Walks:
    found = Walks(Counter(), Counter())
    for seed in range(SEEDS):
        order = grown(shape, seed)
        path, token = accept_ratio(order, lambda node, o=order: law(probs(TARGET, cached_at(o, node))), uniform(seed))  # type: ignore[misc]
        emitted = (*(order.tokens[n] for n in path), token)
        found.joint[_completed(emitted, seed)] += 1
        found.turns[f"depth {len(path)}"] += 1
        found.turns["sibling"] += any(order.parent(n - 1) == order.parent(n) for n in path if n > 0)
    return found


def _completed(emitted: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Go on by the target's own draws, with variates of another sample."""
    while len(emitted) < LENGTH:
        u = noise.uniform(seed, 1, len(emitted), "own")
        emitted = (*emitted, ListLaw(probs(TARGET, START + emitted)).draw(u))
    return emitted


SHAPES = {
    "a sampled child and fixed siblings": Shape(sampled=1, fixed=2),
    "fixed children only": Shape(sampled=0, fixed=2),
    "siblings sampled without replacement": Shape(sampled=3, fixed=0),
    "two sampled siblings and a fixed one": Shape(sampled=2, fixed=1),
}


@pytest.mark.parametrize("name", tiered(SHAPES, list(SHAPES)[:3:2].__contains__))
def test_tree_emits_the_targets_joint_law(name: str) -> None:
    found = walks(SHAPES[name])
    rare = {
        turn: found.turns[turn] for turn in ("depth 0", "depth 1", "depth 2", "sibling") if found.turns[turn] < ENOUGH
    }
    assert not rare, f"the walks show too little of {rare}"
    assert found.p_value > SOUND


def test_siblings_tested_as_if_drawn_with_replacement_are_caught() -> None:
    assert walks(Shape(sampled=3, fixed=0, renormalised=False)).p_value < CAUGHT


@pytest.mark.slow
def test_argmax_residual_in_a_tree_is_caught() -> None:
    assert walks(Shape(sampled=1, fixed=2), law=GreedyResidual).p_value < CAUGHT


def test_one_uniform_for_test_and_residual_is_caught() -> None:
    assert walks(Shape(sampled=1, fixed=2), uniform=one_for_both).p_value < CAUGHT


@pytest.mark.parametrize("name", SHAPES)
def test_no_variate_is_asked_for_twice(name: str) -> None:
    for seed in range(300):
        order, asked = grown(SHAPES[name], seed), list[tuple[int, str, int]]()

        def uniform(
            depth: int, purpose: Purpose, attempt: int, seed: int = seed, asked: list[tuple[int, str, int]] = asked
        ) -> float:
            asked.append((depth, purpose, attempt))
            return fresh(seed)(depth, purpose, attempt)

        accept_ratio(order, lambda node, o=order: ListLaw(probs(TARGET, cached_at(o, node))), uniform)  # type: ignore[misc]
        assert len(asked) == len(set(asked))
