"""The default model for real: SmolLM2-135M-Instruct in float32 says what transformers says, with every method.

Every method also says the same with other weights. Float32 sums in another order move logits by about 1e-5. So a first
divergence from transformers is allowed at a closer tie than `NEAR_LOGITS`, at most once in 10,000 tokens, and is
printed. Our own methods agree exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specbranch import LLM, SamplingParams
from specbranch.config import WeightsName
from specbranch.core.methods import METHODS
from specbranch.core.request import Request
from specbranch.lab.recheck.compare import NEAR_LOGITS
from specbranch.lab.recheck.repeat import margin

pytestmark = [pytest.mark.default_model, pytest.mark.slow]

QUESTIONS = [
    "Why is the sky blue?",
    "Write a haiku about a lighthouse in winter.",
    "Explain to a child how a bicycle stays upright.",
    "List five uses of a paper clip.",
    "Write a Python function that reverses the words of a sentence.",
    "A train leaves at nine and travels 120 km in two hours. How fast is it?",
    "Translate into French: The cat sleeps on the warm stone.",
    "What is the difference between weather and climate?",
    "Give me a recipe for lentil soup.",
    "Who wrote Don Quixote, and what is it about?",
]
OPENINGS = [
    "Once upon a time there was a clockmaker who",
    "def fibonacci(n):\n    ",
    "The three most important things in a contract are",
    "In the year 1969",
    "SELECT name, age FROM people WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "The capital of Portugal is Lisbon. The capital of Spain is Madrid. The capital of Italy is",
    "It was the best of days; it was the",
]
TOKENS = 128


def long_text(llm: LLM, length: int) -> list[int]:
    """A prompt of exactly `length` tokens: a log book that goes on and on."""
    days = (
        f"Day {day}: wind from the {'north' if day % 3 else 'south-west'}, {day * 7 % 31} knots, lamp lit at "
        f"{day % 5 + 4}."
        for day in range(900)
    )
    ids = llm.tokenizer.encode("\n".join(days))
    assert len(ids) >= length
    return ids[:length]


@pytest.fixture(scope="module")
def plain(default_model: Path) -> Iterator[LLM]:
    with LLM(method="autoregressive", device="cpu", options={"weights": "float32"}) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(default_model: Path) -> Any:
    """The same file, read and run by transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    ).eval()


def prompts(llm: LLM) -> list[list[int]]:
    chats = [llm.tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [
        *chats,
        *(llm.tokenizer.encode(opening) for opening in OPENINGS),
        long_text(llm, 4096 - TOKENS),  # attention in transformers takes minutes for the whole context of 8,192
    ]


def near_tie(llm: LLM, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    """Whether two answers first differ at a tie; prints it."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    request = Request(SamplingParams(), 0, len(prompt))
    apart = margin(llm, [*prompt, *ours[:at]], request, ours[at], theirs[at])
    print(f"first divergence at token {at}: {ours[at]} or {theirs[at]}, {apart:.1e} logits apart")
    return abs(apart) < NEAR_LOGITS


def test_greedy_answers_equal_those_of_transformers(plain: LLM, reference: Any) -> None:
    """What transformers would choose after every token of our answers is the next one, so its own greedy answers are
    ours."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    asked = prompts(plain)
    assert len(asked) == 20 and len(asked[-1]) > 3900
    ties = 0
    for prompt in asked:
        ours = list(plain.generate([prompt], params)[0].token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *ours[:-1]]]), logits_to_keep=TOKENS).logits[0]
        theirs = logits.argmax(-1).tolist()
        if ours != theirs:
            assert near_tie(plain, prompt, ours, theirs)
            ties += 1
    print(f"{ties} near-ties in {len(asked) * TOKENS} tokens")
    assert ties <= 1


@pytest.mark.parametrize("number", range(3))
def test_generate_of_transformers_gives_our_greedy_answers(number: int, plain: LLM, reference: Any) -> None:
    prompt = prompts(plain)[number]
    ours = list(plain.generate([prompt], SamplingParams(max_tokens=TOKENS, ignore_eos=True))[0].token_ids)
    length = torch.ones(1, len(prompt))
    ending = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = reference.generate(torch.tensor([prompt]), attention_mask=length, max_new_tokens=TOKENS, **ending)
    theirs = out[0, len(prompt) :].tolist()
    assert ours == theirs or near_tie(plain, prompt, ours, theirs)


