"""From a model's files to a runner: what the model is, how its weights are stored, how large its KV cache is.

Owns the order in which a model is opened and read, not the formats. Invariant: `open_model` reads no weights, so that a
model which does not fit is refused before anything is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from specbranch.config import WeightsName
from specbranch.core.slots import TAIL
from specbranch.file_values import FileValues, read_object
from specbranch.models.decoder import Decoder
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.block_reader import stored_kinds
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.identity import checked_base
from specbranch.models.files.locate import Located, locate
from specbranch.models.files.sources import made_alone
from specbranch.models.files.tensor_file import TensorSource, open_folder
from specbranch.models.files.weights import read_weights
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.native import NativeRunner
from specbranch.models.room import pool_pages
from specbranch.models.storage import agreed, kept_in, refuse_floats, tell, usual_storage


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
) -> NativeRunner:
    """Load a model folder, a GGUF file, a folder with a recipe or a Hub id.

    No device: the CPU; no dtype: float32 on a CPU, bfloat16 elsewhere. `weights`: how matrices are stored; nothing: in
    `dtype`. `cache_tokens`: KV slots for all sequences together; nothing: what there is room for. `cache_dtype`: what
    keys and values are stored in; nothing: in `dtype`.
    """
    located = model if isinstance(model, Located) else locate(str(model))
    where = torch.device(device or "cpu")
    arch, source = open_model(located)
    weights = usual_storage(source, where) if weights is None and dtype is None else weights
    precision, stored = agreed(dtype, weights, where)
    context = arch.choose_context(context_length, shorten=shorten)
    if stored == "stored":
        refuse_floats(source)
    size = sum(stored_kinds(source).values()) if isinstance(source, GgufFile) and stored == "stored" else None
    kept = kept_in(cache_dtype, precision, where)
    pages = pool_pages(arch, precision, where, context, tail, cache_tokens, size, stored, kept)
    held = read_weights(arch, source, where, precision, stored)
    tell(held, stored, where)
    return native_runner(Decoder(arch, held, context + tail), context, tail, pages, kept)


def native_runner(
    decoder: Decoder,
    context_length: int,
    tail: int,
    pages: int | None = None,
    cache_dtype: torch.dtype | None = None,
) -> NativeRunner:
    """Make the runner that suits the decoder's device."""
    if decoder.norm.device.type == "cpu":
        return NativeRunner(decoder, context_length, tail, pages, cache_dtype)
    return GpuRunner(decoder, context_length, tail, pages)


def open_model(located: Located) -> tuple[Architecture, TensorSource]:
    """Read what a model is, and open its weights without reading them."""
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
    return arch, open_folder(located.path)
