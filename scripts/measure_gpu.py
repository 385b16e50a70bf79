"""Check and time a GPU's step: graphs over random weights, against what its memory can read, and against bars.

Figures are median milliseconds of a graph's replay, the choice of a token included. Steps have 1, 16 and 64 rows of one
sequence, and 1 row of each of 4 sequences; --sequences adds another number of sequences, --chains chains of 16 rows. A
case is a shape, its weights and the context before the rows, such as 7b, 1b:int8 or 8b@8000. Last line: JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from shapes import DTYPE, Shaped
from torch import Tensor

from specbranch.lab.inflation.shapes import SHAPES
from specbranch.models.files.matrix import ROUNDED_KINDS
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu import attention
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.kernel_step import step_of
from specbranch.models.gpu.layout import Views, pack, views
from specbranch.models.gpu.step import GpuStep, Graphs

CASES = ("7b", "8b", "1b", "33b", "7b@8000", "8b@8000", "1b:int8", "1b:int4", "8b:int8", "8b:int4")
BARS = {  # milliseconds for one row, share of the floor, times one row for 16; 0: none
    "7b": (3.9, 0.75, 1.10), "8b": (4.23, 0.76, 1.05), "1b": (0.91, 0.58, 1.06), "33b": (16.8, 0.84, 1.05),
    "7b@8000": (0.0, 0.71, 1.08), "8b@8000": (0.0, 0.70, 1.08), "1b:int8": (0.75, 0.0, 1.06),
}  # fmt: skip
WORKS = {"1 row": (1, 1), "16 rows": (16, 1), "64 rows": (64, 1), "4 sequences": (1, 4)}
CHAIN = 16  # rows of a chain, as in a verify step of several sequences
SETTINGS = [(128, 32, 4, 2), (128, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), (64, 64, 2, 2), (64, 64, 8, 2)]


@dataclass(frozen=True)
class Case:
    """A shape, what its weights are stored as, and how much text comes before the rows."""

    named: str
    shape: str
    stored: str
    context: int

    @classmethod
    def of(cls, named: str) -> Case:
        """Take a name apart."""
        rest, _, context = named.partition("@")
        shape, _, stored = rest.partition(":")
        if shape not in SHAPES or stored not in ("", "bfloat16", *ROUNDED_KINDS) or not (context or "0").isdigit():
            raise argparse.ArgumentTypeError(
                f"{named!r}; expected a shape ({', '.join(SHAPES)}), then :KIND of weights "
                f"({', '.join(ROUNDED_KINDS)}), then @CONTEXT"
            )
        return cls(named, shape, stored or "bfloat16", int(context or 1000))


def main() -> None:
    """Measure every case and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "cases", nargs="*", type=Case.of, default=[Case.of(case) for case in CASES], help=f"[{' '.join(CASES)}]"
    )
    options.add_argument("--replays", type=int, default=60)
    options.add_argument("--sequences", type=int, nargs="*", default=[], help="time 1 row of each of so many, too")
    options.add_argument("--chains", type=int, nargs="*", default=[], help="time 16 rows of each of so many, too")
    options.add_argument(
        "--plain", action="store_true", help="products by torch, as where the kernels do not suit a model"
    )
    options.add_argument("--tune", action="store_true", help="time attention alone under other settings")
    options.add_argument("--device", default="cuda", help="on a CPU nothing is captured: to try this script out")
    given = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    peak = bandwidth(given.device)
    print(f"{device_name(given.device)} reads {peak:.2f} TB/s.", flush=True)
    found: list[dict[str, Any]] = []
    tuned: list[dict[str, Any]] = []
    with torch.inference_mode():
        for case in given.cases:
            found += measure(case, given, peak)
            tuned += tune(case, given) if given.tune else []
            gc.collect()
            if given.device == "cuda":
                torch.cuda.empty_cache()
            print(
                case.named,
                *(f"{entry['work']} {entry['ms']:.3f} ms" for entry in found if entry["case"] == case.named),
                sep=", ",
                flush=True,
            )
    for entry in tuned:
        setting = ", ".join(f"{name} {entry[name]}" for name in ("block", "line", "warps", "stages"))
        print(
            f"{entry['case']:>8} attention alone, {setting}: {entry['one']:6.2f} us a layer for 1 row, "
            f"{entry['many']:6.2f} for 16"
        )
    print_table(found)
    print(
        json.dumps(
            {
                "device": device_name(given.device),
                "torch": torch.__version__,
                "read_tb_s": peak,
                "steps": found,
                "tuned": tuned,
            }
        )
    )


def measure(case: Case, given: argparse.Namespace, peak: float) -> list[dict[str, Any]]:
    """Time the steps of one case, with attention and without."""
    device = torch.device(given.device)
    sizes = WORKS | {f"{count} sequences": (1, count) for count in given.sequences}
    sizes |= {f"{count} chains": (CHAIN, count) for count in given.chains}
    model = Shaped(
        case.shape, device, case.context, sequences=3 + sum(size[1] for size in sizes.values()), stored=case.stored
    )
    arch = model.arch
    chosen = attention.choose_attend(device, DTYPE, arch.heads, arch.kv_heads, arch.head_dim)
    works = {label: model.rows(*size) for label, size in sizes.items()}
    timed = {}
    for attend in (chosen, without_attention):
        step = GpuStep(model.decoder, model.memory) if given.plain else step_of(model.decoder, model.memory)
        step.attend = attend
        graphs = Graphs(step, model.pool.pages, chooser=Chooser(step.picks, arch.vocabulary))
        timed[attend] = {label: time_step(graphs, model.spare, rows, given.replays) for label, rows in works.items()}
    return [
        {"case": case.named, "work": label, "kernels": chosen is attention.attend_by_kernels}
        | {**timed[chosen][label], "no_attention_ms": timed[without_attention][label]["ms"]}
        | shares(model, sizes[label][1], timed[chosen][label]["ms"], peak)
        for label in works
    ]


