"""Reading tensors from a weight file directly into their final buffers, a small part at a time.

Owns the byte ranges of one file, not the encodings (`encodings.py`). Files are read, not mapped: mapped pages would
count as memory of this process. A GPU gets the stored bytes and unpacks them itself. Invariant: every tensor that is
read lies inside the file; otherwise a ModelError names file and tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch
from torch import Tensor

from specbranch.errors import ModelError
from specbranch.file_values import FileValues, read_object
from specbranch.models.files.encodings import NUMBERS, SAFETENSORS, Encoding

# Numbers that a GPU unpacks at once, with up to eight bytes of memory for each; a multiple of every block.
UNPACKED_NUMBERS = 1 << 23
# Numbers converted at once on a CPU; a multiple of every block. They fit its cache, and torch uses one thread for fewer
# than 32768: waking threads for each operation costs more than it gains, most of all on shared cores.
CPU_NUMBERS = 31744


class TensorSource(Protocol):
    """Named tensors on disk."""

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        ...

    def __contains__(self, tensor: str) -> bool: ...

    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Read a tensor into a contiguous one of the same shape, and convert it to its type.

        `leading`: `into` may have fewer rows; the first ones are read.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The position of one tensor in its file, and its encoding."""

    shape: tuple[int, ...]
    offset: int
    encoding: Encoding

    @property
    def end(self) -> int:
        """The first byte behind the tensor."""
        return self.offset + math.prod(self.shape) // self.encoding.block * self.encoding.size


class TensorFile:
    """The tensors of one file, by name."""

    def __init__(self, path: Path, entries: dict[str, StoredTensor]) -> None:
        self.path = path
        self.entries = entries
        size = path.stat().st_size
        for tensor, entry in entries.items():
            if not 0 <= entry.offset <= entry.end <= size:
                raise ModelError(
                    f"{path} is cut short: {tensor} ends at byte {entry.end}, the file at {size}. Fetch the file again."
                )

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.path)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.entries

    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Fill `into`; see TensorSource."""
        entry = self.checked(tensor, tuple(into.shape), leading=leading)
        if entry.encoding.name in NUMBERS and entry.encoding.dtype != into.dtype:
            raise _unread(tensor, entry.encoding.name)
        with self._opened(tensor) as file:
            _fill(file, entry, into.view(-1))

    def checked(self, tensor: str, shape: tuple[int, ...], *, leading: bool = False) -> StoredTensor:
        """Return the entry of a tensor, or raise unless it has this shape; `leading`: it may have more rows."""
        entry = self.entries.get(tensor)
        if entry is None:
            raise ModelError(
                f"{self.path} has no tensor {tensor!r}, which its configuration needs. The file belongs to another "
                "model, or is incomplete."
            )
        rows_fit = leading and entry.shape[1:] == shape[1:] and entry.shape[0] >= shape[0]
        if not rows_fit and entry.shape != shape:
            raise ModelError(
                f"{self.path}: tensor {tensor!r} has shape {list(entry.shape)}; its configuration says {list(shape)}."
            )
        return entry

    def read_bytes(self, tensor: str, rows: int, at_once: int) -> Iterator[Tensor]:
        """Yield the first rows of a matrix as stored, `at_once` rows at a time: uint8 [rows, bytes].

        A tensor may hold several matrices, one below the other. All results use one buffer: the next read overwrites
        the last one.
        """
        entry = self.entries[tensor]
        size = entry.shape[-1] // entry.encoding.block * entry.encoding.size
        buffer = torch.empty(min(at_once, rows), size, dtype=torch.uint8)
        with self._opened(tensor) as file:
            file.seek(entry.offset)
            for start in range(0, rows, at_once):
                some = buffer[: min(at_once, rows - start)]
                _read_exactly(file, some.view(-1))
                yield some

    @contextmanager
    def _opened(self, tensor: str) -> Iterator[BinaryIO]:
        try:
            with self.path.open("rb", buffering=0) as file:
                yield cast(BinaryIO, file)
        except (OSError, EOFError) as error:
            raise ModelError(
                f"{self.path}: tensor {tensor!r} could not be read ({error}). Fetch the file again."
            ) from None


@torch.inference_mode()  # saves a sixth of the time on a CPU
def _fill(file: BinaryIO, entry: StoredTensor, flat: Tensor) -> None:
    file.seek(entry.offset)
    if flat.device.type == "cpu" and flat.dtype == entry.encoding.dtype:
        return _read_exactly(file, flat.view(torch.uint8))
    block, size = entry.encoding.block, entry.encoding.size
    step = CPU_NUMBERS if flat.device.type == "cpu" else UNPACKED_NUMBERS
    buffer = torch.empty(
        min(step, flat.numel()) // block * size, dtype=torch.uint8, pin_memory=flat.device.type == "cuda"
    )
    for out in torch.split(flat, step):
        raw = buffer[: out.numel() // block * size]
        _read_exactly(file, raw)
        # The copy is complete when `to` returns, so the next part is read while a GPU unpacks this one.
        out.copy_(entry.encoding.decode(raw.to(flat.device)))
    return None


def _read_exactly(file: BinaryIO, raw: Tensor) -> None:
    view = raw.numpy().data
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise EOFError("the file ends inside it")
        view = view[got:]


def open_safetensors(path: Path) -> TensorFile:
    """Read the header of one safetensors file: eight bytes of length, then JSON, then the data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(path.stat().st_size - 8, 100 << 20):
                raise ValueError(f"its header claims {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        entries = {
            tensor: _entry(tensor, info, 8 + length) for tensor, info in header.items() if tensor != "__metadata__"
        }
    except OSError as error:
        raise ModelError(f"{path} could not be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged or no safetensors file: {error}. Fetch the file again.") from None
    return TensorFile(path, entries)


