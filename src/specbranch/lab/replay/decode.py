"""One request decoded from a record: real orders and verdicts, with time charged by a profile.

Owns the assembly of a replay. Invariant: a replay emits the record's text; any other text is an error, not a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import PLAIN, find_method
from specbranch.core.runner import Runner
from specbranch.core.session import Session
from specbranch.core.stats import Stats
from specbranch.core.trace import Trace
from specbranch.errors import BadParameter
from specbranch.exec.verifier import Verifier
from specbranch.lab.replay.read_ahead import read_ahead
from specbranch.lab.replay.reader import Reader
from specbranch.lab.replay.record import Record
from specbranch.lab.replay.runners import Beyond, Guessed, MemoRunner, OracleRunner, ProposalStore, RecordedRunner
from specbranch.lab.replay.signals import RecordedSignals


class Diverged(AssertionError):
    """A replay that did not emit the record's text."""


@dataclass(frozen=True, slots=True)
class ReplayedModel:
    """A draft in a replay, or a target off its record: its identity, its stored outputs, and the model for the rest."""

    identity: str
    memory: ProposalStore
    runner: Runner

    def worker(self, record: Record, reader: Reader, knows: bool = False) -> MeteredDrafter:
        """Return a draft worker that uses stored proposals; with `knows` it is certain of correct tokens and of
        nothing else."""
        return MeteredDrafter(self._remembering(OracleRunner if knows else MemoRunner, record, reader))

    def read_ahead(self, record: Record, reader: Reader) -> None:
        """Compute in advance the proposals that methods will need on a record, unless they are stored."""
        text, runner = record.text, self.runner
        out_of_reach = len(text) >= runner.context_length or max(text) >= runner.vocabulary
        if out_of_reach or self.memory.has_read(self.identity, record):
            return
        read_ahead(record, self._remembering(MemoRunner, record, reader))
        self.memory.note_read(self.identity, record)

    def _remembering(self, kind: type[MemoRunner], record: Record, reader: Reader) -> MemoRunner:
        return kind(self.identity, record, self.memory, reader, self.runner.vocabulary, self.runner.context_length)


class RecordDecoder:
    """Decodes one record repeatedly, with different methods, settings and profiles; call `close` at the end."""

    def __init__(
        self,
        record: Record,
        draft: ReplayedModel | None,
        forecasts: RecordedSignals | None = None,
        target: ReplayedModel | None = None,
    ) -> None:
        self.record, self.draft, self.forecasts, self.target = record, draft, forecasts, target
        self._reader = Reader(draft.runner, record) if draft else None
        self._asked = Reader(target.runner, record) if target else None

    def decode(
        self,
        config: SpeculativeConfig,
        profile: CostProfile,
        trace: Trace | None = None,
        experience: Experience | None = None,
    ) -> Stats:
        """Decode with a method, charged by a profile; return the request's statistics. A planned method uses
        `experience` and adds to it."""
        method = find_method(config.method or PLAIN, self.draft is not None)
        if method.guesses and self.target is None:
            raise BadParameter(
                f"A record holds only the target's answer, and method {config.method!r} needs its tokens after guesses "
                "of its own. Give the replay the target, or leave the method out."
            )
        executor = self._executor(profile, config.policy == "oracle", method.guesses)
        heard = self.forecasts if method.uses_signals(config) else None
        if heard is not None and heard.longest < config.num_speculative_tokens:
            heard = None
        if heard is not None:
            executor.target.forecaster = heard.of(self.record)
        loop, session = Loop(executor, trace), self._session(heard is not None)
        known = experience or Experience(profile, self.draft is not None)
        loop.join(session, method.start(session, config, known))
        while loop.live:
            loop.step()
        if session.error is not None:
            raise session.error
        if tuple(session.output) != self.record.tokens:
            raise Diverged(
                f"{config.method} emitted {session.output}, which is not the record: {list(self.record.tokens)}"
            )
        return session.stats

    def read_ahead(self) -> None:
        """Compute in advance the proposals that methods will need: faster than token by token."""
        if self.draft and self._reader:
            self.draft.read_ahead(self.record, self._reader)

    def close(self) -> None:
        """Free the models' KV caches."""
        for reader in (self._reader, self._asked):
            if reader:
                reader.close()

    def _executor(self, profile: CostProfile, knows: bool, guesses: bool) -> VirtualClock:
        """Assemble the workers."""
        capacity = len(self.record.text) + 256  # room for what is drafted beyond the end
        target = Verifier(RecordedRunner(self.record, 1 << 31, capacity, self._beyond() if guesses else None))
        draft = self.draft.worker(self.record, self._reader, knows) if self.draft and self._reader else None
        return VirtualClock(target, draft, profile)

    def _beyond(self) -> Beyond | None:
        if self.target is None or self._asked is None:
            return None
        return Guessed(self.target.identity, self.record, self.target.memory, self._asked)

    def _session(self, wants_forecast: bool) -> Session:
        task = self.record.task
        request = replace(task.request, wants_forecast=wants_forecast)
        return Session(0, task.prompt, request, len(task.prompt) + task.params.max_tokens)
