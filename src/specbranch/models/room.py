"""Whether a model fits where it is to run, and how many pages its pool gets.

Owns the counting of memory before anything is loaded. Invariant: what is refused here is told how much is missing, and
which setting fits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specbranch.config import WeightsName
from specbranch.core.pages import PAGE
from specbranch.errors import ModelError
from specbranch.models.cpu.kernels import BYTES, whole_numbers
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import GROUP, fits_int4
from specbranch.models.kv import page_bytes

MOST_SEQUENCES = {"cpu": 64, "cuda": 8}  # at their longest: no pool is larger unless that is asked for
SHARE = 0.25  # of the memory that weights leave, for a pool that is larger than one sequence needs
GIGABYTE = 1e9
SCALE = 4  # bytes


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


def weight_bytes(
    arch: Architecture, dtype: torch.dtype, stored: WeightsName | None = None, device: torch.device | None = None
) -> int:
    """How much memory the embedding and the matrices of a model take; `stored`: how the matrices are kept, nothing:
    in `dtype`."""
    wide, embedding = arch.heads * arch.head_dim, arch.vocabulary * arch.hidden * dtype.itemsize
    layer = [(wide + 2 * arch.kv_heads * arch.head_dim, arch.hidden), (arch.hidden, wide)]
    layer += [(2 * arch.intermediate, arch.hidden), (arch.hidden, arch.intermediate)]
    kind: WeightsName | torch.dtype = stored or dtype
    on_cpu = device is not None and device.type == "cpu"
    head = 0 if arch.tied and stored is None else _matrix_bytes(arch.head_rows, arch.hidden, kind, on_cpu)
    return embedding + head + arch.layers * sum(_matrix_bytes(outs, ins, kind, on_cpu) for outs, ins in layer)


def _matrix_bytes(outs: int, ins: int, kind: WeightsName | torch.dtype, on_cpu: bool) -> int:
    if isinstance(kind, torch.dtype):
        return outs * ins * kind.itemsize
    if kind == "int4" and fits_int4(ins):
        return outs * ins // 2 + outs * (ins // GROUP) * SCALE
    held = kind if kind in ("float32", "bfloat16") else whole_numbers() if on_cpu and kind == "int8" else "int8"
    return outs * (ins * BYTES[held] + SCALE)


def pool_pages(
    arch: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    tail: int,
    cache_tokens: int | None = None,
    weights: int | None = None,
    stored: WeightsName | None = None,
    kept: torch.dtype | None = None,
) -> int:
    """Return how many pages the pool of a model gets, or say why it does not fit.

    `weights`: bytes that are still to be loaded; nothing: all of the model's, its matrices `stored` so. `kept`: what
    keys and values are stored in; nothing: in `dtype`. On a CPU pages that were never written take no memory.
    """
    weights = weight_bytes(arch, dtype, stored, device) if weights is None else weights
    free, page = free_bytes(device), page_bytes(arch, kept or dtype)
    one = -(-(context + tail) // PAGE)
    least = one if cache_tokens is None else max(-(-cache_tokens // PAGE), 1)
    cache = 0 if device.type == "cpu" else least * page
    if weights + cache > free:
        asked = _Asked(arch, dtype, stored, device, (weights, cache, free))
        kv_slots = (free - weights) // page * PAGE
        raise ModelError(
            asked.refused(
                *(("--context-length", kv_slots - tail) if cache_tokens is None else ("--cache-tokens", kv_slots))
            )
        )
    most = min(one * MOST_SEQUENCES[device.type], int((free - weights) * SHARE) // page)
    return least if cache_tokens is not None else max(one, most)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model that does not fit."""

    arch: Architecture
    dtype: torch.dtype
    stored: WeightsName | None
    device: torch.device
    sizes: tuple[int, int, int]  # bytes of its weights and its cache, and those that are free

    def refused(self, option: str, most: int) -> str:
        """Say how much is missing, and which setting would fit."""
        weights, cache, free = (size / GIGABYTE for size in self.sizes)
        named = self.stored or str(self.dtype).removeprefix("torch.")
        asked = f"its weights take {weights:.1f} GB in {named}" + (f", its cache {cache:.1f} GB" if cache else "")
        told = (
            f"{self.arch.name} does not fit on {self.device}: {asked}; {free:.1f} GB are free, "
            f"{weights + cache - free:.1f} GB too few."
        )
        ways = [f"set {option} to at most {most}"] if most >= 2 else []
        ways += [f"load it with {smaller}"] if (smaller := self._smaller()) else []
        advice = ", or ".join(ways or ["free memory there", "choose a smaller model or another device"])
        return f"{told} {advice[0].upper()}{advice[1:]}."

    def _smaller(self) -> str | None:
        """The setting that would fit and changes the model least."""
        _, cache, free = self.sizes
        halved = cache * 2 // self.dtype.itemsize
        if self.stored is None and self.dtype.itemsize > 2 and self._takes(torch.bfloat16, None) + halved <= free:
            return "--dtype bfloat16"
        kinds: tuple[WeightsName, ...] = ("int8", "int4")
        smaller = kinds[0 if self.stored not in kinds else kinds.index(self.stored) + 1 :]
        kind = next((kind for kind in smaller if self._takes(self.dtype, kind) + cache <= free), None)
        return None if kind is None else f"--weights {kind} (of a draft: --draft-weights {kind})"

    def _takes(self, dtype: torch.dtype, stored: WeightsName | None) -> int:
        return weight_bytes(self.arch, dtype, stored, self.device)
