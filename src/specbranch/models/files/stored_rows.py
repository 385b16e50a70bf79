"""An embedding that stays in its file: rows are unpacked when they are looked up.

Owns the mapping of the file, of which only the pages that are looked at are ever in memory. Invariant: a row is what
reading the whole tensor would give for it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from specbranch.models.files.tensor_file import TensorFile


class StoredRows:
    """The first `rows` rows of a tensor, in float32 where they are looked up."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, file: TensorFile, tensor: str, rows: int) -> None:
        entry = file.entries[tensor]
        self.shape = torch.Size((rows, *entry.shape[1:]))
        self.encoding = entry.encoding
        size = math.prod(entry.shape[1:]) // entry.encoding.block * entry.encoding.size
        self._bytes = np.memmap(file.path, np.uint8, "r", entry.offset, (rows, size))

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Look up rows: [ids, …]."""
        raw = torch.from_numpy(self._bytes[ids.numpy()])  # a copy of those alone
        return self.encoding.decode(raw.view(-1)).to(self.dtype).view(*ids.shape, *self.shape[1:])


Embedding = Tensor | StoredRows


def looked_up(table: Embedding, ids: Tensor) -> Tensor:
    """Rows of an embedding, whichever kind it is."""
    return table[ids] if isinstance(table, StoredRows) else torch.nn.functional.embedding(ids, table)
