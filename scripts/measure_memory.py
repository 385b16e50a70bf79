"""Measure the memory of a GPU's runner besides weights and KV pages, over many requests on random weights. Last line:
JSON.

Each request prefills a prompt, verifies trees as speculative methods do, and decodes some tokens plainly. Bars: 1.5 GB
besides weights and pages at the 8B shape, graphs under 1 GB, nothing that increases.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch
from shapes import SHAPES, architecture, random_weights

from specbranch.config import SamplingParams
from specbranch.core.orders import Context, Verify
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed
from specbranch.core.slots import ROOT, TAIL
from specbranch.exec.verifier import Verifier
from specbranch.models.forward.decoder import Decoder
from specbranch.models.gpu.runner import GpuRunner

GIGABYTE = 1e9


def main() -> None:
    """Decode, and tell what is taken."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--shape", default="8b", choices=SHAPES)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--context", type=int, default=8192)
    options.add_argument("--device", default="cuda", help="on a CPU nothing is counted: to try this script out")
    given = options.parse_args()
    device, rng = torch.device(given.device), random.Random(0)
    arch = architecture(given.shape)
    decoder = Decoder(arch, random_weights(arch, device), given.context + TAIL)
    runner = GpuRunner(decoder, given.context)
    verifier = Verifier(runner)
    before = used(device)
    taken: list[float] = []
    for number in range(given.requests):
        one_request(verifier, number, rng, given.context, arch.vocabulary)
        taken.append(used(device) - before)
        if number % 20 == 19:
            print(f"{number + 1} requests: {taken[-1]:.3f} GB beside weights and pool", flush=True)
    runner.check()
    graphs = len(runner.graphs._graphs) + len(runner.graphs._warmed)
    grown = taken[-1] - taken[len(taken) // 2]
    print(f"{graphs} graphs; {max(taken):.3f} GB at most, {grown:+.3f} GB over the second half")
    found: dict[str, Any] = {
        "shape": given.shape,
        "graphs": graphs,
        "most_gb": max(taken),
        "grown_gb": grown,
        "requests": given.requests,
    }
    print(json.dumps(found | {"meets": max(taken) <= 1.5 and grown <= 0.01}))


def one_request(verifier: Verifier, number: int, rng: random.Random, context: int, vocabulary: int) -> None:
    """Prefill a prompt, verify trees behind it, then decode plainly."""
    text = [rng.randrange(vocabulary) for _ in range(rng.choice([20, 300, 1500, context // 2]))]
    verifier.open(number, Request(SamplingParams(temperature=rng.choice([0.0, 0.8])), number, len(text)))
    for rows in (3, 15, 40):
        tokens = tuple(rng.randrange(vocabulary) for _ in range(rows))
        parents = tuple(rng.randrange(ROOT, node) for node in range(rows))
        text.append(judged(verifier, number, Verify(Context(0, tuple(text)), tokens, parents)))
    for _ in range(8):
        text.append(judged(verifier, number, Verify(Context(0, tuple(text)), goes_on=True)))
    verifier.runner.propose([Feed(number, (1, 2), (ROOT, ROOT))], [Ask(number, 0, 4), Ask(number, 1, 4)])
    verifier.free(number)


def judged(verifier: Verifier, number: int, order: Verify) -> int:
    """Run an order; return the target's own token, as if nothing had been accepted."""
    scored, failed = verifier.score({number: order}, {})
    if failed:
        raise SystemExit(str(failed[number]))
    verdict = verifier.judge(scored, {})[number]
    return verdict.token if not verdict.path else order.tokens[verdict.path[0]]


def used(device: torch.device) -> float:
    """Gigabytes in use on the device, by anybody."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GIGABYTE


if __name__ == "__main__":
    main()
