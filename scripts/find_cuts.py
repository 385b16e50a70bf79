"""Time the products of shapes under many cuts, each alone in a graph over all layers, and print the best as lines for
CUTS.

A case is a shape and its weights, such as 7b or 1b:int8. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from itertools import product
from typing import Any

import torch
from measure_gpu import Case, captured_ms
from shapes import Shaped

from specbranch.models.gpu.kernel_step import KernelStep
from specbranch.models.gpu.layout import pack, views
from specbranch.models.gpu.products import Cut, Product

PARTS = {"out": (1, 2, 4, 5), "down": (1, 2, 4, 5)}
NAMES = ("qkv", "out", "gate_up", "down", "head")


def main() -> None:
    """Try all cuts of all products."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("cases", nargs="+", type=Case.of)
    options.add_argument("--names", nargs="+", default=NAMES, choices=NAMES)
    options.add_argument("--replays", type=int, default=10)
    options.add_argument(
        "--layers", type=int, default=8, help="to try with: their weights must not fit in the cache together"
    )
    given = options.parse_args()
    found = []
    with torch.inference_mode():
        for case in given.cases:
            model = Shaped(case.shape, torch.device("cuda"), 64, sequences=2, stored=case.stored)
            model.decoder.layers = model.decoder.layers[: given.layers]
            step = KernelStep(model.decoder, model.memory)
            for name in given.names:
                found += best_cuts(case, name, step, model, given.replays)
            del model, step
            torch.cuda.empty_cache()
    for entry in found:
        print(f"{entry['case']:>8} {entry['us']:8.2f} us  {entry['gb_s']:6.0f} GB/s  {entry['line']}")
    print(json.dumps(found))


def best_cuts(case: Case, name: str, step: KernelStep, model: Shaped, replays: int) -> list[dict[str, Any]]:
    """The three best cuts of one product, and the pinned one."""
    products = [step._head] * 1 if name == "head" else [of_layer[name] for of_layer in step._products]
    pinned = products[0].cut
    timed: dict[Cut, float] = {}
    for cut in dict.fromkeys([pinned, *cuts(name, case.stored, products[0])]):
        timed[cut] = time_cut(name, [replace(one, cut=cut) for one in products], step, model, replays)
    least = sorted(timed, key=timed.__getitem__)[:3]
    size, product = products[0].weight.nbytes, f'("{name}", {products[0].outs}, {products[0].ins})'
    return [
        {
            "case": case.named,
            "us": timed[cut],
            "gb_s": size / timed[cut] / 1e3,
            "line": f"{product}: Cut{astuple(cut)},{'  # pinned' if cut == pinned else ''}",
        }
        for cut in dict.fromkeys([*least, pinned])
    ]


def cuts(name: str, stored: str, of: Product) -> Iterator[Cut]:
    """All cuts that are worth trying."""
    steps = (128,) if stored == "int4" else (128, 256) if stored == "int8" else (128,) if of.ins % 128 == 0 else (64,)
    swaps = (True, False) if stored == "bfloat16" else (False,)
    for tile, step, swap, stages, parts, warps in product(
        (16, 32, 64, 128), steps, swaps, (3, 4, 6, 8), PARTS.get(name, (1,)), (4,)
    ):
        fits = of.ins % step == 0 and (name != "qkv" or of.outs % tile == 0)
        shared = (tile * step * {"int8": 1, "int4": 0.5}.get(stored, 2) + 16 * step * 2) * stages
        if fits and shared <= 220_000 and not (swap and tile < 64):
            yield Cut(tile, step, parts, swap, warps, stages)


def time_cut(name: str, products: list[Product], step: KernelStep, model: Shaped, replays: int) -> float:
    """Microseconds of one product; infinite where it does not run."""
    rows = model.rows(1)
    packed, bucket = pack(rows, model.spare)
    rows[0].table.shrink(0)
    brought = views(torch.from_numpy(packed).to("cuda"), bucket)
    runs: dict[str, Callable[[Product], object]] = {
        "qkv": lambda one: step._attended(0, one, brought, 1),
        "out": lambda one: step._add("out", one, step._queries, model.decoder.norm, 1),
        "down": lambda one: step._add("down", one, step._gated, model.decoder.norm, 1),
        "gate_up": lambda one: step._gate(one, 1),
        "head": lambda one: step._score(1),
    }
    step.attend = lambda queries, keys, values, views: queries.flatten(1)
    widest = max(-(-one.outs // one.cut.tile) for one in products)
    for kept in ("out", "down"):
        step._norms[kept] = 1 << (widest - 1).bit_length() if kept == name else step._norms[kept]
        step._squares[kept] = torch.zeros(512, step._norms[kept], device="cuda")
    step._parts = torch.zeros(512 * products[0].outs * 4, device="cuda") if name in PARTS else step._parts
    step._arrived = torch.zeros(1 << 16, device="cuda", dtype=torch.int32)
    step._head = products[0] if name == "head" else step._head

    def all_layers() -> None:
        for one in products:
            runs[name](one)

    return captured_ms(all_layers, replays) * 1000 / len(products)


if __name__ == "__main__":
    main()
