"""The small-row linear: right, the same whatever the row count, and never in the way."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specbranch.errors import BadParameter
from specbranch.models.cpu import kernels, linear
from specbranch.models.cpu.kernels import Machine, WeightBits, load_kernel, outputs_at_a_time, whole_numbers
from specbranch.models.cpu.linear import (
    PRODUCT_ROWS,
    STORED_AS,
    KernelLinear,
    PlainLinear,
    choose_linear,
    small_linear,
    takes,
)
from specbranch.models.cpu.machine_code import _clean_mappings, compile_text
from specbranch.models.files.matrix import Matrix
from tiers import each_value

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_linear.py"

SHAPES = [(576, 576), (960, 577), (1, 64), (7, 3), (5, 1), (130, 1000), (4099, 33)]  # outputs, inputs
KINDS = ["torch", "onednn", "llvm"]

needs_kernel = pytest.mark.skipif(load_kernel() is None, reason="no kernel can be compiled on this machine")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kernel_linear(weight: Tensor, bias: Tensor | None = None, most_rows: int = PRODUCT_ROWS) -> KernelLinear:
    kernel = load_kernel()
    assert kernel is not None
    return KernelLinear(kernel, weight, bias, most_rows)


def int8_linear(weight: Tensor, bias: Tensor | None = None, stored: WeightBits = "int8") -> KernelLinear:
    """Whole numbers with scales, kept as int8 or, the same numbers, as bfloat16."""
    kernel, small = load_kernel(stored), Matrix(weight).stored_as("int8")
    assert kernel is not None
    return KernelLinear(kernel, small.weight.to(STORED_AS[stored]), bias, PRODUCT_ROWS, small.scale)


def bfloat16_linear(weight: Tensor) -> KernelLinear:
    return int8_linear(weight, stored="bfloat16")


def written_out(layer: KernelLinear) -> Tensor:
    assert layer.scale is not None
    return layer.weight.double() * layer.scale.double().unsqueeze(-1)


def assert_close_to_float64(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Relative to the terms that were summed: a sum near zero has no relative accuracy of its own.
    scale = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= 1e-5 * scale).all()


@each_value
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_agrees_with_float64_at_1_to_20_rows(
    kind: str, with_bias: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", kind)
    weight, bias = numbers(*shape), numbers(shape[0], seed=1) if with_bias else None
    layer = choose_linear(weight, bias)
    for rows in range(1, 21):
        x = numbers(rows, shape[1], seed=rows)
        assert_close_to_float64(layer(x), x, weight, bias)


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_alone_as_among_others(shape: tuple[int, int]) -> None:
    layer = kernel_linear(numbers(*shape), numbers(shape[0], seed=1))
    x = numbers(PRODUCT_ROWS, shape[1], seed=2)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(2, PRODUCT_ROWS + 1):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[-rows:]), alone[-rows:])


@needs_kernel
@pytest.mark.parametrize("make", [kernel_linear, int8_linear, bfloat16_linear])
def test_the_bits_do_not_depend_on_threads_or_on_the_run(make: Callable[[Tensor], KernelLinear]) -> None:
    weight, x = numbers(1000, 577), numbers(6, 577, seed=1)
    expected = make(weight)(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert all(torch.equal(make(weight)(x), expected) for _ in range(20))


# --- weights in int8 ---


@each_value
@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_int8_weights_agree_with_float64_at_1_to_20_rows(
    stored: WeightBits, with_bias: bool, shape: tuple[int, int]
) -> None:
    bias = numbers(shape[0], seed=1) if with_bias else None
    layer = int8_linear(numbers(*shape), bias, stored)
    for rows in range(1, 21):
        x = numbers(rows, shape[1], seed=rows)
        assert_close_to_float64(layer(x), x, written_out(layer), bias)


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_a_row_has_the_same_bits_alone_as_among_others_over_int8_weights(
    stored: WeightBits, shape: tuple[int, int]
) -> None:
    layer = int8_linear(numbers(*shape), numbers(shape[0], seed=1), stored)
    x = numbers(PRODUCT_ROWS, shape[1], seed=2)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(2, PRODUCT_ROWS + 1):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[-rows:]), alone[-rows:])


@needs_kernel
@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_nothing_is_read_or_written_outside_int8_matrices(stored: WeightBits) -> None:
    outs, ins, rows = 7, 13, 3
    x, scale, y = (torch.full((n + 64,), float("nan")) for n in (rows * ins, outs, rows * outs))
    weight = torch.full((outs * ins + 64,), 100, dtype=STORED_AS[stored])
    weight[32:-32], x[32:-32], scale[32:-32] = 1, 1, 0.5
    addresses = [part[32:].data_ptr() for part in (x, weight, y, scale)]
    kernel = load_kernel(stored)
    assert kernel is not None
    part = outputs_at_a_time(ins, outs, weight.element_size())
    kernel(addresses[0], addresses[1], 0, addresses[2], rows, ins, outs, part, addresses[3])
    assert (y[32:-32] == ins / 2).all()
    assert y[:32].isnan().all() and y[-32:].isnan().all()


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_small_weights_are_taken_by_the_kernel_unless_another_kind_is_forced(
    stored: WeightBits, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind:
        monkeypatch.setenv("SPECBRANCH_LINEAR", kind)
    here = kind in ("llvm", None) and load_kernel(stored) is not None
    assert takes(stored, torch.device("cpu"), torch.float32) == here
    assert not takes(stored, torch.device("cpu"), torch.float64) and not takes(
        stored, torch.device("cuda"), torch.float32
    )
    if here:
        small, x = Matrix(numbers(30, 40)).stored_as(stored), numbers(3, 40, seed=1)
        assert small.scale is not None
        layer = small_linear(small.weight, None, small.scale)
        assert_close_to_float64(layer(x), x, small.widened(torch.float64))
        assert layer.weight.dtype is STORED_AS[whole_numbers() if stored == "int8" else stored]


def test_a_matrix_that_was_in_int8_comes_out_with_the_same_whole_numbers() -> None:
    weight = numbers(200, 300) * numbers(200, 1, seed=1)
    weight[7] = 0
    once = Matrix(weight).stored_as("int8")
    assert once.scale is not None
    dense = once.weight * once.scale.unsqueeze(-1)
    again = Matrix(dense).stored_as("int8")
    assert torch.equal(again.weight, once.weight)
    assert ((dense - weight).abs() <= weight.abs().amax(-1, keepdim=True) / 253).all()


@pytest.mark.slow
@needs_kernel
@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_the_int8_kernel_for_other_vectors_is_right_too(stored: WeightBits) -> None:
    x = numbers(5, 37, seed=1)
    for machine in (
        Machine(lanes=16, outs=1),
        Machine(lanes=8, outs=2),
        Machine(lanes=8, outs=2, turns=4),
        Machine(4, 4, turns=2),
    ):
        engine = compile_text(kernels.source(machine, stored), optimise=False)
        work = engine.get_function_address("work")
        layer = int8_linear(numbers(23, 37), stored=stored)
        layer.kernel = kernels.Kernel(engine, work, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work), None)
        assert_close_to_float64(layer(x), x, written_out(layer))
        assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


# --- what the kernel takes ---


@needs_kernel
def test_more_rows_may_be_asked_for_and_keep_their_bits() -> None:
    layer = kernel_linear(numbers(64, 100), most_rows=64)
    x = numbers(64, 100, seed=1)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


@needs_kernel
def test_above_the_most_rows_torch_takes_over() -> None:
    weight, x = numbers(64, 100), numbers(PRODUCT_ROWS + 1, 100, seed=1)
    assert torch.equal(kernel_linear(weight)(x), F.linear(x, weight))


@needs_kernel
def test_strided_inputs_and_any_number_of_leading_dimensions_are_taken() -> None:
    weight = numbers(30, 40)
    layer = kernel_linear(weight)
    strided = numbers(40, 6).T
    assert not strided.is_contiguous()
    assert_close_to_float64(layer(strided), strided, weight)
    assert torch.equal(layer(strided.reshape(2, 3, 40)), layer(strided).reshape(2, 3, 30))
    assert torch.equal(layer(strided[0]), layer(strided)[0])
    assert layer(numbers(0, 40)).shape == (0, 30)


@needs_kernel
def test_views_of_a_larger_weight_are_used_in_place() -> None:
    whole = numbers(100, 40)
    layer, x = kernel_linear(whole[20:50]), numbers(3, 40, seed=1)
    assert_close_to_float64(layer(x), x, whole[20:50])
    whole[20:50] = 0
    assert not layer(x).any()


@needs_kernel
def test_nothing_is_read_or_written_outside_the_matrices() -> None:
    outs, ins, rows = 7, 13, 3
    weight, x, y = (torch.full((n + 64,), float("nan")) for n in (outs * ins, rows * ins, rows * outs))
    weight[32:-32], x[32:-32] = 1, 1
    addresses = [part[32:].data_ptr() for part in (x, weight, y)]
    kernel = load_kernel()
    assert kernel is not None
    kernel(addresses[0], addresses[1], 0, addresses[2], rows, ins, outs, outputs_at_a_time(ins, outs))
    assert (y[32:-32] == ins).all()
    assert y[:32].isnan().all() and y[-32:].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_tensors_are_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", kind)
    with torch.inference_mode():
        weight, bias, x = numbers(50, 60), numbers(50, seed=1), numbers(4, 60, seed=2)
        layer = choose_linear(weight, bias)
        assert_close_to_float64(layer(x), x, weight, bias)


@pytest.mark.parametrize("kind", ["llvm", "onednn", None])
@pytest.mark.parametrize(
    "weight",
    [numbers(8, 6).bfloat16(), numbers(8, 6).double(), numbers(6, 8).T, numbers(8, 6).requires_grad_(), numbers(8, 0)],
    ids=["bfloat16", "float64", "transposed", "trained", "empty"],
)
def test_other_weights_fall_back_to_torch(kind: str | None, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind:
        monkeypatch.setenv("SPECBRANCH_LINEAR", kind)
    x = numbers(3, weight.shape[1], seed=1).to(weight.dtype)
    layer = choose_linear(weight)
    assert isinstance(layer, PlainLinear)
    assert torch.equal(layer(x), F.linear(x, weight))


@needs_kernel
def test_inputs_that_the_kernel_is_not_made_for_go_to_torch_errors_included() -> None:
    layer = kernel_linear(numbers(8, 6))
    for wrong in (numbers(2, 5), numbers(2, 6).double()):
        with pytest.raises(RuntimeError):
            layer(wrong)
    x = numbers(2, 6).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer(torch.empty(2, 6, device="meta")).device.type == "meta"


@needs_kernel
@pytest.mark.parametrize(
    ("kind", "name"), [("torch", "PlainLinear"), ("onednn", "PackedLinear"), ("llvm", "KernelLinear")]
)
def test_the_environment_forces_a_kind(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "onednn" and not linear.onednn_works():
        pytest.skip("torch offers no oneDNN here")
    monkeypatch.setenv("SPECBRANCH_LINEAR", kind)
    assert type(choose_linear(numbers(8, 6))).__name__ == name


def test_an_unknown_kind_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "one-dnn")
    with pytest.raises(BadParameter, match="Did you mean 'onednn'"):
        choose_linear(numbers(8, 6).double())


def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    kernels.load_kernel.cache_clear()
    try:
        assert load_kernel() is None
        assert isinstance(choose_linear(numbers(8, 6)), PlainLinear)
        monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
        assert isinstance(choose_linear(numbers(8, 6)), PlainLinear)
    finally:
        kernels.load_kernel.cache_clear()


@needs_kernel
def test_the_kernel_serves_every_shape_so_that_no_bit_depends_on_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECBRANCH_LINEAR", raising=False)
    assert all(isinstance(choose_linear(numbers(*shape)), KernelLinear) for shape in SHAPES)


@needs_kernel
def test_calls_from_several_threads_do_not_mix() -> None:
    torch.set_num_threads(2)
    layer = kernel_linear(numbers(300, 200))
    inputs = [numbers(4, 200, seed=seed) for seed in range(4)]
    expected = [layer(x) for x in inputs]
    wrong: list[int] = []

    def call(which: int) -> None:
        wrong.extend(which for _ in range(30) if not torch.equal(layer(inputs[which]), expected[which]))

    threads = [threading.Thread(target=call, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@needs_kernel
def test_the_kernel_for_narrower_vectors_is_right_too() -> None:

    weight, x = numbers(23, 37), numbers(5, 37, seed=1)
    for machine in (Machine(lanes=4, outs=4), Machine(lanes=8, outs=2)):
        engine = compile_text(kernels.source(machine), optimise=False)
        work = engine.get_function_address("work")
        kernel = kernels.Kernel(engine, work, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work), None)
        layer = KernelLinear(kernel, weight, None, PRODUCT_ROWS)
        assert_close_to_float64(layer(x), x, weight)
        assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


@pytest.mark.parametrize(
    ("features", "machine"),
    [
        ({"fma": True, "avx512f": True}, Machine(16, 4)),
        ({"fma": True, "avx512f": False}, Machine(8, 2)),
        ({"avx": True}, None),
    ],
)
def test_vectors_are_as_wide_as_the_processor_has_them(
    features: dict[str, bool], machine: Machine | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    assert kernels._machine(features) == machine


def test_only_clean_read_only_mappings_of_the_library_are_forgotten() -> None:
    smaps = """1000-2000 r-xp 00000000 08:01 11 /lib/libllvmlite.so
Rss: 4 kB
Anonymous: 0 kB
VmFlags: rd ex mr
2000-3000 r--p 00001000 08:01 11 /lib/libllvmlite.so
Anonymous: 4 kB
3000-4000 rw-p 00002000 08:01 11 /lib/libllvmlite.so
Anonymous: 0 kB
4000-5000 r-xp 00000000 08:01 12 /lib/libother.so
Anonymous: 0 kB
5000-6000 r--p 00000000 00:00 0
Anonymous: 0 kB
"""
    assert list(_clean_mappings(smaps, "libllvmlite")) == [(0x1000, 0x2000)]


@pytest.mark.slow
def test_the_benchmark_ends_with_json() -> None:
    command = [sys.executable, str(SCRIPT), "--layers", "1", "--cycles", "1", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["kinds"]["torch"]) == {"1", "2", "3", "4", "6", "8", "16"}
    assert result["kinds"]["torch"]["1"]["ratio"] == 1
    assert result["gigabytes"] > 0.1
