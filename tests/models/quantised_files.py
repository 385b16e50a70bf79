"""Quantised checkpoints written from their formats' definitions, with the weights that they stand for.

The dequantisation here is independent of what the package reads with: it never unpacks, and computes in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word holds, the lowest nibble first
Parts = dict[str, Tensor]  # by suffix


@dataclass(frozen=True)
class Stored:
    """A matrix as tensors of a file, and its weights in float64 [out, in]."""

    parts: Parts
    weights: Tensor


@dataclass(frozen=True)
class Form:
    """A format with its settings: `quantization_config`, and how a matrix is written."""

    config: dict[str, Any]
    write: Callable[[Tensor, torch.Generator], Stored]
    head: bool = False  # True if the head is quantised, too
    plain: tuple[str, ...] = field(default=())  # ends of matrices that stay in floats


def words(numbers: Tensor, bits: int) -> Tensor:
    """Pack rows of numbers without a sign, the first number in the lowest bits; the last word may be partly used."""
    each = 32 // bits
    found = torch.zeros(len(numbers), -(-numbers.shape[1] // each), dtype=torch.int64)
    for at in range(each):
        some = numbers[:, at::each].long()
        found[:, : some.shape[1]] += some << (bits * at)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def rounded(
    weight: Tensor, groups: Tensor, bits: int, symmetric: bool, made: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise [out, in]; `groups`: the group of each input. Returns numbers without a sign, scales, zeros."""
    count, most = int(groups.max()) + 1, (1 << bits) - 1
    scales = torch.zeros(len(weight), count)
    for group in range(count):
        scales[:, group] = weight[:, groups == group].abs().amax(1) / (most // 2)
    scales = (scales + 1e-6).to(dtype)
    middle = 1 << (bits - 1)
    zeros = torch.full(scales.shape, middle)
    if not symmetric:
        zeros = torch.randint(middle - 4, middle + 5, scales.shape, generator=made)
        zeros[0, 0] = most  # the largest zero that fits
    numbers = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, most).long()
    return numbers, scales, zeros


