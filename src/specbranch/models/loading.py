"""Loading: from a model's files to a runner.

Owns the order of the steps: open, choose precision and KV cache size, read the weights. Does not own the file formats
(`files/`). Invariant: `open_model` reads no weights, so that a model that does not fit is refused before it is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from specbranch.config import WeightsName
from specbranch.core.slots import TAIL
from specbranch.file_values import FileValues, read_object
from specbranch.models.cache.pool_size import pool_pages
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.block_reader import stored_kinds
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.identity import checked_base
from specbranch.models.files.locate import Located, locate
from specbranch.models.files.quantised.checkpoint import QuantisedCheckpoint, open_checkpoint
from specbranch.models.files.sources import made_alone
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import read_weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.gpu.compiling import load_triton_early
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.precision import (
    default_weight_storage,
    require_blocks,
    resolve_cache_dtype,
    resolve_precision,
    warn_about_int4,
)


def load_native(
    model: str | Path | Located,
    *,
    context_length: int | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    weights: WeightsName | None = None,
    tail: int = TAIL,
    shorten: bool = False,
    cache_tokens: int | None = None,
    cache_dtype: str | None = None,
    draft_window: int | None = None,
) -> NativeRunner:
    """Load a model folder, a GGUF file, a folder with a recipe or a Hub id.

    `device`: None: the CPU. `dtype`: None: float32 on a CPU, bfloat16 elsewhere. `weights`: how matrices are stored;
    None: in `dtype`, or as a GGUF file has them if `dtype` is None, too. `shorten`: cut `context_length` to the model's
    own instead of refusing it. `cache_tokens`: KV slots for all sequences together; None: as many as fit.
    `cache_dtype`: type of keys and values; None: `dtype`. `draft_window`: last positions that rows attend to besides
    the first few; None: all.
    """
    located = model if isinstance(model, Located) else locate(str(model))
    where = torch.device(device or "cpu")
    if where.type == "cuda":
        load_triton_early()
    arch, source = open_model(located)
    arch = arch.with_draft_window(draft_window)
    weights = weights or default_weight_storage(source, where, dtype)
    precision, stored = resolve_precision(dtype, weights, where, source)
    context = arch.choose_context(context_length, shorten=shorten)
    weight_bytes = _block_bytes(source) if stored == "stored" else None
    kv_dtype = resolve_cache_dtype(cache_dtype, precision, where)
    pages = pool_pages(arch, precision, where, context, tail, cache_tokens, weight_bytes, stored, kv_dtype)
    tensors = read_weights(arch, source, where, precision, stored)
    warn_about_int4(tensors, stored, where)
    return native_runner(Decoder(arch, tensors, context + tail), context, tail, pages, kv_dtype)


def _block_bytes(source: TensorSource) -> int | None:
    """Return the bytes of matrices that stay in their file's blocks; raises unless the file has blocks."""
    require_blocks(source)
    if isinstance(source, QuantisedCheckpoint):
        return source.weight_bytes()
    return sum(stored_kinds(source).values()) if isinstance(source, GgufFile) else None


def native_runner(
    decoder: Decoder,
    context_length: int,
    tail: int,
    pages: int | None = None,
    cache_dtype: torch.dtype | None = None,
) -> NativeRunner:
    """Make the runner for the decoder's device.

    `cache_dtype`: only on a CPU; `resolve_cache_dtype` refuses any on other devices.
    """
    if decoder.norm.device.type == "cpu":
        return NativeRunner(decoder, context_length, tail, pages, cache_dtype)
    return GpuRunner(decoder, context_length, tail, pages)


def open_model(located: Located) -> tuple[Architecture, TensorSource]:
    """Read a model's architecture, and open its weights without reading them."""
    if located.kind == "made":
        made = made_alone(located.path)
        return made.made_from(*open_model(checked_base(made)))
    if located.kind == "gguf":
        file = GgufFile(located.path)
        return Architecture.from_gguf(file), file
    arch = Architecture.from_config(read_object(located.path / "config.json"), str(located.path))
    generation = located.path / "generation_config.json"
    if generation.is_file():  # instruct models often name a second end token here only
        ends = FileValues(read_object(generation), str(generation)).ids("eos_token_id")
        arch = replace(arch, eos_ids=tuple(dict.fromkeys((*arch.eos_ids, *ends))))
    return arch, open_checkpoint(located.path)
