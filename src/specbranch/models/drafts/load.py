"""Running a draft folder beside its target: the layers are the draft's, embedding and output head the target's.

Owns how the two are put together. Invariant: nothing of the target is stored twice in one process but the rows of a
reduced head, and those as the draft is; a draft of another target is refused. Where either is inflated, what the draft
shares is that of the target's source: a draft as it was made keeps its own size, an inflated one has an embedding and a
head of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specbranch.config import WeightsName
from specbranch.core.runner import Runner
from specbranch.core.slots import TAIL
from specbranch.errors import BadParameter, ModelError
from specbranch.lab.inflation.recipe import is_inflation, read_inflation, uninflated
from specbranch.lab.inflation.tensors import InflatedSource, inflated_architecture
from specbranch.models.columns import Columns
from specbranch.models.cpu.block_kernels import runs_blocks
from specbranch.models.cpu.linear import takes
from specbranch.models.decoder import Decoder
from specbranch.models.drafts.draft_folder import DraftFile, fingerprint_of, read_draft
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.blocks import ROWS, AnyMatrix
from specbranch.models.files.identity import checked_source
from specbranch.models.files.locate import locate
from specbranch.models.files.stored_rows import Embedding
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import (
    HUGGING_FACE,
    ReducedHead,
    Weights,
    read_layers,
    read_part,
    read_weights,
    whole_rows,
)
from specbranch.models.native import NativeRunner, native_runner, open_model
from specbranch.models.room import pool_pages
from specbranch.models.storage import agreed, kept_in, tell

SHARED = {f"{HUGGING_FACE[part]}.weight": part for part in ("embedding", "head")}


@dataclass(frozen=True, slots=True)
class Shared:
    """What a draft takes from its target."""

    embedding: Embedding
    head: AnyMatrix  # [vocabulary, hidden], as the target has it, or as the draft does where it was read for it alone

    @classmethod
    def of(cls, runner: Runner | None, device: torch.device, dtype: torch.dtype) -> Shared | None:
        """Take it from a target that runs in this process, on the same device and in the same precision."""
        if not isinstance(runner, NativeRunner) or (runner.device, runner.dtype) != (device, dtype):
            return None
        head = runner.decoder.head_matrix
        return None if head is None else cls(runner.decoder.embedding, head)


def load_draft(
    folder: str | Path,
    target: str | Path,
    *,
    target_runner: Runner | None = None,
    context_length: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    weights: WeightsName | None = None,
    tail: int = TAIL,
    cache_tokens: int | None = None,
    cache_dtype: str | None = None,
) -> NativeRunner:
    """Load a draft; what it shares is taken from the target that runs `beside` it, or read from the target's file.

    `weights`: how its matrices are stored; nothing: in int8 if its file says so, else in `dtype`, as an inflated one
    is. `cache_dtype`: what keys and values are stored in; nothing: in `dtype`.
    """
    where = torch.device(device)
    precision, stored = agreed(dtype, weights, where)
    recipe = read_inflation(folder) if is_inflation(folder) else None
    found = open_for_target(folder if recipe is None else checked_source(recipe).path, target)
    arch = (
        found.arch if recipe is None else inflated_architecture(found.arch, recipe.sizes, recipe.head_rows, recipe.name)
    )
    context, kept = arch.choose_context(context_length, shorten=True), kept_in(cache_dtype, precision, where)
    if recipe is None:
        stored = _own_storage(found.draft, where, precision, dtype) if weights is None else stored
        if stored == "stored" and found.draft.info.storage != "int8":
            raise BadParameter(
                f"weights of the draft is 'stored', but {found.name} stores floats; expected int8. Leave "
                "--draft-weights out, or use int8."
            )
        # An inflated target's embedding is padded.
        shared = None if is_inflation(target) else Shared.of(target_runner, where, precision)
        shared = shared or _read_shared(found.target, found.source, where, precision, stored)
        layers, norm = read_layers(arch, found.draft, where, precision, stored)
        reduced = _reduced(found.draft.head_ids, shared.head, where, precision, stored)
        held = Weights(shared.embedding, layers, norm, shared.head, reduced)
        pages = pool_pages(arch, precision, where, context, tail, cache_tokens, weights=0, kept=kept)
    else:
        pages = pool_pages(arch, precision, where, context, tail, cache_tokens, stored=stored, kept=kept)
        held = _inflated(found, arch, recipe.seed, where, precision, stored)
    tell(held, stored, where)
    return native_runner(Decoder(arch, held, context + tail), context, tail, pages, kept)


@dataclass(frozen=True, slots=True)
class DraftOfTarget:
    """A draft as it was made, opened beside the target it was made for, as a source of all its tensors; nothing is
    read yet."""

    draft: DraftFile
    arch: Architecture
    target: Architecture
    source: TensorSource  # the target's

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        return self.draft.name

    def __contains__(self, tensor: str) -> bool:
        return tensor in SHARED or tensor in self.draft

    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Fill a tensor, from the target where the draft has none of its own; see TensorSource."""
        if tensor in SHARED:
            into.copy_(read_part(self.target, self.source, SHARED[tensor], into.device, into.dtype))
        else:
            self.draft.read(tensor, into, leading=leading)


