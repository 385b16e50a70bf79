"""Compare decoding on this CPU with llama.cpp's: the same GGUF file, prompts and threads, in turns, medians.

Each side is a process of its own that sleeps while another works: ours, and llama.cpp of the package xllamacpp. With
--built there is a third: the interpreter it names has the package llama-cpp-python, built for this machine. The script
prints what each was built with. A round runs every prompt of every suite on each side. Then it times steps of several
rows, and the prefill of a long prompt. Last line: JSON.

    python scripts/compare_llamacpp.py --data FOLDER --built VENV/bin/python
    python scripts/compare_llamacpp.py --model qwen.gguf --draft FOLDER --suites humaneval
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROWS = (1, 4, 8)
LONG = 384  # tokens of the prompt whose prefill is timed
STEPS = 7  # of each number of rows in a round
CONTEXT = 2048
MEGABYTE = 1 << 20
PLAIN, OURS = "autoregressive", "specbranch"


def main() -> None:
    """Run all sides by turns and print what they took."""
    given = _options()
    if given.side:
        serve({"ours": Ours, "wheel": Wheel, "built": Built}[given.side](given))
        return
    sides = {"ours": Side("ours", sys.executable), "wheel": Side("wheel", sys.executable)}
    if given.built:
        sides["built"] = Side("built", given.built)
    path = file_of(given)
    loads = {name: side.ask("load", path=path) for name, side in sides.items()}
    for name, load in loads.items():
        print(f"{name:6} {load['seconds']:5.1f} s to load  {load['about']}")
    asked: dict[str, list[list[int]]] = sides["ours"].ask("prompts")["prompts"]
    long = [token for prompts in asked.values() for prompt in prompts for token in prompt][:LONG]
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(given.rounds + 1):  # the first is a warm-up
        for name, value in _round(sides, asked, long, given.tokens).items():
            found[name] += value if number else []
        print(f"round {number} of {given.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in found.items()}
    memory = {name: side.ask("memory") for name, side in sides.items()}
    _print(medians, memory, list(asked), [name for name in sides if name != "ours"])
    print(json.dumps({"loads": loads, "ms": medians, "memory": memory, "rounds": given.rounds}))


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", help="a GGUF file [that of the default pair]")
    options.add_argument("--draft", help="its draft [that of the default pair, for its own file]")
    options.add_argument("--suites", default="humaneval,gsm8k")
    options.add_argument("--data", help="the folder of public prompts")
    options.add_argument("--limit", type=int, default=4, help="prompts of each suite [4]")
    options.add_argument("--tokens", type=int, default=96, help="of each answer, at most [96]")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--built", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    options.add_argument("--side", choices=["ours", "wheel", "built"], help="for internal use")
    return options.parse_args()


class Side:
    """A process that answers one request at a time."""

    def __init__(self, name: str, python: str) -> None:
        command = [python, __file__, *sys.argv[1:], "--side", name]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.name, self._child = name, subprocess.Popen(command, text=True, **pipes)

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps({"what": what, **values}) + "\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        raise SystemExit(f"The side {self.name!r} ended when asked for {what}. Run it by hand with --side {self.name}.")


def serve(side: Any) -> None:
    """Answer the requests on standard input."""
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.pop("what")
        found = memory() if what == "memory" else getattr(side, what)(**asked)
        print("@" + json.dumps(found), flush=True)


def memory() -> dict[str, float]:
    """Most megabytes that were ever resident, and those resident now."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {name: int(found[field].split()[0]) / 1024 for name, field in (("peak", "VmHWM"), ("now", "VmRSS"))}


def _round(sides: dict[str, Side], asked: dict[str, list[list[int]]], long: list[int], tokens: int) -> dict[str, Any]:
    """Milliseconds of one round, by what was timed."""
    found: dict[str, list[float]] = defaultdict(list)
    for suite, prompts in asked.items():
        for prompt in prompts:
            for name, side in sides.items():
                for method, ms in side.ask("decode", prompt=prompt, tokens=tokens).items():
                    found[f"{suite} {name} {method}"].append(ms)
    for name, side in sides.items():
        found[f"reading {name}"].append(side.ask("read", prompt=long)["ms"])
    for rows, values in sides["ours"].ask("rows", prompt=long[:200]).items():
        found[f"rows {rows}"] += values
    return found


