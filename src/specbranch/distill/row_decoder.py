"""A decoder over many rows at once, one token each, with a static cache: every row is a text of its own.

Owns that cache and the attention over it. Invariant: a row attends to its own line, up to the place it writes, and to nothing else; shapes
never change, so that a step can be captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specbranch.models.decoder import Decoder, Part, Step
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.weights import Weights

log = logging.getLogger("specbranch")


class RowDecoder(Decoder):
    """A decoder over one token a row, each row with a line of the cache for itself."""

    def __init__(self, arch: Architecture, weights: Weights, rows: int, length: int) -> None:
        super().__init__(arch, weights, length)
        self.device, self.dtype = self.norm.device, self.norm.dtype
        places = -(-length // 16) * 16  # masked kernels on GPUs want aligned rows
        shape = (2, arch.layers, rows, places, arch.kv_heads, arch.head_dim)
        self._cache = torch.zeros(shape, device=self.device, dtype=self.dtype)  # what a mask hides must not be NaN
        self._attention_of = self._fastest()
        self._seen = _Seen.of(torch.zeros(rows, dtype=torch.int64, device=self.device), self._cache)

    def scores(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed a token a row at its position; returns logits [rows, vocabulary] in float32 or better."""
        self._seen = _Seen.of(positions, self._cache)
        logits = self.logits(self.forward(Step(tokens, positions, ()), self))
        return logits.float() if logits.dtype.itemsize < 4 else logits

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of one layer, each [rows, places, kv_heads, head_dim]."""
        return self._cache[0, index], self._cache[1, index]

    def _attend(self, parts: Sequence[Part], held: tuple[Tensor, Tensor], queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store the rows' keys and values, then let each row attend to its own line; there are no parts here."""
        for stored, new in zip(held, (keys, values), strict=True):
            stored.flatten(0, 1).index_copy_(0, self._seen.places, new)
        return self._attention_of(queries, *held, self._seen).flatten(1)

    def _fastest(self) -> Attend:
        """Return the kernel that reads no more of the cache than is filled, where there is one and it is right."""
        if self.device.type != "cuda" or self.dtype not in (torch.bfloat16, torch.float16):
            return attend_masked
        count, places = min(self._cache.shape[2], 64), self._cache.shape[3]
        lines = torch.randn_like(self._cache[:, 0, :count])
        queries = torch.randn(count, self.arch.heads, self.arch.head_dim, device=self.device, dtype=self.dtype)
        seen = _Seen.of(torch.arange(count, device=self.device) * 7 % places, lines[:, None])
        try:
            filled, masked = (attend(queries, lines[0], lines[1], seen) for attend in (attend_filled, attend_masked))
            close = torch.allclose(filled, masked, atol=0.03, rtol=0.03)
        except (RuntimeError, TypeError) as error:  # the operator is torch's own affair and may change
            log.info("Attention over filled places only is not to be had here: %s", error)
            close = False
        return attend_filled if close else attend_masked


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the rows of a step attend to: each its own line, up to the place it writes."""

    places: Tensor  # [rows] int64, in the lines laid end to end
    counts: Tensor  # [rows] int32, places filled in each line
    mask: Tensor  # [rows, 1, 1, span], 0 or -inf
    edges: Tensor  # [rows + 1] int32, where each line begins

    @classmethod
    def of(cls, positions: Tensor, cache: Tensor) -> _Seen:
        """Describe a step that writes at these positions of the cache [2, layers, rows, places, kv_heads, head_dim]."""
        rows, places = cache.shape[2:4]
        # Asking for the longest row would make a GPU wait; a CPU gains by it.
        span = places if cache.device.type == "cuda" else int(positions.max()) + 1
        lines = torch.arange(rows + 1, device=cache.device) * places
        hidden = torch.arange(span, device=cache.device) > positions[:, None]
        mask = torch.zeros(rows, span, device=cache.device, dtype=cache.dtype).masked_fill_(hidden, -torch.inf)
        return cls(lines[:-1] + positions, (positions + 1).to(torch.int32), mask[:, None, None], lines.to(torch.int32))


Attend = Callable[[Tensor, Tensor, Tensor, _Seen], Tensor]


def attend_masked(queries: Tensor, keys: Tensor, values: Tensor, seen: _Seen) -> Tensor:
    """Attend with queries [rows, heads, head_dim] to lines [rows, places, kv_heads, head_dim], whatever the device.

    Heads that share a key head are taken as several queries of it: masked kernels on GPUs know no groups.
    """
    rows, heads, head_dim = queries.shape
    kv_heads, span = keys.shape[2], seen.mask.shape[-1]
    grouped = queries.reshape(rows, kv_heads, -1, head_dim)
    keys, values = (lines[:, :span].transpose(1, 2) for lines in (keys, values))
    mask = seen.mask.expand(rows, kv_heads, heads // kv_heads, span)
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(rows, heads, head_dim)


def attend_filled(queries: Tensor, keys: Tensor, values: Tensor, seen: _Seen) -> Tensor:
    """Do the same on a GPU with the flash kernel for sequences of different lengths, which stops where each line is filled.

    Here too the heads of a group are several queries of their key head: the line is read once for all of them.
    """
    rows, places, kv_heads, head_dim = keys.shape
    group = queries.shape[1] // kv_heads
    grouped = queries.view(rows, kv_heads, group, head_dim).transpose(1, 2).flatten(0, 1)  # [rows · group, kv_heads, head_dim]
    queries_from = torch.arange(rows + 1, device=queries.device, dtype=torch.int32) * group
    found: Tensor = torch.ops.aten._flash_attention_forward(
        grouped,
        keys.flatten(0, 1),
        values.flatten(0, 1),
        queries_from,
        seen.edges,
        group,
        places,
        0.0,
        False,
        False,
        seqused_k=seen.counts,
    )[0]
    return found.view(rows, group, kv_heads, head_dim).transpose(1, 2).reshape(queries.shape)
