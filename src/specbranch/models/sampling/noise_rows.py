"""Rows of the shared Gumbel noise as tensors; on a CPU a cache keeps them for all lanes, nodes and models.

Owns the cache and the transform to Gumbel noise; `core/noise.py` owns the hash. Invariant: an entry depends on (seed,
sample, position) and the token id alone. Rows are computed elementwise, so neither other rows nor the size of the
vocabulary change their bits. The cache is thread-safe: a lock guards it, and rows are computed outside the lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbranch.core.noise import SCALE, keys
from specbranch.models.cpu.contenders import contenders
from specbranch.models.files.head_columns import Columns

DrawKey = tuple[int, int, int]  # seed, sample, position
NoiseKey = tuple[DrawKey, Columns | None]
NOISE_ROWS = 256  # rows in the cache at most: twice the tail of a sequence
NOISE_BYTES = 16 * 2**20  # bytes of the cache at most: 85 rows of 49,152 tokens, more positions than a round touches


class Noise:
    """A cache of the most recently used rows of noise.

    Draft and target may share one, and so may engines in several threads. Rows are as long as the longest vocabulary
    requested so far; callers get them cut to their own size.
    """

    def __init__(self, rows: int = NOISE_ROWS, most_bytes: int = NOISE_BYTES) -> None:
        self._rows = rows
        self._bytes = most_bytes
        self._width = 0  # tokens of a whole row
        self._ids: dict[torch.device, Tensor] = {}
        self._kept: OrderedDict[NoiseKey, Tensor] = OrderedDict()
        self._lock = Lock()

    def ids(self, vocabulary: int, device: torch.device) -> Tensor:
        """Return the first token ids [vocabulary], on a device."""
        ids = self._ids.get(device)
        if ids is None or len(ids) < vocabulary:
            ids = self._ids[device] = torch.arange(vocabulary, device=device)
        return ids[:vocabulary]

    def row(self, draw: DrawKey, vocabulary: int) -> Tensor:
        """Return −log E of the first `vocabulary` token ids for a draw [vocabulary], float32."""
        return self.rows([draw], vocabulary)[0]

    def rows(self, draws: Sequence[DrawKey], vocabulary: int) -> list[Tensor]:
        """Return the rows of several draws, and compute those that are not in the cache."""
        with self._lock:
            if vocabulary > self._width:
                self._width = vocabulary
                self._kept.clear()
            width = self._width
        return [row[:vocabulary] for row in self._found(draws, self.ids(width, torch.device("cpu")), None)]

    def rows_of(self, draws: Sequence[DrawKey], columns: Columns) -> list[Tensor]:
        """Return the rows of several draws for some tokens only [columns].

        If whole rows are in use, too, as by a target beside the draft, these are parts of them: none is computed twice.
        """
        if self._width:
            return [row.index_select(0, columns.ids) for row in self.rows(draws, columns.vocabulary)]
        return self._found(draws, columns.ids, columns)

    def _found(self, draws: Sequence[DrawKey], ids: Tensor, columns: Columns | None) -> list[Tensor]:
        with self._lock:
            kept = {draw: self._kept.get((draw, columns)) for draw in draws}
        found = {draw: gumbel(hashed(draw, ids)) if row is None else row for draw, row in kept.items()}
        with self._lock:
            for draw, row in found.items():
                self._remember((draw, columns), row)
        return [found[draw] for draw in draws]

    def _remember(self, key: NoiseKey, row: Tensor) -> None:
        if key[1] is None and len(row) < self._width:
            return  # another thread has requested a longer vocabulary in the meantime
        self._kept[key] = row
        self._kept.move_to_end(key)
        while len(self._kept) > max(1, min(self._rows, self._bytes // (4 * max(self._width, len(row))))):
            self._kept.popitem(last=False)


@cache
def shared_noise() -> Noise:
    """Return the cache that all samplers of this process share."""
    return Noise()


def winner(scores: Tensor, draw: DrawKey) -> int:
    """Return argmax(scores + noise) of one row on a CPU [vocabulary], float32; ties to the lowest id.

    Computes noise only for tokens that can still win: few if logits differ much. Without compiled code it computes the
    noise of all tokens.
    """
    row = scores.numpy()
    top = int(row.argmax())
    if not np.isfinite(row[top]):  # NaN, too: noise changes no such score
        return top
    ids = contenders(np.ascontiguousarray(row), top, keys(*draw))
    if ids is None:
        ids = np.arange(len(row))
    return int(ids[0]) if len(ids) == 1 else int(ids[_best(row[ids], draw, ids)])


def _best(
    scores: np.ndarray[Any, np.dtype[np.float32]], draw: DrawKey, ids: np.ndarray[Any, np.dtype[np.int64]]
) -> int:
    noise = gumbel(hashed(draw, torch.from_numpy(ids)))
    return int((torch.from_numpy(scores) + noise).numpy().argmax())


def hashed(draw: DrawKey, ids: Tensor) -> Tensor:
    """Return the 32 hash bits of each token id for a draw, as int32.

    Computes `core.noise.mix` in wrapping 32-bit arithmetic, which is 4 times as fast.
    """
    first, second = keys(*draw)
    bits = ids.numpy().astype(np.uint32)
    bits ^= np.uint32(first)
    _permute(bits)
    bits ^= np.uint32(second)
    _permute(bits)
    return torch.from_numpy(bits.view(np.int32))


def _permute(x: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)


def gumbel(bits: Tensor) -> Tensor:
    """Return −log E with E = −log1p(−v) and v = (bits + ½)·2⁻³², in float32; `bits` are wrapped into int32.

    A float32 v is precise near 0 but rounds to 1 at the other end. There 1 − v is computed from the inverted bits.
    """
    sign = bits >> 31  # −1 where v ≥ ½
    small = (bits ^ sign).float().add_(0.5).mul_(SCALE)  # min(v, 1 − v), never 0
    # 1 or 0: both logarithms are finite, so the products select exactly (and 6 times faster than `where`)
    upper = sign.neg_().float()
    log = small.neg().log1p_().mul_(1.0 - upper).addcmul_(small.log_(), upper)
    return log.neg_().log_().neg_()
