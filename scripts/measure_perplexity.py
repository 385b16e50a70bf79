"""Compare stored weights and quantised KV caches with float32 and llama.cpp: perplexity of a model on a fixed text.

All have the same tokens and windows. The text is that of our own suite's articles. Each window is computed from its
first token; its second half is scored. llama.cpp runs in a process of its own, if --llama names an interpreter with the
package xllamacpp. It decodes token by token, with the next token of the text forced, and returns its probability.

    python scripts/measure_perplexity.py MODEL.gguf --llama /path/to/venv/bin/python

With --weights it compares float32 with other kinds of weights instead, for any model, and prints a table:

    python scripts/measure_perplexity.py MODEL --weights bfloat16,int8,fp8,int4 --text docs/*.md
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROWS = 64  # tokens that are scored at once


def main() -> None:
    """Measure, and print a line for each way and one of JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model")
    options.add_argument("--windows", type=int, default=4)
    options.add_argument("--window", type=int, default=256, help="tokens in each")
    options.add_argument("--weights", metavar="KINDS", help="kinds of weights to compare with float32, with commas")
    options.add_argument("--text", nargs="+", metavar="FILE", help="the text, instead of our own suite's articles")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--llama", metavar="PYTHON", help="an interpreter that has xllamacpp")
    options.add_argument("--only", choices=["llama"], help="for internal use: one part, in a process of its own")
    given = options.parse_args()
    if given.only:
        print("@" + json.dumps(by_llama(given.model, json.load(sys.stdin), given.threads)))
        return
    texts = windows(given.model, given.windows, given.window, given.text)
    if given.weights:
        print_kinds(given.model, texts, given.weights.split(","), given.threads)
        return
    found: dict[str, Any] = {"tokens": sum(len(text) // 2 for text in texts)}
    floats, stored = (ours(given.model, texts, weights, None, given.threads) for weights in ("float32", "stored"))
    found["float32"], found["stored"] = perplexity(floats["said"]), perplexity(stored["said"])
    found |= divergence("stored", floats["logits"], stored["logits"])
    for kind in ("bfloat16", "int8"):
        for name, weights, exact in (("float32", "float32", floats), ("stored", "stored", stored)):
            way, small = f"{name}, cache {kind}", ours(given.model, texts, weights, kind, given.threads)
            found[way] = perplexity(small["said"])
            found[f"{way}: / {name}"] = found[way] / found[name]
            found[f"{way}: error of that"] = uncertainty(small["said"], exact["said"])
            found |= divergence(way, exact["logits"], small["logits"])
    if given.llama:
        command = [given.llama, __file__, given.model, "--only", "llama", "--threads", str(given.threads)]
        child = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
        answer = next(line for line in child.stdout.splitlines() if line.startswith("@"))
        theirs = json.loads(answer[1:])
        found["llama.cpp"] = perplexity(theirs)
        found["stored / llama.cpp"] = found["stored"] / found["llama.cpp"]
        found["standard error of that"] = uncertainty(stored["said"], theirs)
    for name, value in found.items():
        print(f"{name:48} {value:.5g}")
    print(json.dumps(found))


def print_kinds(model: str, texts: list[list[int]], kinds: list[str], threads: int) -> None:
    """Print a table of kinds of weights, and the same as JSON."""
    exact = ours(model, texts, "float32", None, threads)
    found: dict[str, Any] = {"tokens": len(exact["said"]), "float32": {"perplexity": perplexity(exact["said"])}}
    print(f"| weights | perplexity | ratio | standard error | KL | best token equal |  ({found['tokens']} tokens)")
    print(f"| float32 | {found['float32']['perplexity']:.3f} | 1 | | | |", flush=True)
    for kind in kinds:
        small = ours(model, texts, kind, None, threads)
        apart = divergence("", exact["logits"], small["logits"])
        kl, equal = apart.values()
        here = {"perplexity": perplexity(small["said"]), "error": uncertainty(small["said"], exact["said"])}
        here |= {"ratio": here["perplexity"] / found["float32"]["perplexity"], "kl": kl, "equal": equal}
        found[kind] = here
        print(
            f"| {kind} | {here['perplexity']:.3f} | {here['ratio']:.4f} | {here['error']:.4f} | {kl:.4f} | "
            f"{equal:.1%} |",
            flush=True,
        )
    print(json.dumps(found))


def windows(model: str, many: int, length: int, files: list[str] | None = None) -> list[list[int]]:
    """The first tokens of our articles, or of some files, cut into windows."""
    from specbranch.assembly import ModelChoice, load_tokenizer
    from specbranch.lab.suites.suite import load_suite

    if files:
        text = "\n\n".join(Path(file).read_text(encoding="utf-8") for file in files)
    else:
        text = "\n\n".join(prompt.turns[0].partition("\n\n")[2] for prompt in load_suite("own-summary").prompts)
    ids = load_tokenizer(ModelChoice(model)).encode(text)
    if len(ids) < many * length:
        raise SystemExit(
            f"The text has {len(ids)} tokens, {many * length} were asked for. Lower --windows or --window."
        )
    return [ids[at * length : (at + 1) * length] for at in range(many)]


def ours(model: str, texts: list[list[int]], weights: Any, cache: str | None, threads: int) -> dict[str, Any]:
    """What we say to the second half of each window: log-probabilities of its tokens, and all logits."""
    import torch

    from specbranch.models.loading import load_native

    torch.set_num_threads(threads)
    runner = load_native(model, context_length=len(texts[0]), weights=weights, dtype="float32", cache_dtype=cache)
    logits = torch.cat([_read(runner, text) for text in texts])
    wanted = torch.tensor([token for text in texts for token in text[len(text) // 2 :]])
    said = logits.log_softmax(-1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    return {"said": said.tolist(), "logits": logits}


def _read(runner: Any, text: list[int]) -> Any:
    """The logits before each token of the second half [tokens, vocabulary]."""
    import torch

    from specbranch.config import SamplingParams
    from specbranch.core.request import Request
    from specbranch.core.runner import Feed
    from specbranch.core.slots import ROOT

    half, found = len(text) // 2, []
    runner.open(0, Request(SamplingParams(), seed=0, prompt_length=0))
    runner.extend(0, text[: half - 1])
    for start in range(half - 1, len(text) - 1, ROWS):
        some = text[start : min(start + ROWS, len(text) - 1)]
        rows = runner.score([Feed(0, tuple(some), tuple(range(ROOT, len(some) - 1)))])[0]
        found += [row.logits.float() for row in rows]
        runner.keep(0, tuple(range(len(some))), len(some))
    runner.close(0)
    return torch.stack(found)


def by_llama(model: str, texts: list[list[int]], threads: int) -> list[float]:
    """What llama.cpp says to the second half of each window."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, len(texts[0]) + 8, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server, said = xllamacpp.Server(params), []
    for text in texts:
        for at in range(len(text) // 2, len(text)):
            # The token is forced by a bias; the reported probability is the one without it.
            asked = {"prompt": text[:at], "n_predict": 1, "temperature": 0.0, "n_probs": 1, "cache_prompt": True}
            answer = server.handle_completions({**asked, "logit_bias": [[text[at], 1000.0]], "ignore_eos": False})
            reported = answer["choices"][0]["logprobs"]["content"][0]
            if reported["id"] != text[at]:
                raise SystemExit(f"llama.cpp was to say token {text[at]}, and said {reported['id']}.")
            said.append(float(reported["logprob"]))
    return said


def perplexity(said: list[float]) -> float:
    """e to the mean surprise."""
    return math.exp(-sum(said) / len(said))


def uncertainty(said: list[float], theirs: list[float]) -> float:
    """How far the ratio of two perplexities may be off by chance: each token's chances differ by rounding, up or
    down."""
    return statistics.stdev(a - b for a, b in zip(said, theirs, strict=True)) / math.sqrt(len(said))


def divergence(name: str, exact: Any, found: Any) -> dict[str, float]:
    """How far distributions are from the exact ones, and how often both have the same best token."""
    p, q = exact.log_softmax(-1), found.log_softmax(-1)
    return {
        f"{name}: mean divergence": float((p.exp() * (p - q)).sum(-1).mean()),
        f"{name}: same best token": float((exact.argmax(-1) == found.argmax(-1)).float().mean()),
    }


if __name__ == "__main__":
    main()