def open_for_target(folder: str | Path, target: str | Path) -> DraftOfTarget:
    """Open a draft beside its target, or beside what an inflated target was made of; another target's is refused."""
    target_arch, source = open_model(uninflated(locate(str(target))))
    draft = read_draft(folder, fingerprint_of(target_arch, source))
    arch = Architecture.from_config(draft.config, draft.name)
    if (arch.hidden, arch.vocabulary) != (target_arch.hidden, target_arch.vocabulary):
        sizes = f"{arch.hidden} × {arch.vocabulary}, its target's is {target_arch.hidden} × {target_arch.vocabulary}"
        raise ModelError(
            f"{draft.name}: by its config.json the embedding is {sizes}. Make the draft again, or fetch it again."
        )
    return DraftOfTarget(draft, arch, target_arch, source)


def _inflated(
    found: DraftOfTarget,
    large: Architecture,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    stored: WeightsName | None,
) -> Weights:
    """Make the weights of an inflated draft; behind a reduced head's rows come random ones, as tokens that nobody
    has."""
    ids = found.draft.head_ids
    held = read_weights(large, InflatedSource(found.arch, found, large, seed, ids), device, dtype, stored)
    if ids is None:
        return held
    beyond = range(large.vocabulary, large.vocabulary + large.head_rows - len(ids))
    columns = Columns(torch.cat((ids, torch.tensor(beyond, dtype=torch.int64))).to(device), beyond.stop)
    return replace(held, reduced=ReducedHead(held.head, columns))


def _own_storage(
    draft: DraftFile, device: torch.device, dtype: torch.dtype, asked: torch.dtype | None
) -> WeightsName | None:
    """How a draft is stored unless told: as its file is, but on a CPU without the kernel, which would write int8 out
    at every step. Integer products, where rows are rounded too, are for who asks for no precision."""
    if draft.info.storage != "int8":
        return None
    if asked is None and runs_blocks(device, (ROWS,)):
        return "stored"
    return "int8" if device.type != "cpu" or takes("int8", device, dtype) else None


def _read_shared(
    arch: Architecture, source: TensorSource, device: torch.device, dtype: torch.dtype, stored: WeightsName | None
) -> Shared:
    """Read embedding and head, and of the layers only one, which is forgotten at once."""
    whole = read_weights(replace(arch, layers=1), source, device, dtype, stored)
    return Shared(whole.embedding, whole.head)


def _reduced(
    ids: Tensor | None, head: AnyMatrix, device: torch.device, dtype: torch.dtype, stored: WeightsName | None
) -> ReducedHead | None:
    """Copy a reduced head's rows: scattered among the target's, they could not be read at the memory's pace."""
    if ids is None:
        return None
    columns = Columns(ids.to(device), head.outs)
    rows = head.rows(columns.ids)
    if stored == "stored":
        return ReducedHead(whole_rows(rows), columns)
    return ReducedHead(rows.in_floats(dtype) if stored is None else rows.stored_as(stored), columns)
