"""Paged attention of decode steps: a row reads shared positions through its group's page table, then its own path.

Owns two implementations: Triton kernels, and plain torch on any device, which the kernels are compared with. Invariant:
with the kernels, a row's bits depend only on its queries and on the keys it sees, in the order of positions.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from specbranch.core.pages import PAGE, Pool
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.layout import GROUP_ROWS, LONGEST_OWN, Views, pack, power_of_two, views

log = logging.getLogger("specbranch")

Attend = Callable[[Tensor, Tensor, Tensor, Views], Tensor]

SHARED_BLOCK, QUERY_TILE = 128, 64  # shared positions of a program, and its queries (rows times heads)
# behind this many positions blocks are several times as long if a program has few queries, as results are read again
NEAR_POSITIONS = 2048
WIDE_BLOCK, WIDE_TILE = 32, 16  # the same in float32, which has no fast products and twice the size
PATH_BLOCK = 32  # KV slots of an own path that are read at a time
JOINED_BLOCKS = 16  # blocks that are joined at a time; twice as many if there are more
WARPS, JOIN_WARPS = 4, 2
STAGES = 2
EARLY_VARIABLE = "SPECBRANCH_EARLY"  # 0: a kernel starts only when the one before it has ended


def choose_attend(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Attend:
    """Return the kernels if they work for this shape, else plain torch."""
    return attend_by_kernels if triton_works(device, dtype, heads, kv_heads, head_dim) else attend_plainly


def attend_plainly(queries: Tensor, keys: Tensor, values: Tensor, step: Views) -> Tensor:
    """Attend in plain torch, from queries [rows, heads, head_dim] to pages [pages, kv_heads, PAGE, head_dim].

    Returns [rows, heads·head_dim]. It copies all keys and values that each row sees.
    """
    rows, heads, head_dim = queries.shape
    kv_slots, seen = _seen_slots(step)
    # [rows, kv_heads, KV slots, head_dim]
    k, v = (side[kv_slots // PAGE, :, kv_slots % PAGE].transpose(1, 2) for side in (keys, values))
    exact = torch.promote_types(queries.dtype, torch.float32)
    q = queries.view(rows, keys.shape[1], -1, head_dim).to(exact) / math.sqrt(head_dim)
    scores = torch.matmul(q, k.to(exact).transpose(-1, -2)).masked_fill(~seen[:, None, None], -torch.inf)
    out = torch.matmul(scores.softmax(-1), v.to(exact))
    return out.to(queries.dtype).reshape(rows, heads * head_dim)


def attend_by_kernels(queries: Tensor, keys: Tensor, values: Tensor, step: Views) -> Tensor:
    """Attend with Triton: one launch for partial results of own paths and shared blocks, one to join them."""
    from specbranch.models.gpu import attention_kernels as kernels

    rows, heads, head_dim = queries.shape
    kv_heads, share = keys.shape[1], heads // keys.shape[1]
    padded = power_of_two(share)
    block, tile = (WIDE_BLOCK, WIDE_TILE) if keys.element_size() > 2 else (SHARED_BLOCK, QUERY_TILE)
    tile_rows = min(GROUP_ROWS, max(tile // padded, 1))
    groups, pages = step.tables.shape
    long = 2 if tile_rows * padded <= GROUP_ROWS else 1
    slots = 1 + blocks_of(pages, block, long)
    shape = {
        "HEADS": heads,
        "DIM": head_dim,
        "WIDTH": max(power_of_two(head_dim), 16),
        "BLOCK": block,
        "LONG": long,
        "NEAR": NEAR_POSITIONS,
    }
    tiling = {"SHARE": share, "PADDED": padded, "PAGE": PAGE, "PATH_BLOCK": PATH_BLOCK, "OWN": LONGEST_OWN}
    tiling |= {"TILE_ROWS": tile_rows, "TILES": GROUP_ROWS // tile_rows, "OWN_TILE": max(padded, 16)}
    # Within a capture this is memory of the graphs' pool, which all layers and graphs use in turn.
    sums = queries.new_empty(rows, heads, slots, head_dim)
    tops, totals = queries.new_empty(2, rows, heads, slots, dtype=torch.float32)
    # products read whole tiles of rows
    out = queries.new_empty(-(-rows // GROUP_ROWS) * GROUP_ROWS, heads * head_dim)[:rows]
    scale = math.log2(math.e) / math.sqrt(head_dim)  # the kernels take powers of 2
    early = begins_early(queries.device)
    programs = rows + groups * tiling["TILES"] * (slots - 1)
    sections = (step.shared, step.own_count, step.groups, step.tables, step.own)
    kernels.partial_results[(programs, kv_heads)](
        queries, keys, values, sums, tops, totals, *sections, scale, keys.stride(0), rows, pages, slots, **shape,
        **tiling, EARLY=early, num_warps=WARPS, num_stages=STAGES, **launch(early),
    )  # fmt: skip
    kernels.join[(rows, heads)](
        sums,
        tops,
        totals,
        step.shared,
        out,
        slots,
        **shape,
        CHUNK=JOINED_BLOCKS,
        EARLY=early,
        num_warps=JOIN_WARPS,
        **launch(early),
    )
    return out


def blocks_of(pages: int, block: int = SHARED_BLOCK, long: int = 1) -> int:
    """Return the number of blocks of this many pages; blocks far back are `long` times as long."""
    near = min(pages * PAGE, NEAR_POSITIONS)
    return near // block + (pages * PAGE - near) // (long * block)


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


@cache
def triton_works(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """True if the kernels agree with plain torch, tested once for each shape; warns if a GPU cannot use them."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    try:
        error = _largest_error(device, dtype, heads, kv_heads, head_dim)
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
def _largest_error(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> float:
    """Compare both implementations on a chain of some rows over two pages."""
    pool = Pool(2)
    rows = Rows(Table(pool, pool.take(2)), [0] * 3, 300, 300, [0b1, 0b11, 0b111])
    packed, bucket = pack([rows], 2 * PAGE)
    step = views(torch.from_numpy(packed).to(device), bucket)
    random = torch.Generator().manual_seed(0)
    q = torch.randn(bucket.rows, heads, head_dim, generator=random).to(device, dtype)
    k, v = torch.randn(2, 3, kv_heads, PAGE, head_dim, generator=random).to(device, dtype)
    return float((attend_by_kernels(q, k, v, step).float() - attend_plainly(q, k, v, step).float()).abs().max())


def _seen_slots(step: Views) -> tuple[Tensor, Tensor]:
    """Return the KV slots of the pool that each row may see, own path first, and the mask [rows, KV slots]."""
    device = step.tables.device
    first, count = step.groups.unbind(1)
    row = torch.arange(len(step.slots), device=device)
    group = ((row >= first[:, None]) & (row < (first + count)[:, None])).int().argmax(0)  # 0 if in none
    # To read how much is shared would make a GPU wait; on a CPU it saves time.
    longest = int(step.shared.max()) if device.type == "cpu" else step.tables.shape[1] * PAGE
    position = torch.arange(longest, device=device)
    through_table = step.tables[group][:, position // PAGE] * PAGE + position % PAGE
    seen = torch.cat(
        (torch.arange(step.own.shape[1], device=device) < step.own_count[:, None], position < step.shared[:, None]), 1
    )
    # Masked slots may never have been written, or not exist: they are replaced by the row's own slot.
    return torch.where(seen, torch.cat((step.own, through_table), 1), step.slots[:, None]), seen
