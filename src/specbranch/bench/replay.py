"""Decoding without the target, and mostly without the draft: a Runner over a record, and a Runner whose proposals are remembered.

Owns both. They take the models' places under the unchanged workers, so orders, verdicts, stops and counts are the real ones. Invariants:
what is picked after a prefix of the record is the record's next token, and after anything else no token at all; a remembered proposal is
the one the draft made after those very tokens.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from specbranch.bench.record import Record, Task
from specbranch.core.orders import TokenLogprobs
from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Feed, Law, Proposal, Row, Sampler
from specbranch.core.slots import ROOT, Slots
from specbranch.errors import BadParameter

NONE = -1  # no token: what a target picks where its record says nothing
WIDTH = 12  # candidates remembered of a row
AT_HAND = 300_000  # proposals kept in memory: about 200 MB
TABLE, READ = "proposals_2", "read_2"

Mark = TypeVar("Mark")


class Places(Generic[Mark]):
    """The sequences of a runner that has no model: Slots, and a mark for each node, made from its parent's."""

    def __init__(self, vocabulary: int, context_length: int) -> None:
        self.vocabulary, self.context_length = vocabulary, context_length
        self._slots: dict[int, Slots] = {}
        self._marks: dict[int, dict[int, Mark]] = {}  # by node, ROOT included

    def open(self, seq: int) -> None:
        """Make room for a new, empty sequence."""
        self._slots[seq] = Slots(self.context_length)
        self._marks[seq] = {ROOT: self._start()}

    def slots(self, seq: int) -> Slots:
        """The sequence's places."""
        return self._slots[seq]

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Append to the prefix."""
        slots, mark = self._slots[seq], self._marks[seq][ROOT]
        for offset, token in enumerate(tokens):
            mark = self._after(mark, token, len(slots.prefix) + offset)
        slots.extend(tokens)
        self._marks[seq][ROOT] = mark

    def feed(self, work: Sequence[Feed]) -> list[list[Row]]:
        """Add nodes; a node's row is its mark."""
        return [self._grow(item) for item in work]

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail."""
        marks, line = self._marks[seq], [ROOT, *nodes]
        self._slots[seq].keep(nodes, commit)
        self._marks[seq] = {at - commit - 1: marks[node] for at, node in enumerate(line) if at >= commit}

    def rewind(self, seq: int, length: int) -> None:
        """Forget all but the first tokens."""
        slots, mark = self._slots[seq], self._start()
        slots.truncate(length)
        for position, token in enumerate(slots.prefix):
            mark = self._after(mark, token, position)
        self._marks[seq] = {ROOT: mark}

    def close(self, seq: int) -> None:
        """Forget the sequence."""
        del self._slots[seq], self._marks[seq]

    def _grow(self, item: Feed) -> list[Row]:
        slots, marks = self._slots[item.seq], self._marks[item.seq]
        nodes = slots.grow(item.tokens, item.parents)
        for node, token, parent in zip(nodes, item.tokens, item.parents, strict=True):
            marks[node] = self._after(marks[parent], token, slots.position(node))
        return [marks[node] for node in nodes]

    def _start(self) -> Mark:
        """Return the mark before any token."""
        raise NotImplementedError

    def _after(self, mark: Mark, token: int, position: int) -> Mark:
        """Return the mark after a token at a position."""
        raise NotImplementedError


class RecordedRunner(Places[int]):
    """A target that can say nothing but its record. A mark tells how many tokens of the record were followed, NONE once it was left."""

    def __init__(self, record: Record, vocabulary: int, context_length: int) -> None:
        super().__init__(vocabulary, context_length)
        self._text = record.text

    def _start(self) -> int:
        return 0

    def _after(self, mark: int, token: int, position: int) -> int:
        follows = mark == position < len(self._text) and self._text[position] == token
        return position + 1 if follows else NONE


class _Silent:
    """The questions that neither a record nor a memory can answer."""

    def law(self, row: Row, spot: Spot) -> Law:
        """Refuse: there is no whole distribution."""
        raise _unknown()

    def margin(self, row: Row, spot: Spot, first: int, second: int) -> float:
        """Refuse, likewise."""
        raise _unknown()


class RecordedSampler(_Silent):
    """Picks what the record says."""

    def __init__(self, record: Record) -> None:
        self._record, self._text = record, record.text

    def pick(self, rows: Sequence[Row], spots: Sequence[Spot]) -> list[int]:
        """Return the record's next token at each row."""
        return [self._text[row] if 0 <= row < len(self._text) else NONE for row in rows]

    def logprobs(self, row: Row, token: int, top: int) -> TokenLogprobs:
        """Return what was recorded."""
        entries = self._record.rows[row - len(self._record.task.prompt)]
        return TokenLogprobs(dict(entries).get(token, float("-inf")), entries[:top])

    def propose(self, rows: Sequence[Row], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Refuse: a recorded target does not draft."""
        raise _unknown()


def _unknown() -> BadParameter:
    return BadParameter(
        "A record holds the target's tokens alone, so it replays the match rule only. Run the ratio rule on the models themselves."
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A proposal as wide as any method asks for, with both confidences."""

    tokens: tuple[int, ...]
    top: float
    entropy: float
    odds: tuple[float, ...]

    def proposal(self, ask: Ask) -> Proposal:
        """Cut to what is asked for."""
        if ask.width > WIDTH:
            raise BadParameter(f"{ask.width} branches at one token were asked for; a replay remembers {WIDTH}. Lower max_branches.")
        confidence = self.top if ask.measure == "top" else self.entropy
        return Proposal(self.tokens[: ask.width], confidence, odds=self.odds[: ask.width])

    def packed(self) -> bytes:
        """As bytes."""
        many = len(self.tokens)
        return struct.pack(f"<dd{many}I{many}d", self.top, self.entropy, *self.tokens, *self.odds)

    @classmethod
    def unpacked(cls, data: bytes) -> Entry:
        """From bytes."""
        many = (len(data) - 16) // 12
        top, entropy, *rest = struct.unpack(f"<dd{many}I{many}d", data)
        return cls(tuple(rest[:many]), top, entropy, tuple(rest[many:]))


class Memory:
    """Proposals by the digest of what stands before them, in one sqlite file; what was asked for once is at hand."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=60.0, isolation_level=None)
            self._file.execute("pragma journal_mode = wal")
            self._file.execute("pragma synchronous = normal")
            self._file.execute(f"create table if not exists {TABLE} (key blob primary key, entry blob) without rowid")
            self._file.execute(f"create table if not exists {READ} (key blob primary key) without rowid")
        except (OSError, sqlite3.Error) as error:
            raise BadParameter(f"The memory of drafts {path} cannot be used ({error}). Delete it, or name another folder.") from None
        self._held: dict[bytes, Entry] = {}
        self.misses = 0

    def find(self, key: bytes) -> Entry | None:
        """Return what is remembered under a key."""
        if key not in self._held:
            line = self._file.execute(f"select entry from {TABLE} where key = ?", (key,)).fetchone()
            if line is None:
                return None
            self._held[key] = Entry.unpacked(line[0])
        return self._held[key]

    def add(self, entries: dict[bytes, Entry]) -> None:
        """Remember."""
        self._held |= entries
        self.misses += len(entries)
        lines = [(key, entry.packed()) for key, entry in entries.items()]
        try:
            self._file.execute("begin")
            self._file.executemany(f"insert or replace into {TABLE} values (?, ?)", lines)
            self._file.execute("commit")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._file.execute("rollback")
            raise BadParameter(f"What the draft said could not be kept ({error}). Make room, or name another folder.") from None

    def has_read(self, draft: str, record: Record) -> bool:
        """Whether a draft has read all along a record."""
        return self._file.execute(f"select 1 from {READ} where key = ?", (_reading(draft, record),)).fetchone() is not None

    def note_read(self, draft: str, record: Record) -> None:
        """Note that it has."""
        self._file.execute(f"insert or replace into {READ} values (?)", (_reading(draft, record),))

    def forget(self, beyond: int = AT_HAND) -> None:
        """Let go of what is at hand if that is more than so many; the file keeps it."""
        if len(self._held) > beyond:
            self._held.clear()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MemoRunner(Places[bytes]):
    """A draft that reads nothing. A mark is a digest of draft, sampling and all tokens up to a node."""

    def __init__(self, draft: str, task: Task, vocabulary: int, context_length: int) -> None:
        super().__init__(vocabulary, context_length)
        self._first = _digest(f"{draft} {task.sampling}".encode())

    def _start(self) -> bytes:
        return self._first

    def _after(self, mark: bytes, token: int, position: int) -> bytes:
        return _digest(mark + token.to_bytes(4, "little"))


def _reading(draft: str, record: Record) -> bytes:
    return _digest(f"{draft} {record.task.sampling} {len(record.task.prompt)} {record.text}".encode())


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class Reads(Protocol):
    """Something that can read what was never read before."""

    def read(self, spots: Sequence[Spot]) -> list[Entry]:
        """Return the draft's proposals at some spots."""
        ...


class MemoSampler(_Silent):
    """Proposes what is remembered, and has the draft read what is not."""

    def __init__(self, memory: Memory, reader: Reads) -> None:
        self._memory, self._reader = memory, reader

    def propose(self, rows: Sequence[Row], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Return candidates for each row."""
        missing = {row: spot for row, spot in zip(rows, spots, strict=True) if self._memory.find(row) is None}
        if missing:
            self._memory.add(dict(zip(missing, self._reader.read(list(missing.values())), strict=True)))
        entries = [self._memory.find(row) for row in rows]
        return [entry.proposal(ask) for entry, ask in zip(entries, asks, strict=True) if entry is not None]

    def pick(self, rows: Sequence[Row], spots: Sequence[Spot]) -> list[int]:
        """Refuse: a draft does not judge."""
        raise _unknown()

    def logprobs(self, row: Row, token: int, top: int) -> TokenLogprobs:
        """Refuse, likewise."""
        raise _unknown()


class Knowing(_Silent):
    """A draft's sampler that proposes what the draft proposes, and knows what is right: sure of that, and of nothing else."""

    def __init__(self, sampler: Sampler, record: Record) -> None:
        self._sampler, self._text = sampler, record.text

    def propose(self, rows: Sequence[Row], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Return the draft's candidates with the truth in place of its confidence."""
        made = self._sampler.propose(rows, spots, asks)
        return [replace(one, confidence=float(self._right(one, spot))) for one, spot in zip(made, spots, strict=True)]

    def pick(self, rows: Sequence[Row], spots: Sequence[Spot]) -> list[int]:
        """A draft picks nothing."""
        raise _unknown()

    def logprobs(self, row: Row, token: int, top: int) -> TokenLogprobs:
        """Nor does it tell of the target."""
        raise _unknown()

    def _right(self, proposal: Proposal, spot: Spot) -> bool:
        at = spot.position
        return at < len(self._text) and proposal.tokens[0] == self._text[at] and tuple(spot.history()) == self._text[:at]
