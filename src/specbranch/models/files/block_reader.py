"""Reading matrices from a GGUF file into tiles of blocks, a few rows at a time.

Owns the order of reading, not the layouts (`blocks.py`). Invariant: beside the matrix itself, reading needs only a few
megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm, prod

from torch import Tensor

from specbranch.models.files.blocks import FORMS, TILE, BlockForm, BlockPart
from specbranch.models.files.gguf_file import GgufFile

READ_BYTES = 1 << 20  # bytes that are read and laid out at a time: they fit the CPU's cache


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The first rows of a tensor, which become outputs of a matrix.

    `pairs`: the head dimension, if the file pairs dimension 2i with 2i + 1; None: it pairs i with i + head_dim/2.
    `matrices`: how many matrices of equal size the tensor holds, one below the other.
    """

    tensor: str
    rows: int
    pairs: int | None = None
    matrices: int = 1

    def shape(self, ins: int) -> tuple[int, ...]:
        """Return the shape of the tensor in the file."""
        return (self.rows, ins) if self.matrices == 1 else (self.matrices, self.rows // self.matrices, ins)


def read_parts(file: GgufFile, wanted: Sequence[BlockRows], ins: int, *, leading: bool) -> tuple[BlockPart, ...] | None:
    """Read the rows of several tensors, one below the other; None if one of them is not in blocks."""
    entries = {rows.tensor: file.checked(rows.tensor, rows.shape(ins), leading=leading) for rows in wanted}
    kinds = {tensor: entry.encoding.name for tensor, entry in entries.items()}
    if any(kind not in FORMS for kind in kinds.values()):
        return None
    numbered = groupby(enumerate(wanted), lambda one: _together(one, kinds))
    return tuple(_read_part(file, [rows for _, rows in some], kinds, form, ins) for (form, _), some in numbered)


def stored_kinds(file: GgufFile) -> dict[str, int]:
    """Return the bytes that the matrices of each block type take in memory."""
    found: dict[str, int] = {}
    for entry in file.entries.values():
        if (kind := entry.encoding.name) in FORMS and len(entry.shape) > 1:
            *counts, ins = entry.shape
            outs = prod(counts)
            found[kind] = found.get(kind, 0) + -(-outs // TILE) * FORMS[kind][0].tile_bytes(ins)
    return found


def _together(one: tuple[int, BlockRows], kinds: dict[str, str]) -> tuple[BlockForm, int]:
    """Return the key by which rows join one part: their form; rows that do not fill a tile stay alone."""
    number, rows = one
    return FORMS[kinds[rows.tensor]][0], -1 if rows.rows % TILE == 0 else number


def _read_part(
    file: GgufFile, wanted: Sequence[BlockRows], kinds: dict[str, str], form: BlockForm, ins: int
) -> BlockPart:
    part, start = BlockPart.empty(form, sum(rows.rows for rows in wanted), ins), 0
    for rows in wanted:
        fields, whole = FORMS[kinds[rows.tensor]][1], lcm(TILE, rows.pairs or 1)
        size = ins // 8  # bytes of a row, at least
        for raw in file.read_bytes(rows.tensor, rows.rows, max(READ_BYTES // size // whole, 1) * whole):
            part.put(start, fields(raw if rows.pairs is None else halves_together(raw, rows.pairs)))
            start += len(raw)
    return part


def halves_together(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head so that dimension i is paired with i + head_dim/2."""
    return rows.view(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def pairs_together(rows: Tensor, head_dim: int) -> Tensor:
    """Undo `halves_together`: dimension 2i of each head is paired with 2i + 1."""
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
