"""Loading a draft folder beside its target: layers from the draft, embedding and output head from the target.

Owns the combination of the two. A draft in its target's process, on its device and in its precision, shares the
target's tensors; it copies only the rows of a reduced head. With a target that is made from a base (`files/sources.py`)
a draft uses the base's embedding and head. A made draft has its own. Invariant: a draft of another target is refused.
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
from specbranch.models.cache.pool_size import pool_pages
from specbranch.models.cpu.block_kernels import runs_blocks
from specbranch.models.cpu.linear import takes
from specbranch.models.drafts.draft_folder import DraftFile, fingerprint_of, read_draft
from specbranch.models.families.family import HUGGING_FACE
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.blocks import ROW_FORM, AnyMatrix
from specbranch.models.files.head_columns import Columns
from specbranch.models.files.identity import checked_base
from specbranch.models.files.locate import locate, stored_base
from specbranch.models.files.sources import MadeModel, is_made, made_model
from specbranch.models.files.stored_rows import Embedding
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import ReducedHead, Weights, read_layers, read_part, read_weights, whole_rows
from specbranch.models.forward.decoder import Decoder
from specbranch.models.loading import native_runner, open_model
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.precision import resolve_cache_dtype, resolve_precision, warn_about_int4

SHARED = {f"{HUGGING_FACE[part]}.weight": part for part in ("embedding", "head")}


@dataclass(frozen=True, slots=True)
class Shared:
    """The tensors that a draft takes from its target."""

    embedding: Embedding
    head: AnyMatrix  # [vocabulary, hidden], stored as the target's; if read for the draft alone, as the draft's

    @classmethod
    def of(cls, runner: Runner | None, device: torch.device, dtype: torch.dtype) -> Shared | None:
        """Return the tensors of a native target with this device and precision; None for any other runner."""
        where = torch.empty(0, device=device).device  # with an index: "cuda" is not equal to "cuda:0"
        if not isinstance(runner, NativeRunner) or (runner.device, runner.dtype) != (where, dtype):
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
    draft_window: int | None = None,
) -> NativeRunner:
    """Load a draft for a target.

    It takes embedding and head from `target_runner` if that runs on the same device in the same precision; otherwise it
    reads them from the target's file. `weights`: how its matrices are stored; None: in int8 if its file says so, else
    in `dtype`. A made draft ignores what its file says. `cache_dtype`: type of keys and values; None: `dtype`.
    `draft_window`: see `load_native`.
    """
    where = torch.device(device)
    precision, stored = resolve_precision(dtype, weights, where)
    made = made_model(folder)
    found = open_for_target(folder if made is None else checked_base(made).path, target)
    arch, source = _own_tensors(found, made)
    arch = arch.with_draft_window(draft_window)
    context = arch.choose_context(context_length, shorten=True)
    kv_dtype = resolve_cache_dtype(cache_dtype, precision, where)
    if made is None:
        stored = _own_storage(found.draft, where, precision, dtype) if weights is None else stored
        # A made target's embedding may have another size than its base's.
        shared = None if is_made(target) else Shared.of(target_runner, where, precision)
        tensors = _sharing(found, shared, where, precision, stored)
        pages = pool_pages(arch, precision, where, context, tail, cache_tokens, weights=0, cache_dtype=kv_dtype)
    else:
        pages = pool_pages(arch, precision, where, context, tail, cache_tokens, stored=stored, cache_dtype=kv_dtype)
        tensors = _with_reduced_head(read_weights(arch, source, where, precision, stored), arch, found.draft.head_ids)
    warn_about_int4(tensors, stored, where)
    return native_runner(Decoder(arch, tensors, context + tail), context, tail, pages, kv_dtype)


@dataclass(frozen=True, slots=True)
class DraftOfTarget:
    """A draft opened with its target, as a source of all its tensors; no weights are read yet."""

    draft: DraftFile
    arch: Architecture
    target: Architecture
    source: TensorSource  # the target's

    @property
    def name(self) -> str:
        """The draft's name for sentences."""
        return self.draft.name

    def __contains__(self, tensor: str) -> bool:
        return tensor in SHARED or tensor in self.draft

    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Read a tensor: embedding and head from the target, all others from the draft; see TensorSource."""
        if tensor in SHARED:
            into.copy_(read_part(self.target, self.source, SHARED[tensor], into.device, into.dtype))
        else:
            self.draft.read(tensor, into, leading=leading)


def open_for_target(folder: str | Path, target: str | Path) -> DraftOfTarget:
    """Open a draft with its target, or with the base of a made target; refuses a draft of another target."""
    target_arch, source = open_model(stored_base(locate(str(target))))
    draft = read_draft(folder, fingerprint_of(target_arch, source))
    arch = Architecture.from_config(draft.config, draft.name)
    if (arch.hidden, arch.vocabulary) != (target_arch.hidden, target_arch.vocabulary):
        sizes = f"{arch.hidden} × {arch.vocabulary}, its target's is {target_arch.hidden} × {target_arch.vocabulary}"
        raise ModelError(
            f"{draft.name}: by its config.json the embedding is {sizes}. Make the draft again, or fetch it again."
        )
    return DraftOfTarget(draft, arch, target_arch, source)


def _own_tensors(found: DraftOfTarget, made: MadeModel | None) -> tuple[Architecture, TensorSource]:
    """Return a draft's architecture and tensors: those of its folder, or those made from them."""
    if made is None:
        return found.arch, found
    return made.made_from(found.arch, found, found.draft.head_ids)


