"""Check and time a GPU's step: graphs over random bfloat16 weights, with and without attention, against what its memory can read.

Median milliseconds of a graph's replay for 1 and 16 rows of one sequence and 1 row of each of 4. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from shapes import DTYPE, SHAPES, Shaped
from torch import Tensor

from specbranch.models.batch import Rows
from specbranch.models.files.architecture import Architecture
from specbranch.models.gpu import attention
from specbranch.models.gpu.kernel_step import step_of
from specbranch.models.gpu.layout import Views, pack, views
from specbranch.models.gpu.step import GpuStep, Graphs
from specbranch.models.room import weight_bytes

BARS = {"7b": 4.7, "8b": 5.2}  # milliseconds for one row
ROWS_BAR = 1.25  # times one row, for 16
WORKS = {"1 row": (1, 1), "16 rows": (16, 1), "4 sequences": (1, 4)}
SETTINGS = [(128, 32, 4, 2), (128, 32, 4, 1), (128, 32, 8, 2), (64, 32, 4, 2), (256, 32, 8, 1), (128, 64, 4, 2), (128, 64, 4, 1)]


def main() -> None:
    """Measure every shape and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--shapes", nargs="+", default=["7b", "8b", "1b"], choices=SHAPES)
    options.add_argument("--context", type=int, default=1000, help="tokens before the rows")
    options.add_argument("--replays", type=int, default=60)
    options.add_argument("--plain", action="store_true", help="products by torch, as where the kernels do not suit a model")
    options.add_argument("--tune", action="store_true", help="time attention alone under other settings")
    options.add_argument("--device", default="cuda", help="on a CPU nothing is captured: to try this script out")
    given = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    peak = bandwidth(given.device)
    with torch.inference_mode():
        found = [entry for name in given.shapes for entry in measure(name, given, peak)]
        tuned = [entry for name in given.shapes for entry in tune(name, given)] if given.tune else []
    for entry in tuned:
        setting = ", ".join(f"{name} {entry[name]}" for name in ("block", "line", "warps", "stages"))
        print(f"{entry['shape']:>5} attention alone, {setting}: {entry['one']:6.2f} us a layer for 1 row, {entry['many']:6.2f} for 16")
    print_table(found)
    print(json.dumps({"device": device_name(given.device), "torch": torch.__version__, "read_tb_s": peak, "steps": found, "tuned": tuned}))


def measure(name: str, given: argparse.Namespace, peak: float) -> list[dict[str, Any]]:
    """Time the steps of one shape, with attention and without."""
    device = torch.device(given.device)
    model = Shaped(name, device, given.context, sequences=6)
    arch = model.arch
    chosen = attention.choose_attend(device, DTYPE, arch.heads, arch.kv_heads, arch.head_dim)
    works = {label: model.rows(*size) for label, size in WORKS.items()}
    timed = {}
    for attend in (chosen, without_attention):
        step = GpuStep(model.decoder, model.memory) if given.plain else step_of(model.decoder, model.memory)
        step.attend = attend
        graphs = Graphs(step, model.pool.pages)
        timed[attend] = {label: time_step(graphs, model.spare, rows, given.replays) for label, rows in works.items()}
    return [
        {"shape": name, "work": label, "kernels": chosen is attention.attend_by_kernels}
        | {**timed[chosen][label], "no_attention_ms": timed[without_attention][label]["ms"]}
        | shares(arch, given.context, WORKS[label][1], timed[chosen][label]["ms"], peak)
        for label in works
    ]


def time_step(graphs: Graphs, spare: int, rows: list[Rows], replays: int) -> dict[str, float]:
    """Time packing and replays; the first run captures."""
    packed, bucket = pack(rows, spare)
    begun = time.perf_counter()
    logits = graphs.run(packed, bucket)
    if not bool(logits.isfinite().all()):
        raise SystemExit("a step gave logits that are no numbers")
    first = time.perf_counter() - begun
    packing = [seconds(lambda: pack(rows, spare)) for _ in range(200)]
    on_device = torch.from_numpy(packed).to(logits.device)
    times = milliseconds(lambda: graphs.run(on_device, bucket), replays, logits.device)
    return {"ms": statistics.median(times), "least_ms": min(times), "pack_us": statistics.median(packing) * 1e6, "first_s": first}


