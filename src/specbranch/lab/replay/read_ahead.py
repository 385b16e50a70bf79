"""The draft's proposals along a record, computed in advance: many rows per forward instead of one.

Owns no state. It computes the proposals at every token of the record. Where the draft's first choice differs from the
record, it also computes how the draft would continue. Invariant: it changes what is already stored, never what is
stored under a key.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.runner import Ask, Feed, Runner
from specbranch.core.slots import ROOT
from specbranch.lab.replay.record import Record

STRAYING_WINDOW = 12  # tokens of the record whose strayings are computed together
STRAYING_TOKENS = 16  # tokens computed of a straying: methods seldom need more


def read_ahead(record: Record, runner: Runner, depth: int = STRAYING_TOKENS) -> None:
    """Store in advance the proposals that methods will need; uses one sequence of the runner and closes it."""
    text, start = record.text, len(record.task.prompt) - 1
    runner.open(0, record.task.request)
    try:
        runner.extend(0, text[:start])
        for at in range(start, len(text) - 1, STRAYING_WINDOW):
            _read_window(runner, text[at : at + STRAYING_WINDOW + 1], depth)
    finally:
        runner.close(0)


def _read_window(runner: Runner, tokens: Sequence[int], depth: int) -> None:
    """Process some tokens of the record (the last one only for comparison), then all deviations from them in
    lockstep."""
    slots, length = runner.slots(0), len(tokens) - 1
    along = _proposed(runner, tokens[:-1], range(ROOT, length - 1))
    straying = [pair for pair, said in zip(along, tokens[1:], strict=True) if pair[1] != said]
    for _ in range(depth):
        if not straying or len(straying) > slots.room:
            break
        straying = _proposed(runner, [token for _, token in straying], [node for node, _ in straying])
    runner.keep(0, range(length), length)


def _proposed(runner: Runner, tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, int]]:
    """Feed nodes; return each with the first token proposed after it."""
    first = len(runner.slots(0).tokens)
    nodes = range(first, first + len(tokens))
    made = runner.propose([Feed(0, tuple(tokens), tuple(parents))], [Ask(0, node) for node in nodes])
    return [(node, proposal.tokens[0]) for node, proposal in zip(nodes, made, strict=True)]
