"""The server with OpenAI's client: a streamed answer, and the speculation behind a whole one.

specbranch serve                        # terminal 1: an OpenAI-compatible server on http://127.0.0.1:8000
python examples/openai_client.py        # terminal 2; OPENAI_BASE_URL names another server
"""

import os

from openai import OpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
TOKENS = int(os.environ.get("SPECBRANCH_EXAMPLE_TOKENS", "120"))

client = OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id

for event in client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why is the sky blue?"}],
    max_tokens=TOKENS,
    stream=True,
):
    print(event.choices[0].delta.content or "", end="", flush=True)

answer = client.completions.create(model=model, prompt="Once upon a time", max_tokens=TOKENS, temperature=0)
print("\n---\nOnce upon a time", answer.choices[0].text)
print(answer.usage)
print(answer.model_dump()["metrics"]["speculative_decoding"])
