"""Several records decoded as one batch of requests that share both models: real decisions, with time charged per batch.

Owns the assembly, and when each request starts. Invariant: each request emits its record's text, whatever else is in
the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import PLAIN, find_method
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed, Judged, Proposal, Runner, Trial, Verdicts
from specbranch.core.session import Session
from specbranch.core.slots import Slots
from specbranch.core.stats import Stats
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import Worker
from specbranch.lab.replay.decode import Diverged, ReplayedModel
from specbranch.lab.replay.reader import Reader
from specbranch.lab.replay.record import Record
from specbranch.lab.replay.runners import MemoRunner, PlainSlots, RecordedRunner

SPARE_SLOTS = 256  # KV slots beyond the end of a text


class OneEach:
    """A Runner with a runner of its own for each sequence."""

    prefill_chunk = PlainSlots.prefill_chunk
    most_prefill = None
    kv_slots = None
    kv_slots_free = 0
    page = 1

    def __init__(self, vocabulary: int, context_length: int) -> None:
        self.vocabulary, self.context_length = vocabulary, context_length
        self.runners: dict[int, Runner] = {}

    def open(self, seq: int, request: Request) -> None:
        """Open the sequence with the runner that was set for it."""
        self.runners[seq].open(seq, request)

    def slots(self, seq: int) -> Slots:
        """The KV slots of the sequence."""
        return self.runners[seq].slots(seq)

    def demand(self, seq: int, count: int) -> None:
        """Make sure that this many more nodes fit."""
        self.runners[seq].demand(seq, count)

    def recall(self, seq: int, tokens: Sequence[int]) -> int:
        """Ask the sequence's runner."""
        return self.runners[seq].recall(seq, tokens)

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Append to the prefix."""
        self.runners[seq].extend(seq, tokens)

    def flush(self) -> None:
        """Do nothing: no prefill is put off."""

    def feed(self, work: Sequence[Feed]) -> None:
        """Add nodes."""
        for feed in work:
            self.runners[feed.seq].feed([feed])

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Add nodes, and return candidates for each row."""
        self.feed(work)
        return [self.runners[ask.seq].propose((), [ask])[0] for ask in asks]

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Add nodes, and verify them."""
        self.feed(work)
        judged: list[Judged] = [self.runners[trial.seq].verify((), [trial])()[0] for trial in trials]
        return Verdicts(lambda: judged)

    def knows(self, seq: int, node: int) -> bool:
        """True if a node was fed, not prefilled."""
        return self.runners[seq].knows(seq, node)

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Ask the sequence's runner."""
        return self.runners[seq].margin(seq, node, first, second)

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail."""
        self.runners[seq].keep(seq, nodes, commit)

    def rewind(self, seq: int, length: int) -> None:
        """Keep only the first tokens."""
        self.runners[seq].rewind(seq, length)

    def close(self, seq: int) -> None:
        """Drop the sequence and its runner."""
        self.runners.pop(seq).close(seq)


class _PromptsUncharged(Verifier):
    """A target whose prefill takes no time: only decoding is compared."""

    def _extend(self, session: int, tokens: Sequence[int]) -> None:
        self.runner.extend(session, tokens)


class _DraftPromptsUncharged(MeteredDrafter):
    """A draft whose prefill takes no time."""

    def _extend(self, session: int, tokens: Sequence[int]) -> None:
        self.runner.extend(session, tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one batch and their time."""

    seconds: float  # from the first one's beginning to the last one's end
    requests: tuple[Stats, ...]
    tokens: int  # emitted in that time, including requests that only kept the batch full

    @property
    def tokens_per_second(self) -> float:
        """The throughput of all requests together."""
        return self.tokens / self.seconds

    @property
    def seconds_per_token(self) -> list[float]:
        """Seconds per token of each request after its first token, in ascending order."""
        return sorted(stats.decode_seconds / (stats.emitted - 1) for stats in self.requests if stats.emitted > 1)


class SeveralRecords:
    """Decodes many records with a fixed batch size; call `close` at the end."""

    def __init__(self, records: Sequence[Record], draft: ReplayedModel | None) -> None:
        self._records, self._draft = records, draft
        self._readers = {record.task: Reader(draft.runner, record) for record in records} if draft else {}

    def decode(self, config: SpeculativeConfig, profile: CostProfile, at_once: int, experience: Experience) -> Load:
        """Decode all records with a method at a batch size.

        When a request ends, the next starts. After the last record the first ones start again, so that the batch is
        full until the last is done.
        """
        clock, sessions = self._clock(profile), list[Session]()
        loop, waiting = Loop(clock), enumerate(cycle(self._records))
        method = find_method(config.method or PLAIN, self._draft is not None)
        while len(counted := sessions[: len(self._records)]) < len(self._records) or not _all_finished(counted):
            free = at_once - sum(not session.finished for session in sessions)
            for number, record in islice(waiting, free):
                sessions.append(self._session(number, record, clock))
                loop.join(sessions[-1], method.start(sessions[-1], config, experience))
            loop.step()
        self._check(sessions)
        emitted = sum(session.stats.emitted for session in sessions)
        return Load(clock.now(), tuple(session.stats for session in counted), emitted)

    def read_ahead(self) -> None:
        """Compute in advance the proposals that methods will need: faster than token by token."""
        if self._draft:
            for record in {record.task: record for record in self._records}.values():
                self._draft.read_ahead(record, self._readers[record.task])

    def close(self) -> None:
        """Free the draft's KV cache."""
        for reader in self._readers.values():
            reader.close()

    def _clock(self, profile: CostProfile) -> VirtualClock:
        longest = max(len(record.text) for record in self._records) + SPARE_SLOTS
        draft = _DraftPromptsUncharged(OneEach(self._draft.runner.vocabulary, longest)) if self._draft else None
        return VirtualClock(_PromptsUncharged(OneEach(1 << 31, longest)), draft, profile)

    def _session(self, number: int, record: Record, clock: VirtualClock) -> Session:
        """Create a request and set its runners."""
        task, capacity = record.task, len(record.text) + SPARE_SLOTS
        _runners(clock.target)[number] = RecordedRunner(record, 1 << 31, capacity)
        if self._draft and clock.metered:
            known, reader = self._draft, self._readers[task]
            made = MemoRunner(known.identity, record, known.memory, reader, known.runner.vocabulary, capacity)
            _runners(clock.metered)[number] = made
        return Session(number, task.prompt, task.request, len(task.prompt) + task.params.max_tokens)

    def _check(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            if session.error is not None:
                raise session.error
            said, expected = tuple(session.output), self._records[session.number % len(self._records)].tokens
            if said != (expected if session.finished else expected[: len(said)]):
                raise Diverged(f"request {session.number} emitted {session.output}, which is not its record")


def _all_finished(sessions: Sequence[Session]) -> bool:
    return all(session.finished for session in sessions)


def _runners(worker: Worker) -> dict[int, Runner]:
    runner = worker.runner
    assert isinstance(runner, OneEach)
    return runner.runners
