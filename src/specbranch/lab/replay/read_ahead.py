"""What every method will ask of a draft on a record, read in good time: many rows in a forward instead of one after
another.

Owns no state. Reads the draft's proposals all along the record and, wherever its first one strays from it, what the
draft would go on with. Invariant: it changes what is remembered already, never what is remembered under a key.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.runner import Ask, Feed, Runner
from specbranch.core.slots import ROOT
from specbranch.lab.replay.record import Record

STRAYING_WINDOW = 12  # strayings from so many tokens of the record are read together
STRAYING_TOKENS = 16  # tokens read of a straying: methods seldom ask for more


def read_ahead(record: Record, runner: Runner, depth: int = STRAYING_TOKENS) -> None:
    """Ask a draft that remembers for what it will be asked; one sequence of the runner is used, and closed."""
    text, start = record.text, len(record.task.prompt) - 1
    runner.open(0, record.task.request)
    try:
        runner.extend(0, text[:start])
        for at in range(start, len(text) - 1, STRAYING_WINDOW):
            _read_window(runner, text[at : at + STRAYING_WINDOW + 1], depth)
    finally:
        runner.close(0)


def _read_window(runner: Runner, tokens: Sequence[int], depth: int) -> None:
    """Read some tokens of the record, the last one only compared with; then what strays from them, all strayings in
    step."""
    slots, length = runner.slots(0), len(tokens) - 1
    along = _proposed(runner, tokens[:-1], range(ROOT, length - 1))
    straying = [pair for pair, said in zip(along, tokens[1:], strict=True) if pair[1] != said]
    for _ in range(depth):
        if not straying or len(straying) > slots.room:
            break
        straying = _proposed(runner, [token for _, token in straying], [node for node, _ in straying])
    runner.keep(0, range(length), length)


def _proposed(runner: Runner, tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, int]]:
    """Feed nodes; returns each with the first token proposed behind it."""
    first = len(runner.slots(0).tokens)
    nodes = range(first, first + len(tokens))
    made = runner.propose([Feed(0, tuple(tokens), tuple(parents))], [Ask(0, node) for node in nodes])
    return [(node, proposal.tokens[0]) for node, proposal in zip(nodes, made, strict=True)]
