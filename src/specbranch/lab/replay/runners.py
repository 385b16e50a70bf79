"""Runners for replays: one over the target's record, and one with stored draft proposals.

Owns both. They replace the models under the unchanged workers, so orders, verdicts, stops and counts are the real ones.
Invariants: after a prefix of the record, the target's token is the record's next one. After any other text it is no
token. If a method needs it, as lookahead decoding does for its guesses, the real target computes it. A stored proposal
was computed after exactly those tokens.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from specbranch.core.orders import TokenLogprobs
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed, Judged, Proposal, Trial, Verdicts
from specbranch.core.slots import ROOT, Slots
from specbranch.core.verify import accept_match
from specbranch.errors import BadParameter
from specbranch.lab.replay.record import Record

NO_RECORD = -1  # no token: what a target says where its record says nothing
CANDIDATES_KEPT = 12  # the most likely candidates that are kept for each position
AT_HAND = 300_000  # proposals kept in memory: about 200 MB
TABLE, READ = "proposals_2", "read_2"

Mark = TypeVar("Mark")
Beyond = Callable[[Sequence[Sequence[int]]], list[int]]  # from texts that left a record to the target's next tokens


class PlainSlots(Generic[Mark]):
    """A Runner without a model: Slots, and a mark for each node, derived from its parent's. Subclasses define what
    it can answer."""

    prefill_chunk = 256
    most_prefill: int | None = None
    kv_slots = None
    kv_slots_free = 0
    page = 1

    def __init__(self, vocabulary: int, context_length: int) -> None:
        self.vocabulary, self.context_length = vocabulary, context_length
        self._slots: dict[int, Slots] = {}
        self._ends: dict[int, Mark] = {}  # the mark after the prefix
        # Marks of the nodes that may be asked about, ROOT's where it was one of them.
        self._marks: dict[int, dict[int, Mark]] = {}

    def open(self, seq: int, request: Request) -> None:
        """Open a new, empty sequence."""
        if request.by_ratio:
            raise _unknown()
        self._slots[seq], self._ends[seq], self._marks[seq] = Slots(self.context_length), self._start(), {}

    def slots(self, seq: int) -> Slots:
        """The KV slots of the sequence."""
        return self._slots[seq]

    def demand(self, seq: int, count: int) -> None:
        """Make sure that this many more nodes fit."""
        self._slots[seq].demand(count)

    def recall(self, seq: int, tokens: Sequence[int]) -> int:
        """Return no cached prefix: each request pays for its own prefill."""
        return len(self._slots[seq].prefix)

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Append to the prefix."""
        for position, token in zip(self._slots[seq].extend(tokens), tokens, strict=True):
            self._ends[seq] = self._after(self._ends[seq], token, position)
            self._marks[seq].clear()

    def flush(self) -> None:
        """Do nothing: no prefill is put off."""

    def feed(self, work: Sequence[Feed]) -> None:
        """Add nodes with their marks."""
        for seq, tokens, parents in work:
            slots, marks = self._slots[seq], self._marks[seq]
            for node, token, parent in zip(slots.grow(tokens, parents), tokens, parents, strict=True):
                above = self._ends[seq] if parent == ROOT else marks[parent]
                marks[node] = self._after(above, token, slots.position(node))

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Refuse, unless this is a draft."""
        raise _unknown()

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Refuse, unless this is a target."""
        raise _unknown()

    def knows(self, seq: int, node: int) -> bool:
        """True if a node was fed, not prefilled."""
        return node in self._marks[seq]

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Refuse: there are no logits."""
        raise _unknown()

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail."""
        marks, path = self._marks[seq], [ROOT, *nodes]
        self._slots[seq].keep(nodes, commit)
        self._ends[seq] = marks[path[commit]] if commit else self._ends[seq]
        self._marks[seq] = {
            at - commit - 1: marks[node] for at, node in enumerate(path) if at >= commit and node in marks
        }

    def rewind(self, seq: int, length: int) -> None:
        """Keep only the first tokens."""
        slots, mark = self._slots[seq], self._start()
        slots.truncate(length)
        for position, token in enumerate(slots.prefix):
            mark = self._after(mark, token, position)
        self._ends[seq], self._marks[seq] = mark, {}

    def close(self, seq: int) -> None:
        """Drop the sequence."""
        del self._slots[seq], self._ends[seq], self._marks[seq]

    def _start(self) -> Mark:
        """Return the mark before any token."""
        raise NotImplementedError

    def _after(self, mark: Mark, token: int, position: int) -> Mark:
        """Return the mark after a token at a position."""
        raise NotImplementedError


