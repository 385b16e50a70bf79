"""A draft as a GGUF file, as llama.cpp reads it.

Owns the entries of the header and the order of rows. llama.cpp pairs dimension 2i of a head with 2i + 1 in Llama's
family, so rows of queries and keys are moved. Invariant: what llama.cpp cannot say of an architecture is refused before
anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specbranch.errors import BadParameter
from specbranch.models.families.family import GGUF, HUGGING_FACE
from specbranch.models.families.rotary import Rope, usual_magnitude
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.block_reader import pairs_together
from specbranch.models.forward.rope import frequencies
from specbranch.progress import StepsDone
from specbranch.training.export.whole_draft import WholeDraft

if TYPE_CHECKING:
    from gguf import GGUFWriter

INTERLEAVED = ("llama", "mistral")  # families whose heads llama.cpp pairs 2i with 2i + 1; both are its "llama"
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
MAGNITUDE_ERROR = 1e-4  # by which a YaRN factor may differ from the usual one


def check_for_llamacpp(arch: Architecture) -> None:
    """Refuse what a GGUF header has no entry for."""
    if not arch.is_plain(min(arch.context_length, arch.window or arch.context_length)):
        raise BadParameter(
            f"{arch.name} is of the family {arch.family}, whose layers are not Llama's; GGUF files are written of "
            "those. Use --format hf."
        )
    rope = arch.rope
    usual = usual_magnitude(rope.factor)
    bounds = (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    if rope.kind == "yarn" and (abs(rope.magnitude - usual) > MAGNITUDE_ERROR or not bounds):
        raise BadParameter(
            f"{arch.name} scales its rotary positions by YaRN with settings of its own (factor of cos and sin "
            f"{rope.magnitude:.4g}, usual {usual:.4g}), which GGUF files do not have. Use --format hf."
        )


def write_gguf(draft: WholeDraft, vocabulary: Mapping[str, Any], name: str, path: Path, steps: StepsDone) -> None:
    """Write a draft in its precision; norms and biases are in float32."""
    from gguf import GGUFWriter

    arch = draft.arch
    writer = GGUFWriter(path, "llama" if arch.family in INTERLEAVED else arch.family)
    _add_header(writer, arch, name)
    matrices = next(iter(draft.tensors.values())).dtype
    writer.add_file_type(FILE_TYPES[matrices])
    for key, value in vocabulary.items():
        _add_value(writer, key, value)
    if (divisors := _divisors(arch)) is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    names = _gguf_names(arch.layers)
    for number, (theirs, tensor) in enumerate(draft.tensors.items()):
        steps("Converting", number, len(draft.tensors))
        part, _, suffix = theirs.rpartition(".")
        _add_tensor(writer, f"{names[part]}.{suffix}", _ordered(arch, part, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_header(writer: GGUFWriter, arch: Architecture, name: str) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_block_count(arch.layers)
    writer.add_context_length(min(arch.context_length, arch.window or arch.context_length))
    writer.add_embedding_length(arch.hidden)
    writer.add_feed_forward_length(arch.intermediate)
    writer.add_head_count(arch.heads)
    writer.add_head_count_kv(arch.kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_layer_norm_rms_eps(arch.rms_eps)
    writer.add_vocab_size(arch.vocabulary)
    _add_rope(writer, arch)


def _add_rope(writer: GGUFWriter, arch: Architecture) -> None:
    from gguf import RopeScalingType

    rope = arch.rope
    writer.add_rope_dimension_count(arch.head_dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope.kind))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.original_context)


def _divisors(arch: Architecture) -> Tensor | None:
    """Return by how much each plain frequency is divided, where that is what GGUF has instead of parameters."""
    if arch.rope.kind not in ("llama3", "divisors"):
        return None
    return frequencies(Rope(arch.rope.theta), arch.head_dim) / frequencies(arch.rope, arch.head_dim)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add an entry in the type that llama.cpp expects of a vocabulary's entries."""
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _gguf_names(layers: int) -> dict[str, str]:
    """Return GGUF's name of each tensor by Hugging Face's, both without suffixes."""
    return {
        name.format(index): GGUF[part].format(index) for part, name in HUGGING_FACE.items() for index in range(layers)
    }


def _ordered(arch: Architecture, part: str, tensor: Tensor) -> Tensor:
    turned = part.endswith(("q_proj", "k_proj")) and arch.family in INTERLEAVED
    return pairs_together(tensor, arch.head_dim) if turned else tensor


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor) -> None:
    from gguf import GGMLQuantizationType

    held = tensor.contiguous()
    if held.dim() < 2:
        writer.add_tensor(name, held.float().numpy())
    elif held.dtype == torch.bfloat16:
        writer.add_tensor(name, held.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, held.numpy())
