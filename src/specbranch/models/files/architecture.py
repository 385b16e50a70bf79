"""The architecture of a model, from a config.json or from a GGUF header; no weights are read for it.

Owns the parsing of both, and the refusal of variants that the native decoder does not compute. Invariant: the decoder
can run every `Architecture` that exists, and ignores nothing of its definition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from specbranch.errors import ModelError, UnsupportedArchitecture
from specbranch.file_values import MOST_CONTEXT_TOKENS, FileValues
from specbranch.gguf_header import GgufArray
from specbranch.models.files.quantised.settings import read_quantisation
from specbranch.models.files.rollback import active_window, refuse_if_cannot_roll_back

if TYPE_CHECKING:
    from specbranch.models.files.gguf_file import GgufFile

__all__ = ["Architecture", "Family", "Rope", "refuse_if_cannot_roll_back"]

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors"]
USE_TRANSFORMERS = "Load it with runner='transformers'."
MOST_SIZE = 1 << 26  # largest dimension: far beyond any model, and the product of two does not overflow
THETAS = (2.0, 1e15)  # bases of rotary positions
FACTORS = (1e-6, 1e6)  # range of scaling factors
SPECULATORS_TYPE, INDEPENDENT = "speculators_model_type", "independent"  # of a draft that is a plain model
DRAFT_VOCABULARY = "draft_vocab_size"  # tokens of a reduced head, in the same form
COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "context_length")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: the base θ, and how its frequencies are scaled to longer contexts."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn: context length before scaling
    low_freq: float = 1.0  # llama3: below this many turns per original context `factor` divides a frequency
    high_freq: float = 4.0  # llama3: above this many turns a frequency stays as it is
    beta_fast: float = 32.0  # yarn: the same two bounds
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: bounds rounded outwards to whole dimensions
    magnitude: float = 1.0  # yarn: factor of cos and sin
    divisors: tuple[float, ...] = ()  # one for each frequency, as GGUF stores llama3 scaling
    times: int = 1  # how often each frequency is repeated, for heads that are this many times larger


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
    # rows of the output head if it has more than the vocabulary; nothing reads the rows behind it
    head_rows_charged: int | None = None
    head_tokens: int | None = None  # tokens that a reduced head in the model's own file scores; None: all

    @property
    def head_rows(self) -> int:
        """The number of rows of the output head."""
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
        values = FileValues(config, f"The configuration of {name}")
        family = _known_family(values.text("model_type", ""), name)
        _refuse_variants(values, name)
        heads, hidden = _count(values, "num_attention_heads"), _count(values, "hidden_size")
        attention_bias = family != "mistral" and values.flag("attention_bias", False)
        context = values.count("max_position_embeddings", most=MOST_CONTEXT_TOKENS)
        return cls(
            name=name,
            family=family,
            layers=_count(values, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=_count(values, "num_key_value_heads", heads),
            head_dim=_count(values, "head_dim", max(hidden // heads, 1)),
            intermediate=_count(values, "intermediate_size"),
            vocabulary=_count(values, "vocab_size"),
            rms_eps=values.number("rms_norm_eps", 1e-6, 0.0, 1.0),
            rope=_rope_from_config(values, context, name),
            qkv_bias=family == "qwen2" or attention_bias,
            out_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and values.flag("mlp_bias", False),
            qk_norm=family == "qwen3",
            tied=values.flag("tie_word_embeddings", False),
            context_length=context,
            window=active_window(config, name),
            eos_ids=values.ids("eos_token_id"),
            bos_id=next(iter(values.ids("bos_token_id")), None),
            head_tokens=_head_tokens(values),
        )

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Self:
        """Read the header of a GGUF file."""
        family = str(file.metadata.get("general.architecture", "unknown"))
        refuse_if_cannot_roll_back({"model_type": family}, 0, file.name)
        family = _known_family(family, file.name)
        values = _of_architecture(file, family)
        heads, hidden = _count(values, "attention.head_count"), _count(values, "embedding_length")
        head_dim = _count(values, "attention.key_length", max(hidden // heads, 1))
        _refuse_gguf_variants(values, head_dim)
        tokenizer = _below(file, "tokenizer.ggml.")
        return cls(
            name=file.name,
            family=family,
            layers=_count(values, "block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=_count(values, "attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=_count(values, "feed_forward_length"),
            vocabulary=_count(values, "vocab_size", _length_of(tokenizer, "tokens")),
            rms_eps=values.number("attention.layer_norm_rms_epsilon", 1e-6, 0.0, 1.0),
            rope=_rope_from_gguf(file, values, head_dim),
            qkv_bias="blk.0.attn_q.bias" in file,
            out_bias="blk.0.attn_output.bias" in file,
            mlp_bias="blk.0.ffn_gate.bias" in file,
            qk_norm="blk.0.attn_q_norm.weight" in file,
            tied="output.weight" not in file,
            context_length=values.count("context_length", most=MOST_CONTEXT_TOKENS),
            window=values.count("attention.sliding_window", 0, least=0, most=MOST_CONTEXT_TOKENS) or None,
            eos_ids=tuple(dict.fromkeys((*tokenizer.ids("eos_token_id"), *tokenizer.ids("eot_token_id")))),
            bos_id=next(iter(tokenizer.ids("bos_token_id")), None),
        )

    def choose_context(self, asked: int | None, most: int = 8192, shorten: bool = False) -> int:
        """Return the context length to use: `asked` if the model allows it; None: the model's own, up to `most`.

        `shorten`: cut `asked` to the model's own instead of refusing it.
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


