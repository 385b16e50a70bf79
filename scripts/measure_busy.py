"""Measure decoding on this CPU while other processes take its cores: tokens/s by method and load, medians of paired
rounds.

Starts busy processes of its own and ends them. "pulsed" is one process that works every other second. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

METHODS = {"plain": "autoregressive", "specbranch": "specbranch", "tree": "tree"}
BUSY = "while True: pass"
PULSED = "import time\nwhile True:\n until = time.time() + 1\n while time.time() < until: pass\n time.sleep(1)"
LOADS = {"quiet": [], "one": [BUSY], "two": [BUSY, BUSY], "pulsed": [PULSED]}
QUESTION = [{"role": "user", "content": "Explain how a lighthouse works, and why sailors still like them."}]
SETTLE = 0.5  # seconds a load runs before it is measured beside
Speeds = dict[str, dict[str, list[float]]]  # tokens/s by load and method, a number a round


def main() -> None:
    """Measure, print a table and the JSON line."""
    given = _options()
    import torch

    if given.threads:
        torch.set_num_threads(given.threads)
    models = {name: _load(METHODS[name]) for name in given.methods}
    for model in models.values():
        _speed(model, given, 1.0)  # warms up
    speeds = {load: _beside(load, models, given) for load in given.loads}
    print(_table(speeds))
    setting = {"threads": torch.get_num_threads(), "rounds": given.rounds, "seconds": given.seconds}
    print(json.dumps({**setting, "temperature": given.temperature, "medians": _medians(speeds), "speeds": speeds}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS), help="what to measure beside")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="what to measure")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of; each runs every method")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of decoding for one number")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature")
    parser.add_argument("--threads", type=int, default=0, help="threads (default: torch's choice)")
    return parser.parse_args()


def _load(method: str) -> Any:
    from specbranch import LLM

    return LLM(method=method, device="cpu", options={"prefix_cache": False})


def _beside(load: str, models: dict[str, Any], given: argparse.Namespace) -> dict[str, list[float]]:
    """Measure all methods in turns beside one load; every second round in the other order."""
    found: dict[str, list[float]] = {name: [] for name in models}
    seconds = given.seconds if load != "pulsed" else max(given.seconds, 4.0)  # whole periods of the load
    with _busy(LOADS[load]):
        time.sleep(SETTLE)
        for round_ in range(given.rounds):
            for name in list(models)[:: -1 if round_ % 2 else 1]:
                found[name].append(_speed(models[name], given, seconds))
                print(f"{load}: {name} {found[name][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    return found


@contextmanager
def _busy(programs: list[str]) -> Iterator[None]:
    """Run programs beside the block, and end them."""
    running = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _speed(model: Any, given: argparse.Namespace, seconds: float) -> float:
    """Decode for some seconds; returns tokens/s, prefill apart."""
    from specbranch import SamplingParams

    prompt = model.tokenizer.chat(QUESTION)
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True, temperature=given.temperature, seed=1)
    tokens, spent, until = 0, 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        speed = float(model.generate([prompt], params)[0].stats["tokens_per_second"])
        tokens, spent = tokens + given.tokens, spent + given.tokens / speed
    return tokens / spent


def _medians(speeds: Speeds) -> dict[str, dict[str, float]]:
    return {load: {name: median(found) for name, found in by_name.items()} for load, by_name in speeds.items()}


def _table(speeds: Speeds) -> str:
    """Lay out medians, and beside them what share of the quiet speed and of plain decoding they are."""
    lines = [f"{'load':>8} {'method':>12} {'tokens/s':>9} {'of quiet':>9} {'of plain':>9}"]
    for load, by_name in speeds.items():
        for name, found in by_name.items():
            quiet = speeds.get("quiet", {}).get(name)
            of_quiet = f"{median(found) / median(quiet):9.2f}" if quiet else " " * 9
            plain = by_name.get("plain")
            of_plain = f"{median(a / b for a, b in zip(found, plain, strict=True)):9.2f}" if plain else " " * 9
            lines.append(f"{load:>8} {name:>12} {median(found):9.1f} {of_quiet} {of_plain}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
