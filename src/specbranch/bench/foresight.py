"""What every method will ask of a draft on a record, read in good time: many rows in a forward instead of one after another.

Owns no state. Reads the draft's proposals all along the record and, wherever its first one strays from it, what the draft would go on with.
Invariant: it changes what is remembered already, never what is remembered under a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specbranch.bench.record import Record
from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Feed, Proposal, Row, Runner
from specbranch.core.slots import ROOT

WINDOW = 12  # tokens of the record whose strayings are read together
DEPTH = 16  # tokens of a straying: methods seldom ask for more


class Proposes(Protocol):
    """The part of a sampler that is needed here."""

    def propose(self, rows: Sequence[Row], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Return candidates for each row."""
        ...


def read_ahead(record: Record, runner: Runner, sampler: Proposes, depth: int = DEPTH) -> None:
    """Ask a draft that remembers for what it will be asked; one sequence of the runner is used, and closed."""
    text, start = record.text, len(record.task.prompt) - 1
    runner.open(0)
    try:
        runner.extend(0, text[:start])
        for at in range(start, len(text) - 1, WINDOW):
            _read_window(_Line(record, runner, sampler), text[at : at + WINDOW + 1], depth)
    finally:
        runner.close(0)


class _Line:
    """A runner's sequence 0 with its proposals."""

    def __init__(self, record: Record, runner: Runner, sampler: Proposes) -> None:
        self.record, self.runner, self.sampler = record, runner, sampler

    def proposed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, int]]:
        """Feed nodes; returns each with the first token proposed behind it."""
        slots = self.runner.slots(0)
        first = len(slots.tokens)
        rows = self.runner.feed([Feed(0, tuple(tokens), tuple(parents))])[0]
        nodes = range(first, first + len(rows))
        asked = self.sampler.propose(rows, [self._spot(node) for node in nodes], [Ask()] * len(rows))
        return [(node, proposal.tokens[0]) for node, proposal in zip(nodes, asked, strict=True)]

    def _spot(self, node: int) -> Spot:
        slots = self.runner.slots(0)
        return Spot(self.record.task.request, slots.position(node) + 1, lambda: slots.sequence(node))


def _read_window(line: _Line, tokens: Sequence[int], depth: int) -> None:
    """Read some tokens of the record, the last one only compared with; then what strays from them, all strayings in step."""
    slots, length = line.runner.slots(0), len(tokens) - 1
    along = line.proposed(tokens[:-1], range(ROOT, length - 1))
    straying = [pair for pair, said in zip(along, tokens[1:], strict=True) if pair[1] != said]
    for _ in range(depth):
        if not straying or len(straying) > slots.room:
            break
        straying = line.proposed([token for _, token in straying], [node for node, _ in straying])
    line.runner.keep(0, range(length), length)
