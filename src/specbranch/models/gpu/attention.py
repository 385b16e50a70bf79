"""Paged attention: of sampled rows, which read shared positions through a page table and then their own path, and of
rows of prompts, which read all their positions through one.

Owns two implementations: Triton kernels, and plain torch on any device, which the kernels are compared with. Invariant:
with the kernels, a row's bits depend only on its queries and on the keys it sees, in the order of positions.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specbranch.core.pages import PAGE, Pool
from specbranch.models.cache.kv_memory import Table
from specbranch.models.families.operations import PLAIN_ATTENTION, Attention
from specbranch.models.forward.arithmetic import outside, shares
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.layout import (
    BATCH_GROUP_ROWS,
    GROUP_ROWS,
    LEAST_TILE_ROWS,
    LONGEST_OWN,
    Views,
    pack,
    power_of_two,
    views,
)

log = logging.getLogger("specbranch")


class Attend(Protocol):
    """An implementation of attention; see `attend_plainly`."""

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Views,
        out: Tensor | None = None,
        sampled_only: bool = False,
        attention: Attention = PLAIN_ATTENTION,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from the queries of a step."""
        ...


SHARED_BLOCK, QUERY_TILE = 128, 16  # shared positions of a block, and queries of a program (rows times heads)
LARGE_HEAD, LARGE_BLOCK, LARGE_QUERIES = 256, 64, 64  # heads from this size on have smaller blocks and tiles
WIDE_BLOCK, WIDE_TILE = 32, 16  # the same in float32, which has no fast products and twice the size
PATH_BLOCK = 32  # KV slots of an own path that are read at a time
CHUNK_QUERIES, CHUNK_ROWS = 128, 64  # queries and rows of a tile of a prompt, at most
CHUNK_WARPS, BATCH_WARPS, WARPS, JOIN_WARPS = 8, 4, 4, 2
CHUNK_STAGES, STAGES = 3, 2
BATCH_STAGES = ((128, 2), (1, 3))  # by the least number of rows
# Rows of a step up to which `join` has a program for each query head: it reads a row's blocks one after the other, so
# few rows behind long contexts would wait for it. Of more rows, a program has all heads of a key head.
JOINED_ROWS = 64
PARTIAL_BYTES = 1 << 28  # bytes of the results of blocks in a step, at most
PROGRAMS, LEAST_SPLITS, MOST_SPLITS = 256, 8, 64  # programs for the blocks of a step of one sequence, and of one tile
BATCH_PROGRAMS, LEAST_BATCH_SPLITS, MOST_BATCH_SPLITS = 1024, 2, 16  # the same for several sequences
# Groups with at most so many blocks are one program, by the least number of rows: many rows leave no program idle.
WHOLE_BLOCKS = ((32, 8), (1, 2))
CHUNK_PROGRAMS = 128  # programs that share the blocks of prompts in a step, about
WHOLE_CHUNK_BLOCKS = 4  # tiles with at most so many blocks are one program
EARLY_VARIABLE = "SPECBRANCH_EARLY"  # 0: a kernel starts only when the one before it has ended


def choose_attend(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    forms: Iterable[Attention] = (PLAIN_ATTENTION,),
) -> Attend:
    """Return the kernels if they work for this shape and all of these forms, else plain torch."""
    works = all(triton_works(device, dtype, heads, kv_heads, head_dim, form) for form in forms)
    return attend_by_kernels if works else attend_plainly


