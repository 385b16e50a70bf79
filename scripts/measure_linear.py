"""Measure what each kind of linear layer costs on this CPU over the weights of a SmolLM2-135M. Last line: JSON."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.cpu.linear import PRODUCT_ROWS, KernelLinear, Linear, PackedLinear, PlainLinear, onednn_works

BENCH_ROWS = (1, 2, 3, 4, 6, 8, 16)
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # SmolLM2-135M: qkv, o, gate and up, down
HEAD_SHAPE = (49152, 576)


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of passes over all weights, by kind and row count; the n-th passes of all were made one after the
    other."""

    gigabytes: float
    passes: dict[str, dict[int, list[float]]]

    def summary(self) -> dict[str, dict[int, dict[str, float]]]:
        """Give medians: of the time, of its ratio to the one-row pass of the same turn, and of the weights read per
        second."""
        return {kind: {rows: self._medians(by_rows, rows) for rows in by_rows} for kind, by_rows in self.passes.items()}

    def table(self) -> str:
        """Lay the summary out for people."""
        summary = self.summary()
        lines = [f"{'rows':>4}" + "".join(f"{kind:>28}" for kind in summary)]
        for rows in BENCH_ROWS:
            cells = [by_rows[rows] for by_rows in summary.values()]
            lines.append(
                f"{rows:>4}"
                + "".join(f"{c['ms']:>10.2f} ms {c['ratio']:>4.2f}x {c['gb_per_s']:>5.1f} GB/s" for c in cells)
            )
        return "\n".join(lines)

    def _medians(self, by_rows: dict[int, list[float]], rows: int) -> dict[str, float]:
        ms = median(by_rows[rows])
        ratio = median(some / one for some, one in zip(by_rows[rows], by_rows[1], strict=True))
        return {"ms": ms, "least_ms": min(by_rows[rows]), "ratio": ratio, "gb_per_s": self.gigabytes / ms * 1000}


def bench(layers: int, cycles: int) -> Costs:
    """Time every kind over the weights of a SmolLM2-135M, which fit in no cache, as a decoder goes through them."""
    shapes = [*LAYER_SHAPES * layers, HEAD_SHAPE]
    weights = [torch.randn(shape) for shape in shapes]
    inputs = {rows: {ins: torch.randn(rows, ins) for _, ins in shapes} for rows in BENCH_ROWS}
    models = _models(weights)
    passes: dict[str, dict[int, list[float]]] = {kind: {rows: [] for rows in BENCH_ROWS} for kind in models}
    for cycle in range(cycles + 1):
        for rows, (kind, model) in product(BENCH_ROWS, models.items()):
            milliseconds = _pass(model, inputs[rows])
            passes[kind][rows] += [milliseconds] if cycle else []  # the first warms up
    return Costs(sum(weight.nbytes for weight in weights) / 1e9, passes)


def _models(weights: list[Tensor]) -> dict[str, list[tuple[int, Linear]]]:
    """One list of layers, each with its input width, for every kind that works here."""
    kernel = load_kernel()
    makers: dict[str, Callable[[Tensor], Linear]] = {"torch": lambda weight: PlainLinear(weight, None)}
    if onednn_works():
        makers["onednn"] = lambda weight: PackedLinear(weight, None)
    if kernel:
        makers["llvm"] = lambda weight: KernelLinear(kernel, weight, None, PRODUCT_ROWS)
    return {kind: [(weight.shape[1], make(weight)) for weight in weights] for kind, make in makers.items()}


def _pass(model: list[tuple[int, Linear]], inputs: dict[int, Tensor]) -> float:
    start = time.perf_counter()
    for ins, layer in model:
        layer(F.silu(inputs[ins]))  # some work of torch's between, as in a decoder
    return (time.perf_counter() - start) * 1000


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads for torch and the kernel")
    parser.add_argument("--layers", type=int, default=30, help="layers of weights to go through")
    parser.add_argument("--cycles", type=int, default=9, help="passes to take the median of")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        costs = bench(options.layers, options.cycles)
    print(costs.table())
    setting = {
        "threads": options.threads,
        "layers": options.layers,
        "cycles": options.cycles,
        "torch": torch.__version__,
    }
    print(
        json.dumps({**setting, "machine": platform.machine(), "gigabytes": costs.gigabytes, "kinds": costs.summary()})
    )


if __name__ == "__main__":
    _main()