def _refuse_variants(values: FileValues, name: str) -> None:
    """Refuse variants of known families that this decoder does not compute."""
    if (activation := values.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedArchitecture(
            f"{name} uses the activation {activation!r}; the native decoder has silu only. {USE_TRANSFORMERS}"
        )
    whole = values.number("partial_rotary_factor", 1.0, 0.0, 1.0)
    if (part := values.group("rope_parameters").number("partial_rotary_factor", whole, 0.0, 1.0)) != 1.0:
        raise UnsupportedArchitecture(
            f"{name} turns only {part} of each head by position; the native decoder turns all. {USE_TRANSFORMERS}"
        )
    if (kind := values.text(SPECULATORS_TYPE, INDEPENDENT)) != INDEPENDENT:
        raise UnsupportedArchitecture(
            f"{name} is a draft of kind {kind!r}, which reads its target's hidden states; SpecBranch runs drafts that "
            "are models of their own. Give another draft, or make one with `specbranch distill`."
        )
    read_quantisation(values)  # refuses unknown kinds


def _head_tokens(values: FileValues) -> int | None:
    """Return how many tokens a reduced head scores; None if it scores all."""
    vocabulary = _count(values, "vocab_size")
    kept = values.count(DRAFT_VOCABULARY, vocabulary, most=vocabulary)
    return None if kept == vocabulary else kept


def _count(values: FileValues, key: str, default: int | None = None) -> int:
    """Return one of a model's dimensions."""
    return values.count(key, default, most=MOST_SIZE)


def _rope_from_config(values: FileValues, context: int, name: str) -> Rope:
    scaling = values.group("rope_scaling")
    scaling = scaling if scaling.values else values.group("rope_parameters")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    theta = scaling.number("rope_theta", values.number("rope_theta", 10000.0, *THETAS), *THETAS)
    return _scaled(kind, theta, scaling, context, name)


def _scaled(kind: str, theta: float, scaling: FileValues, context: int, name: str) -> Rope:
    original = scaling.count("original_max_position_embeddings", context, most=MOST_CONTEXT_TOKENS)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", scaling.number("factor", None, *FACTORS))
    if kind == "llama3":
        low, high = (scaling.number(f"{end}_freq_factor", None, *FACTORS) for end in ("low", "high"))
        if low >= high:
            scaling.refuse("high_freq_factor", f"more than low_freq_factor, {low}")
        return Rope(theta, "llama3", scaling.number("factor", None, *FACTORS), original, low, high)
    if kind == "yarn":
        return _yarn(theta, scaling, context, original)
    raise UnsupportedArchitecture(
        f"{name} uses {kind!r} rotary scaling; the native decoder has default, linear, llama3 and yarn. "
        f"{USE_TRANSFORMERS}"
    )


def _yarn(theta: float, scaling: FileValues, context: int, original: int) -> Rope:
    factor = scaling.number("factor", context / original, *FACTORS)
    scale, over = (scaling.number(key, 0.0, 0.0, FACTORS[1]) for key in ("mscale", "mscale_all_dim"))
    usual = _mscale(factor, scale) / _mscale(factor, over) if scale and over else usual_magnitude(factor)
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0, *FACTORS),
        beta_slow=scaling.number("beta_slow", 1.0, *FACTORS),
        truncate=scaling.flag("truncate", True),
        magnitude=scaling.number("attention_factor", usual, *FACTORS),
    )


def usual_magnitude(factor: float) -> float:
    """Return YaRN's factor of cos and sin if no other one is set."""
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    # YaRN, arXiv 2309.00071, eq. 22: longer contexts flatten the softmax, this sharpens it again.
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _below(file: GgufFile, prefix: str) -> FileValues:
    """Return the metadata of a GGUF file under a prefix."""
    below = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    return FileValues(below, file.name, prefix)


def _of_architecture(file: GgufFile, family: str) -> FileValues:
    return _below(file, f"{family}.")


def _length_of(values: FileValues, key: str) -> int | None:
    """Return the length of a list, None if there is none; long lists stay in the file as a GgufArray."""
    value = values.get(key)
    return len(value) if isinstance(value, GgufArray) else len(values.items(key)) or None


def _refuse_gguf_variants(values: FileValues, head_dim: int) -> None:
    if (turned := _count(values, "rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedArchitecture(
            f"{values.name} turns {turned} of {head_dim} dimensions of each head; the native decoder turns all."
        )
    if (length := _count(values, "attention.value_length", head_dim)) != head_dim:
        raise UnsupportedArchitecture(
            f"{values.name} has values of {length} and keys of {head_dim} dimensions; the native decoder needs one "
            "size."
        )
    if experts := values.count("expert_count", 0, least=0, most=MOST_SIZE):
        raise UnsupportedArchitecture(
            f"{values.name} is a mixture of {experts} experts, which the native decoder does not run."
        )


def _rope_from_gguf(file: GgufFile, values: FileValues, head_dim: int) -> Rope:
    theta = values.number("rope.freq_base", 10000.0, *THETAS)
    if "rope_freqs.weight" in file:
        divisors = tuple(file.values("rope_freqs.weight"))
        if len(divisors) != head_dim // 2 or not all(0.0 < one < math.inf for one in divisors):
            raise ModelError(f"{file.name}: rope_freqs.weight is not {head_dim // 2} positive numbers. Fetch it again.")
        return Rope(theta, "divisors", divisors=divisors)
    kind = values.text("rope.scaling.type", "none")
    as_config = {
        "factor": values.number("rope.scaling.factor", 1.0, *FACTORS),
        "attention_factor": values.get("rope.scaling.attn_factor"),
        "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
    }
    scaling = FileValues(as_config, values.name, f"{values.prefix}rope.scaling.")
    context = values.count("context_length", most=MOST_CONTEXT_TOKENS)
    return _scaled("default" if kind == "none" else kind, theta, scaling, context, file.name)
