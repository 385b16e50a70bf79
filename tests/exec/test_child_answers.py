"""What a draft worker answers is held against what it was ordered: whatever does not fit is refused."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from specbranch.config import SamplingParams
from specbranch.core.experience import Experience
from specbranch.core.orders import (
    Branch,
    Context,
    Draft,
    Drafted,
    DraftOrder,
    Effort,
    Grow,
    Plan,
    Prefill,
    Reached,
    Sparse,
)
from specbranch.core.request import Request
from specbranch.core.trees import NO_TREE, Growth, Node, Tree
from specbranch.exec.child_answers import Asked, BadAnswer
from specbranch.exec.drafter import Drafter
from specbranch.lab.toys.toys import ToyRunner
from toybench import PROFILE, VOCABULARY, law

NOW = Effort(1.0)
ON = Context(0, (1, 2, 3))
GROWTH = Growth((0.0,) * 3, Experience(PROFILE).insight.chances(), most=6, worth=1.0, deepest=4)
CHAIN, FORKS = Draft(ON, Plan(3)), Draft(ON, Plan(3, ((0, 1), (2, 2))), pending=2)
SAMPLED = Draft(ON, Plan(2, ((1, 2),), heads="sampled"), pending=1)
LAW = Sparse((4, 1), (0.75, 0.25))
SOUND = Branch(0, (4, 1), (0.5, 1.0))
DRAWN = Branch(1, (4, 1), (0.75, 0.5), (LAW, None))
TREE = Tree((Node(1, -1, 0.5, 0.5, 1, 0, 0.5, 0, True), Node(2, 0, 0.5, 0.25, 2, 0, 0.5)), True, (3, 1))


def asked(order: DraftOrder) -> Asked:
    return Asked({7: order}, {7} if order is SAMPLED else set(), VOCABULARY)


def node(**changes: object) -> Tree:
    """A tree whose last node is changed."""
    return replace(TREE, nodes=(TREE.nodes[0], TREE.nodes[1]._replace(**changes)))


def test_what_is_sound_passes() -> None:
    asked(CHAIN).check_round({7: (SOUND,)}, NOW)
    asked(CHAIN).check_round({7: (replace(SOUND, confidence=(0.5, 1.0, 0.1)),)}, NOW)
    asked(CHAIN).check_round({7: ()}, NOW)
    asked(FORKS).check_round({7: (SOUND, replace(SOUND, after=2), replace(SOUND, after=2))}, NOW)
    asked(SAMPLED).check_round({7: (DRAWN,)}, NOW)
    asked(SAMPLED).check_heads({7: DRAWN})
    asked(Grow(ON, NO_TREE, GROWTH)).check_round({7: TREE}, NOW)
    asked(Grow(ON, TREE, GROWTH)).check_round({7: TREE}, NOW)
    asked(Prefill(ON, 2)).check_round({7: Reached(2)}, NOW)
    asked(replace(CHAIN, on=Context(2, (3,)))).check_stale((7,))


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_whatever_a_sound_worker_drafts_passes(rule: str) -> None:
    drafter, rng = Drafter(ToyRunner(law(0.4))), random.Random(4)
    for session in range(100):
        drafter.open(session, Request(SamplingParams(temperature=1.0), session, 3, rule=rule))  # type: ignore[arg-type]
        on = Context(0, tuple(rng.randrange(VOCABULARY) for _ in range(5)))
        plan = Plan(
            rng.randint(0, 5), rng.choice(((), ((2, 3),), ((0, 2), (1, 1), (2, 4)))), rng.choice((0.0, 0.6)),
            rng.random() < 0.5, rng.choice(("top", "entropy")), rng.random() < 0.5, rng.choice(("top", "sampled")),
        )  # fmt: skip
        growth = replace(GROWTH, children=rng.randint(1, 5), most=rng.randint(0, 9), deepest=rng.randint(1, 9))
        draft, grow = Draft(on, plan, pending=2), Grow(on, NO_TREE, growth)
        by_ratio = {session} if rule == "ratio" else set()
        for order in (draft, grow, Prefill(on, 2)):
            made = drafter.draft({session: order})
            Asked({session: order}, by_ratio, VOCABULARY).check_round(made, NOW)
            if isinstance(tree := made[session], Tree):  # and extended further
                again = replace(grow, tree=tree)
                Asked({session: again}, by_ratio, VOCABULARY).check_round(drafter.draft({session: again}), NOW)


@pytest.mark.parametrize(
    ("order", "made", "said"),
    [
        (CHAIN, (replace(SOUND, tokens=(1,) * 4, confidence=(0.5,) * 4),), "a chain of 4 tokens where at most 3"),
        (CHAIN, (replace(SOUND, tokens=(), confidence=()),), "a chain of 0 tokens"),
        (CHAIN, (SOUND, SOUND), "2 branches after 0 pending tokens"),
        (CHAIN, (replace(SOUND, after=1),), "1 branches after 1 pending tokens"),
        (FORKS, (replace(SOUND, after=2),) * 3, "3 branches after 2 pending tokens"),
        (CHAIN, (replace(SOUND, tokens=(1, VOCABULARY)),), f"token ids 1 to {VOCABULARY}; there are {VOCABULARY}"),
        (CHAIN, (replace(SOUND, tokens=(-1, 1)),), "token ids -1 to 1"),
        (CHAIN, (replace(SOUND, confidence=(0.5, math.nan)),), "nan for a probability"),
        (CHAIN, (replace(SOUND, confidence=(0.5, math.inf)),), "inf for a probability"),
        (CHAIN, (replace(SOUND, confidence=(-0.5, 0.5)),), "-0.5 for a probability"),
        (CHAIN, (replace(SOUND, confidence=(0.5,)),), "1 confidences of 2 tokens"),
        (CHAIN, (replace(SOUND, q=(None, None)),), "a law for a token that was not drawn"),
        (SAMPLED, (replace(DRAWN, q=(LAW,)),), "1 laws of 2 tokens"),
        (SAMPLED, (replace(DRAWN, q=(Sparse((4,), (0.75, 0.25)), None)),), "a law of 1 tokens"),
        (SAMPLED, (replace(DRAWN, q=(Sparse((4, 1), (0.75, 0.75)), None)),), "a law that sums to 1.5"),
        (SAMPLED, (replace(DRAWN, q=(Sparse((4, 4), (0.75, 0.25)), None)),), "names a token twice"),
        (SAMPLED, (replace(DRAWN, q=(Sparse((4, 9), (0.75, 0.25)), None)),), "token ids 4 to 9"),
        (SAMPLED, (replace(DRAWN, q=(Sparse((3, 1), (0.75, 0.25)), None)),), "token 4, which its own law rules out"),
        (CHAIN, TREE, "a Tree for a Draft"),
        (Grow(ON, NO_TREE, GROWTH), (SOUND,), "a tuple for a Grow"),
        (Grow(ON, NO_TREE, GROWTH), Reached(1), "a Reached for a Grow"),
        (Grow(ON, NO_TREE, replace(GROWTH, most=0, children=1)), TREE, "a tree of 2 nodes where at most 1"),
        (Grow(ON, TREE, GROWTH), NO_TREE, "a tree of 0 nodes"),
        (Grow(ON, TREE, GROWTH), node(token=3), "a tree that has lost nodes"),
        (Grow(ON, NO_TREE, GROWTH), node(parent=1), "a node 1 whose parent is 1"),
        (Grow(ON, NO_TREE, GROWTH), node(parent=-2), "a node 1 whose parent is -2"),
        (Grow(ON, NO_TREE, GROWTH), node(depth=3), "a node at depth 3 below one at 1"),
        (Grow(ON, NO_TREE, GROWTH), node(token=VOCABULARY), "token ids"),
        (Grow(ON, NO_TREE, GROWTH), node(said=math.nan), "nan for a probability"),
        (Grow(ON, NO_TREE, GROWTH), node(reach=2.0), "2.0 for a probability"),
        (Grow(ON, NO_TREE, GROWTH), node(look=99), "looked up as 99"),
        (Grow(ON, NO_TREE, GROWTH), node(sent=True), "a new node at depth 2"),
        (Grow(ON, NO_TREE, replace(GROWTH, deepest=1)), TREE, "a new node at depth 2"),
        (Grow(ON, NO_TREE, GROWTH), replace(TREE, steps=(1,) * 99), "a tree of 99 steps"),
        (Grow(ON, NO_TREE, GROWTH), replace(TREE, steps=(10**9,)), "a step of 1000000000 nodes"),
        (Prefill(ON, 2), Reached(4), "4 tokens read of 3"),
        (Prefill(ON, 2), Reached(-1), "-1 tokens read of 3"),
    ],
)
def test_what_was_not_ordered_is_refused(order: DraftOrder, made: Drafted, said: str) -> None:
    with pytest.raises(BadAnswer, match=said):
        asked(order).check_round({7: made}, NOW)


def test_nothing_passes_for_a_session_that_ordered_nothing() -> None:
    for check in (
        lambda: asked(CHAIN).check_round({8: ()}, NOW),
        lambda: asked(SAMPLED).check_heads({8: DRAWN}),
        lambda: asked(CHAIN).check_stale((8,)),
    ):
        with pytest.raises(BadAnswer, match="session 8, for which nothing was ordered"):
            check()


def test_heads_are_wanted_where_they_are_drawn_and_continue_the_whole_chain() -> None:
    with pytest.raises(BadAnswer, match="session 7, which wants none"):
        asked(CHAIN).check_heads({7: SOUND})
    with pytest.raises(BadAnswer, match="does not continue the whole"):
        asked(SAMPLED).check_heads({7: replace(DRAWN, after=0)})


def test_a_text_that_was_sent_whole_is_not_missing() -> None:
    with pytest.raises(BadAnswer, match="session 7 as missing, which was sent whole"):
        asked(CHAIN).check_stale((7,))


@pytest.mark.parametrize("effort", [Effort(-1.0), Effort(math.nan), Effort(math.inf), Effort(1.0, -1)])
def test_a_time_that_is_none_is_refused(effort: Effort) -> None:
    with pytest.raises(BadAnswer):
        asked(CHAIN).check_round({}, effort)
