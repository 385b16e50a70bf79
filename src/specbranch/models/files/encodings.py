"""How numbers are stored in weight files, and their unpacking to floats, a piece at a time.

Owns no file. Invariant: `decode` gives, bit for bit, what the `gguf` package gives for the same bytes in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoding:
    """A storage type: `block` numbers in `size` bytes. `dtype` is set where the bytes are plain numbers."""

    block: int
    size: int
    decode: Callable[[Tensor], Tensor]  # uint8 [n·size] to floats [n·block]
    dtype: torch.dtype | None = None


def plain(dtype: torch.dtype) -> Encoding:
    """Numbers as they are."""
    return Encoding(1, dtype.itemsize, lambda raw: raw.view(dtype), dtype)


def _half(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).float()  # uint8 [n, 2] to [n, 1]


def _q4_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 18)
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks[:, :2])).view(-1)


def _q4_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 20)
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks[:, :2])).add_(_half(blocks[:, 2:4])).view(-1)


def _q8_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 34)
    return (blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks[:, :2]))).view(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [n, 16] bytes to [n, 32]: first all low halves, then all high ones."""
    out = torch.empty(packed.shape[0], 32, device=packed.device)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


SAFETENSORS = {"F64": plain(torch.float64), "F32": plain(torch.float32), "F16": plain(torch.float16), "BF16": plain(torch.bfloat16)}

_GGUF = {
    0: plain(torch.float32),
    1: plain(torch.float16),
    2: Encoding(32, 18, _q4_0),
    3: Encoding(32, 20, _q4_1),
    8: Encoding(32, 34, _q8_0),
    28: plain(torch.float64),
    30: plain(torch.bfloat16),
}


def gguf_encoding(kind: int) -> Encoding:
    """Return GGUF's storage type number `kind`; ValueError if nobody can unpack it."""
    return _GGUF[kind] if kind in _GGUF else _by_package(kind)


def _by_package(kind: int) -> Encoding:
    """Unpack the rarer types with the gguf package, which is slower."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    name = GGMLQuantizationType(kind)
    block, size = GGML_QUANT_SIZES[name]

    def decode(raw: Tensor) -> Tensor:
        return torch.from_numpy(dequantize(raw.cpu().numpy().reshape(-1, size), name)).view(-1)

    return Encoding(block, size, decode)
