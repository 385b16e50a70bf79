"""`make demo`: stream one answer of the embedded default, then compare the methods that need no draft on this machine."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from specbranch import LLM, Output, SamplingParams
from specbranch.cli.paint import LEGEND, show, summary

# Lookup drafts from the text itself, so an answer that quotes its prompt shows what it can do.
TEXT = (
    "The lighthouse keeper wrote in the log every evening. On Monday the lighthouse keeper wrote that the lamp burned well. "
    "On Tuesday the lighthouse keeper wrote that a ship had passed. On Wednesday the lighthouse keeper wrote that fog came in."
)
MESSAGES = [{"role": "user", "content": f"Copy this text word for word, then say in one sentence what it is about:\n\n{TEXT}"}]
PARAMS = SamplingParams(max_tokens=160)
METHODS = ("autoregressive", "lookup")


def main() -> None:
    """Run the demonstration."""
    console = Console(stderr=True, highlight=False)
    console.print("[bold]SmolLM2-135M-Instruct, method lookup[/] copies a text:\n")
    with LLM(method="lookup") as llm:
        first = show(llm.stream_chat(MESSAGES, PARAMS), colour=sys.stdout.isatty())
    console.print(f"\n{summary(first)}", markup=False)
    if sys.stdout.isatty():
        print(LEGEND, file=sys.stderr)
    console.print(_table({"lookup": first} | {name: _answer(name) for name in METHODS if name != "lookup"}))
    console.print("Go on with:\n  .venv/bin/specbranch chat\n  .venv/bin/specbranch generate --help")


def _answer(method: str) -> Output:
    with LLM(method=method) as llm:
        return llm.chat(MESSAGES, PARAMS)


def _table(outputs: dict[str, Output]) -> Table:
    table = Table(title="The same answer, on this machine")
    for column in ("method", "tokens/s", "tokens per target forward", "rollback", "same tokens as plain decoding"):
        table.add_column(column, justify="left" if column == "method" else "right")
    plain = outputs["autoregressive"]
    for name in METHODS:
        stats = outputs[name].stats
        rollback = "–" if stats["rollback_rate"] is None else f"{stats['rollback_rate']:.0%}"
        same = "yes" if outputs[name].token_ids == plain.token_ids else "NO"
        table.add_row(name, f"{stats['tokens_per_second']:.1f}", f"{stats['tokens_per_forward']:.2f}", rollback, same)
    return table


if __name__ == "__main__":
    main()
