"""What the native decoder must know of a model before it reads a weight, from a config.json or from a GGUF header.

Owns the reading of both and the refusal of what the decoder cannot do. Invariant: an `Architecture` that exists can be
run, with nothing of its definition left aside in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from specbranch.errors import ModelError, UnsupportedArchitecture
from specbranch.models.files.rollback import active_window, refuse_if_cannot_roll_back

if TYPE_CHECKING:
    from specbranch.models.files.gguf_file import GgufFile

__all__ = ["Architecture", "Family", "Rope", "refuse_if_cannot_roll_back", "token_ids"]

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors"]
USE_TRANSFORMERS = "Load it with runner='transformers'."
COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "context_length")


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn keys and queries: the base θ and how its frequencies are stretched to longer contexts."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn: the context of the first training
    low_freq: float = 1.0  # llama3: turns per original context under which a frequency is divided by `factor`
    high_freq: float = 4.0  # llama3: turns above which it is left alone
    beta_fast: float = 32.0  # yarn: the same two bounds
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: bounds rounded outwards to whole dimensions
    magnitude: float = 1.0  # yarn: what cos and sin are multiplied by
    divisors: tuple[float, ...] = ()  # one a frequency, as GGUF stores llama3's
    times: int = 1  # how often each frequency is there: heads may be so much larger than those it was made for


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shape and variant of a decoder of the Llama family."""

    name: str
    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rms_eps: float
    rope: Rope
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    context_length: int
    window: int | None  # active sliding window
    eos_ids: tuple[int, ...]
    bos_id: int | None
    # rows of the output head where they are not the vocabulary's: those behind it are never looked at
    head_rows_charged: int | None = None

    @property
    def head_rows(self) -> int:
        """How many rows the output head has."""
        return self.head_rows_charged or self.vocabulary

    def __post_init__(self) -> None:
        for field in COUNTS:
            if getattr(self, field) < 1:
                raise ModelError(f"{self.name} declares {field} = {getattr(self, field)}; expected a whole number ≥ 1.")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.name} declares {self.heads} attention heads over {self.kv_heads} key heads; expected a "
                "multiple."
            )
        if self.head_dim % 2:
            raise ModelError(
                f"{self.name} declares a head dimension of {self.head_dim}; rotary positions need an even one."
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "the model") -> Self:
        """Read a config.json of transformers, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`)."""
        refuse_if_cannot_roll_back(config, 0, name)
        family = _known_family(str(config.get("model_type", "")), name)
        _refuse_variants(config, name)
        heads, hidden = _count(config, "num_attention_heads", name), _count(config, "hidden_size", name)
        attention_bias = family != "mistral" and bool(config.get("attention_bias", False))
        return cls(
            name=name,
            family=family,
            layers=_count(config, "num_hidden_layers", name),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=_count(config, "intermediate_size", name),
            vocabulary=_count(config, "vocab_size", name),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope_from_config(config, name),
            qkv_bias=family == "qwen2" or attention_bias,
            out_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied=bool(config.get("tie_word_embeddings", False)),
            context_length=_count(config, "max_position_embeddings", name),
            window=active_window(config),
            eos_ids=token_ids(config.get("eos_token_id")),
            bos_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        )

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Self:
        """Read the header of a GGUF file."""
        keys = _GgufKeys(file)
        refuse_if_cannot_roll_back({"model_type": keys.family}, 0, file.name)
        family = _known_family(keys.family, file.name)
        heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
        head_dim = keys.count("attention.key_length", hidden // heads)
        keys.refuse_variants(head_dim)
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        return cls(
            name=file.name,
            family=family,
            layers=keys.count("block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=keys.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=keys.count("feed_forward_length"),
            vocabulary=keys.count("vocab_size", len(tokens) if tokens is not None else None),
            rms_eps=float(keys.get("attention.layer_norm_rms_epsilon", 1e-6)),
            rope=_rope_from_gguf(keys, head_dim),
            qkv_bias="blk.0.attn_q.bias" in file,
            out_bias="blk.0.attn_output.bias" in file,
            mlp_bias="blk.0.ffn_gate.bias" in file,
            qk_norm="blk.0.attn_q_norm.weight" in file,
            tied="output.weight" not in file,
            context_length=keys.count("context_length"),
            window=keys.get("attention.sliding_window", None) or None,
            eos_ids=_unique(file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")),
            bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        )

    def choose_context(self, asked: int | None, most: int = 8192, shorten: bool = False) -> int:
        """Return the context to make room for: what was asked if the model has it, else its own up to `most`.

        `shorten` takes the model's own where more was asked.
        """
        own = min(self.context_length, self.window or self.context_length)
        if asked is None:
            return min(own, most)
        if shorten:
            asked = min(asked, own)
        if not 1 <= asked <= self.context_length:
            raise ModelError(f"context_length is {asked}; {self.name} was made for 1 to {self.context_length} tokens.")
        window = {"model_type": self.family, "sliding_window": self.window, "use_sliding_window": True}
        refuse_if_cannot_roll_back(window, asked, self.name)
        return asked


def _known_family(family: str, name: str) -> Family:
    if family not in FAMILIES:
        raise UnsupportedArchitecture(
            f"{name} has architecture {family!r}; the native decoder runs {', '.join(FAMILIES)}. It may run "
            f"elsewhere: {USE_TRANSFORMERS}"
        )
    return family


def _refuse_variants(config: Mapping[str, Any], name: str) -> None:
    """Refuse what a known family may declare and this decoder does not compute."""
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedArchitecture(
            f"{name} uses the activation {activation!r}; the native decoder has silu only. {USE_TRANSFORMERS}"
        )
    rope = config.get("rope_parameters") or {}
    if (part := rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1, 1.0):
        raise UnsupportedArchitecture(
            f"{name} turns only {part} of each head by position; the native decoder turns all. {USE_TRANSFORMERS}"
        )
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise UnsupportedArchitecture(
            f"{name} is stored in {method!r} quantisation, which the native decoder does not read. {USE_TRANSFORMERS}"
        )


def _count(config: Mapping[str, Any], key: str, name: str) -> int:
    return _whole(config.get(key), f"The configuration of {name} has {key}")


def _whole(value: Any, said: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{said} = {value!r}; expected a whole number ≥ 1. The file may be incomplete.")
    return value


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return an end-token entry, one id or a list, as a tuple."""
    return _unique(value if isinstance(value, list) else [value])


def _unique(ids: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))


def _rope_from_config(config: Mapping[str, Any], name: str) -> Rope:
    values = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10000.0)
    try:
        return _scaled(kind, theta, values, int(config.get("max_position_embeddings", 0)), name)
    except KeyError as missing:
        raise ModelError(f"The configuration of {name} asks for {kind!r} rotary scaling but lacks {missing}.") from None


def _scaled(kind: str, theta: float, values: Mapping[str, Any], context: int, name: str) -> Rope:
    original = int(values.get("original_max_position_embeddings") or context)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", float(values["factor"]))
    if kind == "llama3":
        low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
        return Rope(theta, "llama3", float(values["factor"]), original, low, high)
    if kind == "yarn":
        return _yarn(theta, values, context, original)
    raise UnsupportedArchitecture(
        f"{name} uses {kind!r} rotary scaling; the native decoder has default, linear, llama3 and yarn. "
        f"{USE_TRANSFORMERS}"
    )


def _yarn(theta: float, values: Mapping[str, Any], context: int, original: int) -> Rope:
    factor = float(values.get("factor") or context / original)
    magnitude = values.get("attention_factor")
    if magnitude is None:
        scale, over = values.get("mscale"), values.get("mscale_all_dim")
        magnitude = _mscale(factor, scale) / _mscale(factor, over) if scale and over else _mscale(factor, 1.0)
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=bool(values.get("truncate", True)),
        magnitude=float(magnitude),
    )


def _mscale(factor: float, weight: float) -> float:
    # YaRN, arXiv 2309.00071, eq. 22: longer contexts flatten the softmax, this sharpens it again.
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class _GgufKeys:
    """The metadata of a GGUF file under its architecture's prefix."""

    file: GgufFile

    @property
    def family(self) -> str:
        return str(self.file.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any) -> Any:
        return self.file.metadata.get(f"{self.family}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        return _whole(self.get(key, default), f"{self.file.name} has {self.family}.{key}")

    def refuse_variants(self, head_dim: int) -> None:
        if (turned := self.get("rope.dimension_count", head_dim)) != head_dim:
            raise UnsupportedArchitecture(
                f"{self.file.name} turns {turned} of {head_dim} dimensions of each head; the native decoder turns all."
            )
        if (length := self.get("attention.value_length", head_dim)) != head_dim:
            raise UnsupportedArchitecture(
                f"{self.file.name} has values of {length} and keys of {head_dim} dimensions; the native decoder needs "
                "one size."
            )
        if experts := self.get("expert_count", 0):
            raise UnsupportedArchitecture(
                f"{self.file.name} is a mixture of {experts} experts, which the native decoder does not run."
            )


def _rope_from_gguf(keys: _GgufKeys, head_dim: int) -> Rope:
    theta = float(keys.get("rope.freq_base", 10000.0))
    if "rope_freqs.weight" in keys.file:
        divisors = tuple(keys.file.values("rope_freqs.weight"))
        if len(divisors) != head_dim // 2:
            raise ModelError(
                f"{keys.file.name}: rope_freqs.weight has {len(divisors)} values, expected {head_dim // 2}."
            )
        return Rope(theta, "divisors", divisors=divisors)
    kind = keys.get("rope.scaling.type", "none")
    values = {
        "factor": keys.get("rope.scaling.factor", 1.0),
        "attention_factor": keys.get("rope.scaling.attn_factor", None),
    }
    values["original_max_position_embeddings"] = keys.get("rope.scaling.original_context_length", None)
    return _scaled("default" if kind == "none" else kind, theta, values, keys.count("context_length"), keys.file.name)
