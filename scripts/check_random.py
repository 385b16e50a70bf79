"""Send random requests to one engine, up to 64 at once, and compare each text with plain decoding of the request alone.

Methods and sampling parameters are mixed; requests arrive and are cancelled at random; prompts share beginnings; a
small KV cache (--cache-tokens) makes the engine preempt. At the end no KV slot may be lost, and the second half of the
requests may not take more of a GPU's memory than the first. Prints a sentence for each difference, then a summary and,
as the last line, JSON. Exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from check_exact import METHODS, PROMPTS

import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
from specbranch import LLM, AsyncLLM, SamplingParams

TEMPLATES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logprobs": 3},
    {"temperature": 0.6, "logit_bias": {11: -3.0, 30: 2.0}, "min_tokens": 12},
    {"temperature": 0.0, "stop": (". ", "\n\n")},
    {"temperature": 1.0, "logprobs": 0, "ignore_eos": True},
)
CANCELLED = 0.08  # share of the requests that are cancelled while they run


def main() -> None:
    """Decode, compare and print."""
    given = _options()
    asked = {name: getattr(given, name) for name in ("pair", "target", "draft", "device", "executor")}
    names = {name: value for name, value in asked.items() if value is not None}
    kept = {"max_batch": given.together, "keep_experience": False}
    kept |= {"cache_tokens": given.cache_tokens} if given.cache_tokens else {}
    llm, rng = LLM(**names, method="specbranch", options=kept), random.Random(given.seed)
    kinds = list(_kinds(llm, rng, given.kinds, given.tokens))
    started = time.perf_counter()
    plain = llm.using("autoregressive")
    expected = [plain.generate([prompt], params)[0] for prompt, params in kinds]
    print(f"{len(kinds)} references, one at a time: {time.perf_counter() - started:.1f} s", flush=True)
    free, held = _free_slots(llm), list[int]()
    found: dict[str, int] = {"requests": 0, "cancelled": 0, "different": 0}
    started = time.perf_counter()
    engine = AsyncLLM(llm, max_batch=given.together)
    for _ in range(2):
        for name, count in _ask(engine, kinds, expected, rng, given.requests // 2, given.together).items():
            found[name] += count
        held.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    while engine.stats().running:
        time.sleep(0.01)
    preemptions = engine.stats().preemptions
    lost = {model: count - _free_slots(llm)[model] for model, count in free.items()}
    summary = {
        **found,
        "seconds": round(time.perf_counter() - started, 1),
        "kv_slots_lost": lost,
        "preemptions": preemptions,
        "memory_grown": held[1] - held[0],
    }
    engine.shut_down()
    print(f"{found['different']} of {found['requests']} texts differ; {found['cancelled']} requests were cancelled.")
    print(json.dumps(summary))
    sys.exit(1 if found["different"] or any(lost.values()) else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", help="a pair by name [the default one]")
    parser.add_argument("--target", help="a target, instead of a pair")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--device", help="cpu, cuda … [a GPU if there is one]")
    parser.add_argument("--executor", choices=("serial", "streams", "process"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kinds", type=int, default=250, help="different requests; each is sent several times [250]")
    parser.add_argument("--together", type=int, default=64, help="requests at once, at most [64]")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer, at most [48]")
    parser.add_argument("--cache-tokens", type=int, help="tokens that the KV cache holds: a small one makes it preempt")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _kinds(llm: LLM, rng: random.Random, count: int, tokens: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Yield requests: conversations, some behind a long common text, each with parameters of its own."""
    common = " ".join(PROMPTS) * 4
    for number in range(count):
        asked = rng.choice(PROMPTS)
        text = f"{common[: rng.randrange(1, 6) * 256]}\n\n{asked}" if rng.random() < 0.3 else asked
        prompt = llm.tokenizer.chat([{"role": "user", "content": text}])
        shaping = rng.choice(TEMPLATES)
        most = rng.randrange(shaping.get("min_tokens", 1), tokens + 1)
        yield prompt, SamplingParams(max_tokens=most, seed=number, **shaping)


def _ask(
    engine: AsyncLLM,
    kinds: list[tuple[list[int], SamplingParams]],
    expected: list[Any],
    rng: random.Random,
    count: int,
    together: int,
) -> dict[str, int]:
    """Send requests, some hundred in flight; returns how many were sent, were cancelled, and differ."""
    found = {"requests": 0, "cancelled": 0, "different": 0}
    flying: list[tuple[int, str, bool, Any]] = []
    for sent in range(count):
        number, method = rng.randrange(len(kinds)), rng.choice(METHODS)
        cancelled = rng.random() < CANCELLED
        flying.append((number, method, cancelled, engine.submit(*kinds[number], {"method": method})))
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)  # arrivals come in groups
        while len(flying) > rng.randrange(1, 2 * together) or (sent == count - 1 and flying):
            number, method, cancelled, submission = flying.pop(rng.randrange(len(flying)))
            found["requests"] += 1
            if cancelled:
                submission.cancel()
                found["cancelled"] += 1
            else:
                output = submission.result(timeout=600.0)
                found["different"] += not _is_same(output, expected[number], kinds[number][1], method)
        if sent % 200 == 199:
            print(f"{sent + 1} of {count} sent, {found['different']} differ", file=sys.stderr, flush=True)
    return found


def _is_same(output: Any, expected: Any, params: SamplingParams, method: str) -> bool:
    """True if an output is that of plain decoding alone."""
    wanted = expected.token_ids
    same = output.token_ids == wanted
    if same and params.logprobs is not None:
        same = [one.logprob for one in output.logprobs] == [one.logprob for one in expected.logprobs]
    if not same:
        print(f"{method} with {params}: {output.token_ids} instead of {wanted}; {output.error or output.finish_reason}")
    return same


def _free_slots(llm: LLM) -> dict[str, int]:
    """Return the free KV slots of each model that counts them; pages that only the prefix cache holds are free."""
    return {slots.model: slots.free for slots in llm.core.loop.executor.kv_slots()}


if __name__ == "__main__":
    main()
