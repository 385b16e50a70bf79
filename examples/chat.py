"""A conversation with the default pair, streamed.

python examples/chat.py                                                  # reads questions, until Ctrl-D
python examples/chat.py "Why is the sky blue?" "Say it in one sentence."
"""

import os
import sys
from collections.abc import Iterator

from specbranch import LLM, SamplingParams

TOKENS = int(os.environ.get("SPECBRANCH_EXAMPLE_TOKENS", "200"))


def questions() -> Iterator[str]:
    yield from sys.argv[1:]
    if len(sys.argv) == 1:
        print("Ask, a line at a time; Ctrl-D ends.")
        yield from map(str.strip, sys.stdin)


with LLM(warm_up="lazy") as llm:
    talk: list[dict[str, str]] = []
    for question in questions():
        talk.append({"role": "user", "content": question})
        for chunk in llm.stream_chat(talk, SamplingParams(max_tokens=TOKENS)):
            print(chunk.text, end="", flush=True)
        print(f"\n({chunk.output.stats['tokens_per_forward']:.2f} tokens a forward of the target)")
        talk.append({"role": "assistant", "content": chunk.output.text})  # the last chunk carries the output
