"""The real draft on one text, for what it was never asked before: any beginning of the text, and anything that strays from it.

Owns the draft's cache during a replay. Invariants: a row is that of its own tokens, however the reader came to them; no forward has more
rows than the engine's own small steps, so that a row has the bits it has there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from specbranch.bench.replay import WIDTH, Entry
from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Feed, Row, Runner, Sampler
from specbranch.core.slots import ROOT, Slots

ROWS = 16  # in one forward
_NUMBERS = count(-1, -1)  # of sequences, such as no request has


class Reader:
    """Reads on one text; what strays from it hangs behind the prefix as a tail, each token once."""

    def __init__(self, runner: Runner, sampler: Sampler, text: Sequence[int]) -> None:
        self._runner, self._sampler, self._text = runner, sampler, tuple(text)
        self._rows: list[Row] = []  # by node of the tail
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token
        self._seq = next(_NUMBERS)
        self._is_open = False

    def read(self, spots: Sequence[Spot]) -> list[Entry]:
        """Return the draft's proposals at some spots."""
        rows = self._rows_after([list(spot.history()) for spot in spots])
        top = self._sampler.propose(rows, spots, [Ask(WIDTH)] * len(rows))
        entropy = self._sampler.propose(rows, spots, [Ask(measure="entropy")] * len(rows))
        return [Entry(a.tokens, a.confidence, b.confidence, a.odds) for a, b in zip(top, entropy, strict=True)]

    def close(self) -> None:
        """Free the cache."""
        if self._is_open:
            self._runner.close(self._seq)
        self._is_open = False
        self._forget_tail()

    @property
    def _slots(self) -> Slots:
        return self._runner.slots(self._seq)

    def _rows_after(self, sequences: list[list[int]]) -> list[Row]:
        if not self._within_reach(sequences):
            self._seek(min(min(_common(sequence, self._text), len(sequence) - 1) for sequence in sequences))
        if len(self._unread(sequences)[0]) > self._slots.room:  # more than a tail holds: in two parts
            half = len(sequences) // 2
            if not half:
                self._slots.demand(len(self._unread(sequences)[0]))
            return self._rows_after(sequences[:half]) + self._rows_after(sequences[half:])
        return self._grown(sequences)

    def _within_reach(self, sequences: list[list[int]]) -> bool:
        """Whether all can be read from where the reader is."""
        if not self._is_open:
            return False
        prefix, room = self._slots.prefix, self._slots.room
        follow = all(len(sequence) > len(prefix) and sequence[: len(prefix)] == prefix for sequence in sequences)
        return follow and len(self._unread(sequences)[0]) <= room

    def _seek(self, base: int) -> None:
        """Make the first `base` tokens of the text the prefix, and the tail empty."""
        if not self._is_open:
            self._runner.open(self._seq)
            self._is_open = True
        if base < len(self._slots.prefix):
            self._runner.rewind(self._seq, base)
        ahead = self._text[len(self._slots.prefix) : base]
        path = self._slots.find(ahead)
        self._runner.keep(self._seq, path, len(path))
        if len(path) < len(ahead):
            self._runner.extend(self._seq, ahead[len(path) :])
        self._forget_tail()

    def _forget_tail(self) -> None:
        self._rows, self._nodes = [], {}

    def _unread(self, sequences: list[list[int]]) -> tuple[dict[tuple[int, int], int], list[int]]:
        """Return what has to be read, as new nodes by parent and token, and the node at which each sequence ends."""
        new: dict[tuple[int, int], int] = {}
        start, held, ends = len(self._slots.prefix), len(self._rows), []
        for sequence in sequences:
            node = ROOT
            for token in sequence[start:]:
                known = self._nodes.get((node, token))
                node = known if known is not None else new.setdefault((node, token), held + len(new))
            ends.append(node)
        return new, ends

    def _grown(self, sequences: list[list[int]]) -> list[Row]:
        new, ends = self._unread(sequences)
        for part in _parts(list(new)):
            parents, tokens = zip(*part, strict=True)
            self._rows += self._runner.feed([Feed(self._seq, tokens, parents)])[0]
        self._nodes |= new
        return [self._rows[end] for end in ends]


def _parts(nodes: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    for start in range(0, len(nodes), ROWS):
        yield nodes[start : start + ROWS]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
