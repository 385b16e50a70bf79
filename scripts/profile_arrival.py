"""Gaps of decoding requests while a long prompt is prefilled, by context, and what a GPU does in such rounds.

Without --target the model is a random one in the shape of Qwen2.5-1.5B: times do not depend on weights. With --look the
profiler watches some rounds: time of each kernel, time without a kernel, and CUDA calls of the host. The profiler slows
the host, so gaps are measured without it.

python scripts/profile_arrival.py
python scripts/profile_arrival.py --look 40 400 1500
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from prefill_cases import Sizes, arrivals_among, percentile

from specbranch import LLM
from specbranch.core.orders import Span
from specbranch.core.prefill_budget import PromptCosts

CONTEXT = 32_768
QWEN_SHAPE = {
    "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 8960, "vocab_size": 151_936, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True,
}  # fmt: skip
WATCHED = 30  # rounds that the profiler watches at a time
SHOWN = 14  # kernels
STEP = 5000  # tokens of context that share a line
IDLE = 5.0  # µs: shorter gaps are those between the kernels of a graph


@dataclass
class Watch:
    """Notes each round of the target, and lets the profiler watch some of them."""

    look: Sequence[int]  # rounds with prompt tokens
    rounds: list[tuple[float, int, int]] = field(default_factory=list)  # end, decode rows, prompt tokens of this step
    late: int = 0  # prompt tokens of the step that was launched with the last round
    chunks: int = 0
    until: int | None = None
    profiler: Any = None

    def note(self, span: Span | None, now: float, ahead: bool) -> None:
        """Note a round."""
        if span is None:
            return
        read = sum(prompt.read for prompt in span.prompts.values())
        self.rounds.append((now, span.tokens - read, self.late + (0 if ahead else read)))
        self.late = read if ahead else 0
        self.chunks += read > 0
        if read and self.chunks in self.look:
            self.until = len(self.rounds) + WATCHED
            kinds = torch.profiler.ProfilerActivity
            self.profiler = torch.profiler.profile(activities=[kinds.CUDA, kinds.CPU])
            self.profiler.start()
        elif self.until == len(self.rounds):
            self.profiler.stop()
            _print_profile(f"{WATCHED} rounds behind {self.chunks} with prompt tokens", self.profiler.events())


def main() -> None:
    """Measure, and print."""
    given = _options()
    with TemporaryDirectory() as folder:
        target = given.target or _random_model(Path(folder))
        options = {"max_batch": 2 * given.sessions, "context_length": given.context, "prefix_cache": False}
        watch, learn = Watch(given.look), PromptCosts.observe

        def observe(self: PromptCosts, span: Span | None, decodes: bool, now: float, ahead: bool = False) -> None:
            watch.note(span, now, ahead)
            learn(self, span, decodes, now, ahead)

        PromptCosts.observe = observe  # type: ignore[method-assign]
        rng = Random(1)
        prompts = [
            [rng.randrange(3, given.ids) for _ in range(length)] for length in (given.tokens, *[42] * given.sessions)
        ]
        llm = LLM(target=str(target), method="autoregressive", device=given.device, options=options)
        sizes = Sizes(arrivals=1 if given.look else 3, decoding=given.sessions)
        for figure in asyncio.run(arrivals_among(llm, sizes, prompts[0], prompts[1:])):
            print(f"{figure.what}: {figure.value:.2f} {figure.unit} {figure.note}")
    if not given.look:
        _print_gaps(watch, given.sessions)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="[a random model]")
    parser.add_argument("--device", default="cuda", help="on a CPU only to try this script out")
    parser.add_argument("--tokens", type=int, default=30_000, help="of the prompt that arrives [30000]")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"tokens of a request, at most [{CONTEXT}]")
    parser.add_argument("--sessions", type=int, default=16, help="requests that decode [16]")
    parser.add_argument("--ids", type=int, default=40_000, help="token ids of prompts are below [40000]")
    parser.add_argument("--look", type=int, nargs="*", default=[], help="rounds with prompt tokens to profile behind")
    return parser.parse_args()


def _random_model(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN_SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def _print_gaps(watch: Watch, sessions: int) -> None:
    """Print gaps by context and prompt tokens of the round."""
    found, context = defaultdict[tuple[int, int], list[float]](list), 0
    for (before, _, _), (now, rows, tokens) in zip(watch.rounds, watch.rounds[1:], strict=False):
        context = context + tokens if rows == sessions else 0
        if rows == sessions:
            found[context // STEP * STEP if tokens else -1, tokens].append(1000.0 * (now - before))
    print("context  tokens  rounds  gap p50     p99 ms")
    for (begin, tokens), gaps in sorted(found.items()):
        print(f"{begin:7}  {tokens:6}  {len(gaps):6}  {median(gaps):7.2f} {percentile(gaps, 99):7.2f}")


def _print_profile(title: str, events: Sequence[Any]) -> None:
    """Print what a round took on the device, by kernel, and on the host, by CUDA call; all in µs."""
    kinds = torch.autograd.DeviceType
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type == kinds.CUDA)
    until, idle = spans[0][0], 0.0
    for start, end in spans:
        idle, until = idle + (start - until if start - until > IDLE else 0.0), max(until, end)
    print(f"{title}: a round takes {(until - spans[0][0]) / WATCHED:.0f} µs, of which {idle / WATCHED:.0f} idle")
    taken = defaultdict[tuple[bool, str], list[float]](list)
    for event in events:
        on_device = event.device_type == kinds.CUDA
        if on_device or event.name.startswith("cuda"):
            taken[not on_device, event.name[:60]].append(event.time_range.end - event.time_range.start)
    for (on_host, name), each in sorted(taken.items(), key=lambda one: (one[0][0], -sum(one[1])))[: 2 * SHOWN]:
        print(f"  {'host' if on_host else ''} {sum(each) / WATCHED:8.1f} in {len(each) / WATCHED:5.1f} x {name}")


if __name__ == "__main__":
    main()
