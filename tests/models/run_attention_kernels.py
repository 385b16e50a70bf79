"""A program of its own for test_attention_kernels: attention in Triton's interpreter, or compiled.

It needs Triton, but no GPU. The interpreter replaces Triton's functions for the whole process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

if __name__ == "__main__" and sys.argv[1] != "compile":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import torch
from torch import Tensor

from packed_steps import some_work
from specbranch.core.pages import PAGE, Pool
from specbranch.models.cache.kv_memory import Table
from specbranch.models.families.operations import Attention
from specbranch.models.forward.step_rows import ChunkRows, Rows
from specbranch.models.gpu import attention
from specbranch.models.gpu.attention import attend_by_kernels, attend_plainly, powers_of_two
from specbranch.models.gpu.layout import Views, pack, views

FORMS = {
    "plain": Attention(),
    "window": Attention(window=40),
    "wide-window": Attention(window=300),
    "bounded": Attention(softcap=5.0, scale=0.2),
    "sinks": Attention(sinks=True),
    "all": Attention(window=150, softcap=20.0, scale=0.11, sinks=True),
    "draft-window": Attention(window=40, first=4),
    "wide-draft-window": Attention(window=300, first=4),
    "many-first": Attention(window=70, first=200, softcap=20.0, scale=0.11, sinks=True),
    "itself-alone": Attention(window=1, first=4),  # windows that begin behind all blocks, which are smaller in float32
}
HEADS, KV_HEADS, DIM, PAGES = 3, 1, 16, 64
TOLERATED = 4e-3


def interpret(name: str, seed: int) -> None:
    """Compare the kernels with plain torch, a row's bits alone and among others, and rows of prompts.

    In float16: the interpreter multiplies bfloat16 wrongly.
    """
    import triton.language as tl

    tl.core.tensor.__index__ = lambda self: self.handle.data.item()  # the interpreter's ranges need it
    torch.manual_seed(seed)
    form, dtype = FORMS[name], torch.float32 if name == "itself-alone" else torch.float16
    sinks = torch.randn(HEADS).to(dtype) * 2 if form.sinks else None
    check_rows(form, sinks, seed, dtype)
    for start in (500, 38):  # of the second, own paths begin with the first position
        check_prompt(form, sinks, start, dtype)
    check_prompts(form, sinks, dtype)
    if name in ("plain", "draft-window"):
        check_long_context(form, dtype)
    if form.window is not None:
        check_nothing_before_the_window_is_read(form, sinks, dtype)
    print(name, "right")


def check_rows(form: Attention, sinks: Tensor | None, seed: int, dtype: torch.dtype) -> None:
    _, work = some_work(seed)
    rows = [part for _, part in work]
    step, bucket = packed_views(rows)
    q = torch.randn(bucket.total, HEADS, DIM).to(dtype)
    keys, values = torch.randn(2, PAGES + 1, KV_HEADS, PAGE, DIM).to(dtype)
    found, expected = (
        attend(q, keys, values, step, None, False, form, sinks) for attend in (attend_by_kernels, attend_plainly)
    )
    count = sum(len(part.tokens) for part in rows)
    assert (found[:count].float() - expected[:count].float()).abs().max() < TOLERATED
    first = 0
    for part in rows:
        end = first + len(part.tokens)
        alone, padded = packed_views([part])
        own = torch.zeros(padded.total, HEADS, DIM, dtype=dtype)
        own[: end - first] = q[first:end]
        bits = attend_by_kernels(own, keys, values, alone, None, False, form, sinks)[: end - first]
        assert torch.equal(bits, found[first:end]), "a sequence has other bits alone than among others"
        first = end


def check_prompt(form: Attention, sinks: Tensor | None, start: int, dtype: torch.dtype) -> None:
    """Rows of a prompt, by one program or several a tile, against plain torch and against single rows."""
    table = Table(Pool(8), [5, 3, 1, 0, 2])
    keys, values = torch.randn(2, 9, KV_HEADS, PAGE, DIM).to(dtype)
    count, tile_rows = 20, attention.chunk_tile_rows(HEADS // KV_HEADS, DIM)
    queries, found = torch.randn(count, HEADS, DIM).to(dtype), []
    for programs in (1, 4, 9):
        attention.splits_chunks = lambda *_, programs=programs: programs > 1
        attention.CHUNK_PROGRAMS = programs * KV_HEADS
        packed, bucket = pack([], 8 * PAGE, chunks=[ChunkRows(table, [0] * count, start)], tile_rows=tile_rows)
        step = views(torch.from_numpy(packed), bucket, 8)
        q = torch.zeros(bucket.total, HEADS, DIM, dtype=dtype)
        q[bucket.rows : bucket.rows + count] = queries
        found.append(attend_by_kernels(q, keys, values, step, None, False, form, sinks)[bucket.rows :][:count])
    assert all(torch.equal(one, found[0]) for one in found), "bits depend on the number of programs"
    expected = attend_plainly(q, keys, values, step, None, False, form, sinks)[bucket.rows :][:count]
    assert (found[0].float() - expected.float()).abs().max() < TOLERATED
    for at in (0, count - 1):
        packed, bucket = pack([Rows(table, [0], start + at, start + at, [1])], 8 * PAGE)
        one = views(torch.from_numpy(packed), bucket, 8)
        alone = attend_by_kernels(queries[at : at + 1], keys, values, one, None, False, form, sinks)
        assert torch.equal(alone[0], found[0][at]), "a row has other bits in a prompt than alone"


def check_prompts(form: Attention, sinks: Tensor | None, dtype: torch.dtype) -> None:
    """Rows of several prompts, which have more tiles than a lone prompt has programs for, against each alone."""
    tile_rows = attention.chunk_tile_rows(HEADS // KV_HEADS, DIM)
    keys, values = torch.randn(2, 13, KV_HEADS, PAGE, DIM).to(dtype)
    tables = [Table(Pool(12), pages) for pages in ([5, 3, 1], [0, 2], [4], [6, 7, 8])]
    spans = ((20, 500), (3, 38), (7, 0), (1, 600))
    chunks = [ChunkRows(table, [0] * count, at) for table, (count, at) in zip(tables, spans, strict=True)]
    attention.splits_chunks, attention.CHUNK_PROGRAMS = lambda *_: True, 4 * KV_HEADS

    def attended(some: list[ChunkRows], queries: Tensor) -> Tensor:
        packed, bucket = pack([], 12 * PAGE, chunks=some, tile_rows=tile_rows)
        step = views(torch.from_numpy(packed), bucket, 12)
        q = torch.zeros(bucket.total, HEADS, DIM, dtype=dtype)
        q[bucket.rows : bucket.rows + len(queries)] = queries
        return attend_by_kernels(q, keys, values, step, None, False, form, sinks)[bucket.rows :][: len(queries)]

    queries = [torch.randn(len(chunk.tokens), HEADS, DIM).to(dtype) for chunk in chunks]
    together = attended(chunks, torch.cat(queries))
    alone = torch.cat([attended([chunk], own) for chunk, own in zip(chunks, queries, strict=True)])
    assert torch.equal(together, alone), "a prompt has other bits alone than among others"


def check_long_context(form: Attention, dtype: torch.dtype) -> None:
    """A row behind so many blocks that `join` weighs and loads them in several groups, against plain torch."""
    from triton.language import constexpr

    from specbranch.models.gpu import attention_kernels as kernels

    kernels.WEIGHED, kernels.UNROLLED = constexpr(16), constexpr(8)  # of 128 and 32, for the interpreter's sake
    blocks = 2 * 16 + 8 + 3
    length = blocks * attention.block_positions(DIM, dtype.itemsize)
    pages = -(-length // PAGE) + 1
    table = Table(Pool(pages), list(range(pages)))
    keys, values = torch.randn(2, pages + 1, KV_HEADS, PAGE, DIM).to(dtype)
    packed, bucket = pack([Rows(table, [0], length, length, [1])], pages * PAGE)
    step = views(torch.from_numpy(packed), bucket, pages)
    q = torch.randn(bucket.total, HEADS, DIM).to(dtype)
    found, expected = (
        attend(q, keys, values, step, None, False, form)[:1] for attend in (attend_by_kernels, attend_plainly)
    )
    assert (found.float() - expected.float()).abs().max() < TOLERATED


def check_nothing_before_the_window_is_read(form: Attention, sinks: Tensor | None, dtype: torch.dtype) -> None:
    """Pages before a window hold what is no number; of the lone sequence, and of one in a batch."""
    assert form.window is not None
    pool = Pool(10)
    tables = [Table(pool, [4, 3, 2, 1]), Table(pool, [5, 6, 7, 8])]
    position = 800
    keys, values = torch.randn(2, 11, KV_HEADS, PAGE, DIM).to(dtype)
    unread = range(-(-form.first // PAGE), (position + 1 - form.window) // PAGE)
    for page in [table.pages[at] for table in tables for at in unread]:
        keys[page], values[page] = torch.nan, torch.nan
    for some in (tables[:1], tables):
        packed, bucket = pack([Rows(table, [0], position, position, [1]) for table in some], 10 * PAGE)
        step = views(torch.from_numpy(packed), bucket, 8)
        q = torch.randn(bucket.total, HEADS, DIM).to(dtype)
        assert attend_by_kernels(q, keys, values, step, None, False, form, sinks)[: len(some)].isfinite().all()


def packed_views(rows: list[Rows]) -> tuple[Views, Any]:
    packed, bucket = pack(rows, PAGES * PAGE)
    return views(torch.from_numpy(packed), bucket), bucket


def compile_all() -> None:
    """Compile the kernels of windows, bounded scores and sinks for an H100 or H200, heads of 256 included."""
    from specbranch.models.gpu import attention_kernels as kernels

    for head_dim, form in ((64, FORMS["all"]), (256, FORMS["window"]), (128, FORMS["draft-window"])):
        block, (_, softcap) = attention.block_positions(head_dim, 2), powers_of_two(form, head_dim)
        shape = {"HEADS": 16, "SHARE": 2, "PADDED": 2, "DIM": head_dim, "WIDTH": head_dim, "PAGE": PAGE}
        shape |= {"PATH_BLOCK": attention.PATH_BLOCK, "BLOCK": block, "EARLY": True}
        shape |= {"WINDOW": form.window or 0, "FIRST": form.first, "SOFTCAP": softcap, "OWN": 192, "TOTAL": 512}
        tile_rows = attention.chunk_tile_rows(2, head_dim)
        for kernel, sizes, warps, stages in (
            (kernels.partial_results, {"TILE_ROWS": 8, "TILES": 2, "OWN_TILE": 16, "SPLITS": 16}, 4, 2),
            (kernels.attend_batch, {"TILE": 16, "WHOLE": 4, "SPLITS": 4, "BESIDE": True}, 4, 3),
            (kernels.attend_chunks, {"TILE_ROWS": tile_rows, "WHOLE": 4, "SPLIT": True}, 8, 3),
            (kernels.join, {"BATCH": True, "COUNT": 1}, 1, 2),
        ):
            compile_one(kernel, {**shape, **sizes}, form.sinks, {"num_warps": warps, "num_stages": stages})


def compile_one(kernel: Any, sizes: dict[str, Any], sinks: bool, options: dict[str, Any]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    whole = dict.fromkeys(("page_stride", "rows", "room"), "i32") | {
        "scale": "fp32",
        "tops": "*fp32",
        "totals": "*fp32",
    }
    tables = ("shared", "own_count", "groups", "tables", "own", "counts", "tiles", "positions")
    whole |= dict.fromkeys(tables, "*i32")
    sizes = sizes if sinks else {**sizes, "sinks": None}
    kinds = {name: "constexpr" if name in sizes else whole.get(name, "*bf16") for name in names}
    known = {(names.index(name),): size for name, size in sizes.items() if name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if kinds[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=known, attrs=aligned)
    done = compile(source, target=GPUTarget("cuda", 90, 32), options={**options, "enable_fp_fusion": False})
    assert done.metadata.shared <= 227 << 10, f"{kernel.__name__} takes {done.metadata.shared} bytes of shared memory"
    print(kernel.__name__, done.metadata.shared)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        interpret(sys.argv[1], int(sys.argv[2]))