def attend_plainly(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    step: Views,
    out: Tensor | None = None,
    sampled_only: bool = False,
    attention: Attention = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend in plain torch, from queries [rows, heads, head_dim] to pages [pages, kv_heads, PAGE, head_dim].

    Returns [rows, heads·head_dim], written to `out` if there is one. `sampled_only`: leave rows of prompts out.
    `sinks` [heads]. It copies all keys and values that each row sees.
    """
    heads, head_dim = queries.shape[1:]
    rows = len(step.shared) if sampled_only else len(queries)
    kv_slots, positions, seen = _seen_slots(step)
    if attention.window is not None:
        seen = seen & ~outside(attention, positions, step.positions[:, None] + 1 - attention.window)
    kv_slots, seen, queries = kv_slots[:rows], seen[:rows], queries[:rows]
    # [rows, kv_heads, KV slots, head_dim]
    k, v = (side[kv_slots // PAGE, :, kv_slots % PAGE].transpose(1, 2) for side in (keys, values))
    exact = torch.promote_types(queries.dtype, torch.float32)
    q = queries.view(rows, keys.shape[1], -1, head_dim).to(exact)
    q = q / math.sqrt(head_dim) if attention.scale is None else q * attention.scale
    last = None if sinks is None else sinks.view(keys.shape[1], -1, 1)
    found = shares(torch.matmul(q, k.to(exact).transpose(-1, -2)), ~seen[:, None, None], attention.softcap, last)
    attended = torch.matmul(found, v.to(exact)).to(queries.dtype).reshape(rows, heads * head_dim)
    return attended if out is None else out[:rows].copy_(attended)


def attend_by_kernels(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    step: Views,
    out: Tensor | None = None,
    sampled_only: bool = False,
    attention: Attention = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with Triton. Blocks that have programs of their own are joined by another launch; see `attend_plainly`."""
    from specbranch.models.gpu import attention_kernels as kernels

    assert step.counts is not None
    (total, heads, head_dim), rows = queries.shape, len(step.shared)
    kv_heads, share = keys.shape[1], heads // keys.shape[1]
    padded, wide = power_of_two(share), keys.element_size() > 2
    block, tile = block_positions(head_dim, keys.element_size()), WIDE_TILE if wide else QUERY_TILE
    early = begins_early(queries.device)
    shape = {"HEADS": heads, "DIM": head_dim, "WIDTH": max(power_of_two(head_dim), 16), "BLOCK": block, "EARLY": early}
    tiling = {"SHARE": share, "PADDED": padded, "PAGE": PAGE, "PATH_BLOCK": PATH_BLOCK}
    if out is None:  # products read whole tiles of rows
        out = queries.new_empty(-(-total // GROUP_ROWS) * GROUP_ROWS, heads * head_dim)[:total]
    chunks = step.tiles is not None and not sampled_only
    chunk_tile = chunk_tile_rows(share, head_dim)
    tiles_alone = -(-(total - rows) // chunk_tile)  # of a lone prompt; several prompts have more
    split_chunks = chunks and splits_chunks(tiles_alone, kv_heads)
    # Within a capture this is memory of the graphs' pool, which all layers and graphs use in turn.
    results_of = total if split_chunks else rows
    partial = partial_slots(results_of, heads, head_dim, queries.element_size(), step.most_pages, block)
    sums = queries.new_empty(partial, head_dim)
    tops, totals = queries.new_empty(2, partial, dtype=torch.float32)
    scale, softcap = powers_of_two(attention, head_dim)
    window = {"WINDOW": attention.window or 0, "FIRST": attention.first}
    form = {**window, "SOFTCAP": softcap}
    how: dict[str, Any] = {"enable_fp_fusion": False, **launch(early)}
    sections = (step.shared, step.own_count, step.groups, step.tables, step.own, step.counts)
    groups, batch = len(step.groups), len(step.groups) == rows > 1
    if chunks and step.tiles is not None:
        programs = CHUNK_PROGRAMS // kv_heads if split_chunks else len(step.tiles)
        kernels.attend_chunks[(programs, kv_heads)](
            queries, keys, values, sums, tops, totals, out, step.tiles, step.tables, step.counts, scale, keys.stride(0),
            rows, partial, sinks, **shape, **tiling, **form, TILE_ROWS=chunk_tile, TOTAL=total,
            WHOLE=WHOLE_CHUNK_BLOCKS, SPLIT=split_chunks,
            num_warps=CHUNK_WARPS if chunk_tile * padded > CHUNK_ROWS or head_dim >= LARGE_HEAD else WARPS,
            num_stages=CHUNK_STAGES, **how,
        )  # fmt: skip
    if not batch:
        tile_rows = min(GROUP_ROWS, max(tile // padded, 1), rows)
        while tile_rows * padded < 16:
            tile_rows *= 2
        tiles = max(GROUP_ROWS // tile_rows, 1) if rows > tile_rows else 1
        splits = power_of_two(max(min(PROGRAMS // (kv_heads * groups * tiles), MOST_SPLITS), LEAST_SPLITS))
        kernels.partial_results[(rows + groups * tiles * splits, kv_heads)](
            queries, keys, values, sums, tops, totals, *sections, scale, keys.stride(0), rows, sinks, **shape, **tiling,
            **form, OWN=LONGEST_OWN, TILE_ROWS=tile_rows, TILES=tiles, OWN_TILE=max(padded, 16), SPLITS=splits,
            num_warps=WARPS, num_stages=STAGES, **how,
        )  # fmt: skip
    else:
        splits = power_of_two(max(min(BATCH_PROGRAMS // (kv_heads * rows), MOST_BATCH_SPLITS), LEAST_BATCH_SPLITS))
        whole = _by_rows(WHOLE_BLOCKS, rows) * SHARED_BLOCK // block
        kernels.attend_batch[(groups, kv_heads, splits)](
            queries, keys, values, sums, tops, totals, out, *sections, scale, keys.stride(0), sinks, **shape, **tiling,
            **form, OWN=LONGEST_OWN, TILE=max(BATCH_GROUP_ROWS * padded, 16), WHOLE=whole, SPLITS=splits, BESIDE=chunks,
            num_warps=BATCH_WARPS, num_stages=_by_rows(BATCH_STAGES, rows), **how,
        )  # fmt: skip
    joined_heads = share if batch and rows > JOINED_ROWS and not split_chunks else 1
    kernels.join[(results_of, heads // joined_heads)](
        sums, tops, totals, step.shared, step.positions, step.counts, out, rows, partial, **shape, BATCH=batch,
        COUNT=joined_heads, TOTAL=total, **window, num_warps=JOIN_WARPS, **how,
    )  # fmt: skip
    return out


def _by_rows(table: Sequence[tuple[int, int]], rows: int) -> int:
    return next(value for least, value in table if rows >= least)


def powers_of_two(attention: Attention, head_dim: int) -> tuple[float, float]:
    """Return the factor of scores, and their bound or 0, as the kernels take them: for powers of 2."""
    scale = math.log2(math.e) * attention.scale if attention.scale else math.log2(math.e) / math.sqrt(head_dim)
    if attention.softcap is None:
        return scale, 0.0
    # tanh(x) = 1 - 2 / (e^2x + 1)
    return 2 * scale / attention.softcap, attention.softcap * math.log2(math.e)


def block_positions(head_dim: int, element: int) -> int:
    """Return how many shared positions a block has; `element`: bytes of a number."""
    return WIDE_BLOCK if element > 2 else LARGE_BLOCK if head_dim >= LARGE_HEAD else SHARED_BLOCK


def chunk_tile_rows(share: int, head_dim: int = 0) -> int:
    """Return how many rows of a prompt are a tile; `share`: query heads that share a key head."""
    queries = LARGE_QUERIES if head_dim >= LARGE_HEAD else CHUNK_QUERIES
    return max(min(queries // power_of_two(share), CHUNK_ROWS), LEAST_TILE_ROWS)


def splits_chunks(tiles: int, kv_heads: int) -> bool:
    """True if programs share the blocks of a tile of a prompt, as the `tiles` of a lone prompt leave most idle."""
    return 2 * tiles * kv_heads <= CHUNK_PROGRAMS


def partial_slots(rows: int, heads: int, head_dim: int, element: int, most_pages: int, block: int) -> int:
    """Return how many results of blocks a step of `rows` rows stores at most; see `most_partial_rows`."""
    each, row = head_dim * element + 8, heads * (1 + most_pages * PAGE // block)
    return max(min(rows * row, PARTIAL_BYTES // each), min(rows, GROUP_ROWS) * row)


def most_partial_rows(shared: int, heads: int, head_dim: int, element: int) -> int:
    """Return how many rows a step takes, if the longest has so many shared positions: each has a result per block.

    It is a power of two, as steps are padded.
    """
    block = block_positions(head_dim, element)
    most = PARTIAL_BYTES // ((head_dim * element + 8) * heads * (1 + -(-shared // block)))
    return max(power_of_two(most + 1) // 2, GROUP_ROWS)


@cache
def begins_early(device: torch.device) -> bool:
    """True if a kernel may start before the one before it has ended (programmatic dependent launch)."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] >= 9
        and os.environ.get(EARLY_VARIABLE) != "0"
    )


def launch(early: bool) -> dict[str, bool]:
    """Return the launch options of a kernel; `early`: it may start early."""
    return {"launch_pdl": True} if early else {}


def triton_works(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    attention: Attention = PLAIN_ATTENTION,
) -> bool:
    """True if the kernels agree with plain torch, tested once for each shape; warns if a GPU cannot use them."""
    known = attention == computed_by_kernels(attention)
    return known and _works(device, dtype, heads, kv_heads, head_dim, replace(attention, table=0))


def computed_by_kernels(attention: Attention) -> Attention:
    """Return what the kernels compute of an attention: another one if it has further fields."""
    own = (attention.window, attention.table, attention.scale, attention.softcap, attention.sinks)
    return Attention(*own, first=attention.first)


@cache
def _works(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, attention: Attention
) -> bool:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    try:
        error = _largest_error(device, dtype, heads, kv_heads, head_dim, attention)
    except Exception as reason:  # compilers raise errors of all kinds
        log.warning(
            "Attention runs in plain operations, which is slow: Triton does not work here (%s: %s).",
            type(reason).__name__,
            reason,
        )
        return False
    if error < (1e-4 if dtype is torch.float32 else 2e-2):
        return True
    log.warning("Attention runs in plain operations, which is slow: Triton's results are off by %.2g.", error)
    return False


@torch.inference_mode()
def _largest_error(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, attention: Attention
) -> float:
    """Compare both implementations on a chain of some rows over two pages."""
    pool = Pool(2)
    rows = Rows(Table(pool, pool.take(2)), [0] * 3, 300, 300, [0b1, 0b11, 0b111])
    packed, bucket = pack([rows], 2 * PAGE)
    step = views(torch.from_numpy(packed).to(device), bucket)
    random = torch.Generator().manual_seed(0)
    q = torch.randn(bucket.rows, heads, head_dim, generator=random).to(device, dtype)
    k, v = torch.randn(2, 3, kv_heads, PAGE, head_dim, generator=random).to(device, dtype)
    sinks = torch.randn(heads, generator=random).to(device, dtype) if attention.sinks else None
    found, expected = (
        attend(q, k, v, step, None, False, attention, sinks)[:3].float()
        for attend in (attend_by_kernels, attend_plainly)
    )
    return float((found - expected).abs().max())


def _seen_slots(step: Views) -> tuple[Tensor, Tensor, Tensor]:
    """Return the KV slots of the pool that each row may see, own path first, their positions, and the mask.

    All are [rows, KV slots].

    A row of a prompt has no own path: it sees all its positions through the page table.
    """
    device, rows, total = step.tables.device, len(step.shared), len(step.slots)
    row = torch.arange(total, device=device)
    spans = [step.groups] if step.tiles is None else [step.groups, step.tiles[:, :3]]
    first, count, begin = torch.cat(spans).unbind(1)
    span = ((row >= first[:, None]) & (row < (first + count)[:, None])).int().argmax(0)  # 0 if in none
    in_chunk = row >= rows
    shared = torch.where(in_chunk, step.positions + 1, F.pad(step.shared, (0, total - rows)))
    own_count = F.pad(step.own_count, (0, total - rows))
    own = F.pad(step.own, (0, 0, 0, total - rows))
    # To read how much is shared would make a GPU wait; on a CPU it saves time.
    longest = int(shared.max()) if device.type == "cpu" else step.most_pages * PAGE
    position = torch.arange(longest, device=device)
    at = (begin[span][:, None] + position // PAGE).clamp(max=len(step.tables) - 1)
    through_table = step.tables[at] * PAGE + position % PAGE
    seen = torch.cat((torch.arange(own.shape[1], device=device) < own_count[:, None], position < shared[:, None]), 1)
    # Masked slots may never have been written, or not exist: they are replaced by the row's own slot.
    places = torch.cat((shared[:, None] + torch.arange(own.shape[1], device=device), position.expand(total, -1)), 1)
    return torch.where(seen, torch.cat((own, through_table), 1), step.slots[:, None]), places, seen