class RecordedRunner(PlainSlots[int]):
    """A target that knows only its record. A mark counts the record's tokens that were followed; NO_RECORD marks a
    deviation."""

    def __init__(self, record: Record, vocabulary: int, context_length: int, beyond: Beyond | None = None) -> None:
        """`beyond` returns the target's token after a text that left the record; without it there is no token."""
        super().__init__(vocabulary, context_length)
        self._record, self._text, self._beyond = record, record.text, beyond

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Add nodes, and verify them against the record."""
        self.feed(work)
        judged = [self._judged(trial) for trial in trials]
        astray = [
            at for at, trial in enumerate(trials) if not 0 <= self._marks[trial.seq][trial.root] < len(self._text)
        ]
        if astray and self._beyond is not None:
            texts = [self._slots[trials[at].seq].sequence(trials[at].root) for at in astray]
            for at, token in zip(astray, self._beyond(texts), strict=True):
                judged[at] = Judged((), token)
        return Verdicts(lambda: judged)

    def _judged(self, trial: Trial) -> Judged:
        marks = [self._marks[trial.seq][trial.node(n)] for n in range(ROOT, len(trial.nodes))]
        path, token = accept_match(
            trial.order, [self._text[mark] if 0 <= mark < len(self._text) else NO_RECORD for mark in marks]
        )
        if trial.logprobs is None:
            return Judged(path, token)
        tokens = (*(trial.order.tokens[n] for n in path), token)
        followed = [marks[n + 1] for n in (ROOT, *path)]
        return Judged(
            path, token, tuple(self._logprobs(*one, trial.logprobs) for one in zip(followed, tokens, strict=True))
        )

    def _logprobs(self, mark: int, token: int, top: int) -> TokenLogprobs:
        entries = self._record.rows[mark - len(self._record.task.prompt)]
        return TokenLogprobs(dict(entries).get(token, float("-inf")), entries[:top])

    def _start(self) -> int:
        return 0

    def _after(self, mark: int, token: int, position: int) -> int:
        follows = mark == position < len(self._text) and self._text[position] == token
        return position + 1 if follows else NO_RECORD


def _unknown() -> BadParameter:
    return BadParameter(
        "A record holds the target's tokens alone, so it replays the match rule only. Run the ratio rule on the "
        "models themselves."
    )


@dataclass(frozen=True, slots=True)
class KnownProposal:
    """A stored proposal, as wide as any method needs, with both confidences."""

    tokens: tuple[int, ...]
    top: float
    entropy: float
    odds: tuple[float, ...]

    def proposal(self, ask: Ask) -> Proposal:
        """Return the part that an order asks for."""
        if ask.width > CANDIDATES_KEPT:
            raise BadParameter(
                f"{ask.width} branches at one token were asked for; a replay stores {CANDIDATES_KEPT}. "
                "Lower max_branches."
            )
        confidence = self.top if ask.measure == "top" else self.entropy
        return Proposal(self.tokens[: ask.width], confidence, odds=self.odds[: ask.width])

    def cut(self, width: int) -> KnownProposal:
        """Return it with at most this many candidates."""
        return replace(self, tokens=self.tokens[:width], odds=self.odds[:width])

    def packed(self) -> bytes:
        """Return it as bytes."""
        many = len(self.tokens)
        return struct.pack(f"<dd{many}I{many}d", self.top, self.entropy, *self.tokens, *self.odds)

    @classmethod
    def unpacked(cls, data: bytes) -> KnownProposal:
        """Build it from bytes."""
        many = (len(data) - 16) // 12
        top, entropy, *rest = struct.unpack(f"<dd{many}I{many}d", data)
        return cls(tuple(rest[:many]), top, entropy, tuple(rest[many:]))


class Reads(Protocol):
    """A model that computes what is not stored."""

    def read(self, sequences: Sequence[Sequence[int]]) -> list[KnownProposal]:
        """Return the draft's proposals after some sequences of tokens."""
        ...


