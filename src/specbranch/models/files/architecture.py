"""The architecture of a model, from a config.json or from a GGUF header; no weights are read for it.

Owns the sizes, and the refusal of variants that the native decoder does not compute. What a family adds is read by its
file in `families/`. Invariant: the decoder can run every `Architecture` that exists, and ignores nothing of its
definition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from specbranch.errors import ModelError, UnsupportedArchitecture
from specbranch.file_values import MOST_CONTEXT_TOKENS, FileValues
from specbranch.gguf_header import GgufArray
from specbranch.models.families.family import Family, Traits
from specbranch.models.families.operations import LayerForm, is_plain, narrowed, within
from specbranch.models.families.rotary import FACTORS, THETAS, USE_TRANSFORMERS, Rope, rope_from_config, scaled_rope
from specbranch.models.families.table import FAMILIES, family_of_config, family_of_gguf
from specbranch.models.files.quantised.settings import EXPERT_METHODS, QUANTISATION_KEY, read_quantisation
from specbranch.models.files.rollback import refuse_if_cannot_roll_back

if TYPE_CHECKING:
    from specbranch.models.files.gguf_file import GgufFile

MOST_SIZE = 1 << 26  # largest dimension: far beyond any model, and the product of two does not overflow
SPECULATORS_TYPE, INDEPENDENT = "speculators_model_type", "independent"  # of a draft that is a plain model
DRAFT_VOCABULARY = "draft_vocab_size"  # tokens of a reduced head, in the same form
COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "context_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(Traits):
    """Shape and variant of a decoder."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rms_eps: float
    rope: Rope
    tied: bool
    context_length: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    # rows of the output head if it has more than the vocabulary; nothing reads the rows behind it
    head_rows_charged: int | None = None
    head_tokens: int | None = None  # tokens that a reduced head in the model's own file scores; None: all
    draft_window: int | None = None  # last positions that a row sees besides the first few; None: as the family says

    @property
    def head_rows(self) -> int:
        """The number of rows of the output head."""
        return self.head_rows_charged or self.vocabulary

    @property
    def window(self) -> int | None:
        """How many positions a row of the narrowest layer sees; None: all layers see everything."""
        return min((window for window in self.windows if window), default=None)

    def forms(self, positions: int) -> tuple[LayerForm, ...]:
        """Return what each layer computes in a context of so many positions; a window that covers them is none."""
        forms = self.of_family.layers(self, self.layers)
        if (window := self.draft_window) is not None:
            forms = tuple(narrowed(form, window) for form in forms)
        return tuple(within(form, positions) for form in forms)

    def with_draft_window(self, window: int | None) -> Architecture:
        """Return the architecture as a draft that sees `window` last positions; None: all.

        A window as long as the model's own context hides nothing that the model was made for, so it is none.
        """
        return self if window is None or window >= self.context_length else replace(self, draft_window=window)

    @property
    def of_family(self) -> Family:
        """The description of the family."""
        return FAMILIES[self.family]

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary tables that attention may turn by."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def embedding_scale(self) -> float | None:
        """The factor of looked-up embeddings; None: 1."""
        return math.sqrt(self.hidden) if self.of_family.scales_embedding else None

    def is_plain(self, positions: int) -> bool:
        """True if a context of so many positions computes what Llama computes, so that compiled steps may run it."""
        return is_plain(self.forms(positions)) and self.embedding_scale is None and self.logit_softcap is None

    def is_plain_but_for_draft_window(self, positions: int) -> bool:
        """True if `is_plain` holds, or would without the draft window."""
        return replace(self, draft_window=None).is_plain(positions)

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
        outer = FileValues(config, f"The configuration of {name}")
        inner = outer.group("text_config")  # of a model that also reads pictures, say
        family = family_of_config(inner.text("model_type", outer.text("model_type", "")), name)
        values = FileValues({**family.defaults, **_text_part(outer, inner)}, outer.name)
        _refuse_variants(values, family, name)
        heads, hidden = _count(values, "num_attention_heads"), _count(values, "hidden_size")
        context = values.count("max_position_embeddings", most=MOST_CONTEXT_TOKENS)
        return cls(
            name=name,
            family=family.name,
            layers=_count(values, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=_count(values, "num_key_value_heads", heads),
            head_dim=_count(values, "head_dim", max(hidden // heads, 1)),
            intermediate=_count(values, "intermediate_size"),
            vocabulary=_count(values, "vocab_size"),
            rms_eps=values.number("rms_norm_eps", 1e-6, 0.0, 1.0),
            rope=rope_from_config(_global_rotation(values), context, name, family.theta),
            tied=values.flag("tie_word_embeddings", False),
            context_length=context,
            eos_ids=values.ids("eos_token_id") or outer.ids("eos_token_id"),
            bos_id=next(iter(values.ids("bos_token_id")), None),
            head_tokens=_head_tokens(values),
            **_named(family.traits(values, name)),
        )

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Self:
        """Read the header of a GGUF file."""
        stated = str(file.metadata.get("general.architecture", "unknown"))
        refuse_if_cannot_roll_back({"model_type": stated}, 0, file.name)
        family = family_of_gguf(stated, file.name)
        values = _below(file, f"{stated}.")
        heads, hidden = _count(values, "attention.head_count"), _count(values, "embedding_length")
        head_dim = _count(values, "attention.key_length", max(hidden // heads, 1))
        _refuse_gguf_variants(values, head_dim)
        shown = Traits(
            qkv_bias="blk.0.attn_q.bias" in file,
            out_bias="blk.0.attn_output.bias" in file,
            mlp_bias="blk.0.ffn_gate.bias" in file,
            qk_norm="blk.0.attn_q_norm.weight" in file,
        )
        traits = family.gguf_traits(values, shown)
        _refuse_experts(values, traits)
        tokenizer = _below(file, "tokenizer.ggml.")
        return cls(
            name=file.name,
            family=family.name,
            layers=_count(values, "block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=_count(values, "attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=_count(values, "feed_forward_length"),
            vocabulary=_count(values, "vocab_size", _length_of(tokenizer, "tokens")),
            rms_eps=values.number("attention.layer_norm_rms_epsilon", 1e-6, 0.0, 1.0),
            rope=_rope_from_gguf(file, values, head_dim, family.theta),
            tied="output.weight" not in file,
            context_length=values.count("context_length", most=MOST_CONTEXT_TOKENS),
            eos_ids=tuple(dict.fromkeys((*tokenizer.ids("eos_token_id"), *tokenizer.ids("eot_token_id")))),
            bos_id=next(iter(tokenizer.ids("bos_token_id")), None),
            **_named(traits),
        )

    def choose_context(self, asked: int | None, most: int = 8192, shorten: bool = False) -> int:
        """Return the context length to use: `asked` if the model allows it; None: the model's own, up to `most`.

        `shorten`: cut `asked` to the model's own instead of refusing it. With a draft window no distance gets longer
        than the model knows, except to the first positions, so the context may.
        """
        if self.draft_window is not None and asked is not None:
            return asked
        # Where every layer has a window, compiled steps run within it only: the default stays inside.
        widest = max((window or self.context_length for window in self.windows), default=self.context_length)
        own = min(self.context_length, widest)
        if asked is None:
            return min(own, most)
        if shorten:
            asked = min(asked, own)
        if not 1 <= asked <= self.context_length:
            raise ModelError(f"context_length is {asked}; {self.name} was made for 1 to {self.context_length} tokens.")
        return asked


def _named(traits: Traits) -> dict[str, Any]:
    """Return traits by name, to make an architecture with."""
    return {field.name: getattr(traits, field.name) for field in fields(Traits)}


def _text_part(outer: FileValues, inner: FileValues) -> Mapping[str, Any]:
    """Return the configuration of the text model; a model of several kinds of input has it in a group."""
    stored = {"quantization_config": outer.get("quantization_config")}
    return {**inner.values, **stored} if inner.values else outer.values


def _global_rotation(values: FileValues) -> FileValues:
    """Return the values with the rotary parameters of layers without a window, where each kind of layer has its own."""
    own = values.group("rope_parameters").group("full_attention").values
    return FileValues({**values.values, "rope_parameters": own}, values.name) if own else values


def _refuse_variants(values: FileValues, family: Family, name: str) -> None:
    """Refuse variants of known families that this decoder does not compute."""
    stated = values.text(family.activation_key, values.text("hidden_act", family.activations[0]))
    if stated not in family.activations:
        raise UnsupportedArchitecture(
            f"{name} uses the activation {stated!r}; the native decoder has {family.activations[0]} for the family "
            f"{family.name}. {USE_TRANSFORMERS}"
        )
    whole = values.number("partial_rotary_factor", 1.0, 0.0, 1.0)
    if (part := values.group("rope_parameters").number("partial_rotary_factor", whole, 0.0, 1.0)) != 1.0:
        raise UnsupportedArchitecture(
            f"{name} turns only {part} of each head by position; the native decoder turns all. {USE_TRANSFORMERS}"
        )
    if (kind := values.text(SPECULATORS_TYPE, INDEPENDENT)) != INDEPENDENT:
        raise UnsupportedArchitecture(
            f"{name} is a draft of kind {kind!r}, which reads its target's hidden states; SpecBranch runs those of "
            "kind 'eagle3', given as a folder by --draft. Give another draft, or make one with `specbranch distill`."
        )
    method = values.group(QUANTISATION_KEY).text("quant_method", "")
    if method in EXPERT_METHODS and method not in family.quantised_as:
        raise UnsupportedArchitecture(
            f"{name} is stored in {method!r} quantisation, which is read for gpt-oss only. {USE_TRANSFORMERS}"
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


def _below(file: GgufFile, prefix: str) -> FileValues:
    """Return the metadata of a GGUF file under a prefix."""
    below = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    return FileValues(below, file.name, prefix)


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


def _refuse_experts(values: FileValues, traits: Traits) -> None:
    """Refuse a GGUF file with experts whose family has none here."""
    if traits.experts is None and (experts := values.count("expert_count", 0, least=0, most=MOST_SIZE)):
        raise UnsupportedArchitecture(
            f"{values.name} is a mixture of {experts} experts, which the native decoder does not run for its family. "
            f"{USE_TRANSFORMERS}"
        )


def _rope_from_gguf(file: GgufFile, values: FileValues, head_dim: int, theta: float) -> Rope:
    theta = values.number("rope.freq_base", theta, *THETAS)
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
    return scaled_rope("default" if kind == "none" else kind, theta, scaling, context, file.name)