def _print(ms: dict[str, float], resident: dict[str, Any], suites: list[str], others: list[str]) -> None:
    for suite in suites:
        for name in others:
            theirs = ms[f"{suite} {name} plain"]
            parts = [f"llama.cpp ({name}) {theirs:.2f} ms a token"]
            parts += [f"its n-grams {ms[key]:.2f}"] if (key := f"{suite} {name} ngram") in ms else []
            for method in (PLAIN, OURS):
                if (key := f"{suite} ours {method}") in ms:
                    parts.append(f"{method} {ms[key]:.2f} = {theirs / ms[key]:.2f} times as fast")
            print(f"{suite}: {'; '.join(parts)}")
    for name in others:
        theirs = statistics.mean(ms[f"{suite} {name} plain"] for suite in suites)
        rows = ", ".join(f"{rows} rows {ms[f'rows {rows}'] / theirs:.2f}" for rows in ROWS)
        read = ms[f"reading {name}"], ms["reading ours"]
        print(
            f"in tokens of llama.cpp ({name}): {rows}; reading a prompt, ms a token: {read[0]:.2f}, ours {read[1]:.2f}"
        )
    for name, found in resident.items():
        print(f"{name}: {found['peak']:.0f} MB at most, {found['now']:.0f} at the end")


class Ours:
    """This engine."""

    def __init__(self, given: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(given.threads)
        self.given, self.imported = given, 0.0

    def load(self, path: str) -> dict[str, Any]:
        """Load the pair."""
        from specbranch import LLM
        from specbranch.pairs import chosen_models

        given = self.given
        own = (path, given.draft) if given.model else chosen_models(None, None, None)
        self.imported = memory()["now"]
        start = time.perf_counter()
        self.llm = LLM(
            *own, device="cpu", options={"context_length": CONTEXT, "prefix_cache": False, "keep_experience": False}
        )
        seconds = time.perf_counter() - start
        runner: Any = self.llm.target_runner
        about = f"weights {runner.weights}, compiled: {runner.compiled}; {self.imported:.0f} MB were imported"
        return {"seconds": seconds, "about": about, "imported": self.imported}

    def prompts(self) -> dict[str, Any]:
        """The prompts as all sides are given them."""
        from specbranch.lab.suites.suite import load_suites

        data = Path(self.given.data) if self.given.data else None
        suites = load_suites(self.given.suites.split(","), data=data, limit=self.given.limit)
        chat = self.llm.tokenizer.chat
        return {
            "prompts": {
                suite.name: [chat([{"role": "user", "content": prompt.turns[0]}]) for prompt in suite.prompts]
                for suite in suites
            }
        }

    def decode(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """Milliseconds a token, plain and planned."""
        from specbranch import SamplingParams, SpeculativeConfig

        methods = (PLAIN, OURS) if self.llm.drafter is not None else (PLAIN,)
        found = {}
        for method in methods:
            llm = self.llm.using(speculative=SpeculativeConfig(method=method))
            found[method] = (
                1000 / llm.generate([prompt], SamplingParams(max_tokens=tokens))[0].stats["tokens_per_second"]
            )
        return found

    def read(self, prompt: list[int]) -> dict[str, float]:
        """Milliseconds a token of reading a prompt."""
        runner = self.llm.target_runner
        runner.open(-1, self._greedy())
        start = time.perf_counter()
        runner.extend(-1, prompt)
        runner.flush()
        seconds = time.perf_counter() - start
        runner.close(-1)
        return {"ms": 1000 * seconds / len(prompt)}

    def rows(self, prompt: list[int]) -> dict[str, list[float]]:
        """Milliseconds of steps of several rows."""
        from specbranch.core.runner import Feed
        from specbranch.core.slots import ROOT

        runner, found = self.llm.target_runner, {}
        runner.open(-1, self._greedy())
        runner.extend(-1, prompt)
        runner.flush()
        for rows in ROWS:
            times = []
            for _ in range(STEPS):
                start = time.perf_counter()
                runner.feed([Feed(-1, tuple(prompt[:rows]), tuple(range(ROOT, rows - 1)))])
                times.append(1000 * (time.perf_counter() - start))
                runner.keep(-1, (), 0)
            found[str(rows)] = times[1:]
        runner.close(-1)
        return found

    def _greedy(self) -> Any:
        from specbranch.config import SamplingParams
        from specbranch.core.request import Request

        return Request(SamplingParams(), seed=0, prompt_length=0)


class Wheel:
    """llama.cpp as the package xllamacpp has it, plain and by n-grams."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given

    def load(self, path: str) -> dict[str, Any]:
        """Load both servers; the first is timed."""
        import torch

        from specbranch.lab.bench.other_engines.llamacpp import built_with, make_server

        torch.set_num_threads(self.given.threads)
        start = time.perf_counter()
        self.plain = make_server(path, CONTEXT, "llamacpp")
        seconds = time.perf_counter() - start
        self.ngram = make_server(path, CONTEXT, "llamacpp-ngram")
        return {"seconds": seconds, "about": built_with()}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """Milliseconds a token."""
        both = {"plain": self.plain, "ngram": self.ngram}
        return {name: self._timed(one, prompt, tokens)["predicted_per_token_ms"] for name, one in both.items()}

    def read(self, prompt: list[int]) -> dict[str, float]:
        """Milliseconds a token of reading a prompt."""
        return {"ms": self._timed(self.plain, prompt, 1)["prompt_per_token_ms"]}

    def _timed(self, server: Any, prompt: list[int], tokens: int) -> dict[str, float]:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "cache_prompt": False}
        timings: dict[str, float] = server.handle_completions(asked)["timings"]
        return timings


class Built:
    """llama.cpp as pip built it for this machine with the package llama-cpp-python; knows nothing of ours."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given

    def load(self, path: str) -> dict[str, Any]:
        """Load the model."""
        import llama_cpp

        self.llama_cpp, threads, start = llama_cpp, self.given.threads, time.perf_counter()
        self.model = llama_cpp.Llama(path, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)
        about = f"llama.cpp of llama-cpp-python {llama_cpp.__version__}: {llama_cpp.llama_print_system_info().decode()}"
        return {"seconds": time.perf_counter() - start, "about": about.strip(" |")}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """Milliseconds a token, the choice of tokens left out of the clock."""
        self.model.reset()
        self.model.eval(prompt)
        ends, seconds, made = {self.model.token_eos()}, 0.0, 0
        token = self._best()
        while made < tokens - 1 and token not in ends:
            start = time.perf_counter()
            self.model.eval([token])
            seconds += time.perf_counter() - start
            token, made = self._best(), made + 1
        return {"plain": 1000 * seconds / max(made, 1)}

    def read(self, prompt: list[int]) -> dict[str, float]:
        """Milliseconds a token of reading a prompt."""
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(prompt)
        return {"ms": 1000 * (time.perf_counter() - start) / len(prompt)}

    def _best(self) -> int:
        import numpy

        logits = self.llama_cpp.llama_get_logits_ith(self.model._ctx.ctx, -1)
        return int(numpy.ctypeslib.as_array(logits, shape=(self.model.n_vocab(),)).argmax())


def file_of(given: argparse.Namespace) -> str:
    """The GGUF file that all sides run."""
    from specbranch.assembly import ModelChoice, fetched
    from specbranch.pairs import chosen_models

    return fetched(ModelChoice(given.model or chosen_models(None, None, None)[0]))


if __name__ == "__main__":
    main()