class ProposalStore:
    """Proposals by the digest of their prefix, in one sqlite file and, once used, in memory."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=60.0, isolation_level=None)
            self._file.execute("pragma journal_mode = wal")
            self._file.execute("pragma synchronous = normal")
            self._file.execute(f"create table if not exists {TABLE} (key blob primary key, entry blob) without rowid")
            self._file.execute(f"create table if not exists {READ} (key blob primary key) without rowid")
        except (OSError, sqlite3.Error) as error:
            raise BadParameter(
                f"The stored proposals in {path} cannot be used ({error}). Delete it, or name another folder."
            ) from None
        self._held: dict[bytes, KnownProposal] = {}
        self.misses = 0

    def find(self, key: bytes) -> KnownProposal | None:
        """Return the proposal stored under a key."""
        if key not in self._held:
            row = self._file.execute(f"select entry from {TABLE} where key = ?", (key,)).fetchone()
            if row is None:
                return None
            self._held[key] = KnownProposal.unpacked(row[0])
        return self._held[key]

    def recall(
        self, keys: Sequence[bytes], text: Callable[[int], Sequence[int]], reader: Reads, width: int = CANDIDATES_KEPT
    ) -> list[KnownProposal]:
        """Return the proposals of some keys; the model computes missing ones from their `text`, and this many
        candidates are stored."""
        missing = {key: text(at) for at, key in enumerate(keys) if self.find(key) is None}
        if missing:
            read = reader.read(list(missing.values()))
            self.add({key: one.cut(width) for key, one in zip(missing, read, strict=True)})
        return [entry for key in keys if (entry := self.find(key)) is not None]

    def add(self, entries: dict[bytes, KnownProposal]) -> None:
        """Store proposals."""
        self._held |= entries
        self.misses += len(entries)
        rows = [(key, entry.packed()) for key, entry in entries.items()]
        try:
            self._file.execute("begin")
            self._file.executemany(f"insert or replace into {TABLE} values (?, ?)", rows)
            self._file.execute("commit")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._file.execute("rollback")
            raise BadParameter(
                f"The draft's proposals could not be stored ({error}). Free some space, or name another folder."
            ) from None

    def has_read(self, draft: str, record: Record) -> bool:
        """True if a draft has processed the whole of a record."""
        return (
            self._file.execute(f"select 1 from {READ} where key = ?", (_reading(draft, record),)).fetchone() is not None
        )

    def note_read(self, draft: str, record: Record) -> None:
        """Store that it has."""
        self._file.execute(f"insert or replace into {READ} values (?)", (_reading(draft, record),))

    def forget(self, beyond: int = AT_HAND) -> None:
        """Drop proposals from memory if there are more than this many; the file keeps them."""
        if len(self._held) > beyond:
            self._held.clear()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _reading(draft: str, record: Record) -> bytes:
    return _digest(f"{draft} {record.task.sampling} {len(record.task.prompt)} {record.text}".encode())


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class Guessed:
    """A target's tokens off a record: stored ones, and the model for the rest."""

    def __init__(self, target: str, record: Record, memory: ProposalStore, reader: Reads) -> None:
        self._memory, self._reader = memory, reader
        self._first = f"{target} {record.task.sampling}".encode()

    def __call__(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Return the target's token after each text."""
        keys = [_digest(self._first + struct.pack(f"<{len(text)}I", *text)) for text in texts]
        return [entry.tokens[0] for entry in self._memory.recall(keys, texts.__getitem__, self._reader, width=1)]


class MemoRunner(PlainSlots[bytes]):
    """A draft with stored proposals; the model computes missing ones. A mark is a digest of draft, sampling and all
    tokens up to a node."""

    def __init__(
        self, draft: str, record: Record, memory: ProposalStore, reader: Reads, vocabulary: int, context_length: int
    ) -> None:
        super().__init__(vocabulary, context_length)
        self._text, self._memory, self._reader = record.text, memory, reader
        self._first = _digest(f"{draft} {record.task.sampling}".encode())

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Add nodes, and return candidates for each row."""
        self.feed(work)
        keys = [self._marks[ask.seq][ask.node] for ask in asks]
        known = self._memory.recall(keys, lambda at: self._before(asks[at]), self._reader)
        return [entry.proposal(ask) for entry, ask in zip(known, asks, strict=True)]

    def _before(self, ask: Ask) -> list[int]:
        return self._slots[ask.seq].sequence(ask.node)

    def _start(self) -> bytes:
        return self._first

    def _after(self, mark: bytes, token: int, position: int) -> bytes:
        return _digest(mark + token.to_bytes(4, "little"))


class OracleRunner(MemoRunner):
    """A draft with the real draft's candidates that knows which one is correct, and is certain of that alone."""

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Return the draft's candidates with the truth instead of its confidence."""
        made = super().propose(work, asks)
        return [replace(one, confidence=float(self._right(one, ask))) for one, ask in zip(made, asks, strict=True)]

    def _right(self, proposal: Proposal, ask: Ask) -> bool:
        follows = (*self._before(ask), proposal.tokens[0])
        return follows == self._text[: len(follows)]
