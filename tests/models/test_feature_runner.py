"""A draft that reads its target's features: its forward by the formula, its files, and which features its rows read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from feature_drafts import Formula, Recipe, save_feature_draft
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.models.drafts.feature_load import load_feature_draft
from specbranch.models.loading import load_native
from specbranch.models.runners.feature_runner import FeatureRunner
from specbranch.models.runners.native import NativeRunner
from tiny_models import GREEDY, exact_softmax, in_double, some_tokens
from tiny_pair import SIZES, make_pair

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 6
KEPT = tuple(range(3, 421, 5))
RECIPES = {
    "ours": Recipe(),
    "ours-two-layers": Recipe(layers=2, feeds_normed=True, taps=(0, 3, LAYERS)),
    "speculators": Recipe("speculators", kept=KEPT, normed_residual=True, fc_norm=True),
    "speculators-qwen3.1": Recipe("speculators", feeds_normed=True, norm_before_fc=True, scores=True),
    "eagle3": Recipe("eagle3", taps=None, kept=KEPT),
    "eagle3-own-embedding": Recipe("eagle3", hidden=48, target_hidden=32, embeds=True, scores=True),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    return make_pair(folder, sizes={**SIZES, "num_hidden_layers": LAYERS})[0]


def loaded(target: str, draft: str, dtype: torch.dtype = torch.float64, **options: Any) -> FeatureRunner:
    runner = load_native(target, context_length=256, dtype=dtype)
    return load_feature_draft(draft, target, target_runner=runner, context_length=256, dtype=dtype, **options)


def states_of(target: str, tokens: list[int], taps: tuple[int, ...]) -> list[Tensor]:
    """The target's hidden states behind the taps, by transformers."""
    model = in_double(LlamaForCausalLM.from_pretrained(target)).eval()
    seen: dict[int, Tensor] = {}
    for index, layer in enumerate(model.model.layers):  # hidden_states[-1] would be normed
        layer.register_forward_hook(lambda _, given, out, at=index: seen.update({at: given[0], at + 1: out}))
    with torch.inference_mode(), exact_softmax():
        model(torch.tensor([tokens]))
    return [seen[tap].view(len(tokens), -1) for tap in taps]


def formula_of(recipe: Recipe, target: str) -> Formula:
    stored = load_file(f"{target}/model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    return Formula(recipe, embedding, stored.get("lm_head.weight", embedding))


def read(runner: NativeRunner, tokens: list[int], chunk: int = 0) -> None:
    """Open sequence 0, and compute its tokens: prefill, then a step each for the last `chunk`."""
    runner.open(0, GREEDY)
    runner.extend(0, tokens[: len(tokens) - chunk])
    for token in tokens[len(tokens) - chunk :]:
        runner.feed([Feed(0, (token,), (ROOT,))])
        runner.keep(0, (0,), 1)


@pytest.mark.parametrize("name", RECIPES)
def test_the_forward_is_that_of_the_formula(name: str, target: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    taps = recipe.taps or (2, LAYERS // 2, LAYERS - 3)
    if recipe.layout == "eagle3" and taps[0] == 1:
        taps = tuple(tap + 1 for tap in taps)
    draft = loaded(target, save_feature_draft(tmp_path, recipe, target))
    tokens, more = some_tokens(90)[:86], [7, 9, 11, 13]
    formula = formula_of(recipe, target)
    features = formula.features(states_of(target, tokens, taps))
    wanted = formula.logits([*tokens, *more], features)
    read(draft.target, tokens, chunk=5)
    draft.open(0, GREEDY)
    draft.extend(0, tokens[:70])  # the prompt, then true rows in a step, then fed-back ones
    rest = [*tokens[70:], *more]
    rows = draft.score([Feed(0, tuple(rest), tuple(range(ROOT, len(rest) - 1)))])[0]
    found = torch.stack([row.logits for row in rows]).double()
    if recipe.kept:
        assert found.isinf().sum() == found.numel() - len(found) * len(recipe.kept)
        found = found[:, list(recipe.kept)]
    assert (found - wanted[69:]).abs().max() < 1e-9 * wanted.abs().max()