def time_step(graphs: Graphs, spare: int, rows: list[Rows], replays: int) -> dict[str, float]:
    """Time packing and replays; the first run captures."""
    packed, bucket = pack(rows, spare, least=graphs.step.least)
    graphs.bring(packed)
    started = time.perf_counter()
    logits = graphs.run_brought(bucket, count=1).logits
    if not bool(logits.isfinite().all()):
        raise SystemExit("a step gave logits that are no numbers")
    first = time.perf_counter() - started
    packing = [seconds(lambda: pack(rows, spare)) for _ in range(200)]
    times = milliseconds(lambda: graphs.run_brought(bucket, count=1), replays, logits.device)
    return {
        "ms": statistics.median(times),
        "least_ms": min(times),
        "pack_us": statistics.median(packing) * 1e6,
        "first_s": first,
    }


def shares(model: Shaped, sequences: int, ms: float, peak: float) -> dict[str, float]:
    """What has to be read, and how near the step comes to reading it at the memory's own pace."""
    arch = model.arch
    cache = 2 * sequences * model.context * arch.layers * arch.kv_heads * arch.head_dim * DTYPE.itemsize
    floor = (model.matrix_bytes + cache) / peak / 1e9
    return {"floor_ms": floor, "share": floor / ms}


def tune(case: Case, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time attention alone, microseconds a layer, under several settings: many layers one after the other in a
    graph."""
    model = Shaped(case.shape, torch.device(given.device), case.context, sequences=2)
    found = []
    pinned = attention.SHARED_BLOCK, attention.PATH_BLOCK, attention.WARPS, attention.STAGES
    for block, line, warps, stages in [*SETTINGS, pinned]:
        attention.SHARED_BLOCK, attention.PATH_BLOCK, attention.WARPS, attention.STAGES = block, line, warps, stages
        one, many = (attention_alone(model, given, rows) for rows in (1, 16))
        found.append(
            {
                "case": case.named,
                "block": block,
                "line": line,
                "warps": warps,
                "stages": stages,
                "one": one,
                "many": many,
            }
        )
    return found


def attention_alone(model: Shaped, given: argparse.Namespace, rows: int) -> float:
    """Microseconds of one layer's attention; infinite where these settings do not run."""
    arch, device = model.arch, model.memory.data.device
    some = model.rows(rows)
    packed, bucket = pack(some, model.spare)
    some[0].table.shrink(0)
    step = views(torch.from_numpy(packed).to(device), bucket)
    q = torch.randn(bucket.rows, arch.heads, arch.head_dim, device=device, dtype=DTYPE)

    def all_layers() -> None:
        for layer in range(arch.layers):
            attention.attend_by_kernels(q, *model.memory.layer(layer), step)

    return captured_ms(all_layers, given.replays) * 1000 / arch.layers


def captured_ms(call: Callable[[], object], replays: int) -> float:
    """Median milliseconds of a call's replays as a graph; infinite, aloud, where it does not run."""
    try:
        call()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()
        return statistics.median(milliseconds(graph.replay, replays, torch.device("cuda")))
    except Exception as reason:  # such as of a compiler
        print(f"does not run: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
        return float("inf")


def without_attention(queries: Tensor, keys: Tensor, values: Tensor, step: Views, *_: object) -> Tensor:
    """Leave attention out, to see what it costs."""
    return queries.flatten(1)


def bandwidth(device: str) -> float:
    """Terabytes a second that reading much memory reaches, at best of two ways."""
    much = torch.ones(1 << (31 if device == "cuda" else 22), device=device, dtype=DTYPE)
    ways: list[Callable[[], object]] = [lambda: much.view(torch.int32).sum(dtype=torch.int32)]
    if device == "cuda":
        from reading import read_all

        ways.append(lambda: read_all(much))
    return max(much.nbytes / min(milliseconds(way, 20, much.device)) / 1e9 for way in ways)


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
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def device_name(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def print_table(found: list[dict[str, Any]]) -> None:
    """Lay the steps out for people, with the bars they are to meet."""
    print("    case         work      ms   least no att.  floor  share of 1 row pack us first s")
    for entry in found:
        one = next(other["ms"] for other in found if other["case"] == entry["case"] and other["work"] == "1 row")
        verdict = ", ".join(verdicts(entry, one)) + ("" if entry["kernels"] else "  (plain attention)")
        times = (
            f"{entry['ms']:7.3f} {entry['least_ms']:7.3f} {entry['no_attention_ms']:7.3f} "
            f"{entry['floor_ms']:6.2f} {entry['share']:6.1%}"
        )
        rest = f"{entry['ms'] / one:8.3f} {entry['pack_us']:7.1f} {entry['first_s']:7.1f}"
        print(f"{entry['case']:>8} {entry['work']:>12} {times} {rest}  {verdict}")


def verdicts(entry: dict[str, Any], one: float) -> list[str]:
    """Which bars an entry meets."""
    ms, share, times = BARS.get(entry["case"], (0.0, 0.0, 0.0))
    if entry["work"] == "1 row":
        bars = [(entry["ms"] <= ms, f"{ms} ms", ms), (entry["share"] >= share, f"{share:.0%}", share)]
    else:
        bars = [(entry["ms"] / one <= times, f"{times} x", times if entry["work"] == "16 rows" else 0.0)]
    return [f"{'meets' if met else 'MISSES'} {bar}" for met, bar, there in bars if there]


if __name__ == "__main__":
    main()
