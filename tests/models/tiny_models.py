"""Tiny random models of each family, made with transformers, and the logits transformers gives for them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specbranch.config import SamplingParams
from specbranch.core.request import Request
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT

GREEDY = Request(SamplingParams(), seed=0, prompt_length=0)

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # far from uniform, so that a wrong sign or position shows
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-llama3": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama-linear-biases": lambda: LlamaConfig(
        **SHAPE,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    ),
    "llama-yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=YARN),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None, head_dim=16),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
}
# layers that the compiled steps do not run: windows, sinks, bounded scores, experts
GEMMA = {**SHAPE, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3}
FURTHER = {
    "mistral-window": lambda: MistralConfig(**SHAPE, sliding_window=40, head_dim=16),
    "qwen2-window": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "gemma2": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA, sliding_window_pattern=2),
    "mixtral": lambda: MixtralConfig(**SHAPE, **EXPERTS),
    "mixtral-window": lambda: MixtralConfig(**SHAPE, **EXPERTS, sliding_window=40),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "qwen3-moe-some-dense": lambda: Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
    "smollm3": lambda: SmolLM3Config(**SHAPE, no_rope_layer_interval=2, pad_token_id=0),
    "gpt-oss": lambda: GptOssConfig(**SHAPE, head_dim=16, **EXPERTS, sliding_window=24),
}

DENSE = ("mistral-window", "qwen2-window", "gemma3", "smollm3")  # of these drafts can be made


def tiny(kind: str, seed: int = 0) -> PreTrainedModel:
    """Build a model of one kind."""
    return random_model({**CONFIGS, **FURTHER}[kind](), seed)


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Build a model; biases, norms and sinks are random too, where transformers would leave them at 0 and 1."""
    torch.manual_seed(seed)
    eager = config.model_type in ("gemma2", "gpt_oss")  # other attention leaves bounds and sinks out
    attention = {"attn_implementation": "eager"} if eager else {}
    # grouped products of experts know no float64
    model = AutoModelForCausalLM.from_config(config, **attention, experts_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")) or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model


def saved(model: PreTrainedModel, folder: Path, shards: bool = False) -> Path:
    """Save a model as a folder, whole or in several files."""
    model.save_pretrained(folder, max_shard_size="30KB" if shards else "1GB")
    return folder


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """Convert to float64 throughout; transformers' norms, routers and scales would round to float32 otherwise."""
    for module in model.double().modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = (_exact_gemma_norm if kind.startswith("Gemma") else _exact_norm).__get__(module)
        if kind in ("MixtralTopKRouter", "Qwen3MoeTopKRouter"):
            module.forward = _exact_router.__get__(module)
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    return model


def _exact_norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def _exact_gemma_norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (1 + norm.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)


def _exact_router(router: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(x.reshape(-1, router.hidden_dim), router.weight)
    best, ids = logits.softmax(-1).topk(router.top_k, dim=-1)
    if getattr(router, "norm_topk_prob", True):
        best = best / best.sum(-1, keepdim=True)
    return logits, best, ids


@contextmanager
def exact_softmax() -> Iterator[None]:
    """Within this context softmaxes stay in float64 where transformers asks for float32."""
    plain = torch.nn.functional.softmax

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return plain(x, dim=dim, dtype=None if x.dtype is torch.float64 else dtype)

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = plain


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """What transformers gives for a whole sequence [tokens, vocabulary]."""
    with exact_softmax():
        return model(torch.tensor([tokens])).logits[0]


def some_tokens(count: int, seed: int = 1) -> list[int]:
    """Random token ids."""
    return torch.randint(0, SHAPE["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def planted(rng: random.Random, line: Sequence[int]) -> tuple[Feed, list[int]]:
    """A line of tokens with garbage siblings, and their children, before and between; returns where the line lies."""
    tokens: list[int] = []
    parents: list[int] = []
    nodes: list[int] = []
    for token in line:
        above = nodes[-1] if nodes else ROOT
        for _ in range(rng.choice((0, 1, 2))):
            tokens.append(rng.randrange(SHAPE["vocab_size"]))
            parents.append(rng.choice([above, len(tokens) - 2] if len(tokens) > 1 else [above]))
        nodes.append(len(tokens))
        tokens.append(token)
        parents.append(above)
    return Feed(0, tuple(tokens), tuple(parents)), nodes
