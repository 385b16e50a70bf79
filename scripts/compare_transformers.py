"""Compare plain decoding of the whole engine with transformers' generate: the same random weights, in one process, on
one device.

Figures are milliseconds a token behind some context: greedy, medians, warm-up dropped. Transformers runs eagerly
(dynamic cache, sdpa), and with a static cache and its own compilation. Ours includes everything that a token costs:
host, step, copy to the host, stop rules, text. The script also times our step's bare replay, and a long prompt up to
its first token. Weights exist once: transformers' are views of ours. Last line: JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from measure_gpu import device_name, milliseconds
from shapes import architecture, random_weights
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from torch import Tensor

from specbranch.answer import Answer
from specbranch.config import SamplingParams
from specbranch.core.costs import MeasuredCosts
from specbranch.core.loop import Loop
from specbranch.core.methods import find_method
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed
from specbranch.core.slots import ROOT, TAIL
from specbranch.decoding import Decoding, resolve
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.experiences import Experiences
from specbranch.lab.bench.other_engines.transformers_weights import as_transformers
from specbranch.lab.inflation.shapes import SHAPES
from specbranch.models.cache.kv_memory import Table
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.weights import Weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.layout import pack
from specbranch.models.gpu.runner import GpuRunner
from specbranch.text.tokenizer import Tokenizer

EAGER_BAR, COMPILED_BAR = 3.0, 1.15  # times as fast
HOST_BAR = {"7b": 0.12}  # milliseconds of a token beside its step
PROMPT_BAR = {"8b": 1.3}  # times transformers' time for a prompt
CHECKED = 60  # tokens of the prompt that logits are compared behind
AGREED = 0.1  # of the largest logit: what bfloat16 makes of many layers; other weights would be off by more than 1
WARM_UPS = 3  # of what is compiled: it compiles, records, and may compile once more
GREEDY = Request(SamplingParams(), 0, 0)

Found = dict[str, Any]


def main() -> None:
    """Measure every shape, then print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--shapes", nargs="+", default=["7b", "8b"], choices=SHAPES)
    options.add_argument("--context", type=int, default=1000, help="tokens of the prompt")
    options.add_argument("--tokens", type=int, default=64, help="new tokens of a run")
    options.add_argument("--prompt", type=int, default=8192, help="tokens of the long prompt")
    options.add_argument("--runs", type=int, default=3)
    options.add_argument(
        "--device", default="cuda", help="on a CPU nothing is captured or compiled: to try this script out"
    )
    options.add_argument(
        "--skip-compile",
        action="store_true",
        help="leave out the static cache, whose compilation takes a minute a shape",
    )
    given = options.parse_args()
    found = [measure(name, given) for name in given.shapes]
    print_table(found, given)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"device": device_name(given.device), **versions, "arguments": vars(given), "shapes": found}))


