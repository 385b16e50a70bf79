"""The model families that the native decoder runs, by the names that files use for them."""

from __future__ import annotations

from specbranch.errors import UnsupportedArchitecture
from specbranch.models.families import gemma2, gemma3, gpt_oss, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from specbranch.models.families.family import Family
from specbranch.models.families.rotary import USE_TRANSFORMERS

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (llama, mistral, qwen2, qwen3, gemma2, gemma3, mixtral, qwen3_moe, gpt_oss)
}
BY_MODEL_TYPE = {kind: family for family in FAMILIES.values() for kind in family.model_types}
BY_GGUF_NAME = {kind: family for family in FAMILIES.values() for kind in family.gguf_names}


def family_of_config(model_type: str, name: str) -> Family:
    """Return the family of a config.json's `model_type`, or refuse it by name."""
    return BY_MODEL_TYPE.get(model_type) or _refuse(model_type, name)


def family_of_gguf(architecture: str, name: str) -> Family:
    """Return the family of a GGUF file's `general.architecture`, or refuse it by name."""
    return BY_GGUF_NAME.get(architecture) or _refuse(architecture, name)


def _refuse(family: str, name: str) -> Family:
    raise UnsupportedArchitecture(
        f"{name} has architecture {family!r}; the native decoder runs {', '.join(FAMILIES)}. It may run elsewhere: "
        f"{USE_TRANSFORMERS}"
    )
