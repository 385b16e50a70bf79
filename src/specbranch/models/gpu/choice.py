"""Sampling by the match rule on a device: each row's token and best entries, with noise, and the rows they lead to.

Owns two implementations: Triton kernels, and plain torch on any device, which the kernels are compared with. Invariant:
a row's result depends on its own logits and parameters only. So all tokens of the match rule are sampled here, inside
graphs and outside.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from specbranch.core.noise import MASK, mix
from specbranch.models.files.head_columns import Columns
from specbranch.models.gpu.attention import begins_early, launch
from specbranch.models.gpu.layout import BEFORE, ONE, ROOT_ROW, power_of_four, power_of_two
from specbranch.models.sampling.noise_rows import gumbel
from specbranch.models.sampling.sample import entropy_bound

log = logging.getLogger("specbranch")

CHOICE_TILE = 2048  # columns of a program
ENTRY_COUNTS = (1, 8)  # numbers of best entries that graphs compute


class Chooser:
    """Samples from the first `width` columns of a model's logits; also writes the tokens to `picks`.

    Results are [rows, BEFORE + 2·count] in float32, which represents token ids exactly: token, 1 if the row is reached,
    two confidences, the best tokens, their scores. They are valid until the next call with as many rows.
    """

    def __init__(self, picks: Tensor, width: int, columns: Columns | None = None) -> None:
        device = picks.device
        self.width, self.picks, self._device = width, picks, device
        self._ids = torch.arange(width, device=device) if columns is None else columns.ids[:width].to(device)
        self._listed = columns is not None
        self._results: dict[tuple[int, int], Tensor] = {}
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.by_kernels = self._kernels_work()

    def __call__(self, logits: Tensor, choosing: Tensor, counts: Tensor, count: int) -> Tensor:
        """Sample every row; `choosing` [fields, at least rows] and `counts` are sections of a packed step."""
        choose = self.choose_by_kernels if self.by_kernels else self.choose_plainly
        return choose(logits, choosing, counts, count)

    def choose_plainly(self, logits: Tensor, choosing: Tensor, counts: Tensor, count: int) -> Tensor:
        """Sample in plain torch."""
        rows = logits.shape[0]
        temperature, noisy = choosing[0, :rows].view(torch.float32), choosing[3, :rows]
        first, second = choosing[1:3, :rows].long()[..., None] & MASK
        law = logits[:, : self.width].float() / temperature[:, None]
        scores = torch.where(noisy[:, None] != 0, law + gumbel(mix(self._ids, (first, second)).int()), law)
        top, best = _leading(scores, count)
        tokens = self._ids[best]
        self.picks[:rows] = tokens[:, 0]
        reached = _reached(choosing[4, :rows], choosing[5, :rows], tokens[:, 0])
        confidence = scores.softmax(dim=-1).amax(dim=-1, keepdim=True)
        bound = entropy_bound(law).float() if count > 1 else torch.zeros_like(confidence[:, 0])
        parts = [tokens[:, :1].float(), reached[:, None].float(), confidence, bound[:, None], tokens.float(), top]
        return self._kept(rows, count).copy_(torch.cat(parts, dim=-1))

    def choose_by_kernels(self, logits: Tensor, choosing: Tensor, counts: Tensor, count: int) -> Tensor:
        """Sample with the Triton kernels, in two launches.

        ROWS has the sizes of buckets: so rows that are sampled behind a graph compile no further kernel.
        """
        from specbranch.models.gpu import choice_kernels as kernels

        rows, tiles, early = logits.shape[0], -(-self.width // CHOICE_TILE), begins_early(self._device)
        tops = logits.new_empty(rows, tiles, count, dtype=torch.float32)
        columns, sums = torch.empty_like(tops, dtype=torch.int32), tops.new_empty(4, rows, tiles)
        results = self._kept(rows, count)
        shared = {"COUNT": count, "LISTED": self._listed, "EARLY": early, "num_warps": 4, **launch(early)}
        per = choosing.stride(0)
        kernels.scan[(rows, tiles)](
            logits, self._ids, choosing, tops, columns, sums, self.width, logits.stride(0), per,
            TILE=CHOICE_TILE, **shared,
        )  # fmt: skip
        kernels.settle[(rows,)](
            self._ids, choosing, counts, tops, columns, sums, self.picks, results, self._arrived, self.width, per,
            tiles, results.shape[1], ENTRIES=power_of_two(tiles * count), TILES=power_of_two(tiles),
            ROWS=power_of_four(rows), **shared,
        )  # fmt: skip
        return results

    def _kept(self, rows: int, count: int) -> Tensor:
        if (rows, count) not in self._results:
            self._results[rows, count] = torch.zeros(rows, BEFORE + 2 * count, device=self._device)
        return self._results[rows, count]

    @torch.inference_mode()
    def _kernels_work(self) -> bool:
        """True if the kernels agree with plain torch, tested once; warns if a GPU cannot use them."""
        if self._device.type != "cuda":
            return False
        logits = torch.randn(4, self.width, generator=torch.Generator().manual_seed(0)).to(self._device)
        choosing = torch.tensor(
            [[ONE] * 4, [3] * 4, [5] * 4, [0, 1, 0, 1], range(4), [ROOT_ROW] * 4],
            dtype=torch.int32,
            device=self._device,
        )
        counts = torch.zeros(2, dtype=torch.int32, device=self._device)
        try:
            found, plain = (
                choose(logits, choosing, counts, 8).clone() for choose in (self.choose_by_kernels, self.choose_plainly)
            )
        except Exception as reason:  # compilers raise errors of all kinds
            log.warning(
                "Tokens are chosen in plain operations: Triton does not work here (%s: %s).",
                type(reason).__name__,
                reason,
            )
            return False
        if torch.allclose(found, plain, rtol=1e-3, atol=1e-3):
            return True
        log.warning("Tokens are chosen in plain operations: Triton chooses others.")
        return False


def _leading(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the greatest scores of each row and their columns [rows, count]; among equals the lowest first."""
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    return ordered.values[:, :count], ordered.indices[:, :count]


def _reached(parent: Tensor, said: Tensor, tokens: Tensor) -> Tensor:
    """Return which rows are reached: those whose token, and those of all ancestors, were sampled [rows]."""
    chosen = (said == ROOT_ROW) | (said == tokens[parent.long()])
    reached, way = chosen, parent.long()
    # To read the depth of the tree would make a GPU wait; so each turn doubles the number of ancestors checked.
    for _ in range(max(len(parent) - 1, 1).bit_length()):
        reached = reached & reached[way]
        way = way[way]
    return reached
