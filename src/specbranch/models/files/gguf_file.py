"""A GGUF file as a source of tensors.

Owns the conversion of its header to tensor entries; `gguf_header.py` owns the parsing. Invariant: every tensor that the
header names lies inside the file.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from specbranch.errors import ModelError
from specbranch.gguf_header import GgufTensor, read_header
from specbranch.models.files.encodings import gguf_encoding
from specbranch.models.files.tensor_file import StoredTensor, TensorFile


class GgufFile(TensorFile):
    """The metadata and tensors of one GGUF file."""

    def __init__(self, path: Path) -> None:
        try:
            header = read_header(path)
            self.metadata = header.metadata
            entries = {tensor.name: _stored(tensor) for tensor in header.tensors}
        except OSError as error:
            raise ModelError(f"{path} could not be read: {error.strerror}.") from None
        except (struct.error, ValueError, KeyError, IndexError, OverflowError, MemoryError, RecursionError) as error:
            raise ModelError(f"{path} is damaged, cut short or no GGUF file: {error}. Fetch the file again.") from None
        super().__init__(path, entries)

    def values(self, tensor: str) -> list[float]:
        """Return the values of a small tensor."""
        numbers = torch.empty(self.entries[tensor].shape)
        self.read(tensor, numbers)
        return numbers.flatten().tolist()


def _stored(tensor: GgufTensor) -> StoredTensor:
    try:
        encoding = gguf_encoding(tensor.kind)
    except ValueError:
        raise ValueError(f"{tensor.name} is stored as type {tensor.kind}, which is not known here") from None
    if tensor.sizes[0] % encoding.block:
        raise ValueError(f"rows of {tensor.name} have {tensor.sizes[0]} numbers, no multiple of {encoding.block}")
    return StoredTensor(tuple(reversed(tensor.sizes)), tensor.offset, encoding)
