"""A GPU's step: through all layers a row has the same bits alone, among others, behind siblings and in any slot.

By kernels in half precision; in float32 by torch's products, whose width is pinned.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from specbranch.config import SamplingParams
from specbranch.core.orders import Context, Verify
from specbranch.core.request import Request
from specbranch.core.runner import Feed, Trial
from specbranch.core.slots import ROOT
from specbranch.models.gpu.kernel_step import KernelStep
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from tiny_models import GREEDY, planted, some_tokens

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 384,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.1}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=128),
}


HALF = [(kind, dtype) for kind in CONFIGS for dtype in ("bfloat16", "float16")]


@pytest.fixture(scope="module", params=[*HALF, ("biases", "float32"), ("qwen3", "float32")], ids="-".join)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    kind, dtype = request.param
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.0))
    folder = Path(tmp_path_factory.mktemp(kind))
    model.save_pretrained(folder)
    made = load_native(folder, context_length=2000, device="cuda", dtype=dtype, cache_tokens=700 * 256)
    assert isinstance(made.graphs.step, KernelStep) == (dtype != "float32")  # type: ignore[attr-defined]
    return made


@pytest.fixture
def runner(loaded: NativeRunner) -> Iterator[NativeRunner]:
    """One model for many tests; what a failed one left open is closed."""
    yield loaded
    for seq in list(loaded.sequences):
        loaded.close(seq)


def bits(rows: list[Any]) -> torch.Tensor:
    return torch.stack([row.logits for row in rows]).cpu()


@pytest.mark.parametrize("prefix", [1, 20, 250, 700, 1000, 1016])
def test_a_row_has_the_same_bits_in_any_batch(prefix: int, runner: NativeRunner) -> None:
    line, text = some_tokens(30, seed=9), some_tokens(prefix)
    for seq in range(6):
        runner.open(seq, GREEDY)
        runner.extend(seq, text if seq < 3 else some_tokens(100 * seq, seed=seq))
    alone = []
    for token in line:
        alone += runner.score([Feed(0, (token,), (ROOT,))])[0]
        runner.keep(0, (0,), 1)
    expected = bits(alone)
    chain = Feed(1, tuple(line), tuple(range(ROOT, 29)))
    assert torch.equal(bits(runner.score([chain])[0]), expected)
    runner.keep(1, (), 0)
    others = [Feed(seq, (1, 2, 3), (ROOT, 0, 0)) for seq in (3, 4, 5)]
    assert torch.equal(bits(runner.score([others[0], chain, *others[1:]])[1]), expected)
    feed, nodes = planted(random.Random(prefix), line)
    rows = runner.score([Feed(2, feed.tokens, feed.parents)])[0]
    assert torch.equal(bits([rows[node] for node in nodes]), expected)
    runner.keep(2, nodes[:20], 20)
    assert torch.equal(bits(runner.score([Feed(2, tuple(line[20:]), tuple(range(ROOT, 9)))])[0]), expected[20:])
    for seq in range(6):
        runner.close(seq)


@pytest.mark.parametrize("count", [40, 64, 130, 300])
def test_a_row_has_the_same_bits_among_many(count: int, runner: NativeRunner) -> None:
    """Every row has a sequence of its own; some of them hold what is no number."""
    texts = [some_tokens(3 + 5 * (seq % 60), seed=seq) for seq in range(count)]
    for seq, text in enumerate(texts):
        runner.open(seq, GREEDY)
        runner.extend(seq, text)
    runner.flush()
    torch.cuda.synchronize()
    runner.memory.data[runner.sequences[1].table.pages[0], :, :, :, 0] = float("nan")
    feeds = [Feed(seq, (seq % 300,), (ROOT,)) for seq in range(count)]
    alone = [runner.score([feed])[0][0] for feed in feeds if feed.seq % 17 == 0]
    for seq in range(count):
        runner.keep(seq, (), 0)
    among = [rows[0] for rows in runner.score(feeds)]
    assert torch.equal(bits(among[::17]), bits(alone))
    assert among[1].logits.isnan().all() and not bits(among[::17]).isnan().any()
    for seq in range(count):
        runner.close(seq)
    runner.memory.data.nan_to_num_(0.0)
    torch.cuda.synchronize()  # the runner has a stream of its own


@pytest.mark.parametrize("shaping", [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3}], ids=str)
def test_a_token_is_chosen_alike_in_any_batch(shaping: dict[str, float], runner: NativeRunner) -> None:
    """In a graph, and behind it where another request's logits are shaped."""
    text, line = some_tokens(50), some_tokens(12, seed=3)
    said = []
    for others in ({}, {"top_p": 0.9}, {"logprobs": 2}):
        for seq, params in enumerate((shaping, {"temperature": 1.0, **others})):
            runner.open(seq, Request(SamplingParams(**params), 5, len(text)))
            runner.extend(seq, text[:-1])
        feeds = [Feed(seq, (text[-1], *line), tuple(range(ROOT, len(line)))) for seq in range(2 if others else 1)]
        trials = [
            Trial(feed.seq, Verify(Context(0, tuple(text)), tuple(line)), 0, tuple(range(1, 13)), logprobs=None)
            for feed in feeds
        ]
        said.append(runner.verify(feeds, trials)()[0])
        for seq in range(2):
            runner.close(seq)
    assert said[0] == said[1] == said[2]


def test_tokens_of_far_positions_have_the_same_bits(tmp_path: Path) -> None:
    """Behind 32,000 tokens, where a text has hundreds of blocks."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**{**SIZES, "max_position_embeddings": 33000, "num_hidden_layers": 2})
    )
    model.save_pretrained(tmp_path)
    runner = load_native(tmp_path, context_length=32900, device="cuda")
    line = some_tokens(20, seed=9)
    for seq in range(2):
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(32000))
    expected = []
    for token in line:
        expected += runner.score([Feed(0, (token,), (ROOT,))])[0]
        runner.keep(0, (0,), 1)
    feed, nodes = planted(random.Random(1), line)
    rows = runner.score([Feed(1, feed.tokens, feed.parents)])[0]
    assert torch.equal(bits([rows[node] for node in nodes]), bits(expected))


def test_bits_differ_where_a_token_differs(runner: NativeRunner) -> None:
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(40))
    rows = runner.score([Feed(0, (1, 2, 5, 5), (ROOT, ROOT, 0, 1))])[0]
    runner.close(0)
    assert not torch.equal(rows[2].logits, rows[3].logits)
