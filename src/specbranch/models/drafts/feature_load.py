"""Loading a draft that reads its target's features, beside the target that will write them.

Owns the combination of the two: layers and fc from the draft, embedding and head from the target unless the draft
brings its own. Invariants: a target that cannot write features for it is refused with what to do instead; nothing of
the target changes before the draft is read whole.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specbranch.config import WeightsName
from specbranch.core.runner import Runner
from specbranch.core.slots import TAIL
from specbranch.errors import BadParameter
from specbranch.models.cache.pool_size import pool_pages
from specbranch.models.cpu.linear import choose_linear
from specbranch.models.drafts.feature_folder import (
    FC,
    FC_NORM,
    INPUT_NORM,
    OWN_EMBEDDING,
    OWN_HEAD,
    FeatureDraft,
    open_feature_draft,
)
from specbranch.models.files.blocks import AnyMatrix
from specbranch.models.files.head_columns import Columns
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.sources import is_made
from specbranch.models.files.weights import ReducedHead, Weights, read_layers, whole_rows
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.features import Fuse
from specbranch.models.runners.feature_runner import FeatureRunner
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.precision import resolve_cache_dtype, resolve_precision

INSTEAD = "Take a plain draft (`specbranch distill` without --kind features)"


def load_feature_draft(
    folder: str | Path,
    target: str | Path,
    *,
    target_runner: Runner | None,
    context_length: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    weights: WeightsName | None = None,
    tail: int = TAIL,
    cache_tokens: int | None = None,
    cache_dtype: str | None = None,
) -> FeatureRunner:
    """Load a feature draft, and let its target write features; parameters as for `load_draft`."""
    where = torch.empty(0, device=device).device  # with its index, as tensors there have it
    precision, stored = resolve_precision(dtype, weights, where)
    beside = _checked(folder, target, target_runner, where, precision)
    found = open_feature_draft(folder, target, beside.architecture)
    stored = "int8" if weights is None and found.storage == "int8" and where.type != "cpu" else stored
    context = found.arch.choose_context(context_length, shorten=True)
    kv_dtype = resolve_cache_dtype(cache_dtype, precision, where)
    tensors = _tensors(found, beside, where, precision, stored)
    fuse = _fuse(found, where, precision)
    pages = pool_pages(found.arch, precision, where, context, tail, cache_tokens, weights=0, cache_dtype=kv_dtype)
    beside.write_features(fuse)
    decoder = Decoder(found.arch, tensors, context + tail)
    return FeatureRunner(decoder, beside, context, tail, pages, kv_dtype, feeds_normed=found.form.feeds_normed)


def _checked(
    folder: str | Path, target: str | Path, runner: Runner | None, device: torch.device, dtype: torch.dtype
) -> NativeRunner:
    """Return the target's runner, or refuse one that cannot write features for this draft."""
    reads = f"The draft in {folder} reads its target's hidden states"
    if is_made(target):
        raise BadParameter(f"{reads}, and {target} is computed from another model. {INSTEAD}, or that model itself.")
    if runner is None:
        raise BadParameter(
            f"{reads}, so both run in one process, in turn. {INSTEAD}, or executor 'serial' with the draft in the "
            "target's process."
        )
    if not isinstance(runner, NativeRunner):
        raise BadParameter(
            f"{reads}, which the transformers runner does not give. {INSTEAD}, or run the target by the native runner."
        )
    if (runner.device, runner.dtype) != (device, dtype):
        raise BadParameter(
            f"{reads}, so both run on one device in one precision; the target runs on {runner.device} in "
            f"{runner.dtype}, the draft was to run on {device} in {dtype}. {INSTEAD}, or leave --draft-device out."
        )
    return runner


def _tensors(
    found: FeatureDraft, target: NativeRunner, device: torch.device, dtype: torch.dtype, stored: WeightsName | None
) -> Weights:
    """Read the draft's own weights, and take the target's for the rest."""
    layers, norm = read_layers(found.arch, found.tensors, device, dtype, stored)
    own = OWN_EMBEDDING in found.tensors
    embedding = _read(found, OWN_EMBEDDING, (found.arch.vocabulary, found.arch.hidden), device, dtype) if own else None
    head, reduced = _head(found, target, device, dtype, stored)
    return Weights(target.decoder.embedding if embedding is None else embedding, layers, norm, head, reduced)


def _head(
    found: FeatureDraft, target: NativeRunner, device: torch.device, dtype: torch.dtype, stored: WeightsName | None
) -> tuple[AnyMatrix, ReducedHead | None]:
    """Return the head, and the reduced one if it scores some tokens only."""
    ids, whole = found.head_ids(), target.decoder.head_matrix
    if OWN_HEAD not in found.tensors:
        if whole is None or found.arch.hidden != target.architecture.hidden:
            raise BadParameter(f"{found.name} has no head of its own, and its target's does not fit. {INSTEAD}.")
        if ids is None:
            return whole, None
        ids = ids.sort().values
        rows = whole.rows(ids.to(device))
        made = whole_rows(rows) if stored == "stored" else rows.stored_as(stored) if stored else rows.in_floats(dtype)
        return made, ReducedHead(made, Columns(ids.to(device), found.arch.vocabulary))
    count = found.arch.vocabulary if ids is None else len(ids)
    rows = Matrix(_read(found, OWN_HEAD, (count, found.arch.hidden), device, dtype))
    if ids is not None:  # columns ascend
        ids, order = ids.sort()
        rows = Matrix(rows.weight[order.to(device)])
    own = whole_rows(rows) if stored == "stored" else rows.stored_as(stored) if stored else rows
    return own, None if ids is None else ReducedHead(own, Columns(ids.to(device), found.arch.vocabulary))


def _fuse(found: FeatureDraft, device: torch.device, dtype: torch.dtype) -> Fuse:
    """Read what makes features of the target's hidden states."""
    form, size = found.form, found.target.hidden
    fc = _read(found, FC, (found.arch.hidden, len(form.taps) * size), device, dtype)
    norms = tuple(
        _read(found, FC_NORM.format(index), (size,), device, dtype)
        for index in range(len(form.taps) if form.norms_taps else 0)
    )
    whole = _read(found, INPUT_NORM, (len(form.taps) * size,), device, dtype) if form.norms_input else None
    return Fuse(form.taps, choose_linear(fc, None), found.arch.hidden, found.arch.rms_eps, norms, whole)


def _read(found: FeatureDraft, tensor: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    into = torch.empty(shape, device=device, dtype=dtype)
    found.tensors.read(tensor, into)
    return into
