"""Trees extended on a GPU: those that the host makes from the same proposals, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_exact_on_gpu import CONFIGS
from transformers import AutoModelForCausalLM

from specbranch.core.trees import Tree
from specbranch.models.loading import load_native
from test_device_trees import GREEDY, NOISY, assert_grown_alike

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = Path(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(1)  # where two candidates tie but for the last digit, host and device may differ
    AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(folder)
    return load_native(folder, context_length=2000, device="cuda", dtype=request.param).decoder


def rounded(tree: Any) -> Tree:
    """A device's exponential may differ from the host's in the last digit of what a draft says."""
    assert isinstance(tree, Tree)
    return Tree(tuple(node._replace(said=round(node.said, 12)) for node in tree.nodes), tree.root_scored, tree.steps)


@pytest.mark.parametrize("request_", [GREEDY, NOISY], ids=["greedy", "noisy"])
@pytest.mark.parametrize("seed", range(6))
def test_a_tree_grown_on_the_device_is_the_one_that_is_grown_step_by_step(
    seed: int, request_: Any, decoder: Any
) -> None:
    assert_grown_alike(seed, request_, decoder, rounded)
