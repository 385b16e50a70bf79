"""A draft that reads its target's features: its forward by the formula, its files, and which features its rows read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from feature_drafts import Formula, Recipe, save_feature_draft
from specbranch import LLM
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter, ModelError
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.cpu.linear import choose_linear
from specbranch.models.drafts.feature_load import load_feature_draft
from specbranch.models.forward.features import Fuse
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.gpu.step import GpuStep
from specbranch.models.loading import load_native
from specbranch.models.runners.feature_runner import FeatureRunner
from specbranch.models.runners.native import NativeRunner
from specbranch.training.distill.agreement import AnsweredPrompt, compare
from tiers import tiered
from tiny_models import GREEDY, SHAPE, exact_softmax, in_double, random_model, saved, some_tokens, tiny
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


@pytest.mark.parametrize("name", tiered(RECIPES, lambda one: one in ("ours-two-layers", "speculators", "eagle3")))
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


def changed(recipe: Recipe, folder: Path, target: str, tensors: dict[str, Tensor | None]) -> str:
    """A draft with some tensors replaced, or left out."""
    name = save_feature_draft(folder, recipe, target)
    stored = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({key: value for key, value in stored.items() if value is not None}, folder / "model.safetensors")
    return name


PUBLIC = Recipe("speculators", kept=KEPT)
TWICE = torch.tensor(KEPT) - torch.arange(len(KEPT)) - torch.eye(len(KEPT), dtype=torch.int64)[1] * 5
FAULTS: dict[str, tuple[Recipe, dict[str, Tensor | None], str]] = {
    "tokens": (replace(PUBLIC, vocabulary=300, kept=()), {}, "was made for 300 tokens; its target .* has 421"),
    "hidden": (replace(PUBLIC, hidden=48, kept=()), {}, "hidden size of 48 and no embedding of its own"),
    "taps": (replace(PUBLIC, taps=(1, 2, 9)), {}, "behind 1, 2, 9 layers; .* has 6"),
    "three layers": (replace(PUBLIC, layers=3), {}, "has 3 layers of the family llama; feature drafts have 1 or 2"),
    "no fc": (PUBLIC, {"fc.weight": None}, "no tensor 'fc.weight'"),
    "no layer": (PUBLIC, {"layers.0.self_attn.q_proj.weight": None}, "no tensor 'layers.0.self_attn.q_proj.weight'"),
    "no norms": (PUBLIC, {"layers.0.hidden_norm.weight": None}, "no tensor 'layers.0.hidden_norm.weight'"),
    "narrow q": (PUBLIC, {"layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)}, r"has shape \[32, 32\]"),
    "no table": (PUBLIC, {"d2t": None}, "no tensor 'd2t'"),
    "far token": (
        PUBLIC,
        {"d2t": torch.full((len(KEPT),), 400)},
        "stands for token 421; the target's ids are 0 to 420",
    ),
    "token twice": (PUBLIC, {"d2t": TWICE}, "two rows of the head stand for token 3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_draft_that_does_not_fit_is_refused_by_name(fault: str, target: str, tmp_path: Path) -> None:
    recipe, tensors, said = FAULTS[fault]
    with pytest.raises(ModelError, match=said):
        loaded(target, changed(recipe, tmp_path, target, tensors))


def test_rows_of_a_head_may_stand_in_any_order(target: str, tmp_path: Path) -> None:
    order = torch.randperm(len(KEPT), generator=torch.Generator().manual_seed(0))
    plain = save_feature_draft(tmp_path / "plain", PUBLIC, target)
    head = load_file(tmp_path / "plain" / "model.safetensors")["lm_head.weight"][order]
    mixed = {"d2t": torch.tensor(KEPT)[order] - torch.arange(len(KEPT)), "lm_head.weight": head.contiguous()}
    found = []
    for name in (plain, changed(PUBLIC, tmp_path / "mixed", target, mixed)):
        draft = loaded(target, name)
        read(draft.target, some_tokens(20))
        read(draft, some_tokens(20)[:19])
        found.append(draft.score([Feed(0, (some_tokens(20)[19],), (ROOT,))])[0][0].logits)
    assert torch.equal(*found)


def test_a_target_that_cannot_write_features_is_refused(target: str, tmp_path: Path) -> None:
    draft = save_feature_draft(tmp_path, Recipe(), target)
    for runner, said in ((None, "both run in one process, in turn"), (object(), "the transformers runner")):
        with pytest.raises(BadParameter, match=f"{said}.*plain draft"):
            load_feature_draft(draft, target, target_runner=runner)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match=r"one device in one precision.*plain draft"):
        load_feature_draft(draft, target, target_runner=load_native(target), dtype=torch.float64)
    for executor in ("process", "streams"):
        with pytest.raises(BadParameter, match=r"plain draft|needs a GPU|on a GPU"):
            LLM(target, draft, executor=executor, device="cpu")  # type: ignore[arg-type]


def test_our_draft_for_another_target_is_refused(target: str, tmp_path: Path) -> None:
    other = make_pair(tmp_path / "pair", sizes={**SIZES, "num_hidden_layers": 5})[1]
    draft = save_feature_draft(tmp_path / "draft", Recipe(), other)
    with pytest.raises(ModelError, match="was made for"):
        loaded(target, draft)


def fuse_of(arch: Any, taps: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Fuse:
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(24, len(taps) * arch.hidden, generator=random, dtype=torch.float64).to(dtype)
    return Fuse(taps, choose_linear(weight, None), 24)


def written(runner: NativeRunner, taps: tuple[int, ...]) -> list[Tensor]:
    """The features of three sequences after prefill, trees, moves, a shared beginning and a rollback."""
    runner.write_features(fuse_of(runner.architecture, taps, runner.dtype))
    assert runner.features is not None
    stem = some_tokens(300)
    for seq, prompt in enumerate((stem, some_tokens(40), [*stem[:260], 5, 6])):
        runner.open(seq, GREEDY)
        runner.extend(seq, prompt[runner.recall(seq, prompt) :])
        runner.flush()
    for _ in range(3):
        runner.feed([Feed(seq, (3, 4, 5, 6, 7), (ROOT, ROOT, 1, 2, 0)) for seq in range(3)])
        runner.keep(0, (1, 2, 3), 3)  # these close up
        runner.keep(1, (0, 4), 2)
        runner.keep(2, (1, 2), 1)
        runner.keep(2, (), 0)
    runner.rewind(0, 303)
    runner.feed([Feed(0, (9, 8), (ROOT, 0))])
    runner.keep(0, (0, 1), 2)
    found = []
    for seq in range(3):
        slots, table = runner.slots(seq), runner.sequences[seq].table
        found.append(runner.features.memory.data[table.flat(np.arange(len(slots.prefix)))])
    return found


@pytest.mark.parametrize("taps", tiered([(0, 2, 3), (1, 2, 4)], (0, 2, 3).__eq__))
@pytest.mark.parametrize("way", tiered(("gpu", "gpu chunks", "compiled"), "gpu".__eq__))
def test_every_step_of_a_target_writes_the_same_features(
    way: str, taps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(LlamaConfig(**{**SHAPE, "num_hidden_layers": 4, "max_position_embeddings": 400}))
    dtype = "float32" if way == "compiled" else "float64"
    path = saved(model, tmp_path)
    if way == "compiled" and load_kernel() is None:
        pytest.skip("no compiled kernels on this machine")
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm" if way == "compiled" else "torch")
    runner = load_native(path, context_length=360, dtype=dtype)
    monkeypatch.setattr(GpuStep, "takes_chunks", way == "gpu chunks")
    other = runner if way == "compiled" else GpuRunner(runner.decoder, 360)
    assert other.compiled == (way == "compiled")
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")
    plain = load_native(path, context_length=360, dtype="float64")
    for one, true in zip(written(other, taps), written(plain, taps), strict=True):
        error = (one.double() - true).abs().max() / true.abs().max()
        assert error < (1e-4 if way == "compiled" else 1e-10)


def test_a_plain_round_on_a_gpu_writes_features(tmp_path: Path) -> None:
    runner = load_native(saved(tiny("llama"), tmp_path), context_length=128, dtype="float64")
    taps, found = (0, 1, 3), []
    for made in (NativeRunner(runner.decoder, 128), GpuRunner(runner.decoder, 128)):
        made.write_features(fuse_of(made.architecture, taps))
        assert made.features is not None
        made.open(0, GREEDY)
        made.extend(0, some_tokens(20))
        made.flush()
        text = [*some_tokens(20), 3]
        for _ in range(6):
            if isinstance(made, GpuRunner):
                step = made.decode({0: text}, {0})
                assert step is not None
                text.append(step.sampled()[0])
            else:
                row = made.score([Feed(0, (text[-1],), (ROOT,))])[0][0]
                made.keep(0, (0,), 1)
                text.append(int(row.logits.argmax()))
        found.append((text, made.features.memory.data[made.sequences[0].table.flat(np.arange(26))]))
    assert found[0][0] == found[1][0]
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-9, atol=1e-9)


def test_agreement_is_measured_beside_the_target(target: str, tmp_path: Path) -> None:
    recipe = Recipe()
    draft, text = loaded(target, save_feature_draft(tmp_path, recipe, target)), some_tokens(60)
    formula = formula_of(recipe, target)
    assert recipe.taps is not None
    states = states_of(target, text[:-1], recipe.taps)
    wanted = formula.logits(text[:-1], formula.features(states)).argmax(-1).tolist()  # behind tokens 1, 2 …
    text[-1] = wanted[-1]  # the last token is right
    found = compare(draft, [AnsweredPrompt(tuple(text[:41]), tuple(text[41:]))])
    hits = [choice == token for choice, token in zip(wanted[39:], text[41:], strict=True)]
    assert found.tokens == 19 and found.top1 * 19 == pytest.approx(sum(hits)) and hits[-1]
    assert not draft.target.sequences and not draft.sequences


def test_rows_are_made_again_once_the_target_has_their_features_and_only_then(target: str, tmp_path: Path) -> None:
    """Also where the prompt is one token, before which there is no feature."""
    draft = loaded(target, save_feature_draft(tmp_path, Recipe(), target))
    one = draft.target
    read(one, [5], chunk=1)
    draft.open(0, GREEDY)
    draft.feed([Feed(0, (5, 6, 7, 8, 9), (ROOT, 0, 1, 2, 1))])  # 5 has no feature, 6 reads that of 5
    draft.keep(0, (0, 1, 2), 2)
    draft.refresh(0)
    assert (draft.slots(0).prefix, draft.slots(0).tokens) == ([5, 6], [7])  # 7 reads the draft's own state of 6
    one.feed([Feed(0, (6,), (ROOT,))])
    one.keep(0, (0,), 1)
    draft.refresh(0)
    assert (draft.slots(0).prefix, draft.slots(0).tokens) == ([5, 6], [])
    draft.feed([Feed(0, (7, 8, 9), (ROOT, 0, 1))])
    draft.keep(0, (0, 1, 2), 3)
    draft.refresh(0)
    assert draft.slots(0).prefix == [5, 6, 7, 8, 9] and draft.reads(0, 3) and not draft.reads(0, 4)
    one.feed([Feed(0, (7,), (ROOT,))])
    one.keep(0, (0,), 1)
    draft.refresh(0)
    assert draft.slots(0).prefix == [5, 6, 7]  # 8 and 9 read fed-back states
