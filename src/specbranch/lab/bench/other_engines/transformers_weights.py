"""Our decoder as a model of transformers, on the same memory: for models whose weights are in no file.

Owns the mapping from our weights to transformers' names. Invariants: no weight is held twice. Both engines score the
same tokens: head rows without a token are computed and cut off, and a reduced head gives −∞ to all other tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specbranch.errors import BadParameter
from specbranch.models.families.family import HUGGING_FACE
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.head_columns import Columns
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.rope import frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYER_PARTS = ("attention_norm", "mlp_norm", "out", "down", "q", "k", "v", "gate", "up")


def refuse_other_families(arch: Architecture) -> None:
    """Raise, before anything is loaded, if a model cannot be built from our weights."""
    if arch.family != "llama" or arch.qkv_bias or arch.out_bias or arch.mlp_bias or arch.qk_norm:
        raise BadParameter(
            f"{arch.name} is of the family {arch.family}; a model of transformers can be built from weights in memory "
            "only for Llama models without biases. Leave transformers' own methods (hf-…) out of --methods."
        )
    if arch.hidden % arch.heads:
        raise BadParameter(
            f"{arch.name} has a width of {arch.hidden} and {arch.heads} heads; transformers expects a multiple. "
            "Choose another shape, or "
            "leave transformers' own methods (hf-…) out of --methods."
        )


def as_transformers(decoder: Decoder) -> PreTrainedModel:
    """Build a model of transformers on a decoder's memory."""
    import transformers

    arch = decoder.arch
    refuse_other_families(arch)
    dtype, device = decoder.dtype, decoder.norm.device
    family: Any = transformers.LlamaConfig, transformers.LlamaForCausalLM  # whose constructors are not typed
    config = family[0](
        vocab_size=arch.vocabulary, hidden_size=arch.hidden, intermediate_size=arch.intermediate,
        num_hidden_layers=arch.layers, num_attention_heads=arch.heads, num_key_value_heads=arch.kv_heads,
        head_dim=arch.head_dim, rms_norm_eps=arch.rms_eps, max_position_embeddings=arch.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": arch.rope.theta}, eos_token_id=None, bos_token_id=None,
        pad_token_id=0, attn_implementation="sdpa", dtype=dtype, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = family[1](config)
    model.load_state_dict(named(decoder), assign=True, strict=False)
    model.lm_head = _Head(_weight(decoder.head), decoder.columns, arch.vocabulary)
    model.model.rotary_emb = _turning(model.model.rotary_emb, config, arch).to(device)
    assert model.config._attn_implementation == "sdpa" and model.dtype == dtype
    return model.requires_grad_(False).eval()  # type: ignore[no-any-return]


def named(decoder: Decoder) -> dict[str, Tensor]:
    """Return views of the weights under transformers' names, except the head."""
    arch = decoder.arch
    found = {f"{HUGGING_FACE['embedding']}.weight": _floats(decoder.embedding)}
    found[f"{HUGGING_FACE['norm']}.weight"] = decoder.norm
    kv = arch.kv_heads * arch.head_dim
    for index, layer in enumerate(decoder.layers):
        q, k, v = torch.split(_weight(layer.qkv), [arch.heads * arch.head_dim, kv, kv])
        gate, up = _weight(layer.gate_up).chunk(2)
        tensors = (layer.attention_norm, layer.mlp_norm, _weight(layer.out), _weight(layer.down), q, k, v, gate, up)
        found |= {
            f"{HUGGING_FACE[part].format(index)}.weight": tensor
            for part, tensor in zip(LAYER_PARTS, tensors, strict=True)
        }
    return found


def _weight(linear: object) -> Tensor:
    """Return the matrix of a linear layer, in floats."""
    return _floats(None if getattr(linear, "scale", None) is not None else getattr(linear, "weight", None))


def _floats(weight: object) -> Tensor:
    if not isinstance(weight, Tensor):
        raise BadParameter(
            "Weights in int8, int4, fp8 or blocks cannot be shared with transformers, which has no kernel for them. "
            "Leave its methods (hf-…) out of --methods, or run in plain floats."
        )
    return weight


def _turning(given: Any, config: Any, arch: Architecture) -> Any:
    """Return transformers' rotary embedding with our frequencies; an inflated model has its source's."""
    made = type(given)(config)
    made.inv_freq = frequencies(arch.rope, arch.head_dim // arch.rope.times).repeat_interleave(arch.rope.times)
    made.original_inv_freq = made.inv_freq
    made.attention_scaling = arch.rope.magnitude
    return made


class _Head(torch.nn.Module):
    """Computes all rows of the head and returns those of tokens."""

    def __init__(self, weight: Tensor, columns: Columns | None, vocabulary: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._columns, self._vocabulary = columns, vocabulary

    def forward(self, hidden: Tensor) -> Tensor:
        """Score hidden states […, hidden]."""
        logits = F.linear(hidden, self.weight)
        whole = logits if self._columns is None else self._columns.spread(logits)
        return whole[..., : self._vocabulary]
