"""Trees extended on the device: the same trees as step by step, and the same KV slots."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import Charge, MeteredDrafter
from specbranch.config import SamplingParams
from specbranch.core.orders import Context, Grow
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.runner import Growing
from specbranch.core.slots import ROOT
from specbranch.core.trees import CLASSES, LOOKS, NO_TREE, STANDINGS, Chances, GrowingTree, Growth, Tree, below
from specbranch.exec.drafter import Drafter
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from tiers import each_value, tiered
from tiny_models import saved, some_tokens, tiny

torch.set_num_threads(1)
PROMPT = 40
GREEDY = Request(SamplingParams(), 3, PROMPT)
NOISY = Request(SamplingParams(temperature=0.9), 3, PROMPT)
SHAPED = Request(SamplingParams(temperature=0.9, top_p=0.9), 3, PROMPT)


class StepByStep(GpuRunner):
    """Leaves the choice of what is read next to who asks."""

    def grow(self, growing: Growing, done: object) -> None:
        return None


class Counting(GpuRunner):
    """Counts the trees that it extended by itself."""

    grown = 0

    def grow(self, growing: Growing, done: Any) -> Tree | None:
        tree = super().grow(growing, done)
        self.grown += tree is not None
        return tree


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_native(
        saved(tiny("llama"), Path(tmp_path_factory.mktemp("llama"))), context_length=600, dtype="float64"
    ).decoder


def some_growth(rng: random.Random) -> Growth:
    """Prices and chances at random, such that trees of all sizes come of them."""
    first, other = (tuple(sorted(rng.uniform(0, high) for _ in range(CLASSES))) for high in (1.0, 0.4))
    looked = tuple(rng.random() for _ in range(LOOKS * STANDINGS))
    chances = Chances(first, other, looked, tuple(rng.uniform(-1, 2) for _ in range(LOOKS * STANDINGS)))
    step = tuple(rng.uniform(0.001, 0.02) * (1 + 0.1 * lane) for lane in range(rng.choice([1, 4, 8, 16])))
    beside = rng.random() < 0.5
    return Growth(
        step,
        chances,
        free_time=rng.uniform(0.01, 0.3) if beside else 0.0,
        target_delay=rng.uniform(0, 0.005) if beside else 0.0,
        draft_delay=rng.uniform(0, 0.005) if beside else 0.0,
        worth=rng.uniform(0.3, 1.0),
        children=rng.choice([1, 4, 8]),
        least=rng.choice([0.01, 0.0005]),
        rows=rng.choice([7, 15]),
        row_price=rng.choice([0.0, 0.001]),
        most=rng.choice([5, 40, 96]),
        deepest=rng.choice([3, 12, 32]),
    )


def with_lookup(rng: random.Random, tree: Tree, growth: Growth) -> Tree:
    """The tree with some lines that were met before; now and then they repeat what it has."""
    growing = GrowingTree(tree)
    for _ in range(rng.randint(0, 2)):
        line, here = [], ROOT
        while (known := tree.children(here)) and rng.random() < 0.7:
            here = rng.choice(known)
            line.append(tree.nodes[here].token)
        growing.graft(
            [*line, *(rng.randrange(131) for _ in range(rng.randint(1, 4)))], rng.randint(1, 5), growth.chances
        )
    return growing.tree()


@each_value
@pytest.mark.parametrize("request_", [GREEDY, NOISY], ids=["greedy", "noisy"])
@pytest.mark.parametrize("seed", tiered(range(12), (2).__gt__))
def test_a_tree_grown_at_once_is_the_one_that_is_grown_step_by_step(seed: int, request_: Request, decoder: Any) -> None:
    assert_grown_alike(seed, request_, decoder)


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("length", tiered((PAGE - 12, PAGE - 3, PAGE - 1), (PAGE - 12).__ne__))
@pytest.mark.parametrize("seed", tiered(range(4), (2).__gt__))
def test_a_tree_that_grows_into_another_page_keeps_it(seed: int, length: int, decoder: Any) -> None:
    assert_grown_alike(seed, replace(GREEDY, prompt_length=length), decoder)


def assert_grown_alike(
    seed: int, request: Request, decoder: Any, seen: Callable[[Any], Any] = lambda tree: tree
) -> None:
    """Extend a dozen trees both ways, each behind the rest of the one before; compare them one by one."""
    rng = random.Random(seed)
    at_once, in_steps = Drafter(Counting(decoder, 600)), Drafter(StepByStep(decoder, 600))
    tokens, base, tree = some_tokens(request.prompt_length, seed), 0, NO_TREE
    for drafter in (at_once, in_steps):
        drafter.open(0, request)
    for number in range(12):
        growth = some_growth(rng)
        order = Grow(Context(base, tuple(tokens[base:]), tokens), with_lookup(rng, tree, growth), growth, number)
        base, polls = len(tokens), rng.choice([99, 99, 2])
        grown, expected = (seen(drafter.draft({0: order}, done_after(polls))[0]) for drafter in (at_once, in_steps))
        assert grown == expected
        for drafter in (at_once, in_steps):
            drafter.runner.check()  # type: ignore[attr-defined]
            held = drafter.runner.sequences[0]  # type: ignore[attr-defined]
            assert len(held.table.pages) == -(-len(held.slots) // PAGE), "a page was given back, or kept for nothing"
        slots, others = (drafter.slots(0) for drafter in (at_once, in_steps))
        assert (slots.prefix, slots.tokens, slots.parents) == (others.prefix, others.tokens, others.parents)
        tree = taken(rng, expected, tokens)
    assert at_once.runner.grown == 12  # type: ignore[attr-defined]
    assert at_once.rows_fed == in_steps.rows_fed


def done_after(polls: int) -> Any:
    """A target that is done after some polls."""
    left = iter(range(polls))
    return lambda: next(left, None) is None


def taken(rng: random.Random, tree: Tree, tokens: list[int]) -> Tree:
    """Commit some line of a tree to the text, or what it does not have; returns what is left of it."""
    here = ROOT
    while (known := tree.children(here)) and (rng.random() < 0.8 or here == ROOT):
        here = rng.choice(known[:2])
        tokens.append(tree.nodes[here].token)
    if here == ROOT or rng.random() < 0.3:
        tokens.append(rng.randrange(131))
        return NO_TREE
    return below(tree, here)


def test_what_the_device_does_not_choose_is_asked_for_step_by_step(decoder: Any) -> None:
    drafter, tokens = Drafter(Counting(decoder, 600)), some_tokens(PROMPT)
    drafter.open(0, SHAPED)
    tree = drafter.draft({0: Grow(Context(0, tuple(tokens)), NO_TREE, some_growth(random.Random(3)), 1)})[0]
    assert isinstance(tree, Tree) and len(tree) > 0
    assert drafter.runner.grown == 0  # type: ignore[attr-defined]


def test_a_growth_that_is_broken_off_leaves_the_text_and_is_made_again(decoder: Any) -> None:
    drafter, other = (Drafter(kind(decoder, 600)) for kind in (Counting, StepByStep))
    tokens, growth = some_tokens(PROMPT), some_growth(random.Random(1))
    order = Grow(Context(0, tuple(tokens)), NO_TREE, Growth((0.001,) * 8, growth.chances, free_time=9.0), 1)
    for one in (drafter, other):
        one.open(0, GREEDY)

    def interrupted() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drafter.draft({0: order}, interrupted)
    drafter.runner.check()  # type: ignore[attr-defined]
    assert drafter.draft({0: order}) == other.draft({0: order})


def test_where_memory_is_short_a_tree_is_extended_step_by_step_in_what_there_is(decoder: Any) -> None:
    drafter, other = (Drafter(kind(decoder, 600, pages=1)) for kind in (Counting, StepByStep))
    tokens, growth = some_tokens(230), some_growth(random.Random(1))
    order = Grow(Context(0, tuple(tokens)), NO_TREE, Growth((0.001,) * 8, growth.chances, most=90), 1)
    for one in (drafter, other):
        one.open(0, Request(SamplingParams(), 3, 230))
    assert drafter.draft({0: order}) == other.draft({0: order})
    assert drafter.runner.grown == 0  # type: ignore[attr-defined]
    drafter.runner.check()  # type: ignore[attr-defined]


def test_a_drafter_that_is_charged_by_the_step_sees_every_step(decoder: Any) -> None:
    drafter, tokens = MeteredDrafter(Counting(decoder, 600)), some_tokens(PROMPT)
    drafter.charge = Charge(CostProfile(target=((1, 1.0),), draft=((1, 0.1),)))
    drafter.open(0, GREEDY)
    tree = drafter.draft({0: Grow(Context(0, tuple(tokens)), NO_TREE, some_growth(random.Random(1)), 1)})[0]
    assert isinstance(tree, Tree) and len(tree.steps) > 1
    assert drafter.runner.grown == 0  # type: ignore[attr-defined]


def test_a_tree_is_never_extended_in_a_page_that_another_sequence_writes_to(decoder: Any) -> None:
    runner, prompt, rng = GpuRunner(decoder, 600, pages=2), some_tokens(PROMPT), random.Random(1)
    drafter = Drafter(runner)
    drafter.open(0, GREEDY)
    drafter.draft({0: Grow(Context(0, tuple(prompt)), NO_TREE, some_growth(rng), 0)}, done_after(99))
    pages, growing = runner.sequences[0].table.pages, Growing(1, (prompt[-1],), NO_TREE, {}, some_growth(rng))
    bits = runner.memory.data.view(torch.int64)  # what was never written may be no number
    before = bits[pages].clone()
    for seq in (1, 2):
        runner.open(seq, GREEDY)
    assert runner.recall(1, prompt[:-1]) == PROMPT - 1 and runner.sequences[1].table.pages == pages
    runner.extend(2, prompt[::-1])
    assert runner.grow(growing, done_after(99)) is None  # there is no page to copy it to
    runner.close(2)
    assert runner.grow(growing, done_after(99)) is not None
    assert runner.sequences[1].table.pages != pages and torch.equal(bits[pages], before)
    runner.check()
