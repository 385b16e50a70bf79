"""Two replicas behind one address: conversations at once, whose second turns find their KV cache.

specbranch serve --replicas 2           # terminal 1: needs the extra `ray`
python examples/ray_replicas.py         # terminal 2; OPENAI_BASE_URL names another server
"""

import asyncio
import os

from openai import AsyncOpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
RULES = "Answer in one short sentence. " * 50  # the prefix cache keeps whole pages of 256 tokens


async def cached_tokens(client: AsyncOpenAI, model: str, number: int) -> int:
    talk = [{"role": "user", "content": f"Tell me about the number {number}. {RULES}"}]
    for follow_up in ("Tell me more.", ""):
        answer = await client.chat.completions.create(model=model, messages=talk, max_tokens=24)
        talk += [answer.choices[0].message, {"role": "user", "content": follow_up}]
    return answer.usage.prompt_tokens_details.cached_tokens


async def main() -> None:
    async with AsyncOpenAI(base_url=URL, api_key="none") as client:
        model = (await client.models.list()).data[0].id
        print("From the cache:", await asyncio.gather(*(cached_tokens(client, model, number) for number in range(4))))


asyncio.run(main())
