"""Heads inside a checkpoint that predict further tokens (MTP): their tensors, and the sentence that refuses them.

Owns the names only: no family that is native here carries such a head. docs/gpu.md says how one would run as a draft.
"""

from __future__ import annotations

from specbranch.errors import BadParameter

MTP_DRAFT = "mtp"  # what users of other engines name as the draft
# of Qwen3-Next and Qwen3.5: both inputs are normed, joined by `fc`, and run through layers of the model's own kind
MTP_TENSORS = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.layers.0", "mtp.norm")


def refuse_head_as_draft(name: str) -> None:
    """Refuse a head inside the target's own checkpoint as the draft."""
    if name.lower() == MTP_DRAFT:
        raise BadParameter(
            f"--draft is {name!r}, a head inside the target's own files ({', '.join(MTP_TENSORS)}); expected a model. "
            "Such heads read the target's hidden states, and no native family has one. Name a draft model, or make "
            "one with `specbranch distill`."
        )
