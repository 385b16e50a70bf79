"""Trees that grow on a GPU: those that the host grows, from the same proposals, step by step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_exact_on_gpu import CONFIGS
from transformers import AutoModelForCausalLM

from specbranch.core.orders import Context, Grow
from specbranch.core.trees import NO_TREE, Tree
from specbranch.exec.drafter import Drafter
from specbranch.models.native import load_native
from test_device_trees import GREEDY, NOISY, PROMPT, Counting, StepByStep, done_after, some_growth, taken, with_lookup
from tiny_models import some_tokens

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = Path(tmp_path_factory.mktemp("llama"))
    AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(folder)
    return load_native(folder, context_length=2000, device="cuda", dtype=request.param).decoder


def rounded(tree: Any) -> Tree:
    """A device's exponential may differ from the host's in the last digit of what a draft says."""
    assert isinstance(tree, Tree)
    return Tree(tuple(node._replace(said=round(node.said, 12)) for node in tree.nodes), tree.read, tree.steps)


@pytest.mark.parametrize("request_", [GREEDY, NOISY], ids=["greedy", "noisy"])
@pytest.mark.parametrize("seed", range(6))
def test_a_tree_grown_on_the_device_is_the_one_that_is_grown_step_by_step(seed: int, request_: Any, decoder: Any) -> None:
    rng = random.Random(seed)
    at_once, in_steps = (Drafter(kind(decoder, 1000)) for kind in (Counting, StepByStep))
    tokens, told, tree = some_tokens(PROMPT, seed), 0, NO_TREE
    for drafter in (at_once, in_steps):
        drafter.open(0, request_)
    for number in range(12):
        growth = some_growth(rng)
        order = Grow(Context(told, tuple(tokens[told:]), tokens), with_lookup(rng, tree, growth), growth, number)
        told, polls = len(tokens), rng.choice([99, 99, 2])
        grown, expected = (rounded(drafter.draft({0: order}, done_after(polls))[0]) for drafter in (at_once, in_steps))
        assert grown == expected
        slots, others = (drafter.slots(0) for drafter in (at_once, in_steps))
        assert (slots.prefix, slots.tokens, slots.parents) == (others.prefix, others.tokens, others.parents)
        tree = taken(rng, expected, tokens)
    assert at_once.runner.grown == 12  # type: ignore[attr-defined]
