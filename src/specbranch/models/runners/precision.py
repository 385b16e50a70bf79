"""In which precision a model computes, and how its matrices are stored beside it.

Owns which of the two go together where, and what is said of it. Invariant: what is agreed on here can be multiplied
where it is to run.
"""

from __future__ import annotations

import logging

import torch

from specbranch.config import WeightsName
from specbranch.errors import BadParameter
from specbranch.models.cpu.block_kernels import runs_blocks
from specbranch.models.cpu.linear import takes
from specbranch.models.files.block_reader import stored_kinds
from specbranch.models.files.blocks import FORMS
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.matrix import INT4_GROUP
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import Weights

log = logging.getLogger("specbranch")


def agreed(
    dtype: str | torch.dtype | None, weights: WeightsName | None, device: torch.device
) -> tuple[torch.dtype, WeightsName | None]:
    """Return the precision to compute in, and how matrices are stored; nothing: in that precision.

    Nothing asked for: float32 on a CPU, bfloat16 elsewhere, unless the weights are floats that only go with their own
    precision.
    """
    usual, asked = torch.float32 if device.type == "cpu" else torch.bfloat16, _dtype(dtype)
    if weights is None or weights in ("int8", "int4"):
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


def usual_storage(source: TensorSource, device: torch.device) -> WeightsName | None:
    """How matrices are stored where nothing is asked for: on a CPU as they are, if they lie in blocks."""
    kinds = stored_kinds(source) if isinstance(source, GgufFile) else {}
    return "stored" if kinds and runs_blocks(device, [FORMS[kind][0] for kind in kinds]) else None


def kept_in(asked: str | None, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return what keys and values are stored in, if that is not what is computed in, or say what cannot be."""
    if asked is None or asked == name_of(dtype):
        return None
    kinds = {"bfloat16": torch.bfloat16, "int8": torch.int8}
    if asked not in kinds:
        told = f"expected {', '.join(kinds)}, or {name_of(dtype)} as it is computed in"
        raise BadParameter(f"cache_dtype is {asked!r}; {told}.")
    if device.type != "cpu":
        raise BadParameter(
            f"cache_dtype is {asked!r}, but on {device} keys and values are stored in {name_of(dtype)}, as it computes."
            " Leave --cache-dtype out."
        )
    return kinds[asked]


def refuse_floats(source: TensorSource) -> None:
    """Raise unless a file stores matrices in blocks that can be multiplied as they are."""
    if not isinstance(source, GgufFile) or not stored_kinds(source):
        raise BadParameter(
            f"weights is 'stored', but {source.name} is no GGUF file with matrices in any of {', '.join(FORMS)}. Leave "
            "--weights out, or use int8."
        )


def alike(dtype: torch.dtype | None, weights: WeightsName | None, runner: str) -> torch.dtype | None:
    """Return the precision for a runner that stores matrices in no other, or say what it cannot do."""
    if weights is None or (dtype is not None and weights == name_of(dtype)):
        return dtype
    own = None if weights in ("int8", "int4", "stored") or dtype is not None else getattr(torch, weights)
    if isinstance(own, torch.dtype):
        return own
    raise BadParameter(
        f"weights is {weights!r}, but the {runner} runner stores matrices in the precision it computes in; expected "
        "the same as --dtype. "
        "Leave --weights out, or take a model that the native runner knows."
    )


def tell(weights: Weights, asked: WeightsName | None, device: torch.device) -> None:
    """Say what was made of int4, where that is not what one might expect."""
    if asked != "int4":
        return
    kinds = [matrix.stored for matrix in weights.matrices]
    if others := kinds.count("int8"):
        log.warning(
            "%d of %d matrices are in int8: int4 needs a multiple of %d inputs.", others, len(kinds), INT4_GROUP
        )
    if "int4" in kinds and device.type == "cpu":
        log.warning(
            "int4 has no kernel on CPUs: every step writes its matrices out, which is slow. Use --weights int8 "
            "(--draft-weights)."
        )


def name_of(dtype: torch.dtype) -> str:
    """A precision's name."""
    return str(dtype).removeprefix("torch.")


def _dtype(asked: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if asked is not None and (not isinstance(found, torch.dtype) or not found.is_floating_point):
        raise BadParameter(f"dtype is {asked!r}; expected float32, float64, bfloat16 or float16.")
    return found
