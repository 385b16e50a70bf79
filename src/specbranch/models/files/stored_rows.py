"""An embedding that stays in its file: rows are unpacked when they are looked up.

Owns the memory map of the file, of which only accessed pages are in memory, and a cache of unpacked rows. Invariant: a
row has the bits that reading the whole tensor would give.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from specbranch.models.files.tensor_file import TensorFile

ROWS_KEPT = 1024  # unpacked rows in the cache, as texts repeat words
FEW_LOOKUPS = 64  # only lookups of a step use the cache; a prompt has more rows and evicts nothing


class StoredRows:
    """The first `rows` rows of a tensor; a lookup returns float32."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, file: TensorFile, tensor: str, rows: int) -> None:
        entry = file.entries[tensor]
        self.shape = torch.Size((rows, *entry.shape[1:]))
        self.encoding = entry.encoding
        size = math.prod(entry.shape[1:]) // entry.encoding.block * entry.encoding.size
        self._bytes = np.memmap(file.path, np.uint8, "r", entry.offset, (rows, size))
        self._row_of: dict[int, int] = {}  # by token: its row in the cache
        self._kept = torch.empty(ROWS_KEPT, *self.shape[1:], dtype=self.dtype)

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Look up rows [ids, …]."""
        if ids.dim() == 1 and len(ids) <= FEW_LOOKUPS:
            return self._kept.index_select(0, self._found(ids))
        return self._unpacked(ids.numpy()).view(*ids.shape, *self.shape[1:])

    def _found(self, ids: Tensor) -> Tensor:
        """Return the cache rows of tokens, after unpacking those that were missing."""
        tokens, row_of = ids.tolist(), self._row_of
        if new := [token for token in dict.fromkeys(tokens) if token not in row_of]:
            if len(row_of) + len(new) > ROWS_KEPT:
                row_of.clear()
                new = list(dict.fromkeys(tokens))
            first = len(row_of)
            self._kept[first : first + len(new)] = self._unpacked(np.array(new))
            row_of.update((token, first + at) for at, token in enumerate(new))
        return torch.tensor([row_of[token] for token in tokens])

    def _unpacked(self, ids: np.ndarray) -> Tensor:
        raw = torch.from_numpy(self._bytes[ids])  # copies these rows only
        return self.encoding.decode(raw.view(-1)).to(self.dtype).view(-1, *self.shape[1:])


Embedding = Tensor | StoredRows


def looked_up(table: Embedding, ids: Tensor) -> Tensor:
    """Look up rows of an embedding of either kind."""
    return table[ids] if isinstance(table, StoredRows) else torch.nn.functional.embedding(ids, table)
