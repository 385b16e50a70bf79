"""The precision that a model computes in, and the types that its matrices, keys and values are stored in.

Owns which combinations run on which device, and the errors for the others. Does not own the storage formats
(`files/matrix.py`, `files/blocks.py`). Invariant: a device has a product for every combination that is returned here.
"""

from __future__ import annotations

import logging

import torch

from specbranch.config import WeightsName
from specbranch.errors import BadParameter
from specbranch.models.cpu.block_kernels import runs_blocks
from specbranch.models.cpu.linear import takes
from specbranch.models.files.block_reader import stored_kinds
from specbranch.models.files.blocks import FORMS, AnyMatrix
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.matrix import INT4_KINDS, ROUNDED_KINDS, Matrix
from specbranch.models.files.quantised.checkpoint import QuantisedCheckpoint
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import Weights

log = logging.getLogger("specbranch")


def resolve_precision(
    dtype: str | torch.dtype | None,
    weights: WeightsName | None,
    device: torch.device,
    source: TensorSource | None = None,
) -> tuple[torch.dtype, WeightsName | None]:
    """Return the precision to compute in, and how matrices are stored; None: in that precision.

    If `dtype` is None, the precision is float32 on a CPU and bfloat16 elsewhere. Float weights that the device cannot
    multiply in that precision are the exception: the model computes in their type. The matrices of a quantised
    checkpoint, `source`, may stay as they are in any precision.
    """
    usual, asked = torch.float32 if device.type == "cpu" else torch.bfloat16, _dtype(dtype)
    if weights is None or weights in ROUNDED_KINDS or (weights == "stored" and isinstance(source, QuantisedCheckpoint)):
        return asked or usual, weights
    if weights == "stored":
        if device.type == "cpu" and asked in (None, torch.float32):
            return torch.float32, weights
        raise BadParameter(
            f"weights is 'stored' on {device} with dtype {name_of(asked or usual)!r}; expected a CPU and float32, for "
            "which its kernels are made. Leave --weights out, or use int8 or int4."
        )
    own: torch.dtype = getattr(torch, weights)
    computed = asked or (usual if takes(weights, device, usual) else own)
    if computed is own:
        return own, None
    if takes(weights, device, computed):
        return computed, weights
    raise BadParameter(
        f"weights is {weights!r} and dtype {name_of(computed)!r}; expected the same of both, or int8 or int4 weights "
        "(on CPUs with "
        "compiled kernels bfloat16 weights with dtype float32, too). Leave --weights or --dtype out."
    )


def default_weight_storage(
    source: TensorSource, device: torch.device, dtype: str | torch.dtype | None = None
) -> WeightsName | None:
    """Return how matrices are stored by default; None: in the dtype.

    Those of a quantised checkpoint stay as they are. So do GGUF blocks on a CPU unless a `dtype` was asked for: their
    product rounds activations, too.
    """
    if isinstance(source, QuantisedCheckpoint):
        return "stored"
    if dtype is not None:
        return None
    kinds = stored_kinds(source) if isinstance(source, GgufFile) else {}
    return "stored" if kinds and runs_blocks(device, [FORMS[kind][0] for kind in kinds]) else None


def resolve_cache_dtype(asked: str | None, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the type of keys and values, None if it is `dtype`; raise a BadParameter if the device lacks it."""
    if asked is None or asked == name_of(dtype):
        return None
    kinds = {"bfloat16": torch.bfloat16, "int8": torch.int8}
    if asked not in kinds:
        expected = f"expected {', '.join(kinds)}, or {name_of(dtype)} as it is computed in"
        raise BadParameter(f"cache_dtype is {asked!r}; {expected}.")
    if device.type != "cpu":
        raise BadParameter(
            f"cache_dtype is {asked!r}, but on {device} keys and values are stored in {name_of(dtype)}, as it computes."
            " Leave --cache-dtype out."
        )
    return kinds[asked]


def require_blocks(source: TensorSource) -> None:
    """Raise a BadParameter unless the file is a quantised checkpoint, or a GGUF file with blocks of a CPU kernel."""
    if isinstance(source, QuantisedCheckpoint):
        return
    if not isinstance(source, GgufFile) or not stored_kinds(source):
        raise BadParameter(
            f"weights is 'stored', but {source.name} is no quantised checkpoint and no GGUF file with matrices "
            f"in any of {', '.join(FORMS)}. Leave --weights out, or use int8."
        )


def resolve_single_dtype(dtype: torch.dtype | None, weights: WeightsName | None, runner: str) -> torch.dtype | None:
    """Return the precision of a runner that stores matrices in the type it computes in; refuse all other `weights`."""
    if weights is None or (dtype is not None and weights == name_of(dtype)):
        return dtype
    own = None if weights in (*ROUNDED_KINDS, "stored") or dtype is not None else getattr(torch, weights)
    if isinstance(own, torch.dtype):
        return own
    raise BadParameter(
        f"weights is {weights!r}, but the {runner} runner stores matrices in the precision it computes in; expected "
        "the same as --dtype. "
        "Leave --weights out, or take a model that the native runner knows."
    )


def warn_about_int4(weights: Weights, asked: WeightsName | None, device: torch.device) -> None:
    """Warn if int4 was asked for and some matrices are in int8, or if the device has no kernel for the weights."""
    kinds = [matrix.stored for matrix in weights.matrices]
    if asked in INT4_KINDS and (others := kinds.count("int8")):
        log.warning(
            "%d of %d matrices are in int8: %s needs a multiple of %d inputs.",
            others,
            len(kinds),
            asked,
            INT4_KINDS[asked],
        )
    slow = next((kind for kind, matrix in zip(kinds, weights.matrices, strict=True) if _is_slow(matrix)), None)
    if slow is not None and device.type == "cpu":
        log.warning(
            "%s has no kernel on CPUs: every step writes its matrices out, which is slow. Use --weights int8 "
            "(--draft-weights).",
            slow,
        )


def _is_slow(matrix: AnyMatrix) -> bool:
    """True if a CPU has no kernel for a matrix."""
    return isinstance(matrix, Matrix) and matrix.scale is not None and (matrix.scale.dim() > 1 or not matrix.simple)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a type, as in options: float32, bfloat16, int8 … ."""
    return str(dtype).removeprefix("torch.")


def _dtype(asked: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if asked is not None and (not isinstance(found, torch.dtype) or not found.is_floating_point):
        raise BadParameter(f"dtype is {asked!r}; expected float32, float64, bfloat16 or float16.")
    return found
