"""An inflated model is its source in another shape: the same logits and tokens, and nothing in it that could be
skipped."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
from specbranch.config import SamplingParams
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter, ModelError
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.lab.inflation.recipe import FORMAT, Inflation, read_inflation, write_inflation
from specbranch.lab.inflation.shapes import SHAPES, Shape
from specbranch.lab.inflation.tensors import InflatedSource, inflated_architecture, shape_of
from specbranch.models.cache import pool_size
from specbranch.models.cache.pool_size import weight_bytes
from specbranch.models.files.identity import model_identity
from specbranch.models.files.locate import locate
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import Weights, read_weights
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native, open_model
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.transformers_runner import load_transformers
from specbranch.models.sampling.logit_rows import collate
from test_identity_models import SHAPINGS, decode
from tiers import each_value, tiered
from tiny_models import CONFIGS, GREEDY, SHAPE, saved, some_tokens, tiny

VOCABULARY = SHAPE["vocab_size"]
CPU = torch.device("cpu")
# heads, key heads, times the head dimension: groups smaller than the model's three, as large, larger, and of one
GROUPS = [(12, 6, 1), (9, 3, 2), (14, 2, 2), (8, 8, 4)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved(tiny(kind), tmp_path_factory.mktemp(kind)) for kind in CONFIGS}


def recipe_of(
    source: Path, heads: int = 14, kv_heads: int = 7, times: int = 2, vocabulary: int = 150, **other: Any
) -> Inflation:
    arch, _ = open_model(locate(str(source)))
    sizes = Shape(128, 5, heads, kv_heads, arch.head_dim * times, 112, vocabulary)
    rows = max(vocabulary, arch.vocabulary)
    reported = {
        "kind": "model",
        "source": str(source),
        "source_identity": model_identity(str(source)),
        "shape": "test",
        "sizes": sizes,
    }
    return Inflation(**{**reported, "head_rows": rows, "head_scored": arch.vocabulary, **other})


def inflated(source: Path, folder: Path, **asked: Any) -> Path:
    write_inflation(folder, recipe_of(source, **asked))
    return folder


def scores(runner: NativeRunner, tokens: list[int], read: int = 40) -> torch.Tensor:
    runner.open(0, GREEDY)
    runner.extend(0, tokens[:read])
    last = tuple(tokens[read:])
    rows = runner.score([Feed(0, last, (ROOT, *range(len(last) - 1)))])[0]
    runner.close(0)
    return collate(rows)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@each_value
@pytest.mark.parametrize(("heads", "kv_heads", "times"), GROUPS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_of_every_family_are_the_sources(
    kind: str, heads: int, kv_heads: int, times: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = inflated(folders[kind], tmp_path / "inflated", heads=heads, kv_heads=kv_heads, times=times)
    asked: dict[str, Any] = {"context_length": 400, "dtype": "float64", "tail": 64}
    tokens = some_tokens(330)
    found, expected = (
        scores(load_native(folder, **asked), tokens, 290),
        scores(load_native(folders[kind], **asked), tokens, 290),
    )
    assert found.shape[1] == 150 and expected.shape[1] == VOCABULARY
    assert apart(found[:, :VOCABULARY], expected) < 1e-9


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("kind", tiered(CONFIGS, ("llama", "qwen3").__contains__))
@pytest.mark.parametrize("weights", [None, "int8"])
def test_compiled_steps_give_the_sources_logits_in_float32_and_int8(
    kind: str, weights: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"context_length": 128, "weights": weights}
    found = load_native(inflated(folders[kind], tmp_path / "inflated", times=4), **asked)
    expected = load_native(folders[kind], **asked)
    assert found.weights == (weights or "float32")
    assert apart(scores(found, some_tokens(60))[:, :VOCABULARY], scores(expected, some_tokens(60))) < 1e-4


@each_value
@pytest.mark.parametrize("shaping", ["greedy", "everything"])
@pytest.mark.parametrize("on_graphs", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_tokens_are_the_sources_and_rows_behind_the_vocabulary_are_never_said(
    kind: str, on_graphs: bool, shaping: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = inflated(folders[kind], tmp_path / "inflated", vocabulary=300)
    large, small = (load_native(path, context_length=256, dtype="float64") for path in (folder, folders[kind]))
    head: Any = large.decoder.head
    head.weight[VOCABULARY:] *= 1000  # they would win
    loud = scores(large, some_tokens(60))
    assert (loud.argmax(-1) >= VOCABULARY).all()
    runners = [GpuRunner(runner.decoder, 256) if on_graphs else runner for runner in (large, small)]
    params = SamplingParams(**SHAPINGS[shaping], max_tokens=16)  # type: ignore[arg-type]
    said = [
        decode(Serial(Verifier(runner)), "autoregressive", params, some_tokens(20), 3, eos=-1).output
        for runner in runners
    ]
    assert said[0] == said[1]


def made(source: Path, seed: int = 0) -> tuple[Any, Weights]:
    small, file = open_model(locate(str(source)))
    recipe = recipe_of(source)
    large = inflated_architecture(small, recipe.sizes, recipe.head_rows, "test")
    return large, read_weights(large, InflatedSource(small, file, large, seed), CPU, torch.float32)


@pytest.mark.parametrize("kind", ["llama-linear-biases", "qwen3"])
def test_only_what_would_write_into_the_stream_is_zero(kind: str, folders: dict[str, Path]) -> None:
    arch, weights = made(folders[kind])
    hidden = SHAPE["hidden_size"]
    assert not weights.embedding[:, hidden:].any() and weights.embedding[:, :hidden].all()
    for index, layer in enumerate(weights.layers):
        for matrix in (layer.out, layer.down):
            assert not matrix.weight[hidden:].any()
            assert bool(matrix.weight[:hidden].any()) == (index < SHAPE["num_hidden_layers"])
        assert layer.gate_up.weight.all() and layer.attention_norm.all() and layer.mlp_norm.all()
        queries, keys, values = torch.split(
            layer.qkv.weight, [arch.heads * arch.head_dim, *[arch.kv_heads * arch.head_dim] * 2]
        )
        assert values.all() and (keys.all() or (arch.qk_norm and index < SHAPE["num_hidden_layers"]))
        assert queries[:, hidden:].all(), "what reads the padding is random"
    assert weights.head.weight.all() and weights.norm.all()


def test_what_is_random_follows_from_the_seed(folders: dict[str, Path]) -> None:
    heads = [made(folders["llama"], seed)[1].layers[4].gate_up.weight for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_random_numbers_do_not_coarsen_the_steps_of_int8(folders: dict[str, Path]) -> None:
    _, weights = made(folders["llama"])
    small, file = open_model(locate(str(folders["llama"])))
    source = read_weights(small, file, CPU, torch.float32)
    rows = SHAPE["intermediate_size"]
    own, grown = (Matrix(held.layers[0].gate_up.weight[:rows].clone()).stored_as("int8") for held in (source, weights))
    assert torch.equal(grown.weight[:, : SHAPE["hidden_size"]], own.weight)


def test_the_larger_size_is_counted_before_anything_is_made(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = inflated(folders["llama"], tmp_path / "inflated")
    arch, source = open_model(locate(str(folder)))
    held = read_weights(arch, source, CPU, torch.float32)
    biases = sum(0 if matrix.bias is None else matrix.bias.nbytes for matrix in held.matrices)
    assert (
        weight_bytes(arch, torch.float32)
        == held.embedding.nbytes + sum(matrix.weight.nbytes for matrix in held.matrices) + biases
    )
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 100_000)
    with pytest.raises(ModelError, match="as test does not fit"):
        load_native(folder)


def test_tokenizer_facts_are_the_sources(folders: dict[str, Path], tmp_path: Path) -> None:
    small, large = (
        open_model(locate(str(path)))[0]
        for path in (folders["qwen2"], inflated(folders["qwen2"], tmp_path / "inflated"))
    )
    for fact in ("vocabulary", "context_length", "eos_ids", "bos_id", "window", "family"):
        assert getattr(small, fact) == getattr(large, fact)


def test_identity_is_that_of_recipe_and_source(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = recipe_of(folders["llama"])
    others = {
        "same": replace(recipe, checked={"difference": 0.0}),
        "seed": replace(recipe, seed=1),
        "shape": replace(recipe, sizes=replace(recipe.sizes, layers=6)),
        "source": recipe_of(folders["mistral"], times=1),
    }
    identities = {}
    for name, other in {"first": recipe, **others}.items():
        write_inflation(tmp_path / name, other)
        identities[name] = model_identity(str(tmp_path / name))
    assert identities["first"] == identities["same"] and len(set(identities.values())) == 4
    assert model_identity(str(folders["llama"])) not in identities.values()


def test_another_source_than_it_was_checked_with_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders["llama"], source)
    folder = inflated(source, tmp_path / "inflated")
    saved(tiny("llama", seed=9), source)
    with pytest.raises(ModelError, match="not the model that source as test was made of"):
        load_native(folder)
    shutil.rmtree(source)
    with pytest.raises(ModelError, match="source of source as test cannot be had"):
        load_native(folder)


def test_a_damaged_recipe_is_a_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = inflated(folders["llama"], tmp_path / "inflated")
    file = folder / "inflation.json"
    text = file.read_text()
    for damaged, error in (("{", "no recipe"), (text.replace('"sizes"', '"siezs"'), "no recipe"), ("[]", "no recipe")):
        file.write_text(damaged)
        with pytest.raises(ModelError, match=error):
            load_native(folder)
    file.write_text(text.replace(f'"format": {FORMAT}', '"format": 99'))
    with pytest.raises(ModelError, match="format 99"):
        read_inflation(folder)


@pytest.mark.parametrize(
    ("sizes", "reported"),
    [
        ({"hidden": 40, "layers": 2}, "hidden 40 of at least 48, layers 2 of at least 3. .* --hidden 48 --layers 3"),
        ({"head_dim": 12}, "head dimension is 12; expected a multiple of the model's 8"),
        ({"heads": 7, "kv_heads": 2}, "7 heads over 2 key heads"),
        ({"heads": 6, "kv_heads": 3}, "4 key heads of 2 query heads are needed; the shape has 3"),
    ],
)
def test_a_shape_that_does_not_hold_the_model_is_refused(
    sizes: dict[str, int], reported: str, folders: dict[str, Path]
) -> None:
    arch, _ = open_model(locate(str(folders["llama"])))
    with pytest.raises(BadParameter, match=reported):
        inflated_architecture(arch, replace(shape_of(arch), **sizes), VOCABULARY, "it")


def test_a_smaller_vocabulary_keeps_the_models_own_head(folders: dict[str, Path], tmp_path: Path) -> None:
    runner = load_native(inflated(folders["llama"], tmp_path / "inflated", vocabulary=100), context_length=64)
    assert scores(runner, some_tokens(50)).shape[1] == VOCABULARY


def test_transformers_refuses_it(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is inflated.*--runner native"):
        load_transformers(inflated(folders["llama"], tmp_path / "inflated"))


def test_shapes_are_as_large_as_they_say() -> None:
    named = {"68m": 68e6, "1b": 1.24e9, "1.3b": 1.35e9, "7b": 6.74e9, "8b": 8.03e9, "13b": 13.0e9, "33b": 33.3e9}
    for name, parameters in named.items():
        shape = SHAPES[name]
        tied = shape.vocabulary * shape.hidden if name == "1b" else 0
        assert shape.parameters - tied == pytest.approx(parameters, rel=0.02), name
