"""The real draft on one text, for proposals that are not stored: any prefix of the text, and any deviation from it.

Owns the draft's KV cache during a replay. Invariants: a proposal depends only on its own tokens, not on the path of the
reader. No forward has more rows than the engine's own small steps, so that each row has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from specbranch.core.runner import Ask, Feed, Runner
from specbranch.core.slots import ROOT, Slots
from specbranch.lab.replay.record import Record
from specbranch.lab.replay.runners import CANDIDATES_KEPT, KnownProposal

READER_ROWS = 16  # read in one forward
_NUMBERS = count(-1, -1)  # numbers of sequences: below zero, as no request's are

TextNode = tuple[int, int]  # its parent and its token


class Reader:
    """Processes the text of a record; deviations form a tail after the prefix, each token once."""

    def __init__(self, runner: Runner, record: Record) -> None:
        self._runner, self._text, self._request = runner, record.text, record.task.request
        self._seq = next(_NUMBERS)
        self._is_open = False

    def read(self, sequences: Sequence[Sequence[int]]) -> list[KnownProposal]:
        """Return the draft's proposals after some sequences of tokens."""
        if not self._within_reach(sequences):
            self._seek(min(min(_common(sequence, self._text), len(sequence) - 1) for sequence in sequences))
        new, ends = self._uncomputed(sequences)
        if len(new) > self._slots.room and (half := len(sequences) // 2):  # a tail holds less: in two parts
            return self.read(sequences[:half]) + self.read(sequences[half:])
        self._runner.demand(self._seq, len(new))
        for start in range(0, len(new), READER_ROWS):
            parents, tokens = zip(*new[start : start + READER_ROWS], strict=True)
            self._runner.feed([Feed(self._seq, tokens, parents)])
        return self._entries(ends)

    def close(self) -> None:
        """Free the KV cache."""
        if self._is_open:
            self._runner.close(self._seq)
        self._is_open = False

    @property
    def _slots(self) -> Slots:
        return self._runner.slots(self._seq)

    def _within_reach(self, sequences: Sequence[Sequence[int]]) -> bool:
        """True if all sequences can be processed from the current prefix."""
        if not self._is_open:
            return False
        prefix = self._slots.prefix
        follow = all(len(sequence) > len(prefix) and list(sequence[: len(prefix)]) == prefix for sequence in sequences)
        return follow and len(self._uncomputed(sequences)[0]) <= self._slots.room

    def _seek(self, base: int) -> None:
        """Make the first `base` tokens of the text the prefix, with an empty tail."""
        if not self._is_open:
            self._runner.open(self._seq, self._request)
            self._is_open = True
        if base < len(self._slots.prefix):
            self._runner.rewind(self._seq, base)
        ahead = self._text[len(self._slots.prefix) : base]
        path = self._slots.find(ahead)
        self._runner.keep(self._seq, path, len(path))
        if len(path) < len(ahead):
            self._runner.extend(self._seq, ahead[len(path) :])

    def _uncomputed(self, sequences: Sequence[Sequence[int]]) -> tuple[list[TextNode], list[int]]:
        """Return the tokens to process, in order, and the last node of each sequence."""
        slots, ends = self._slots, list[int]()
        known = {node: number for number, node in enumerate(zip(slots.parents, slots.tokens, strict=True))}
        held = len(known)
        for sequence in sequences:
            node = ROOT
            for token in sequence[len(slots.prefix) :]:
                node = known.setdefault((node, token), len(known))
            ends.append(node)
        return list(known)[held:], ends

    def _entries(self, nodes: Sequence[int]) -> list[KnownProposal]:
        top = self._runner.propose([], [Ask(self._seq, node, CANDIDATES_KEPT) for node in nodes])
        entropy = self._runner.propose([], [Ask(self._seq, node, measure="entropy") for node in nodes])
        return [KnownProposal(a.tokens, a.confidence, b.confidence, a.odds) for a, b in zip(top, entropy, strict=True)]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
