"""The small operations of a layer in plain torch: norms, gated activations, and the softmax of attention scores.

The plain decoder, the GPU step and training share them. Invariants: none waits for the device or changes its inputs,
and all of them can be differentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad, rms_norm, silu

from specbranch.models.families.gpt_oss import ALPHA, LIMIT
from specbranch.models.families.operations import Activation, Attention


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply an RMS norm; a weight in a wider type than x is multiplied before the result is rounded."""
    if weight.dtype == x.dtype:
        return rms_norm(x, (x.shape[-1],), weight, eps)
    return rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)


def heads_normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply an RMS norm to each head [..., heads, head_dim]; `weight`: one row for all heads, or one for each."""
    return (rms_norm(heads, (heads.shape[-1],), eps=eps) * weight).to(heads.dtype)


def gated(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate, up) of gates and ups side by side."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu":
        return silu(gate) * up
    if activation == "gelu_tanh":
        return gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(_rows_apart(gate * ALPHA)) * (up + 1)


def bounded(x: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(x / softcap); without a softcap, x."""
    return x if softcap is None else _rows_apart(x / softcap).tanh() * softcap


def _rows_apart(x: Tensor) -> Tensor:
    """Return x with a gap behind each row, so that a row's bits do not depend on how many there are.

    On a CPU torch computes the last numbers of a contiguous tensor by other code than those before them.
    """
    return pad(x, (0, 1))[..., :-1] if x.device.type == "cpu" else x


def outside(attention: Attention, positions: Tensor, left: Tensor) -> Tensor:
    """Return which positions a row's window hides; `left`: the first one in the window."""
    before = positions < left
    return before & (positions >= attention.first) if attention.first else before


def shares(scores: Tensor, hidden: Tensor, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Return the softmax of attention scores over the keys that are not `hidden`, in float32 or better.

    `sinks`: one further score for each row, in a shape that scores can be extended by; it takes part without a key.
    """
    scores = bounded(wide(scores), softcap).masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    extended = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return extended.softmax(-1)[..., :-1]


def wide(x: Tensor) -> Tensor:
    """Convert to float32 unless the type is as wide or wider."""
    return x.float() if x.dtype.itemsize < 4 else x
