"""The model families that the native decoder runs, by the names that files use for them."""

from __future__ import annotations

from specbranch.errors import UnsupportedArchitecture
from specbranch.models.families.family import Family
from specbranch.models.families.gemma2 import GEMMA2_FAMILY
from specbranch.models.families.gemma3 import GEMMA3_FAMILY
from specbranch.models.families.gpt_oss import GPT_OSS_FAMILY
from specbranch.models.families.llama import LLAMA_FAMILY
from specbranch.models.families.mistral import MISTRAL_FAMILY
from specbranch.models.families.mixtral import MIXTRAL_FAMILY
from specbranch.models.families.qwen2 import QWEN2_FAMILY
from specbranch.models.families.qwen3 import QWEN3_FAMILY
from specbranch.models.families.qwen3_moe import QWEN3_MOE_FAMILY
from specbranch.models.families.rotary import USE_TRANSFORMERS
from specbranch.models.families.smollm3 import SMOLLM3_FAMILY

_ALL = (
    LLAMA_FAMILY,
    MISTRAL_FAMILY,
    QWEN2_FAMILY,
    QWEN3_FAMILY,
    GEMMA2_FAMILY,
    GEMMA3_FAMILY,
    MIXTRAL_FAMILY,
    QWEN3_MOE_FAMILY,
    GPT_OSS_FAMILY,
    SMOLLM3_FAMILY,
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
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
