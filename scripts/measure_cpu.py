"""Measure plain decoding on this CPU: the native decoder against transformers' `generate`, loading, peak memory and the
cost of few rows.

Same weights (SmolLM2-135M-Instruct), float32, same threads, paired and alternating, prefill apart, medians. Last line:
JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

TOKENS = 128
QUESTION = [{"role": "user", "content": "Explain how a lighthouse works, and why sailors still like them."}]
MEGABYTE = 1 << 20


def main() -> None:
    """Measure everything and print it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", choices=["memory"], help="for internal use: one part, in a process of its own")
    given = options.parse_args()
    if given.only:
        print(json.dumps(memory(given.threads)))
        return
    child = subprocess.run(
        [sys.executable, __file__, "--only", "memory", "--threads", str(given.threads)], capture_output=True, check=True
    )
    found: dict[str, Any] = {"memory": json.loads(child.stdout), "speed": speed(given.threads, given.rounds)}
    pairs = found["speed"]["rounds"]
    print("native ms/token  transformers ms/token  ratio")
    for ours, theirs in pairs:
        print(f"{ours:15.1f}  {theirs:21.1f}  {theirs / ours:5.2f}")
    print(f"median ratio {found['speed']['ratio']:.2f}")
    print("rows in a step: " + ", ".join(f"{rows}: {ms:.1f} ms" for rows, ms in found["speed"]["rows"].items()))
    print(
        "load {load_seconds:.2f} s; peak {peak_mb:.0f} MB = weights {weights_mb:.0f} + cache {cache_mb:.0f} + "
        "{rest_mb:.0f}".format(**found["memory"])
    )
    print(json.dumps(found))


def memory(threads: int) -> dict[str, float]:
    """Load the default model, prefill a prompt of nearly its whole context, and return the memory that took."""
    import torch

    from specbranch import LLM, SamplingParams

    torch.set_num_threads(threads)
    start = time.perf_counter()
    llm = LLM(method="autoregressive", device="cpu", options={"weights": "float32", "prefix_cache": False})
    loaded = time.perf_counter() - start
    prompt = [1 + i * 7919 % 40000 for i in range(llm.context_length - 32)]
    llm.generate([prompt], SamplingParams(max_tokens=16, ignore_eos=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    runner: Any = llm.target_runner
    weights = 4 * sum(x.numel() for x in _tensors(runner.decoder))
    pages = -(-llm.context_length // runner.page)  # memory of pages that were never written is not resident
    cache = pages * runner.memory.data[0].nbytes
    rest = peak - weights - cache
    return {"load_seconds": loaded} | {
        f"{k}_mb": v / MEGABYTE for k, v in (("peak", peak), ("weights", weights), ("cache", cache), ("rest", rest))
    }


def _tensors(decoder: Any) -> list[Any]:
    """The weights, each storage once (the head may be the embedding)."""
    linears = [linear for layer in decoder.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    found = [decoder.embedding, decoder.head.weight, *(linear.weight for linear in linears)]
    return list({tensor.data_ptr(): tensor for tensor in found}.values())


def speed(threads: int, rounds: int) -> dict[str, Any]:
    """Decode the same answer by turns with both."""
    import torch

    from specbranch import LLM, SamplingParams

    torch.set_num_threads(threads)
    llm = LLM(method="autoregressive", device="cpu", options={"weights": "float32", "prefix_cache": False})
    prompt, params = llm.tokenizer.chat(QUESTION), SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    theirs = Reference(prompt)

    def ours() -> float:
        return 1000 / float(llm.generate([prompt], params)[0].stats["tokens_per_second"])

    ours(), theirs.per_token()
    pairs = [(ours(), theirs.per_token()) for _ in range(rounds)]
    ratio = statistics.median(b / a for a, b in pairs)
    return {
        "threads": threads,
        "torch": torch.__version__,
        "rounds": pairs,
        "ratio": ratio,
        "rows": rows_in_a_step(llm, prompt),
    }


class Reference:
    """transformers on the same file."""

    def __init__(self, prompt: list[int]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from specbranch.models.files import store

        file = store.pull("smollm2-135m")
        self.model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
        self.prompt = torch.tensor([prompt])

    def per_token(self) -> float:
        """Milliseconds a token, prefill apart."""
        return (self._seconds(TOKENS) - self._seconds(1)) / (TOKENS - 1) * 1000

    def _seconds(self, tokens: int) -> float:
        import torch

        start = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return time.perf_counter() - start


def rows_in_a_step(llm: Any, prompt: list[int]) -> dict[int, float]:
    """Milliseconds of one forward over 1 to 16 rows of one sequence, median."""
    from specbranch.core.runner import Feed
    from specbranch.core.slots import ROOT
    from specbranch.training.distill.agreement import GREEDY

    runner = llm.target_runner
    runner.open(-1, GREEDY)
    runner.extend(-1, prompt)
    runner.flush()
    times: dict[int, list[float]] = {rows: [] for rows in (1, 2, 4, 8, 16)}
    for _ in range(15):
        for rows, found in times.items():
            start = time.perf_counter()
            runner.feed([Feed(-1, tuple(prompt[:rows]), tuple(range(ROOT, rows - 1)))])
            found.append((time.perf_counter() - start) * 1000)
            runner.keep(-1, (), 0)
    runner.close(-1)
    return {rows: statistics.median(found) for rows, found in times.items()}


if __name__ == "__main__":
    main()
