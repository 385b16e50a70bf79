"""`make demo`: stream an answer of the default pair with SpecBranch, then compare the methods on this machine and on
a modelled GPU."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from specbranch import LLM, Output, SamplingParams
from specbranch.cli.paint import LEGEND, show, summary
from specbranch.core.methods import METHODS as ALL_METHODS
from specbranch.sim.shipped import load_profile

QUESTION = "Write a Python function that tells whether a word reads the same backwards, and explain it."
PROMPTS = (  # code, reasoning and prose: from what a draft foresees well to what it does not
    "Write a Python function that counts the words in a file.",
    "A gardener plants 4 rows of 9 tulips, and 7 of them do not come up. How many flower? Explain step by step.",
    "Describe in a short paragraph a harbour on a foggy morning.",
)
PLAIN = "autoregressive"
# without lookahead, which reads 120 rows a step: too long for a CPU
METHODS = tuple(name for name, method in ALL_METHODS.items() if not method.guesses)
CLOCK = "h200-1b-8b"
SECONDS = 30.0  # after which no further prompt is begun
NEXT = """Go on with
  .venv/bin/specbranch chat
  .venv/bin/specbranch generate --method specbranch "Once upon a time" --trace trace.json
  .venv/bin/specbranch generate --chat "Why is the sky blue?" --temperature 0.7 --json > answer.jsonl
  .venv/bin/specbranch verify answer.jsonl
  .venv/bin/specbranch distill --help    # a draft for a target of your own"""


@dataclass(frozen=True, slots=True)
class Row:
    """One method's figures over all tokens of its answers; the speedup is over plain decoding of the same prompts."""

    method: str
    tokens_per_second: float
    speedup: float
    tokens_per_forward: float
    rollback: float | None
    lossless: bool


def main(**models: Any) -> None:
    """Run the demonstration, on the default pair unless other models are named."""
    console = Console(stderr=True, highlight=False)
    with console.status("Loading SmolLM2-135M-Instruct and its draft"):
        llm = LLM(**models, method="specbranch", prefix_cache=False)
    with llm:
        stream(llm, console)
        with progress(console) as bar:
            here = measure(llm, PROMPTS, bar, "The same with every method, on this machine", SECONDS)
    with console.status("Loading them once more, on a modelled clock"):
        llm = LLM(**models, method="specbranch", clock=CLOCK, prefix_cache=False)
    with llm, progress(console) as bar:
        there = measure(llm, PROMPTS[: len(here[PLAIN])], bar, "On a modelled GPU", SECONDS)
    prompts = len(there[PLAIN])
    found = rows(here, prompts), rows(there, prompts)
    console.print(table(*found, prompts))
    console.print(verdict(*found), soft_wrap=True)
    console.print(f"\n{NEXT}", markup=False, soft_wrap=True)


def stream(llm: LLM, console: Console) -> None:
    """Show one answer as it comes."""
    console.print(f"[bold]{QUESTION}[/]  (method specbranch)\n", soft_wrap=True)
    colour = sys.stdout.isatty()
    output = show(llm.stream_chat(asked(QUESTION), SamplingParams(max_tokens=160)), colour)
    console.print(f"\n{summary(output)}", markup=False, soft_wrap=True)
    if colour:
        print(LEGEND, file=sys.stderr)


def measure(llm: LLM, prompts: Sequence[str], bar: Progress, what: str, seconds: float) -> dict[str, list[Output]]:
    """Answer the prompts with every method by turns; leaves out the last prompts where time runs out."""
    methods = {name: llm.using(name) for name in METHODS}
    answers: dict[str, list[Output]] = {name: [] for name in methods}
    task, start = bar.add_task(what, total=len(prompts) * len(methods)), time.monotonic()
    for one in methods.values():
        one.chat(asked("Hello"), SamplingParams(max_tokens=8))  # warm-up
    for prompt in prompts:
        for name, one in methods.items():
            bar.update(task, description=f"{what}: {name}", refresh=True)
            answers[name].append(one.chat(asked(prompt), SamplingParams(max_tokens=64)))
            bar.advance(task)
        if time.monotonic() - start > seconds:
            break
    return answers