def _sharing(
    found: DraftOfTarget,
    shared: Shared | None,
    device: torch.device,
    dtype: torch.dtype,
    stored: WeightsName | None,
) -> Weights:
    """Read a draft's own weights; embedding and head are `shared`; None: read from the target's file."""
    if stored == "stored" and found.draft.info.storage != "int8":
        raise BadParameter(
            f"weights of the draft is 'stored', but {found.name} stores floats; expected int8. Leave "
            "--draft-weights out, or use int8."
        )
    shared = shared or _read_shared(found.target, found.source, device, dtype, stored)
    layers, norm = read_layers(found.arch, found.draft, device, dtype, stored)
    reduced = _reduced(found.draft.head_ids, shared.head, device, dtype, stored)
    return Weights(shared.embedding, layers, norm, shared.head, reduced)


def _with_reduced_head(weights: Weights, arch: Architecture, ids: Tensor | None) -> Weights:
    """Assign token ids to a made draft's reduced head; surplus rows get ids beyond the vocabulary."""
    if ids is None:
        return weights
    beyond = range(arch.vocabulary, arch.vocabulary + arch.head_rows - len(ids))
    columns = Columns(torch.cat((ids, torch.tensor(beyond, dtype=torch.int64))).to(weights.norm.device), beyond.stop)
    return replace(weights, reduced=ReducedHead(weights.head, columns))


def _own_storage(
    draft: DraftFile, device: torch.device, dtype: torch.dtype, asked: torch.dtype | None
) -> WeightsName | None:
    """Return how a draft's matrices are stored by default: as in its file; None: in `dtype`.

    An int8 file uses integer products, which round activations, too, unless the user asked for a precision. On a CPU
    without an int8 kernel it is converted to floats at load, not at every step.
    """
    if draft.info.storage != "int8":
        return None
    if asked is None and runs_blocks(device, (ROW_FORM,)):
        return "stored"
    return "int8" if device.type != "cpu" or takes("int8", device, dtype) else None


def _read_shared(
    arch: Architecture, source: TensorSource, device: torch.device, dtype: torch.dtype, stored: WeightsName | None
) -> Shared:
    """Read embedding and head; one layer is read, too, and dropped."""
    whole = read_weights(replace(arch, layers=1), source, device, dtype, stored)
    return Shared(whole.embedding, whole.head)


def _reduced(
    ids: Tensor | None, head: AnyMatrix, device: torch.device, dtype: torch.dtype, stored: WeightsName | None
) -> ReducedHead | None:
    """Copy a reduced head's rows from the target's, so that products read contiguous memory; None: no reduced head."""
    if ids is None:
        return None
    columns = Columns(ids.to(device), head.outs)
    rows = head.rows(columns.ids)
    if stored == "stored":
        return ReducedHead(whole_rows(rows), columns)
    return ReducedHead(rows.in_floats(dtype) if stored is None else rows.stored_as(stored), columns)