def _entry(tensor: str, info: dict[str, Any], data: int) -> StoredTensor:
    (begin, end), shape, dtype = info["data_offsets"], tuple(info["shape"]), info["dtype"]
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in (begin, *shape)):
        raise ValueError(f"{tensor} has shape {shape!r:.60} and begins at {begin!r:.60}, which are no whole numbers")
    encoding = SAFETENSORS.get(dtype) or NUMBERS.get(dtype)
    if encoding is None:
        # The error comes only when it is read: a file may have such tensors beside the weights.
        return StoredTensor(shape, data + begin, _unreadable(tensor, dtype))
    entry = StoredTensor(shape, data + begin, encoding)
    if entry.end != data + end:
        raise ValueError(f"{tensor} of shape {info['shape']} does not fill its bytes {info['data_offsets']}")
    return entry


def _unreadable(tensor: str, dtype: str) -> Encoding:
    def decode(raw: Tensor) -> Tensor:
        raise _unread(tensor, dtype)

    return Encoding(1, 0, decode)


def _unread(tensor: str, dtype: str) -> ModelError:
    return ModelError(
        f"Tensor {tensor!r} is stored as {dtype}; expected one of {', '.join(SAFETENSORS)}. Load it with "
        "runner='transformers'."
    )


class ShardedFile:
    """The tensors of several safetensors files, by an index."""

    def __init__(self, index: Path) -> None:
        self.index = index
        files = FileValues(read_object(index), str(index)).group("weight_map")
        self.files = {tensor: files.text(tensor) for tensor in files.values}
        self.shards = {file: self._open(file) for file in sorted(set(self.files.values()))}

    def _open(self, file: str) -> TensorFile:
        path = self.index.parent / file
        if not path.is_file():
            raise ModelError(f"{path} is missing, though {self.index.name} names it. Fetch the model again.")
        return open_safetensors(path)

    @property
    def name(self) -> str:
        """The index's path."""
        return str(self.index)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.files

    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Fill `into`; see TensorSource."""
        if tensor not in self.files:
            raise ModelError(
                f"{self.index} names no tensor {tensor!r}, which its configuration needs. It belongs to another "
                "model, or is incomplete."
            )
        self.shards[self.files[tensor]].read(tensor, into, leading=leading)


def open_folder(folder: Path) -> TensorFile | ShardedFile:
    """Open the safetensors of a model folder, one file or several."""
    if (index := folder / "model.safetensors.index.json").is_file():
        return ShardedFile(index)
    if (single := folder / "model.safetensors").is_file():
        return open_safetensors(single)
    names = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
    raise ModelError(
        f"{folder} has neither model.safetensors nor model.safetensors.index.json (it holds {names}). Fetch or convert "
        "the weights."
    )