def shares(arch: Architecture, context: int, sequences: int, ms: float, peak: float) -> dict[str, float]:
    """What has to be read, and how near the step comes to reading it at the memory's own pace."""
    weights = weight_bytes(arch, DTYPE) - arch.vocabulary * arch.hidden * DTYPE.itemsize  # a row of the embedding is nothing
    cache = 2 * sequences * context * arch.layers * arch.kv_heads * arch.head_dim * DTYPE.itemsize
    floor = (weights + cache) / peak / 1e9
    return {"floor_ms": floor, "share": floor / ms}


def tune(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time attention alone, microseconds a layer, under several settings: many layers one after the other in a graph."""
    model = Shaped(name, torch.device(given.device), given.context, sequences=2)
    found = []
    for block, line, warps, stages in SETTINGS:
        attention.BLOCK, attention.LINE, attention.WARPS, attention.STAGES = block, line, warps, stages
        one, many = (attention_alone(model, given, rows) for rows in (1, 16))
        found.append({"shape": name, "block": block, "line": line, "warps": warps, "stages": stages, "one": one, "many": many})
    return found


def attention_alone(model: Shaped, given: argparse.Namespace, rows: int) -> float:
    """Microseconds of one layer's attention; NaN where these settings do not run."""
    arch, device = model.arch, model.memory.data.device
    some = model.rows(rows)
    packed, bucket = pack(some, model.spare)
    some[0].table.shrink(0)
    step = views(torch.from_numpy(packed).to(device), bucket)
    q = torch.randn(bucket.rows, arch.heads, arch.head_dim, device=device, dtype=DTYPE)

    def all_layers() -> None:
        for layer in range(arch.layers):
            attention.attend_by_kernels(q, *model.memory.layer(layer), step)

    try:
        all_layers()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            all_layers()
    except Exception as reason:
        print(f"not with these settings: {type(reason).__name__}: {str(reason)[:200]}")
        return float("nan")
    return statistics.median(milliseconds(graph.replay, given.replays, device)) * 1000 / arch.layers


def without_attention(queries: Tensor, keys: Tensor, values: Tensor, step: Views) -> Tensor:
    """Let queries through, to see what attention costs."""
    return queries.flatten(1)


def bandwidth(device: str) -> float:
    """Terabytes a second that a sum over much memory reads, at best."""
    much = torch.ones(1 << (31 if device == "cuda" else 22), device=device, dtype=DTYPE)
    times = milliseconds(lambda: much.view(torch.int32).sum(dtype=torch.int32), 20, much.device)
    return much.nbytes / min(times) / 1e9


def milliseconds(call: Callable[[], object], times: int, device: torch.device) -> list[float]:
    """Time calls one by one, warm-up dropped."""
    for _ in range(5):
        call()
    if device.type != "cuda":
        return [seconds(call) * 1000 for _ in range(times)]
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in marks]


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def device_name(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def print_table(found: list[dict[str, Any]]) -> None:
    """Lay the steps out for people, with the bars they are to meet."""
    print("shape         work      ms   least no att.  floor  share of 1 row pack us first s")
    for entry in found:
        one = next(other["ms"] for other in found if other["shape"] == entry["shape"] and other["work"] == "1 row")
        bar = BARS.get(entry["shape"]) if entry["work"] == "1 row" else ROWS_BAR * one if entry["work"] == "16 rows" else None
        told = "" if bar is None else f"  {'meets' if entry['ms'] <= bar else 'MISSES'} {bar:.2f}"
        told += "" if entry["kernels"] else "  (plain attention)"
        print(
            f"{entry['shape']:>5} {entry['work']:>12} {entry['ms']:7.3f} {entry['least_ms']:7.3f} {entry['no_attention_ms']:7.3f} "
            f"{entry['floor_ms']:6.2f} {entry['share']:6.1%} {entry['ms'] / one:8.3f} {entry['pack_us']:7.1f} {entry['first_s']:7.1f}{told}"
        )


if __name__ == "__main__":
    main()
