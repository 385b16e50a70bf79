"""`make demo`: stream an answer of the default pair, then show what pays on this machine, and on a modelled GPU.

Two prompts: an edit, whose answer copies most of the prompt, and a free question. The methods take turns; figures are
medians over turns after a warm-up.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from specbranch import LLM, Output, SamplingParams
from specbranch.cli.paint import LEGEND, show, summary
from specbranch.clock.shipped import load_profile
from specbranch.engine import LLMView
from specbranch.machine_load import LoadMeter, roughness, usable_cores
from specbranch.serve.examples import COPYING, EXAMPLES, FREE, Example

PLAIN, OURS = "autoregressive", "specbranch"
# Those of most interest first: a slow machine leaves out the last ones. Without lookahead, which verifies 120 rows a
# step: too long for a CPU.
METHODS = (PLAIN, OURS, "lookup", "tree", "speculative", "adaptive", "pearl", "auto")
TURNS = 3  # that count
ROUNDS = TURNS + 2  # a warm-up before them, a modelled one after them
TOKENS = 80  # of an answer: the edit's whole one
SECONDS = 50.0  # for all turns together; methods that do not fit are left out
KINDS = {COPYING.name: "edit", FREE.name: "free"}
GAIN = 1.03  # below this a method is not called faster
CLOCK = "h200-1b-8b"
NEXT = """Go on with
  .venv/bin/specbranch chat
  .venv/bin/specbranch serve             # and its page, with a race, on http://127.0.0.1:8000
  .venv/bin/specbranch generate --method specbranch "Once upon a time" --trace trace.json
  .venv/bin/specbranch generate --chat "Why is the sky blue?" --temperature 0.7 --json > answer.jsonl
  .venv/bin/specbranch verify answer.jsonl
  .venv/bin/specbranch distill --help    # a draft for a target of your own"""
Answers = dict[str, dict[str, list[Output]]]  # by example and method, one for each turn


@dataclass(frozen=True, slots=True)
class Row:
    """One method's figures on one prompt: medians over its turns; the speedup is over plain decoding's."""

    method: str
    tokens_per_second: float
    speedup: float
    tokens_per_forward: float
    seconds: tuple[float, ...]  # of each turn's decoding
    lossless: bool


Rows = dict[str, dict[str, Row]]  # by example and method


def main(context_length: int | None = None, **models: Any) -> None:
    """Run the demonstration, on the default pair unless other models are named."""
    console = Console(stderr=True, highlight=False)
    with console.status("Loading SmolLM2-135M-Instruct and its draft"):
        llm = LLM(**models, method=OURS, options={"context_length": context_length, "prefix_cache": False})
        _answer(llm, COPYING)  # what is seen first is not the first forward of a process
    with llm:
        stream(llm, console)
        with progress(console) as bar:
            meter = LoadMeter()
            methods = warm_up(llm, bar, SECONDS)
            here = rows(measure(methods, bar, "On this machine", TURNS))
            # a planned method's turns differ because it learns; plain decoding's are equal work
            rough = roughness(meter.other_cores(), [found[PLAIN].seconds for found in here.values()])
            timed = llm.modelled(CLOCK)
            there = rows(measure({name: timed.using(name) for name in methods}, bar, "On a modelled GPU", 1))
    console.print(table(here))
    console.print(verdict(here, rough), soft_wrap=True)
    console.print(modelled_table(there))
    console.print(sameness(here, there), soft_wrap=True)
    console.print(f"\n{NEXT}", markup=False, soft_wrap=True)


def stream(llm: LLM, console: Console) -> None:
    """Show one answer as it comes."""
    console.print(f"[bold]{COPYING.prompt}[/]\n", soft_wrap=True)
    colour = sys.stdout.isatty()
    output = show(llm.stream_chat(asked(COPYING.prompt), SamplingParams(max_tokens=2 * TOKENS)), colour)
    console.print(f"\n{summary(output)}", markup=False, soft_wrap=True)
    if colour:
        print(LEGEND, file=sys.stderr)


def warm_up(llm: LLM, bar: Progress, seconds: float) -> dict[str, LLMView]:
    """Answer once by each method; returns those for whose turns there is time, plain decoding and ours at least."""
    kept: dict[str, LLMView] = {}
    task, start = bar.add_task("Warming up", total=len(METHODS)), time.monotonic()
    for name in METHODS:
        if len(kept) > 1 and ROUNDS * (time.monotonic() - start) * (1 + 1 / len(kept)) > seconds:
            break
        kept[name] = llm.using(name)
        for example in EXAMPLES:
            _answer(kept[name], example)
        bar.advance(task)
        bar.refresh()
    return kept


