"""Whether a model fits where it is to run, and how many pages its pool gets.

Owns the counting of memory before anything is loaded. Invariant: what is refused here is told how much is missing, and which setting fits.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from specbranch.errors import ModelError
from specbranch.models.files.architecture import Architecture
from specbranch.models.kv import PAGE, page_bytes

MOST_SEQUENCES = {"cpu": 64, "cuda": 8}  # at their longest: no pool is larger unless that is asked for
SHARE = 0.25  # of the memory that weights leave, for a pool that is larger than one sequence needs
GIGABYTE = 1e9


def free_bytes(device: torch.device) -> int:
    """How much memory can still be had on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _available() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available() -> int | None:
    """What Linux says could be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def weight_bytes(arch: Architecture, dtype: torch.dtype) -> int:
    """How much memory the matrices of a model take."""
    heads = (2 * arch.heads + 2 * arch.kv_heads) * arch.head_dim * arch.hidden
    layers = arch.layers * (heads + 3 * arch.hidden * arch.intermediate)
    return (layers + arch.vocabulary * arch.hidden * (1 if arch.tied else 2)) * dtype.itemsize


def pool_pages(
    arch: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    tail: int,
    cache_tokens: int | None = None,
    weights: int | None = None,
) -> int:
    """Return how many pages the pool of a model gets, or say why it does not fit.

    `weights`: bytes that are still to be loaded; nothing: all of the model's. On a CPU pages that were never written take no memory.
    """
    weights, free, page = weight_bytes(arch, dtype) if weights is None else weights, free_bytes(device), page_bytes(arch, dtype)
    one = -(-(context + tail) // PAGE)
    least = one if cache_tokens is None else max(-(-cache_tokens // PAGE), 1)
    cache = 0 if device.type == "cpu" else least * page
    if weights + cache > free:
        places = (free - weights) // page * PAGE
        fits = ("--context-length", places - tail) if cache_tokens is None else ("--cache-tokens", places)
        raise ModelError(_too_large(arch, dtype, device, (weights, cache, free), *fits))
    most = min(one * MOST_SEQUENCES[device.type], int((free - weights) * SHARE) // page)
    return least if cache_tokens is not None else max(one, most)


def _too_large(arch: Architecture, dtype: torch.dtype, device: torch.device, sizes: tuple[int, int, int], option: str, most: int) -> str:
    weights, cache, free = (size / GIGABYTE for size in sizes)
    named = str(dtype).removeprefix("torch.")
    asked = f"its weights take {weights:.1f} GB in {named}" + (f", its cache {cache:.1f} GB" if cache else "")
    told = f"{arch.name} does not fit on {device}: {asked}; {free:.1f} GB are free, {weights + cache - free:.1f} GB too few."
    if most >= 2:
        return f"{told} Set {option} to at most {most}."
    if dtype.itemsize > 2 and weights * 2 / dtype.itemsize < free:
        return f"{told} Load it with --dtype bfloat16."
    return f"{told} Free memory there, or choose a smaller model or another device."
