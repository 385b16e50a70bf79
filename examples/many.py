"""Many requests at once: a list of prompts, then tasks that each have parameters of their own, in one batch.

python examples/many.py
"""

import asyncio
import os

from specbranch import LLM, AsyncLLM, SamplingParams

TOKENS = int(os.environ.get("SPECBRANCH_EXAMPLE_TOKENS", "48"))
COUNTRIES = ["France", "Japan", "Kenya", "Peru"]


async def capitals(llm: LLM) -> None:
    async with AsyncLLM(llm) as engine:  # it owns `llm` now, and closes it
        params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=TOKENS) for seed in range(len(COUNTRIES))]
        talks = [[{"role": "user", "content": f"What is the capital of {country}?"}] for country in COUNTRIES]
        for output in await asyncio.gather(*map(engine.generate, talks, params)):
            print("-", output.text)
        print(engine.stats().finished, "requests finished")


llm = LLM(options={"context_length": 1024})
for output in llm.outputs([f"The capital of {country} is" for country in COUNTRIES], {"max_tokens": TOKENS}):
    print("-", output.text)
asyncio.run(capitals(llm))
