"""The encodings of numbers in weight files (safetensors types, GGML block types), and their decoding to floats.

Owns the formats, no file. Invariant: `decode` returns, bit for bit, what the `gguf` package returns in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoding:
    """A storage type: `block` numbers in `size` bytes; `dtype` is set if the bytes are plain numbers."""

    block: int
    size: int
    decode: Callable[[Tensor], Tensor]  # uint8 [n·size] to floats [n·block]
    dtype: torch.dtype | None = None
    name: str = ""  # of a block type, or of numbers that need scales


def plain(dtype: torch.dtype) -> Encoding:
    """Return the encoding of plain numbers."""
    return Encoding(1, dtype.itemsize, lambda raw: raw.view(dtype), dtype)


def halves_of(raw: Tensor) -> Tensor:
    """View bytes as float16: uint8 [n, 2m] to [n, m]."""
    return raw.contiguous().view(torch.float16)


def _half(raw: Tensor) -> Tensor:
    return halves_of(raw).float()


def _q4_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 18)
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks[:, :2])).view(-1)


def _q4_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 20)
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks[:, :2])).add_(_half(blocks[:, 2:4])).view(-1)


def _q5_0(raw: Tensor) -> Tensor:
    scale, high, low = fields_of(raw, 2, 4, 16)
    return _nibbles(low).add_(unpacked_bits(high, 1, 1) << 4).sub_(16).mul_(_half(scale)).view(-1)


def _q5_1(raw: Tensor) -> Tensor:
    scale, least, high, low = fields_of(raw, 2, 2, 4, 16)
    return _nibbles(low).add_(unpacked_bits(high, 1, 1) << 4).mul_(_half(scale)).add_(_half(least)).view(-1)


def _q8_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 34)
    return (blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks[:, :2]))).view(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [n, 16] bytes to [n, 32]: first all low nibbles, then all high ones."""
    out = torch.empty(packed.shape[0], 32, device=packed.device)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _q2_k(raw: Tensor) -> Tensor:
    groups, low, scale, least = fields_of(raw, 16, 64, 2, 2)
    return _scaled(unpacked_bits(low, 2, 32).float(), _half(scale) * (groups & 15), _half(least) * (groups >> 4))


def _q3_k(raw: Tensor) -> Tensor:
    high, low, groups, groups_high, scale = fields_of(raw, 32, 64, 8, 4, 2)
    scales = (unpacked_bits(groups, 4, 8) | unpacked_bits(groups_high, 2, 4) << 4).float().sub_(32)  # [n, 16]
    numbers = unpacked_bits(low, 2, 32) | unpacked_bits(high, 1, 32) << 2  # [n, 256]
    return _scaled(numbers.float().sub_(4), _half(scale) * scales)


def _q4_k(raw: Tensor) -> Tensor:
    halves, groups, low = fields_of(raw, 4, 12, 128)
    return _scaled(unpacked_bits(low, 4, 32).float(), *_scales_and_leasts(halves, groups))


def _q5_k(raw: Tensor) -> Tensor:
    halves, groups, high, low = fields_of(raw, 4, 12, 32, 128)
    numbers = unpacked_bits(low, 4, 32) | unpacked_bits(high, 1, 32) << 4  # [n, 256]
    return _scaled(numbers.float(), *_scales_and_leasts(halves, groups))


def _q6_k(raw: Tensor) -> Tensor:
    low, high, groups, scale = fields_of(raw, 128, 64, 16, 2)
    numbers = unpacked_bits(low, 4, 64) | unpacked_bits(high, 2, 32) << 4  # [n, 256]
    return _scaled(numbers.float().sub_(32), _half(scale) * groups.view(torch.int8))


def fields_of(raw: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split every block into fields of these sizes in bytes: [n, size] each."""
    return torch.split(raw.view(-1, sum(sizes)), list(sizes), dim=1)


def unpacked_bits(packed: Tensor, bits: int, run: int) -> Tensor:
    """Unpack bytes [n, m] to integers [n, m·8/bits].

    Of each `run` bytes, first all their lowest bits, then the next ones.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    numbers = packed.view(packed.shape[0], -1, 1, run) >> shifts.unsqueeze(1)  # [n, m/run, 8/bits, run]
    return numbers.bitwise_and_((1 << bits) - 1).flatten(1)


def _scaled(numbers: Tensor, scales: Tensor, leasts: Tensor | None = None) -> Tensor:
    """Multiply numbers [n, 256] by the scale [n, ...] of their group, then subtract its minimum; rounds twice."""
    out = numbers.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
    return (out if leasts is None else out.sub_(leasts.unsqueeze(-1))).view(-1)


def _scales_and_leasts(halves: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of eight groups from [n, 12] bytes, times the block's factors: [n, 2, 4] each."""
    scales, leasts = (sixes_of(packed) * _half(halves).view(-1, 1, 2, 1)).unbind(2)
    return scales, leasts


def sixes_of(packed: Tensor) -> Tensor:
    """Unpack two six-bit numbers for each of eight groups from [n, 12] bytes.

    Returns [n, first or last groups, scale or minimum, 4].
    """
    # The upper two bits of the first four groups belong to the last four.
    first, rest = torch.split(packed, [8, 4], dim=1)
    last = unpacked_bits(rest, 4, 4) | first >> 6 << 4
    return torch.cat((first & 63, last), dim=1).view(-1, 2, 2, 4)


SAFETENSORS = {
    "F64": plain(torch.float64),
    "F32": plain(torch.float32),
    "F16": plain(torch.float16),
    "BF16": plain(torch.bfloat16),
    "U8": plain(torch.uint8),  # packed numbers
    "I64": plain(torch.int64),  # token ids of a reduced head
}
# Numbers of quantised checkpoints, which are no weights without their scales.
NUMBERS = {
    name: replace(plain(dtype), name=name)
    for name, dtype in {
        "I32": torch.int32,
        "I8": torch.int8,
        "U8": torch.uint8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
    }.items()
}

_GGUF = {
    0: plain(torch.float32),
    1: plain(torch.float16),
    2: Encoding(32, 18, _q4_0, name="Q4_0"),
    3: Encoding(32, 20, _q4_1, name="Q4_1"),
    6: Encoding(32, 22, _q5_0, name="Q5_0"),
    7: Encoding(32, 24, _q5_1, name="Q5_1"),
    8: Encoding(32, 34, _q8_0, name="Q8_0"),
    10: Encoding(256, 84, _q2_k, name="Q2_K"),
    11: Encoding(256, 110, _q3_k, name="Q3_K"),
    12: Encoding(256, 144, _q4_k, name="Q4_K"),
    13: Encoding(256, 176, _q5_k, name="Q5_K"),
    14: Encoding(256, 210, _q6_k, name="Q6_K"),
    28: plain(torch.float64),
    30: plain(torch.bfloat16),
}


def gguf_encoding(kind: int) -> Encoding:
    """Return the encoding of GGML type `kind`; raises a ValueError if the gguf package does not know it either."""
    return _GGUF[kind] if kind in _GGUF else _by_package(kind)


def _by_package(kind: int) -> Encoding:
    """Decode rarer types with the gguf package, which is slower."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    name = GGMLQuantizationType(kind)
    block, size = GGML_QUANT_SIZES[name]

    def decode(raw: Tensor) -> Tensor:
        return torch.from_numpy(dequantize(raw.cpu().numpy().reshape(-1, size), name)).view(-1)

    return Encoding(block, size, decode)