def rows(answers: dict[str, list[Output]], prompts: int) -> dict[str, Row]:
    """Turn the answers to the first prompts into figures."""
    return {name: _row(name, outputs[:prompts], answers[PLAIN][:prompts]) for name, outputs in answers.items()}


def table(here: dict[str, Row], there: dict[str, Row], prompts: int) -> Table:
    """Set this machine's figures beside the modelled ones."""
    clock = load_profile(CLOCK)
    made = Table(
        title=f"\n{prompts} prompt{'s' if prompts > 1 else ''}, every method on the same pair (over all tokens)",
        caption="* Modelled, not measured: what is drafted and accepted is this pair's, but time is charged by the "
        f"profile {CLOCK}, "
        f"measured on {clock.hardware} with {clock.pair}, both at work at once.",
        caption_justify="left",
    )
    made.add_column("method", no_wrap=True)
    headings = ("tokens/s\nhere", "× plain\nhere", "tokens/\nforward", "rollback", "same\ntokens", "× plain,\nGPU*")
    for heading in headings:
        made.add_column(heading, justify="right")
    for name, row in here.items():
        rollback = "–" if row.rollback is None else f"{row.rollback:.0%}"
        figures = (f"{row.tokens_per_second:.1f}", f"{row.speedup:.2f}", f"{row.tokens_per_forward:.2f}", rollback)
        same = "yes" if row.lossless and there[name].lossless else "[red]NO[/]"
        made.add_row(name, *figures, same, f"{there[name].speedup:.2f}")
    return made


def verdict(here: dict[str, Row], there: dict[str, Row]) -> str:
    """Say in plain words what to use here, and what a GPU would change."""
    best, other = (max(found.values(), key=lambda row: row.speedup) for found in (here, there))
    if best.speedup <= 1.0 or best.method == PLAIN:
        choice = "Plain decoding is the faster choice on this machine: --method autoregressive."
    else:
        choice = f"Fastest here: {best.method}, {best.speedup:.2f} × plain decoding."
    if here["specbranch"].speedup <= 1.0:
        choice += (
            " specbranch does not pay here: drafting costs more than it brings, and on so short a text it has "
            "hardly found that out."
        )
    if any(row.speedup > 1.1 * row.tokens_per_forward for row in here.values()):
        choice += (
            " But something else kept this machine busy: no method can gain more than its tokens per forward. Try "
            "again when it is quiet."
        )
    gpu = "" if other.method == "specbranch" else f"{other.method} {other.speedup:.2f} ×, "
    lossless = all(row.lossless for row in (*here.values(), *there.values()))
    whole, parted = "Every method gave exactly the tokens of plain decoding.", "Not every method gave the same tokens."
    sentence = whole if lossless else f"[red]{parted}[/]"
    return f"{choice}\nOn the modelled GPU: {gpu}specbranch {there['specbranch'].speedup:.2f} ×.\n{sentence}"


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """Show how far a comparison has come; drawn between the answers only, for a thread that draws would take time
    from them."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        yield bar


def asked(question: str) -> list[dict[str, str]]:
    """Return a conversation that consists of a question."""
    return [{"role": "user", "content": question}]


def _row(name: str, outputs: Sequence[Output], plain: Sequence[Output]) -> Row:
    rates = [output.stats["rollback_rate"] for output in outputs if output.stats["rollback_rate"] is not None]
    speed, base = _over_all(outputs, "decode_seconds"), _over_all(plain, "decode_seconds")
    return Row(
        method=name,
        tokens_per_second=speed,
        speedup=speed / base if base else 1.0,
        tokens_per_forward=_over_all(outputs, "target_forwards") or 1.0,
        rollback=statistics.fmean(rates) if rates else None,
        lossless=all(output.token_ids == base.token_ids for output, base in zip(outputs, plain, strict=True)),
    )


def _over_all(outputs: Sequence[Output], what: str) -> float:
    """Tokens of all answers, the first of each left out, by what they took; 0 if that is nothing."""
    taken = sum(output.stats[what] for output in outputs)
    return sum(len(output.token_ids) - 1 for output in outputs) / taken if taken else 0.0


if __name__ == "__main__":
    main()
