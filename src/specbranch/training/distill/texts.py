"""Many sequences decoded at once, one token of each per step: for a target that writes a thousand conversations in
parallel.

Owns their pages, which never change owner: a row has enough for its longest text, in sequence. Invariants: a row sees
only its own text, up to the given token. On a GPU shapes never change and nothing waits, so a step can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbranch.core.pages import PAGE, Pool
from specbranch.models.cache.kv_memory import Memory, Table
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.fused_step import STEP_ROWS, fuse
from specbranch.models.forward.step_rows import GROUP_POSITIONS, Rows, split_into_steps
from specbranch.models.gpu.layout import ALIGNED, LONGEST_OWN, SHARED_COUNT, Views
from specbranch.models.gpu.step import GpuStep


class Texts:
    """The texts of some rows, each up to `length` tokens; a token at position 0 starts a new text."""

    def __init__(self, decoder: Decoder, rows: int, length: int) -> None:
        self.decoder, self._pages = decoder, -(-length // PAGE)
        device, pool = decoder.norm.device, Pool(rows * self._pages)
        self.memory = Memory(decoder.arch, pool.pages + 1, device, decoder.dtype)
        self._tables = [Table(pool, range(row * self._pages, (row + 1) * self._pages)) for row in range(rows)]
        self._fused = fuse(decoder, self.memory)
        self._step = GpuStep(decoder, self.memory) if self._fused is None else None
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)

    def scores(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Process a token of each row at its position [rows]; return logits [rows, vocabulary] in float32 or better."""
        if self._step is None:
            return self._compiled(tokens, positions)
        logits, _ = self._step.forward(self._views(tokens, positions))
        return logits.float() if logits.dtype.itemsize < 4 else logits

    def _compiled(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert self._fused is not None
        texts = zip(self._tables, tokens.tolist(), positions.tolist(), strict=True)
        work = [Rows(table, (token,), position, position, (1,)) for table, token, position in texts]
        return torch.cat([self._fused.logits(step) for step in split_into_steps(work, STEP_ROWS)])

    def _views(self, tokens: Tensor, positions: Tensor) -> Views:
        """Describe the step on the device itself: the pages of a row are contiguous."""
        at, rows = positions.int(), self._rows
        begin = rows * (self._pages * PAGE)
        shared = (at // GROUP_POSITIONS - 1).clamp_(min=0) * GROUP_POSITIONS
        # Asking for the longest row would make a GPU wait; a CPU gains by it.
        longest = int((at - shared).max()) + 1 if rows.device.type == "cpu" else LONGEST_OWN
        own = begin[:, None] + shared[:, None] + torch.arange(longest, dtype=torch.int32, device=rows.device)
        own.clamp_(max=self.memory.data.shape[0] * PAGE - 1)  # what lies beyond a row's count is not read
        tables = torch.arange(len(rows) * self._pages, dtype=torch.int32, device=rows.device)
        groups = torch.stack((rows, torch.ones_like(rows), rows * self._pages), dim=1)
        counts = torch.full((ALIGNED,), len(rows), dtype=torch.int32, device=rows.device)
        counts[SHARED_COUNT] = shared.max()
        return Views(
            tokens.int(), at, begin + at, shared, at - shared + 1, groups, tables, own, counts=counts,
            most_pages=self._pages,
        )  # fmt: skip
