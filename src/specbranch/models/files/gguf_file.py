"""The header of a GGUF file (versions 2 and 3, little endian): metadata, and where its tensors lie.

Owns the parsing. Long arrays (the vocabulary) are skipped over and read only when asked for, since they cost more time
than the weights. Invariant: everything named by the header lies inside the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbranch.errors import ModelError
from specbranch.models.files.encodings import Encoding, gguf_encoding
from specbranch.models.files.tensor_file import StoredTensor, TensorFile

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_SHORT = 16  # arrays up to this length are read at once


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata that was left in the file."""

    path: Path
    kind: int
    count: int
    offset: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())

    def read(self) -> list[Any]:
        """Return its items."""
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, self.offset).items(self.kind, self.count)


class GgufFile(TensorFile):
    """The metadata and tensors of one GGUF file."""

    def __init__(self, path: Path) -> None:
        try:
            self.metadata, entries = _parse(path)
        except OSError as error:
            raise ModelError(f"{path} could not be read: {error.strerror}.") from None
        except (struct.error, ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
            raise ModelError(f"{path} is damaged, cut short or no GGUF file: {error}. Fetch the file again.") from None
        super().__init__(path, entries)

    def values(self, tensor: str) -> list[float]:
        """Return the values of a small tensor."""
        held = torch.empty(self.entries[tensor].shape)
        self.read(tensor, held)
        return held.flatten().tolist()


class _Cursor:
    """A reading position in the header."""

    def __init__(self, data: mmap.mmap, offset: int = 0) -> None:
        self.data = data
        self.offset = offset

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from(code, self.data, self.offset)[0]
        self.offset += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        start, self.offset = self.offset, self.offset + length
        if self.offset > len(self.data):
            raise ValueError(f"a string of {length} bytes reaches behind the end")
        return self.data[start : self.offset].decode("utf-8", errors="replace")

    def value(self, kind: int, path: Path) -> Any:
        if kind == _STRING:
            return self.string()
        return self.array(path) if kind == _ARRAY else self.scalar(_SCALARS[kind])

    def array(self, path: Path) -> Any:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count <= _SHORT:
            return self.items(kind, count)
        held = GgufArray(path, kind, count, self.offset)
        self.skip(kind, count)
        return held

    def items(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return [self.scalar(_SCALARS[kind]) for _ in range(count)]

    def skip(self, kind: int, count: int) -> None:
        if kind != _STRING:
            self.offset += struct.calcsize(_SCALARS[kind]) * count
            return
        length, data, offset = struct.Struct("<Q").unpack_from, self.data, self.offset
        for _ in range(count):
            offset += 8 + length(data, offset)[0]
        self.offset = offset


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        if data[:4] != b"GGUF":
            raise ValueError(f"it begins with {data[:4]!r} instead of b'GGUF'")
        cursor.offset = 4
        if (version := cursor.scalar("<I")) not in (2, 3):
            raise ValueError(f"its version is {version}, expected 2 or 3 in little-endian order")
        tensors, pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
        metadata = {cursor.string(): cursor.value(cursor.scalar("<I"), path) for _ in range(pairs)}
        infos = [_info(cursor) for _ in range(tensors)]
        data_start = _aligned(cursor.offset, int(metadata.get("general.alignment", 32)))
    return metadata, {
        tensor: StoredTensor(shape, data_start + offset, encoding) for tensor, shape, offset, encoding in infos
    }


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, Encoding]:
    name = cursor.string()
    dims = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
    kind, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    encoding = gguf_encoding(kind)
    if dims[0] % encoding.block:
        raise ValueError(f"rows of {name} have {dims[0]} numbers, no multiple of {encoding.block}")
    return name, tuple(reversed(dims)), offset, encoding  # GGUF names the fastest dimension first


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