def measure(methods: Mapping[str, LLMView], bar: Progress, what: str, turns: int) -> Answers:
    """Answer both prompts by every method in turn: load that comes and goes meets them all."""
    answers: Answers = {example.name: {name: [] for name in methods} for example in EXAMPLES}
    task = bar.add_task(what, total=turns * len(EXAMPLES) * len(methods))
    for _ in range(turns):
        for example in EXAMPLES:
            for name, one in methods.items():
                bar.update(task, description=f"{what}: {name}", refresh=True)
                answers[example.name][name].append(_answer(one, example))
                bar.advance(task)
    return answers


def rows(answers: Answers) -> Rows:
    """Turn answers into figures."""
    return {
        example: {name: _row(name, outputs, found[PLAIN]) for name, outputs in found.items()}
        for example, found in answers.items()
    }


def table(here: Rows) -> Table:
    """Set what was measured on both prompts side by side."""
    cores = usable_cores()
    made = Table(
        title=f"\nMeasured on this machine ({cores} core{'s' if cores > 1 else ''}): "
        f"median of {TURNS} turns after a warm-up",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    made.add_column("\n\nmethod", no_wrap=True)
    for example in here:
        for heading in (f"{KINDS[example]}:\ntokens\n/s", "\n×\nplain", "\ntokens/\nforward"):
            made.add_column(heading, justify="right")
    made.add_column("\nsame\ntokens", justify="right")
    for name in _first(here):
        found = [one[name] for one in here.values()]
        figures = [
            figure
            for row in found
            for figure in (f"{row.tokens_per_second:.1f}", f"{row.speedup:.2f}", f"{row.tokens_per_forward:.2f}")
        ]
        made.add_row(name, *figures, "yes" if all(row.lossless for row in found) else "[red]NO[/]")
    return made


def verdict(here: Rows, rough: str) -> str:
    """Say in plain words what pays here and why, which methods were left out, and whether figures are rough."""
    said = [f"{_result(example, here[example.name])} {example.why}" for example in EXAMPLES]
    if left_out := [name for name in METHODS if name not in _first(here)]:
        said.append(f"Left out, for this machine would take too long: {', '.join(left_out)}.")
    if rough:
        said.append(f"[bold red]{rough}[/]")
    return "\n".join(said)


def modelled_table(there: Rows) -> Table:
    """What a cost profile charges for the same decisions."""
    clock = load_profile(CLOCK)
    made = Table(
        title="\nModelled, not measured: × plain on a GPU",
        caption="Drafted and accepted tokens are this pair's; time is charged by the profile "
        f"{CLOCK}, measured on {clock.hardware} with {clock.pair}, both at work at once.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        min_width=60,
    )
    made.add_column("method", no_wrap=True)
    for example in there:
        made.add_column(KINDS[example], justify="right")
    for name in _first(there):
        made.add_row(name, *(f"{found[name].speedup:.2f}" for found in there.values()))
    return made


def sameness(*all_rows: Rows) -> str:
    """Say whether every answer was plain decoding's."""
    if all(row.lossless for found in all_rows for one in found.values() for row in one.values()):
        return "Every method gave exactly the tokens of plain decoding."
    return "[red]Not every method gave the same tokens.[/]"


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


def _answer(llm: LLMView, example: Example) -> Output:
    return llm.chat(asked(example.prompt), SamplingParams(max_tokens=TOKENS))


def _first(found: Rows) -> dict[str, Row]:
    return next(iter(found.values()))


def _result(example: Example, found: Mapping[str, Row]) -> str:
    """Name the fastest method on a prompt, and how ours does."""
    best, ours = max(found.values(), key=lambda row: row.speedup), f"specbranch {found[OURS].speedup:.2f} ×"
    title = f"{example.title[0].upper()}{example.title[1:]}."
    if best.speedup < GAIN:
        return f"{title} Nothing is faster than plain decoding here; {ours}."
    other = "" if best.method == OURS else f"{best.method} {best.speedup:.2f} ×, "
    return f"{title} Against plain decoding: {other}{ours}."


def _row(name: str, outputs: Sequence[Output], plain: Sequence[Output]) -> Row:
    tokens, seconds = len(outputs[0].token_ids) - 1, tuple(one.stats["decode_seconds"] for one in outputs)
    usual, base = statistics.median(seconds), statistics.median(one.stats["decode_seconds"] for one in plain)
    return Row(
        method=name,
        tokens_per_second=tokens / usual if usual else 0.0,
        speedup=base / usual if usual else 1.0,
        tokens_per_forward=statistics.median(one.stats["tokens_per_forward"] or 1.0 for one in outputs),
        seconds=seconds,
        lossless=all(one.token_ids == plain[0].token_ids for one in outputs),
    )


if __name__ == "__main__":
    main()
