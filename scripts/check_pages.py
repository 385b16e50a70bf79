"""Send many requests of every kind to one engine with little memory, and cancel some; check that all KV pages are
freed. Last line: JSON.

Methods, temperatures and lengths are mixed, and the KV caches are so small that requests are preempted. The script
exits with 1 if pages and requests disagree, a page is missing at the end, or a text differs from plain decoding. It
also does if resident memory increases from the second quarter to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from check_exact import METHODS, PROMPTS, SHAPINGS

from specbranch import LLM, AsyncLLM, SamplingParams
from specbranch.answer import Output
from specbranch.core.runner import Runner

MOST_GROWN = 0.02  # of resident memory
SHAPED = ("0", "0.7", "shaped")
Asked = tuple[str, str, int]  # prompt, shaping, longest answer


@dataclass(slots=True)
class Found:
    """The results so far."""

    over: int = 0
    cancelled: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)  # resident, after each request


def main() -> None:
    """Send requests, check pages, and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pair", help="a pair by name [the default one]")
    options.add_argument("--device", default="cpu")
    options.add_argument("--executor", default="serial", choices=("serial", "streams", "process"))
    options.add_argument("--requests", type=int, default=300)
    options.add_argument("--together", type=int, default=8, help="requests at once")
    options.add_argument("--cache-tokens", type=int, default=1536, help="places for all requests together")
    given = options.parse_args()
    llm = LLM(
        pair=given.pair,
        device=given.device,
        executor=given.executor,
        options={"keep_experience": False, "context_length": 768, "cache_tokens": given.cache_tokens},
    )
    asked = [(prompt, shaping, tokens) for prompt in PROMPTS[:4] for shaping in SHAPED for tokens in (8, 48)]
    expected = {one: plainly(llm, one) for one in asked}
    found, counts = asyncio.run(sent(llm, given.requests, given.together, expected))
    quarter = -(-len(found.megabytes) // 4)
    grown = median(found.megabytes[-quarter:]) / median(found.megabytes[quarter : 2 * quarter]) - 1.0
    if grown > MOST_GROWN:
        found.faults.append(f"resident memory grew by {grown:.1%} from the second quarter to the last")
    print("\n".join(found.faults) or "every page came back, every text is that of plain decoding")
    summary = {"requests": found.over, "cancelled": found.cancelled, "tokens": found.tokens, **counts}
    print(json.dumps({**summary, "grown": grown, "most_mb": max(found.megabytes), "faults": found.faults}))
    sys.exit(1 if found.faults else 0)


def plainly(llm: LLM, asked: Asked) -> list[int]:
    """Return the text of plain decoding, one request at a time."""
    prompt, params = request(llm, asked)
    return llm.using("autoregressive").generate([prompt], params)[0].token_ids


def request(llm: LLM, asked: Asked) -> tuple[list[int], SamplingParams]:
    """Return the tokens and parameters of a request."""
    prompt, shaping, tokens = asked
    params = SamplingParams(max_tokens=tokens, seed=7, **SHAPINGS[shaping])
    return llm.tokenizer.chat([{"role": "user", "content": prompt}]), params


async def sent(
    llm: LLM, requests: int, together: int, expected: dict[Asked, list[int]]
) -> tuple[Found, dict[str, Any]]:
    """Send all requests, somewhat more of them at a time than are decoded."""
    found, rng, gate = Found(), random.Random(0), asyncio.Semaphore(2 * together)
    runners = [llm.target_runner, *([llm.drafter.runner] if llm.drafter else [])]
    async with AsyncLLM(llm, max_batch=together) as engine:
        choices = [(*rng.choice(list(expected.items())), rng.choice(METHODS)) for _ in range(requests)]
        cancelled_after = [rng.randrange(12) if rng.random() < 0.3 else None for _ in range(requests)]
        work = [
            one_request(engine, gate, found, *request(llm, asked), text, method, after)
            for (asked, text, method), after in zip(choices, cancelled_after, strict=True)
        ]
        await asyncio.gather(*work)
        missing = [runner.kv_slots - runner.kv_slots_free for runner in runners if runner.kv_slots]
        found.faults += [f"{count} places of a cache are missing at the end" for count in missing if count]
        return found, {"preemptions": engine.stats().preemptions, "failed": engine.stats().failed}


async def one_request(
    engine: AsyncLLM,
    gate: asyncio.Semaphore,
    found: Found,
    prompt: list[int],
    params: SamplingParams,
    expected: list[int],
    method: str,
    cancel_after: int | None,
) -> None:
    """Answer a request, or cancel it after some chunks; then check the pages."""
    async with gate:
        output: Output | None = None
        chunks = engine.stream(prompt, params, {"method": method})
        at = 0
        async for chunk in chunks:
            output, at = chunk.output, at + 1
            if cancel_after is not None and at > cancel_after:
                break
        await chunks.aclose()
        found.cancelled += output is None
        found.tokens += len(output.token_ids) if output else 0
        if output is not None and output.token_ids != expected:
            found.faults.append(f"{method} said {output.token_ids}, plain decoding {expected}")
        async for fault in engine.aside(faults):
            found.faults.append(f"after {found.over} requests: {fault}")
        found.over += 1
        found.megabytes.append(resident())
        if found.over % 50 == 0:
            print(f"{found.over} requests, {found.megabytes[-1]:.0f} MB resident", flush=True)


def faults(llm: LLM) -> Iterator[str]:
    """Return what is wrong with the pages of both models, between two rounds."""
    runners: list[Runner] = [llm.target_runner, *([llm.drafter.runner] if llm.drafter else [])]
    for runner in runners:
        try:
            if check := getattr(runner, "check", None):
                check()
        except AssertionError as error:
            yield str(error)


def resident() -> float:
    """Return the resident memory of this process in megabytes; 0 if the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if file.exists() else 0.0


if __name__ == "__main__":
    main()
