"""Matrices in int8, int4 and bfloat16: their layouts, what is lost, and models that run on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specbranch.config import WEIGHTS, WeightsName
from specbranch.core.runner import Runner
from specbranch.errors import BadParameter
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.cpu.linear import KernelLinear, PlainLinear
from specbranch.models.files import matrix as layouts
from specbranch.models.files.head_columns import Columns
from specbranch.models.files.locate import locate
from specbranch.models.files.matrix import INT4_GROUP, INT4_KINDS, ROUNDED_KINDS, Matrix
from specbranch.models.files.weights import ReducedHead, Weights, read_weights
from specbranch.models.forward.decoder import Decoder, _linear
from specbranch.models.forward.stored_linear import StoredLinear
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native, open_model
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.precision import resolve_precision
from test_decoder import scores
from test_identity_models import SHAPINGS, compare
from tiers import each_pair, each_value, tiered
from tiny_models import SHAPE, saved, some_tokens, tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # the second is only named here
WIDE = {**SHAPE, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}  # whole groups of int4
FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
needs_kernel = pytest.mark.skipif(load_kernel("int8") is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the layouts ---


def test_int4_has_an_input_in_the_low_half_of_a_byte_and_the_one_64_further_in_the_high_half() -> None:
    small = Matrix(numbers(5, 3 * INT4_GROUP)).stored_as("int4")
    assert small.scale is not None and small.weight.dtype is torch.uint8 and small.scale.dtype is torch.float32
    assert small.weight.shape == (5, 192) and small.scale.shape == (5, 3)
    dense = torch.zeros(5, 384)
    for out in range(5):
        for column in range(384):
            group, within = divmod(column, 128)
            byte = int(small.weight[out, group * 64 + within % 64])
            number = (byte & 15 if within < 64 else byte >> 4) - 8
            assert -7 <= number <= 7
            dense[out, column] = number * small.scale[out, group]
    assert torch.equal(small.widened(FLOAT32), dense)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16, FLOAT64])
def test_int8_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = (numbers(70, 300) * numbers(70, 1, seed=1)).to(dtype)
    small = Matrix(weight).stored_as("int8")
    assert (
        small.weight.dtype is torch.int8
        and small.scale is not None
        and small.scale.dtype is FLOAT32
        and small.scale.shape == (70,)
    )
    torch.testing.assert_close(small.scale, weight.float().abs().amax(-1) / 127)
    assert ((small.widened(FLOAT64) - weight.double()).abs() <= small.scale.double().unsqueeze(-1) * 0.50001).all()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_int4_is_off_by_half_a_step_but_where_a_group_is_cut_off(dtype: torch.dtype) -> None:
    weight = (numbers(70, 4 * INT4_GROUP) * numbers(70, 1, seed=1)).to(dtype)
    small = Matrix(weight).stored_as("int4")
    assert small.scale is not None
    groups, scale = weight.double().view(70, 4, INT4_GROUP), small.scale.double().unsqueeze(-1)
    greatest = groups.abs().amax(-1, keepdim=True)
    error = small.widened(FLOAT64).view_as(groups) - groups
    assert (error.abs() <= torch.maximum(scale * 0.50001, groups.abs() - 7 * scale + 1e-6)).all()
    assert (scale <= greatest / 7 * 1.00001).all() and (scale >= 0.75 * greatest / 7 * 0.99999).all()
    plain = (groups / (greatest / 7)).round() * (greatest / 7) - groups
    assert error.square().sum() < 0.85 * plain.square().sum(), "the scales that were looked for gain too little"
    assert (error.square().sum(-1) <= plain.square().sum(-1) * 1.00001).all()


@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_what_was_stored_once_comes_out_with_the_same_whole_numbers(kind: WeightsName) -> None:
    weight = numbers(50, 2 * INT4_GROUP) * numbers(50, 1, seed=1)
    weight[7], weight[9, :INT4_GROUP] = 0, 0
    once = Matrix(weight).stored_as(kind)
    again = Matrix(once.widened(FLOAT32)).stored_as(kind)
    assert torch.equal(again.weight.view(torch.uint8), once.weight.view(torch.uint8))
    assert once.widened(FLOAT32)[7].eq(0).all() and once.widened(FLOAT32).isfinite().all()


@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_rows_are_rounded_alike_however_many_at_a_time(kind: WeightsName, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers(300, 2 * INT4_GROUP)
    whole = Matrix(weight).stored_as(kind)
    monkeypatch.setattr(layouts, "NUMBERS_AT_ONCE", 7 * 2 * INT4_GROUP)
    parts = Matrix(weight).stored_as(kind)
    assert whole.scale is not None and parts.scale is not None
    assert torch.equal(parts.weight.view(torch.uint8), whole.weight.view(torch.uint8))
    assert torch.equal(parts.scale, whole.scale)


@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind not in ("stored", "fp8-block")])
def test_some_rows_of_a_matrix_are_those_rows_stored(kind: WeightsName) -> None:
    whole, ids = Matrix(numbers(50, 2 * INT4_GROUP), numbers(50, seed=1)), torch.tensor([3, 4, 40])
    some, expected = whole.stored_as(kind).rows(ids), whole.rows(ids).stored_as(kind)
    for part in ("weight", "bias", "scale"):
        torch.testing.assert_close(getattr(some, part), getattr(expected, part), rtol=0, atol=0)


def test_a_kind_becomes_another_by_way_of_floats() -> None:
    dense = Matrix(numbers(5, INT4_GROUP))
    small = dense.stored_as("int4")
    assert torch.equal(
        small.stored_as("int8").widened(FLOAT32), Matrix(small.widened(FLOAT32)).stored_as("int8").widened(FLOAT32)
    )
    assert small.stored_as("int4") is small and dense.stored_as("float32") is dense
    widened = small.stored_as("float32")
    assert widened.scale is None and torch.equal(widened.weight, small.widened(FLOAT32))


def test_inputs_that_are_no_whole_groups_stay_in_int8() -> None:
    assert [Matrix(numbers(4, ins)).stored_as("int4").stored for ins in (128, 576, 640)] == ["int4", "int8", "int4"]
    assert [Matrix(numbers(4, ins)).stored_as("int4-64").stored for ins in (576, 96)] == ["int4-64", "int8"]
    assert [Matrix(numbers(4, ins)).stored_as("int4-32").stored for ins in (96, 48)] == ["int4-32", "int8"]


@pytest.mark.parametrize(("kind", "group"), [("int4-64", 64), ("int4-32", 32)])
def test_smaller_groups_have_the_halves_of_each_group_in_the_halves_of_bytes(kind: WeightsName, group: int) -> None:
    small = Matrix(numbers(5, 192)).stored_as(kind)
    assert small.scale is not None and small.weight.shape == (5, 96) and small.scale.shape == (5, 192 // group)
    dense = torch.zeros(5, 192)
    for out in range(5):
        for column in range(192):
            of, within = divmod(column, group)
            byte = int(small.weight[out, of * group // 2 + within % (group // 2)])
            number = (byte & 15 if within < group // 2 else byte >> 4) - 8
            dense[out, column] = number * small.scale[out, of]
    assert torch.equal(small.widened(FLOAT32), dense)


def test_smaller_groups_lose_less() -> None:
    weight = numbers(70, 4 * INT4_GROUP)
    lost = [(Matrix(weight).stored_as(kind).widened(FLOAT32) - weight).square().sum() for kind in INT4_KINDS]
    assert lost[0] > lost[1] > lost[2]


@pytest.mark.parametrize("ins", [256, 200, 576])
def test_fp8_is_off_by_a_sixteenth_at_most_and_a_block_has_one_scale(ins: int) -> None:
    weight = numbers(300, ins) * numbers(300, 1, seed=1)
    channel, block = (Matrix(weight).stored_as(kind) for kind in ("fp8", "fp8-block"))
    for small in (channel, block):
        assert small.weight.dtype is torch.float8_e4m3fn and small.scale is not None and small.scale.dtype is FLOAT32
        tiny_steps = small.scale.double().view(300, -1).repeat_interleave(small.group, 1) * 2**-10
        off = (small.widened(FLOAT64) - weight.double()).abs()
        assert (off <= torch.maximum(weight.double().abs() / 16 * 1.0001, tiny_steps)).all()
    torch.testing.assert_close(channel.scale, weight.abs().amax(-1) / 448)
    if ins == 200:  # its last block is cut, and 8 is no group that anything multiplies by
        assert block.stored == "fp8"
        return
    assert block.scale is not None and block.stored == "fp8-block"
    for first in range(0, 300, 128):
        for start in range(0, ins, 128):
            greatest = weight[first : first + 128, start : start + 128].abs().max() / 448
            held = block.scale[first : first + 128, start // block.group : -(-min(start + 128, ins) // block.group)]
            torch.testing.assert_close(held, greatest.expand_as(held))


# --- the product ---


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_the_plain_product_is_that_of_the_matrix_written_out(
    kind: WeightsName, dtype: torch.dtype, biased: bool
) -> None:
    bias = numbers(30, seed=3).to(dtype) if biased else None
    small = Matrix(numbers(30, 2 * INT4_GROUP), bias).stored_as(kind)
    layer, x = StoredLinear(small), (numbers(4, 2 * INT4_GROUP, seed=2) * 30).to(dtype)
    assert (layer.outs, layer.ins, layer.stored) == (30, 2 * INT4_GROUP, kind.partition("-")[0])
    found = layer(x)
    assert found.dtype is dtype and found.isfinite().all()
    exact = F.linear(x.double(), small.widened(FLOAT64), None if bias is None else bias.double())
    terms = x.double().abs() @ small.widened(FLOAT64).abs().T + (0 if bias is None else bias.double().abs())
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * 2 * terms).all()


def test_sums_of_whole_numbers_do_not_leave_the_range_of_float16() -> None:
    weight = torch.full((2, 1024), 0.5)
    layer, x = StoredLinear(Matrix(weight).stored_as("int8")), torch.full((1, 1024), 2.0, dtype=FLOAT16)
    assert layer(x).eq(1024).all()  # the numbers alone would sum up to 260,096


@needs_kernel
def test_a_matrix_gets_the_kernel_where_there_is_one_and_the_plain_product_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = Matrix(numbers(8, INT4_GROUP))
    kinds = {kind: type(_linear(dense.stored_as(kind), FLOAT32)) for kind in (*ROUNDED_KINDS, "bfloat16")}
    fast = {kind for kind, linear in kinds.items() if linear is KernelLinear}
    assert fast == {"int8", "fp8", "bfloat16"} and all(kinds[kind] is StoredLinear for kind in set(kinds) - fast)
    assert isinstance(_linear(dense.stored_as("int8"), FLOAT64), StoredLinear) and isinstance(
        _linear(dense.stored_as("int8"), BFLOAT16), StoredLinear
    )
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")
    assert isinstance(_linear(dense.stored_as("int8"), FLOAT32), StoredLinear)


# --- which precision goes with which storage ---


@needs_kernel
@pytest.mark.parametrize(
    ("dtype", "weights", "device", "expected"),
    [
        (None, None, CPU, (FLOAT32, None)),
        (None, None, GPU, (BFLOAT16, None)),
        (None, "int8", CPU, (FLOAT32, "int8")),
        (None, "int4", GPU, (BFLOAT16, "int4")),
        (None, "fp8-block", GPU, (BFLOAT16, "fp8-block")),
        ("bfloat16", "int4-32", CPU, (BFLOAT16, "int4-32")),
        ("float16", "int8", GPU, (FLOAT16, "int8")),
        (None, "float32", GPU, (FLOAT32, None)),
        (None, "bfloat16", GPU, (BFLOAT16, None)),
        (None, "bfloat16", CPU, (FLOAT32, "bfloat16")),
        ("float32", "bfloat16", CPU, (FLOAT32, "bfloat16")),
        ("bfloat16", "bfloat16", CPU, (BFLOAT16, None)),
        ("float64", None, CPU, (FLOAT64, None)),
    ],
)
def test_precision_and_storage_agree(
    dtype: str | None, weights: WeightsName | None, device: torch.device, expected: Any
) -> None:
    assert resolve_precision(dtype, weights, device) == expected


def test_floats_that_nothing_multiplies_are_refused() -> None:
    for dtype, weights, device in (
        ("float32", "bfloat16", GPU),
        ("bfloat16", "float32", GPU),
        ("float64", "float32", CPU),
    ):
        with pytest.raises(
            BadParameter,
            match=rf"weights is '{weights}' and dtype '{dtype}'; expected the same of both.*Leave --weights or",
        ):
            resolve_precision(dtype, weights, device)


def test_without_a_kernel_bfloat16_weights_bring_their_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")
    assert resolve_precision(None, "bfloat16", CPU) == (BFLOAT16, None)


# --- reading ---


@cache
def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    biased = {"attention_bias": True, "mlp_bias": True}
    configs: dict[str, Callable[[], Any]] = {
        "tied": lambda: Qwen2Config(**WIDE, tie_word_embeddings=True),
        "biases": lambda: LlamaConfig(**WIDE, **biased),
    }
    model = AutoModelForCausalLM.from_config(configs[kind]()).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved(model_of(kind), tmp_path_factory.mktemp(kind)) for kind in ("tied", "biases")}


def read(folder: Path, stored: WeightsName | None, dtype: torch.dtype = FLOAT32) -> Weights:
    arch, source = open_model(locate(str(folder)))
    return read_weights(arch, source, CPU, dtype, stored)


@pytest.mark.parametrize("kind", ROUNDED_KINDS)
@pytest.mark.parametrize("model", ["tied", "biases"])
def test_matrices_are_stored_small_and_nothing_else_is(model: str, kind: WeightsName, folders: dict[str, Path]) -> None:
    dense, small = read(folders[model], None, BFLOAT16), read(folders[model], kind, BFLOAT16)
    assert small.stored == kind and dense.stored == "bfloat16"
    assert [matrix.stored for matrix in small.matrices] == [kind] * 13
    assert torch.equal(small.embedding, dense.embedding) and small.norm.dtype is BFLOAT16
    for ours, theirs in zip(small.matrices, dense.matrices, strict=True):
        expected = theirs.stored_as(kind)
        assert torch.equal(ours.weight, expected.weight)
        assert (ours.bias is None) == (theirs.bias is None) and (ours.bias is None or ours.bias.dtype is BFLOAT16)
    assert (dense.head.weight.data_ptr() == dense.embedding.data_ptr()) == (model == "tied")


def test_a_matrix_is_stored_before_the_next_one_is_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, source = open_model(locate(str(folders["biases"])))
    log: list[str] = []
    real = source.read

    def noted(tensor: str, into: Tensor, *, leading: bool = False) -> None:
        log.append(tensor)
        real(tensor, into, leading=leading)

    rounding = Matrix._rounded
    monkeypatch.setattr(source, "read", noted)
    monkeypatch.setattr(Matrix, "_rounded", lambda self, *how: log.append("stored") or rounding(self, *how))
    read_weights(arch, source, CPU, FLOAT32, "int8")
    assert log[:3] == ["model.embed_tokens.weight", "lm_head.weight", "stored"]
    wide = 0
    for entry in log[3:]:
        wide = 0 if entry == "stored" else wide + ("proj.weight" in entry)
        assert wide <= 3, "q, k and v are one matrix; no other is read beside it"
    assert log.count("stored") == 13


# --- models at work ---


def written_out(weights: Weights, dtype: torch.dtype) -> Weights:
    """The same model in floats: what its small matrices stand for."""
    names = ("qkv", "out", "gate_up", "down")
    layers = tuple(
        replace(layer, **{name: getattr(layer, name).in_floats(dtype) for name in names}) for layer in weights.layers
    )
    reduced = weights.reduced and replace(weights.reduced, matrix=weights.reduced.matrix.in_floats(dtype))
    return replace(weights, layers=layers, head=weights.head.in_floats(dtype), reduced=reduced)


@each_pair
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("make", [NativeRunner, GpuRunner])
@pytest.mark.parametrize("kind", ROUNDED_KINDS)
@pytest.mark.parametrize("model", ["tied", "biases"])
def test_a_model_scores_as_what_it_stands_for_does_in_floats(
    model: str, kind: WeightsName, make: type[NativeRunner], reduced: bool, folders: dict[str, Path]
) -> None:
    arch, weights = open_model(locate(str(folders[model])))[0], read(folders[model], kind, FLOAT64)
    if reduced:
        ids = torch.arange(0, arch.vocabulary, 3)
        weights = replace(weights, reduced=ReducedHead(weights.head.rows(ids), Columns(ids, arch.vocabulary)))
    runners = [make(Decoder(arch, one, 300), 200) for one in (weights, written_out(weights, FLOAT64))]
    assert isinstance(runners[0].decoder.head, StoredLinear) and isinstance(runners[1].decoder.head, PlainLinear)
    found = [scores(runner, some_tokens(40)) for runner in runners]
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)
    dense = scores(make(Decoder(arch, read(folders[model], None, FLOAT64), 300), 200), some_tokens(40))
    assert runners[0].weights == kind
    if not reduced:
        lost = ((found[0] - dense).abs().mean() / dense.abs().mean()).item()
        # of a random model, which amplifies; unrelated logits: 1.4
        assert 1e-4 < lost < (0.1 if kind == "int8" else 0.3 if kind.startswith("fp8") else 0.8)


@needs_kernel
@pytest.mark.parametrize("kind", ["int8", "fp8", "bfloat16"])
def test_the_compiled_step_runs_on_small_matrices(
    kind: WeightsName, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    arch = open_model(locate(str(folders["tied"])))[0]
    compiled = load_native(folders["tied"], context_length=200, weights=kind)
    assert compiled.compiled and compiled.weights == kind and compiled.dtype is FLOAT32
    plain = NativeRunner(Decoder(arch, written_out(read(folders["tied"], kind), FLOAT32), 300), 200)
    torch.testing.assert_close(scores(compiled, some_tokens(40)), scores(plain, some_tokens(40)), rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def wide_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, target = tmp_path_factory.mktemp("pair"), model_of("tied")
    saved(target, folder / "target")
    disturbed = AutoModelForCausalLM.from_pretrained(folder / "target")
    torch.manual_seed(5)
    for parameter in disturbed.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.08)
    return folder / "target", saved(disturbed, folder / "draft")


def loading(kind: WeightsName, make: type[NativeRunner]) -> Callable[..., Runner]:
    def load(path: Path, *, context_length: int, device: str, dtype: torch.dtype) -> Runner:
        plain = load_native(path, context_length=context_length, device=device, dtype=dtype, weights=kind)
        return plain if make is NativeRunner else make(plain.decoder, context_length)

    return load


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("shaping", tiered(("greedy", "everything"), "greedy".__eq__))
@pytest.mark.parametrize("make", tiered((NativeRunner, GpuRunner), lambda make: make is NativeRunner))
@pytest.mark.parametrize("kind", tiered(("int8", "int4", "int4-32", "fp8", "fp8-block"), "int8".__eq__))
def test_every_method_gives_what_plain_decoding_gives_with_the_same_weights(
    kind: WeightsName, make: type[NativeRunner], shaping: str, wide_pair: tuple[Path, Path]
) -> None:
    sessions = compare(loading(kind, make), *wide_pair, SHAPINGS[shaping], runs=1)
    assert sum(session.stats.accepted for session in sessions.values()) > 0
    assert sum(session.stats.rejected for session in sessions.values()) > 0


def test_int4_says_how_many_matrices_do_not_fit_it_and_that_a_cpu_is_slow(
    wide_pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "specbranch"):
        load_native(wide_pair[0], context_length=64, weights="int8")
        assert not caplog.records
        load_native(wide_pair[0], context_length=64, weights="int4")
        assert len(caplog.records) == 1 and "int4 has no kernel on CPUs" in caplog.text
        caplog.clear()
        narrow = load_native(saved(tiny("llama"), tmp_path), context_length=64, weights="int4")
    assert [record.getMessage() for record in caplog.records] == [
        "13 of 13 matrices are in int8: int4 needs a multiple of 128 inputs."
    ]
    assert narrow.weights == "int8"