def measure(name: str, given: argparse.Namespace) -> Found:
    """Measure one shape; nothing of it is left in memory."""
    torch.manual_seed(0)
    started, device = time.perf_counter(), torch.device(given.device)
    found: Found = {"shape": name}

    def done(**more: Any) -> None:
        found.update(more)
        figures = ", ".join(
            f"{what} {value:.4g}" if isinstance(value, float) else f"{what} {value}" for what, value in more.items()
        )
        print(f"{name} at {time.perf_counter() - started:.0f} s: {figures}", flush=True)

    arch = architecture(name)
    weights = random_weights(arch, device)
    runner = make_runner(arch, weights, max(given.context + given.tokens, given.prompt))
    model = as_transformers(runner.decoder)
    prompt = torch.randint(0, arch.vocabulary, (max(given.context, given.prompt),)).tolist()
    done(**check(runner, model, prompt[:CHECKED]))
    done(**engine(runner, prompt[: given.context], given))
    done(step_ms=bare_step(runner, given.context + given.tokens // 2))
    done(**long_prompt(runner, model, prompt[: given.prompt], given.runs))
    done(**generation(model, prompt[: given.context], given, "eager", 1))
    if not given.skip_compile:
        try:
            done(**generation(model, prompt[: given.context], given, "static", WARM_UPS, cache_implementation="static"))
        except Exception as reason:  # of a compiler: the other figures stand
            done(static_failed=f"{type(reason).__name__}: {str(reason)[:200]}")
    del runner, model, weights
    forget()
    return found


def make_runner(arch: Architecture, weights: Weights, context: int) -> GpuRunner:
    """Make the runner of the engine, with room for two sequences."""
    context += PAGE
    return GpuRunner(Decoder(arch, weights, context + TAIL), context, TAIL, 2 * (-(-(context + TAIL) // PAGE)))


@torch.inference_mode()
def check(runner: GpuRunner, model: Any, prompt: list[int]) -> Found:
    """Compare the logits behind a short prompt, or stop; tells the largest difference, and the largest logit."""
    runner.open(0, GREEDY)
    runner.extend(0, prompt[:-1])
    ours = runner.score([Feed(0, (prompt[-1],), (ROOT,))])[0][0].logits.float()
    runner.close(0)
    theirs = model(torch.tensor([prompt], device=ours.device), use_cache=False, logits_to_keep=1).logits[0, -1].float()
    width = min(ours.shape[-1], theirs.shape[-1])  # an inflated head has columns beyond the vocabulary
    ours, theirs = ours[..., :width], theirs[..., :width]
    difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not difference <= AGREED * largest:
        raise SystemExit(
            f"logits differ by {difference:.3g}, the largest is {largest:.3g}: these are not the same weights"
        )
    return {"largest_difference": difference, "largest_logit": largest}


def engine(runner: GpuRunner, prompt: list[int], given: argparse.Namespace) -> Found:
    """Decode plainly through all of the engine; milliseconds a token, the text made."""
    experiences = Experiences(MeasuredCosts(), has_draft=False)
    loop = Loop(Serial(Verifier(runner)), costs=experiences.learned)
    config = resolve(None, "autoregressive", has_draft=False)
    plain = Decoding(config, find_method("autoregressive", has_draft=False), experiences)
    params, tokenizer = SamplingParams(max_tokens=given.tokens), words(runner.vocabulary)

    def once() -> list[float]:
        answer = Answer(0, prompt, Request(params, 0, len(prompt)), runner.context_length, tokenizer, plain)
        loop.join(answer.session, answer.start())
        marks = []
        while not answer.session.finished:
            loop.step()
            marks.append(time.perf_counter())
        output = answer.output()
        if output.error is not None or len(output.token_ids) != given.tokens or not output.text:
            raise SystemExit(f"the engine said {len(output.token_ids)} tokens, {output.text[:50]!r}: {output.error}")
        return marks

    return summary("ours", [once() for _ in range(1 + given.runs)][1:])


def words(vocabulary: int) -> Tokenizer:
    """Make a tokenizer that has a word for every id."""
    backend = Backend(models.BPE(vocab={f"Ġw{number}": number for number in range(vocabulary)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {})


def bare_step(runner: GpuRunner, context: int) -> float:
    """Milliseconds of a replay of one row's step behind a context, as the engine runs it."""
    table = Table(runner.pool)
    table.reach(context + 1)
    packed, bucket = pack(
        [Rows(table, [1], context, context, [1])], runner.pool.pages * PAGE, least=runner.graphs.step.least
    )
    with runner.stream.here():
        runner.graphs.bring(packed)
        times = milliseconds(lambda: runner.graphs.run_brought(bucket, count=1), 60, runner.device)
    table.shrink(0)
    return statistics.median(times)


def long_prompt(runner: GpuRunner, model: Any, prompt: list[int], runs: int) -> Found:
    """Time a prompt up to its first token, by turns; and what memory each takes besides what rests there."""
    ways = {"ours": partial(read_prompt, runner, prompt), "theirs": partial(forward_prompt, model, prompt)}
    memory = {way: extra_memory(call, runner.device) for way, call in ways.items()}  # which warms up, too
    pairs = [{way: timed(call, runner.device) for way, call in ways.items()} for _ in range(1 + runs)][1:]
    found: Found = {f"prompt_{way}_ms": statistics.median(pair[way] for pair in pairs) for way in ways}
    found["prompt_ratio"] = statistics.median(pair["ours"] / pair["theirs"] for pair in pairs)
    return found | {f"prompt_{way}_gb": size for way, size in memory.items()}


@torch.inference_mode()
def read_prompt(runner: GpuRunner, prompt: list[int]) -> int:
    """Prefill a prompt as the engine does, with its last token as a decode step; return the first token."""
    runner.open(0, GREEDY)
    runner.extend(0, prompt[:-1])
    (said,) = runner.propose([Feed(0, (prompt[-1],), (ROOT,))], [Ask(0, 0)])
    runner.close(0)
    return said.tokens[0]


@torch.inference_mode()
def forward_prompt(model: Any, prompt: list[int]) -> int:
    """Prefill a prompt in one forward that keeps its KV cache and scores its last position; return the first token."""
    out = model(torch.tensor([prompt], device=model.device), use_cache=True, logits_to_keep=1)
    return int(out.logits[0, -1].argmax())


class Clock(transformers.StoppingCriteria):
    """Notes when each token was there, and stops nothing."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **given: Any) -> Tensor:
        """Tell that no sequence is finished."""
        if not self.marks:
            settle(input_ids.device)  # what is read of the prompt belongs to no token
        self.marks.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generation(model: Any, prompt: list[int], given: argparse.Namespace, way: str, warm_ups: int, **how: Any) -> Found:
    """Let transformers generate; milliseconds a token, and the seconds of the first run beyond those of a later one."""
    ids = torch.tensor([prompt], device=model.device)
    marks, seconds = [], []
    for _ in range(warm_ups + given.runs):
        clock, started = Clock(), time.perf_counter()
        watched = transformers.StoppingCriteriaList([clock])
        said = model.generate(ids, max_new_tokens=given.tokens, do_sample=False, stopping_criteria=watched, **how)
        seconds.append(time.perf_counter() - started)
        marks.append(clock.marks)
        assert said.shape[1] == len(prompt) + given.tokens == len(prompt) + len(clock.marks)
    found = summary(way, marks[warm_ups:])
    if how:
        found |= {"compiled": hasattr(model, "_compiled_call"), "compile_s": seconds[0] - seconds[-1]}
    return found


def summary(way: str, runs: list[list[float]]) -> Found:
    """The median time from one token to the next, and the mean over whole runs, in milliseconds."""
    gaps = [1000 * (later - mark) for marks in runs for mark, later in pairwise(marks)]
    return {f"{way}_ms": statistics.median(gaps), f"{way}_mean_ms": statistics.fmean(gaps)}


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call that ends with a read."""
    settle(device)
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def extra_memory(call: Callable[[], object], device: torch.device) -> float:
    """Gigabytes that a call, made before, takes besides what rests on the device."""
    call()
    if device.type != "cuda":
        return 0.0
    rests = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - rests) / 1e9


def settle(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget() -> None:
    """Give back what a shape took."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_table(found: list[Found], given: argparse.Namespace) -> None:
    """Lay the figures out for people, with the bars they are to meet."""
    print(f"{given.tokens} tokens behind {given.context}, greedy, bfloat16; {given.prompt} tokens of a long prompt")
    print("shape                             ms   ours is")
    for one in found:
        ours, host = one["ours_ms"], one["ours_ms"] - one["step_ms"]
        for way, bar in (("eager", EAGER_BAR), ("static", COMPILED_BAR)):
            if f"{way}_ms" in one:
                times = one[f"{way}_ms"] / ours
                named = f"transformers, {'compiled' if one.get('compiled') else way}"
                line(one, named, one[f"{way}_ms"], f"{times:.2f} x as fast", times >= bar, bar)
        line(one, "ours, a whole token", ours)
        line(
            one,
            "ours, the bare step",
            one["step_ms"],
            f"{host:.3f} ms beside it",
            host <= HOST_BAR.get(one["shape"], 0),
            HOST_BAR,
        )
        line(
            one,
            "prompt, transformers",
            one["prompt_theirs_ms"],
            f"{one['prompt_theirs_gb']:.2f} GB beside weights and pool",
        )
        ratio = one["prompt_ratio"]
        note = f"{ratio:.2f} x the time, {one['prompt_ours_gb']:.2f} GB"
        line(one, "prompt, ours", one["prompt_ours_ms"], note, ratio <= PROMPT_BAR.get(one["shape"], 0), PROMPT_BAR)


def line(
    one: Found, what: str, ms: float, note: str = "", meets: bool = True, bar: float | dict[str, float] | None = None
) -> None:
    """Print a line of the table; show a bar by shapes if there is one."""
    limit = bar.get(one["shape"]) if isinstance(bar, dict) else bar
    print(
        f"{one['shape']:>5} {what:<22} {ms:8.3f}   {note}"
        + ("" if limit is None else f"  {'meets' if meets else 'MISSES'} {limit}")
    )


if __name__ == "__main__":
    main()
