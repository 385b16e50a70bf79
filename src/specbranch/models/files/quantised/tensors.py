"""The raw tensors of a quantised checkpoint, each read whole on the device, after its type and shape are checked.

Owns the checks and the unpacking of words into numbers. Invariant: a tensor that is returned has the type and the shape
that was asked for; otherwise a ModelError names file, tensor, what it is and what was expected.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from specbranch.errors import ModelError
from specbranch.models.files.tensor_file import ShardedFile, StoredTensor, TensorFile

SCALE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
WORD = (torch.int32,)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one matrix of a file."""

    file: TensorFile | ShardedFile
    module: str  # the matrix
    device: torch.device

    def __contains__(self, part: str) -> bool:
        return f"{self.module}.{part}" in self.file

    def read(self, part: str, shape: tuple[int, ...], types: tuple[torch.dtype, ...]) -> Tensor:
        """Read a tensor of this shape and one of these types."""
        entry = self.entry(part)
        if entry.encoding.dtype not in types:
            self.refuse(part, f"is stored as {_name(entry.encoding.dtype)}; expected {' or '.join(map(_name, types))}")
        if entry.shape != shape:
            self.refuse(part, f"has shape {list(entry.shape)}; expected {list(shape)}")
        into = torch.empty(shape, dtype=entry.encoding.dtype, device=self.device)
        self.file.read(f"{self.module}.{part}", into)
        return into

    def scales(self, part: str, shape: tuple[int, ...]) -> Tensor:
        """Read scales, in float32; all must be finite."""
        found = self.read(part, shape, SCALE_TYPES).float()
        if not bool(found.isfinite().all()):
            self.refuse(part, "has scales that are not finite")
        return found

    def entry(self, part: str) -> StoredTensor:
        """Return shape and type of a tensor, or refuse a file that lacks it."""
        entry = entry_of(self.file, f"{self.module}.{part}")
        if entry is None:
            raise ModelError(
                f"{self.file.name} has no tensor '{self.module}.{part}', which {self.module} needs as it is quantised. "
                "The file is incomplete, or its quantization_config is of another file."
            )
        return entry

    def matrix_shape(self, part: str) -> tuple[int, int]:
        """Return the shape of a tensor of two dimensions."""
        shape = self.entry(part).shape
        if len(shape) != 2:
            self.refuse(part, f"has shape {list(shape)}; expected two dimensions")
        return shape[0], shape[1]

    def refuse(self, part: str, why: str) -> NoReturn:
        """Raise the error for a tensor."""
        raise ModelError(
            f"{self.file.name}: tensor '{self.module}.{part}' {why}, by its configuration. Fetch the file again, or "
            "check its quantization_config."
        )


def entry_of(file: TensorFile | ShardedFile, tensor: str) -> StoredTensor | None:
    """Return shape and type of a tensor; None if the file has none of this name."""
    if isinstance(file, TensorFile):
        return file.entries.get(tensor)
    return file.shards[file.files[tensor]].entries.get(tensor) if tensor in file else None


def numbers_in(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of 4 or 8 bits in rows of words [rows, words], the lowest bits first: uint8 [rows, …]."""
    assert sys.byteorder == "little"
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _name(dtype: torch.dtype | None) -> str:
    return "an unknown type" if dtype is None else str(dtype).removeprefix("torch.")