def stands_for(numbers: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """The weights, by the formats' definition."""
    return (numbers - zeros[:, groups]).double() * scales.double()[:, groups]


def groups_of(ins: int, group: int, made: torch.Generator | None = None) -> Tensor:
    """The group of each input; `made`: shuffled, as desc_act has it."""
    of_input = torch.arange(ins) // (ins if group == -1 else group)
    return of_input if made is None else of_input[torch.randperm(ins, generator=made)]


def awq(group: int = 64) -> Form:
    def write(weight: Tensor, made: torch.Generator) -> Stored:
        groups = groups_of(weight.shape[1], group)
        numbers, scales, zeros = rounded(weight, groups, 4, False, made, torch.float16)
        mixed = [column + at for column in range(0, len(weight), 8) for at in AWQ_ORDER]
        parts = {
            "qweight": words(numbers.t()[:, mixed], 4),
            "qzeros": words(zeros.t()[:, mixed], 4),
            "scales": scales.t().contiguous(),
        }
        return Stored(parts, stands_for(numbers, scales, zeros, groups))

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Form({**config, "modules_to_not_convert": None}, write)


def gptq(
    bits: int = 4,
    group: int = 64,
    layout: str | None = "gptq",
    act: bool = False,
    symmetric: bool = True,
    as_is: bool = False,
    **other: Any,
) -> Form:
    def write(weight: Tensor, made: torch.Generator) -> Stored:
        # q, k and v have the same inputs, and so the same order
        order = torch.Generator().manual_seed(weight.shape[1]) if act else None
        groups = groups_of(weight.shape[1], group, order)
        numbers, scales, zeros = rounded(weight, groups, bits, symmetric, made, torch.float16)
        less = (zeros - 1) % (1 << bits) if layout != "gptq_v2" and not as_is else zeros
        parts = {
            "qweight": words(numbers, bits).t().contiguous(),
            "qzeros": words(less.t(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": groups.int(),
        }
        return Stored(parts, stands_for(numbers, scales, zeros, groups))

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act, "sym": symmetric}
    return Form(config | ({} if layout is None else {"checkpoint_format": layout}), write, **other)


def compressed(weights: Mapping[str, Any], format: str, **scheme: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": dict(weights), **scheme}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def packed_ints(bits: int = 4, group: int | None = 32, symmetric: bool = True, act: bool = False) -> Form:
    def write(weight: Tensor, made: torch.Generator) -> Stored:
        order = torch.Generator().manual_seed(weight.shape[1]) if act else None
        groups = groups_of(weight.shape[1], group or -1, order)
        numbers, scales, zeros = rounded(weight, groups, bits, symmetric, made, torch.bfloat16)
        parts = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
        if act:
            parts["weight_g_idx"] = groups.int()
        return Stored(parts, stands_for(numbers, scales, zeros, groups))

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return Form(compressed(weights | ({"actorder": "group"} if act else {}), "pack-quantized"), write)


def plain_ints(scales_by: str = "channel", symmetric: bool = True, **scheme: Any) -> Form:
    def write(weight: Tensor, made: torch.Generator) -> Stored:
        groups = groups_of(weight.shape[1], -1)
        numbers, scales, zeros = rounded(weight, groups, 8, symmetric, made, torch.bfloat16)
        if scales_by == "tensor":
            scales = scales.max().reshape(1, 1).expand_as(scales).contiguous()
            numbers = (weight / scales.float() + 128).round().clamp(0, 255).long()
        parts = {"weight": (numbers - 128).to(torch.int8)}
        parts["weight_scale"] = scales[:1, 0].clone() if scales_by == "tensor" else scales
        if not symmetric:
            parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return Stored(parts, stands_for(numbers, scales, zeros, groups))

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": scales_by, "dynamic": False}
    return Form(compressed(weights, "int-quantized", **scheme), write)


def e4m3(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise by block; returns numbers, the scales of blocks, and the weights they stand for."""
    down, across = (-(-size // of) for size, of in zip(weight.shape, block, strict=True))
    scales, numbers = torch.zeros(down, across), torch.zeros(weight.shape)
    for i in range(down):
        for j in range(across):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale = weight[at].abs().max() / 448 + 1e-9
            if dtype is torch.float8_e8m0fnu:
                scale = 2.0 ** scale.log2().ceil()
            scales[i, j] = scale.to(dtype).float() if dtype is not torch.float32 else scale
            numbers[at] = weight[at] / scales[i, j]
    small = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
    rows, columns = torch.arange(weight.shape[0]) // block[0], torch.arange(weight.shape[1]) // block[1]
    return small, scales.to(dtype), small.double() * scales.double()[rows][:, columns]


def block_fp8(block: int = 128, dtype: torch.dtype = torch.float32, scheme: str = "dynamic") -> Form:
    def write(weight: Tensor, made: torch.Generator) -> Stored:
        small, scales, wide = e4m3(weight, (block, block), dtype)
        return Stored({"weight": small, "weight_scale_inv": scales}, wide)

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme, "weight_block_size": [block, block]}
    return Form(config, write)


def whole_fp8() -> Form:
    def write(weight: Tensor, made: torch.Generator) -> Stored:
        small, scales, wide = e4m3(weight, tuple(weight.shape), torch.float32)  # type: ignore[arg-type]
        return Stored(
            {"weight": small, "weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.5)},
            wide,
        )

    return Form({"quant_method": "fp8", "activation_scheme": "static"}, write)


def float_quantized(scales_by: str) -> Form:
    def write(weight: Tensor, made: torch.Generator) -> Stored:
        outs, ins = weight.shape
        block = {"tensor": (outs, ins), "channel": (1, ins), "block": (128, 128), "group": (1, 32)}[scales_by]
        small, scales, wide = e4m3(weight, block, torch.bfloat16)
        return Stored({"weight": small, "weight_scale": scales.reshape(1) if scales_by == "tensor" else scales}, wide)

    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": scales_by}
    weights |= {"block_structure": [128, 128]} if scales_by == "block" else {}
    weights |= {"group_size": 32} if scales_by == "group" else {}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return Form(compressed(weights, "float-quantized", input_activations=activations), write)


FORMS: dict[str, Callable[[], Form]] = {
    "awq": awq,
    "awq-32": lambda: awq(32),
    "awq-channel": lambda: awq(-1),
    "gptq": gptq,
    "gptq-old": lambda: gptq(layout=None, group=32),
    "gptq-act": lambda: gptq(act=True, symmetric=False),
    "gptq-act-32": lambda: gptq(act=True, group=32),
    "gptq-mislabelled": lambda: gptq(as_is=True),  # zeros as in v2, as some files have them
    "gptq-v2": lambda: gptq(layout="gptq_v2", symmetric=False),
    "gptq-int8": lambda: gptq(8, act=True, group=32),
    "gptq-int8-zeros": lambda: gptq(8, symmetric=False, group=-1),
    "gptq-head": lambda: gptq(head=True, plain=("k_proj", "down_proj")),
    "packed": packed_ints,
    "packed-channel": lambda: packed_ints(group=None),
    "packed-zeros": lambda: packed_ints(group=64, symmetric=False),
    "packed-act": lambda: packed_ints(group=64, act=True),
    "packed-int8": lambda: packed_ints(8, 32, symmetric=False),
    "int8": plain_ints,
    "int8-tensor": lambda: plain_ints("tensor"),
    "int8-zeros": lambda: plain_ints(symmetric=False),
    "fp8-block": block_fp8,
    "fp8-block-small": lambda: block_fp8(64),
    "fp8-block-powers": lambda: block_fp8(dtype=torch.float8_e8m0fnu),
    "fp8-tensor": whole_fp8,
    "float-tensor": lambda: float_quantized("tensor"),
    "float-channel": lambda: float_quantized("channel"),
    "float-block": lambda: float_quantized("block"),
    "float-group": lambda: float_quantized("group"),
}


def quantise(source: Path, form: Form, into: Path, widened: Path | None = None, seed: int = 3) -> Path:
    """Quantise the matrices of a saved model; `widened`: the same weights in floats, as a plain model of float32."""
    into.mkdir()
    made, small, wide = torch.Generator().manual_seed(seed), {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        is_matrix = module.endswith("_proj") or (form.head and module == "lm_head")
        if suffix != "weight" or not is_matrix or module.endswith(form.plain or ("\0",)):
            small[name] = wide[name] = tensor
            continue
        stored = form.write(tensor.float(), made)
        small |= {f"{module}.{part}": value.contiguous() for part, value in stored.parts.items()}
        wide[name] = stored.weights.float()
    config = json.loads((source / "config.json").read_text())
    save(into, small, {**config, "quantization_config": form.config})
    if widened is not None:
        widened.mkdir()
        save(widened, wide, config)
    return into


def save(folder: Path, tensors: Parts, config: dict[str, Any]) -> None:
    """Write a model folder."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
