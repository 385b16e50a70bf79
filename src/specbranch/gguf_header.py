"""The header of a GGUF file (versions 2 and 3, little endian): metadata, and the offsets of its tensors.

Owns the parsing, without torch. Long arrays (the vocabulary) are skipped and read only on demand, because they cost
more time than the weights.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_ALIGNED = 1 << 20  # bytes
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
            return _Cursor(self.path, data, self.offset).items(self.kind, self.count)


class GgufTensor(NamedTuple):
    """A tensor as the header lists it."""

    name: str
    sizes: tuple[int, ...]  # the fastest dimension first
    kind: int  # of its encoding, by number
    offset: int  # in the file


@dataclass(frozen=True, slots=True)
class GgufContents:
    """What a header says."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_header(path: Path) -> GgufContents:
    """Read a header; raises a ValueError, KeyError or struct.error where it is damaged."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError(f"it begins with {data[:4]!r} instead of b'GGUF'")
        cursor = _Cursor(path, data, 4)
        if (version := cursor.scalar("<I")) not in (2, 3):
            raise ValueError(f"its version is {version}, expected 2 or 3 in little-endian order")
        tensors, pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
        metadata = {cursor.string(): cursor.value(cursor.scalar("<I")) for _ in range(pairs)}
        listed = [cursor.tensor() for _ in range(tensors)]
        start = _aligned(cursor.offset, metadata.get("general.alignment", 32))
    return GgufContents(metadata, tuple(one._replace(offset=start + one.offset) for one in listed))


class _Cursor:
    """A reading position in the header."""

    def __init__(self, path: Path, data: mmap.mmap, offset: int) -> None:
        self.path, self.data, self.offset = path, data, offset

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

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        return self.array() if kind == _ARRAY else self.scalar(_SCALARS[kind])

    def array(self) -> Any:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count <= _SHORT:
            return self.items(kind, count)
        held = GgufArray(self.path, kind, count, self.offset)
        self.skip(kind, count)
        return held

    def items(self, kind: int, count: int) -> list[Any]:
        return [self.value(kind) for _ in range(count)]

    def skip(self, kind: int, count: int) -> None:
        if kind == _ARRAY:
            for _ in range(count):
                self.skip(self.scalar("<I"), self.scalar("<Q"))
        elif kind == _STRING:
            self._skip_strings(count)
        else:
            self.offset += struct.calcsize(_SCALARS[kind]) * count

    def _skip_strings(self, count: int) -> None:
        length, data, offset = struct.Struct("<Q").unpack_from, self.data, self.offset
        for _ in range(count):
            offset += 8 + length(data, offset)[0]
        self.offset = offset

    def tensor(self) -> GgufTensor:
        name = self.string()
        sizes = tuple(self.scalar("<Q") for _ in range(self.scalar("<I")))
        return GgufTensor(name, sizes, self.scalar("<I"), self.scalar("<Q"))


def _aligned(offset: int, alignment: Any) -> int:
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= _MOST_ALIGNED:
        expected = f"a whole number from 1 to {_MOST_ALIGNED}"
        raise ValueError(f"its general.alignment is {alignment!r:.60}, expected {expected}")
    return -(-offset // alignment) * alignment
