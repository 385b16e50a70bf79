"""An embedding that stays in its file: rows are unpacked when they are looked up.

Owns the mapping of the file, of which only the pages that are looked at are ever in memory, and the rows that were
looked up lately, unpacked. Invariant: a row is what reading the whole tensor would give for it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from specbranch.models.files.tensor_file import TensorFile

ROWS_KEPT = 1024  # unpacked rows: a text says the same words again
FEW_LOOKUPS = 64  # rows of a step; a prompt is read once, and pushes nothing out


class StoredRows:
    """The first `rows` rows of a tensor, in float32 where they are looked up."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, file: TensorFile, tensor: str, rows: int) -> None:
        entry = file.entries[tensor]
        self.shape = torch.Size((rows, *entry.shape[1:]))
        self.encoding = entry.encoding
        size = math.prod(entry.shape[1:]) // entry.encoding.block * entry.encoding.size
        self._bytes = np.memmap(file.path, np.uint8, "r", entry.offset, (rows, size))
        self._places: dict[int, int] = {}  # where the kept row of a token is
        self._kept = torch.empty(ROWS_KEPT, *self.shape[1:], dtype=self.dtype)

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Look up rows: [ids, …]."""
        if ids.dim() == 1 and len(ids) <= FEW_LOOKUPS:
            return self._kept.index_select(0, self._found(ids))
        return self._unpacked(ids.numpy()).view(*ids.shape, *self.shape[1:])

    def _found(self, ids: Tensor) -> Tensor:
        """Where rows are kept, after those that were not have been unpacked."""
        tokens, places = ids.tolist(), self._places
        if new := [token for token in dict.fromkeys(tokens) if token not in places]:
            if len(places) + len(new) > ROWS_KEPT:
                places.clear()
                new = list(dict.fromkeys(tokens))
            first = len(places)
            self._kept[first : first + len(new)] = self._unpacked(np.array(new))
            places.update((token, first + at) for at, token in enumerate(new))
        return torch.tensor([places[token] for token in tokens])

    def _unpacked(self, ids: np.ndarray) -> Tensor:
        raw = torch.from_numpy(self._bytes[ids])  # a copy of those alone
        return self.encoding.decode(raw.view(-1)).to(self.dtype).view(-1, *self.shape[1:])


Embedding = Tensor | StoredRows


def looked_up(table: Embedding, ids: Tensor) -> Tensor:
    """Rows of an embedding, whichever kind it is."""
    return table[ids] if isinstance(table, StoredRows) else torch.nn.functional.embedding(ids, table)
