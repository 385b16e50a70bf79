"""Decode prompts of our own by every method, several at once; compare each text with plain decoding of the prompt
alone. Last line: JSON.

Temperatures 0, 0.7, 1 and 1.3, and one with filters and penalties. Exits with 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
from specbranch import LLM, SamplingParams

PROMPTS = (
    *(
        "Explain why the sky is blue.",
        "Write a Python function for the n-th Fibonacci number.",
        "Tell a short story about a lighthouse.",
    ),
    *(
        "A farmer has 17 sheep. All but nine run away. How many are left?",
        "List five rivers of Europe.",
        "What is a hash table?",
    ),
    *(
        "Summarise the plot of Hamlet.",
        "How do bees make honey?",
        "Translate 'good morning' into French, German and Spanish.",
    ),
    *(
        "Write a haiku about rain.",
        "What is 37 times 24? Show the steps.",
        "Give me a recipe for pancakes.",
        "Who was Ada Lovelace?",
    ),
    *("Explain recursion to a child.", "Write SQL that counts users by country.", "Why do leaves turn red in autumn?"),
    *("Name the planets in order.", "What is the difference between TCP and UDP?", "Write a limerick about a cat."),
    "How does a bicycle stay upright?",
)
METHODS = ("autoregressive", "speculative", "adaptive", "pearl", "specbranch", "tree", "lookup", "lookahead")
SHAPINGS: dict[str, dict[str, Any]] = {
    "0": {"temperature": 0.0},
    "0.7": {"temperature": 0.7},
    "1": {"temperature": 1.0},
    "1.3": {"temperature": 1.3},
    "shaped": {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.15, "presence_penalty": 0.3},
}


def main() -> None:
    """Decode, compare and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pair", help="a pair by name [the default one]")
    options.add_argument("--target", help="a target, instead of a pair")
    options.add_argument("--draft", help="its draft")
    options.add_argument("--device", default="cuda")
    options.add_argument("--executor", default="serial", choices=("serial", "streams", "process"))
    options.add_argument("--dtype")
    options.add_argument("--weights")
    options.add_argument("--draft-weights")
    options.add_argument("--draft-window", type=int)
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--together", type=int, default=10, help="requests at once")
    options.add_argument("--prompts", type=int, default=len(PROMPTS))
    options.add_argument("--shapings", default=",".join(SHAPINGS), help="temperatures, or 'shaped'")
    given = options.parse_args()
    names = ("pair", "target", "draft", "device", "dtype", "executor")
    models = {name: getattr(given, name) for name in names}
    stored = {"weights": given.weights, "draft_weights": given.draft_weights}
    kept = {**stored, "draft_window": given.draft_window, "max_batch": given.together, "keep_experience": False}
    llm = LLM(**models, method="specbranch", options=kept)
    prompts = [llm.tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS[: given.prompts]]
    found = [
        entry
        for name in given.shapings.split(",")
        for entry in compared(llm, prompts, name, SHAPINGS[name], given.tokens)
    ]
    different = sum(entry["prompts"] - entry["same"] for entry in found)
    print(f"{different} of {sum(entry['prompts'] for entry in found)} texts differ from plain decoding")
    print(
        json.dumps(
            {"device": given.device, "dtype": llm.dtype, "weights": llm.weights, "different": different, "found": found}
        )
    )
    sys.exit(1 if different else 0)


def compared(
    llm: LLM, prompts: list[list[int]], name: str, shaping: dict[str, Any], tokens: int
) -> list[dict[str, Any]]:
    """Compare every method under one shaping."""
    params = SamplingParams(max_tokens=tokens, seed=7, **shaping)
    plain = llm.using("autoregressive")
    started = time.perf_counter()
    expected = [plain.generate([prompt], params)[0].token_ids for prompt in prompts]
    print(
        f"temperature {name}: plain decoding, one at a time, "
        f"{sum(map(len, expected)) / (time.perf_counter() - started):.0f} tokens/s"
    )
    found = []
    for method in METHODS:
        outputs = llm.using(method).generate(prompts, params)
        same = sum(output.token_ids == text for output, text in zip(outputs, expected, strict=True))
        accepted = sum(output.stats["accepted"] for output in outputs)
        print(f"  {method}: {same} of {len(prompts)} the same, {accepted} drafted tokens taken", flush=True)
        found.append(
            {"temperature": name, "method": method, "prompts": len(prompts), "same": same, "accepted": accepted}
        )
    return found


if __name__ == "__main__":
    main()
