"""The size of a model's KV cache: how many pages fit the device beside its weights.

Owns the memory estimate before loading, not the memory itself (`kv_memory.py`). Invariant: the error for a model that
does not fit says how many bytes are missing, and which setting would fit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specbranch.config import WeightsName
from specbranch.core.pages import PAGE
from specbranch.errors import ModelError
from specbranch.models.cache.kv_memory import page_bytes
from specbranch.models.cpu.kernels import WEIGHT_BYTES, whole_numbers
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import INT4_KINDS, SCALE_BYTES, block_group, fitting

# A pool has room for at most this many sequences of full context length, unless the user asks for more.
MOST_SEQUENCES = {"cpu": 64, "cuda": 8}
POOL_SHARE = 0.25  # share of the memory beside the weights that a pool may take; room for one sequence it always gets
GIGABYTE = 1e9


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _available() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available() -> int | None:
    """Return the bytes that Linux can give without swapping; None on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def weight_bytes(
    arch: Architecture, dtype: torch.dtype, stored: WeightsName | None = None, device: torch.device | None = None
) -> int:
    """Return the bytes of a model's embedding and matrices.

    `stored`: how the matrices are stored; None: in `dtype`.
    """
    wide, embedding = arch.heads * arch.head_dim, arch.vocabulary * arch.hidden * dtype.itemsize
    attention = [(wide + 2 * arch.kv_heads * arch.head_dim, arch.hidden), (arch.hidden, wide)]
    mixtures = len(arch.expert_layers) if arch.experts else 0
    matrices = [(arch.layers, *matrix) for matrix in attention]
    matrices += [(arch.layers - mixtures, *matrix) for matrix in _mlp(arch.hidden, arch.intermediate)]
    if arch.experts:
        each = _mlp(arch.hidden, arch.experts.intermediate)
        matrices += [(mixtures * arch.experts.count, *matrix) for matrix in each]
    kind: WeightsName | torch.dtype = stored or dtype
    on_cpu = device is not None and device.type == "cpu"
    head = 0 if arch.tied and stored is None else _matrix_bytes(arch.head_rows, arch.hidden, kind, on_cpu)
    return embedding + head + sum(count * _matrix_bytes(outs, ins, kind, on_cpu) for count, outs, ins in matrices)


def _mlp(hidden: int, intermediate: int) -> list[tuple[int, int]]:
    """Return the outputs and inputs of the matrices of a gated MLP."""
    return [(2 * intermediate, hidden), (hidden, intermediate)]


def _matrix_bytes(outs: int, ins: int, kind: WeightsName | torch.dtype, on_cpu: bool) -> int:
    if isinstance(kind, torch.dtype):
        return outs * ins * kind.itemsize
    kind = fitting(kind, ins)
    if kind in INT4_KINDS:
        return outs * ins // 2 + outs * (ins // INT4_KINDS[kind]) * SCALE_BYTES
    if kind == "fp8-block":
        return outs * ins + outs * (ins // block_group(ins)) * SCALE_BYTES
    layout = kind if kind in ("float32", "bfloat16") else whole_numbers() if on_cpu and kind == "int8" else "int8"
    return outs * (ins * WEIGHT_BYTES[layout] + SCALE_BYTES)


def pool_pages(
    arch: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    tail: int,
    cache_tokens: int | None = None,
    weights: int | None = None,
    stored: WeightsName | None = None,
    cache_dtype: torch.dtype | None = None,
) -> int:
    """Return the number of pages of a model's pool, or raise a ModelError if the model does not fit.

    `cache_tokens`: KV slots that the user asked for; None: as many as fit. `weights`: bytes still to be loaded; None:
    the whole model's, with its matrices stored as `stored`. `cache_dtype`: type of keys and values; None: `dtype`. On a
    CPU the pool is not counted, as pages that were never written take no memory.
    """
    weights = weight_bytes(arch, dtype, stored, device) if weights is None else weights
    free, page = free_bytes(device), page_bytes(arch, cache_dtype or dtype)
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
    most = min(one * MOST_SEQUENCES[device.type], int((free - weights) * POOL_SHARE) // page)
    return least if cache_tokens is not None else max(one, most)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model that does not fit, and the settings it was asked for with."""

    arch: Architecture
    dtype: torch.dtype
    stored: WeightsName | None
    device: torch.device
    sizes: tuple[int, int, int]  # bytes: weights, KV cache, free on the device

    def refused(self, option: str, most: int) -> str:
        """Return the error sentence: how much is missing, and which setting would fit."""
        weights, cache, free = (size / GIGABYTE for size in self.sizes)
        named = self.stored or str(self.dtype).removeprefix("torch.")
        asked = f"its weights take {weights:.1f} GB in {named}" + (f", its cache {cache:.1f} GB" if cache else "")
        reason = (
            f"{self.arch.name} does not fit on {self.device}: {asked}; {free:.1f} GB are free, "
            f"{weights + cache - free:.1f} GB too few."
        )
        ways = [f"set {option} to at most {most}"] if most >= 2 else []
        ways += [f"load it with {smaller}"] if (smaller := self._smaller()) else []
        advice = ", or ".join(ways or ["free memory there", "choose a smaller model or another device"])
        return f"{reason} {advice[0].upper()}{advice[1:]}."

    def _smaller(self) -> str | None:
        """Return the setting that fits and changes the model least; None: no setting fits."""
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