def test_lookahead_gives_the_tokens_of_plain_decoding_in_fewer_forwards(plain: LLM) -> None:
    prompt = plain.tokenizer.chat([{"role": "user", "content": "Count from one to forty in words, one number a line."}])
    params = SamplingParams(max_tokens=48, seed=1, ignore_eos=True)
    small = {"method": "lookahead", "lookahead_window": 5, "lookahead_ngram": 4, "lookahead_candidates": 5}
    answer, expected = (llm.generate([prompt], params)[0] for llm in (plain.using(speculative=small), plain))
    assert answer.token_ids == expected.token_ids
    assert answer.stats["accepted"] > 4 and answer.stats["target_forwards"] < 44


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_lookup_gives_the_tokens_of_plain_decoding(temperature: float, plain: LLM) -> None:
    text = "The keeper lit the lamp. The keeper wound the clock. The keeper wrote the log. "
    prompt = plain.tokenizer.chat([{"role": "user", "content": f"Repeat this three times: {text * 3}"}])
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=100, ignore_eos=True)
    with LLM(method="lookup", device="cpu", options={"weights": "float32"}) as llm:
        answer = llm.generate([prompt], params)[0]
    expected = plain.generate([prompt], params)[0]
    assert answer.token_ids == expected.token_ids
    assert answer.stats["drafted"] > 0


@pytest.mark.parametrize("executor", ["serial", "process"])
@pytest.mark.parametrize(
    "method", [*(name for name, method in METHODS.items() if method.needs_draft), "specbranch:confidence"]
)
def test_drafting_methods_give_the_tokens_of_plain_decoding(method: str, executor: str, plain: LLM, half: str) -> None:
    method, _, policy = method.partition(":")
    settings = {"num_speculative_tokens": 3, "stop_below": 0.3, "policy": policy or None}
    with LLM(
        "smollm2-135m",
        half,
        method,
        executor=executor,
        device="cpu",
        options={"weights": "float32", "context_length": 512},
        speculative=settings,
    ) as llm:
        for temperature in (0.0, 0.7, 1.3):
            params = SamplingParams(temperature=temperature, seed=2, max_tokens=20, ignore_eos=True)
            prompt = llm.tokenizer.chat([{"role": "user", "content": QUESTIONS[0]}])
            answer, expected = llm.generate([prompt], params)[0], plain.generate([prompt], params)[0]
            assert answer.token_ids == expected.token_ids
            # this draft is dear: a planner may leave it
            assert answer.stats["drafted"] > 0 or METHODS[method].plans(llm.config)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("method", ["tree", "specbranch"])
def test_trees_give_the_tokens_of_plain_decoding(method: str, temperature: float, plain: LLM, half: str) -> None:
    """Planned by a profile in which drafting pays, so that trees are drafted, verified and re-rooted; decisions and
    tokens are real."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    with LLM(
        "smollm2-135m",
        half,
        method,
        options={"clock": "c10", "weights": "float32", "context_length": 512},
        device="cpu",
    ) as llm:
        prompt = llm.tokenizer.chat([{"role": "user", "content": QUESTIONS[0]}])
        answer, expected = llm.generate([prompt], params)[0], plain.generate([prompt], params)[0]
    assert answer.token_ids == expected.token_ids
    assert answer.stats["rollback"]["tree_siblings"] > 0 and answer.stats["accepted"] > 0


@pytest.mark.parametrize("method", ["speculative", "pearl", "tree", "specbranch"])
@pytest.mark.parametrize("weights", ["stored", "int8", "bfloat16"])
def test_stored_weights_have_a_text_of_their_own_and_every_method_gives_it(
    weights: WeightsName, method: str, default_model: Path
) -> None:
    with LLM(method=method, options={"weights": weights, "context_length": 512}, device="cpu") as llm:
        own = llm.using("autoregressive")
        for temperature in (0.0, 0.7, 1.3):
            params = SamplingParams(temperature=temperature, seed=2, max_tokens=30, ignore_eos=True)
            prompt = llm.tokenizer.chat([{"role": "user", "content": QUESTIONS[0]}])
            answer, expected = llm.generate([prompt], params)[0], own.generate([prompt], params)[0]
            assert answer.token_ids == expected.token_ids
    assert llm.weights == weights


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_small_caches_have_a_text_of_their_own_and_every_method_gives_it(cache_dtype: str, default_model: Path) -> None:
    with LLM(method="specbranch", options={"cache_dtype": cache_dtype, "context_length": 512}, device="cpu") as llm:
        prompt = llm.tokenizer.chat([{"role": "user", "content": QUESTIONS[0]}])
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=2, max_tokens=30, ignore_eos=True)
            expected = llm.using("autoregressive").generate([prompt], params)[0]
            for method in ("speculative", "pearl", "tree", "specbranch", "lookup"):
                assert llm.using(method).generate([prompt], params)[0].token_ids == expected.token_ids, method


@pytest.fixture(scope="module")
def half(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft from the target itself: the same model without a few of its layers, as a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("half")
    model = AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.bfloat16
    )
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList([*layers[:12], *layers[16:]])
    model.config.num_hidden_layers = len(model.model.layers)
    model.hf_quantizer = None  # the weights are plain numbers by now
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name).save_pretrained(folder)
    return str(folder)
