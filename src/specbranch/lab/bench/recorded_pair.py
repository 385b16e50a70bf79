"""A loaded pair and its records: the target answers each prompt once, and replays reuse what both models computed.

Owns the loaded pair and the folder of its records. Invariant: every method gets the same prompts as plain decoding; in
a conversation, the earlier answers are the target's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specbranch.assembly import identity
from specbranch.config import LoadOptions, SamplingParams, WarmUpName
from specbranch.core.draft_evaluation import DraftEvaluation
from specbranch.core.runner import Runner
from specbranch.engine import LLM
from specbranch.errors import BadParameter, ModelError
from specbranch.hrad.forecaster import ON
from specbranch.hrad.predictor import Predictor
from specbranch.lab.bench.pair_setup import Running, model_facts, pair_title
from specbranch.lab.measure.loaded_pair import cached_in, precision, stored_in
from specbranch.lab.replay.decode import ReplayedModel
from specbranch.lab.replay.pricing import ReplayedMethods
from specbranch.lab.replay.record import Record, Records, Task
from specbranch.lab.replay.runners import ProposalStore
from specbranch.lab.replay.signals import RecordedSignals
from specbranch.lab.suites.suite import Prompt, conversation
from specbranch.models.files.store import cache_folder
from specbranch.pairs import chosen_models, predictor_folder
from specbranch.progress import StepsDone

log = logging.getLogger("specbranch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The values that decide a text, besides the prompt and the target."""

    temperature: float = 0.0
    max_tokens: int = 128
    seed: int = 0

    def params(self) -> SamplingParams:
        """Return the sampling parameters."""
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)

    def seed_of(self, prompt: Prompt, turn: int) -> int:
        """Return the seed of a prompt's turn, the same every time."""
        return int.from_bytes(sha256(f"{self.seed} {prompt.digest} {turn}".encode()).digest()[:7], "little")


class RecordedPair:
    """A loaded pair, its records and the stored proposals of its draft; call `close` at the end."""

    def __init__(
        self,
        pair: str | None = None,
        target: str | None = None,
        draft: str | None = None,
        folder: Path | None = None,
        predictor: str | None = None,
        keep_experience: bool = False,
        title: str | None = None,
        running: Running | None = None,
        context_length: int | None = None,
        texts: Path | None = None,
        max_num_batched_tokens: int | None = None,
        warm_up: WarmUpName = "lazy",
        max_batch: int | None = None,
    ) -> None:
        """Load the pair.

        `predictor` replaces the pair's own H-RAD predictor for policy "paper". Unless `keep_experience` is true,
        nothing learned earlier takes part. `title` names the pair in the results; `running` says where and how it runs.
        `texts` is the folder of records of another target, whose texts are replayed as this target's. `warm_up` and
        `max_batch` are those of `LoadOptions`; a replay needs no warm-up.
        """
        target, draft = chosen_models(pair, target, draft)
        running = running or Running()
        self.pair = title or pair_title(pair, target, draft)
        self.models = target, draft
        self.folder = folder or cache_folder() / "lab"  # of records, stored proposals and searches
        self._running, self._texts = running.not_default(), texts
        with ExitStack() as opened:  # on failure, close what was opened before
            self.llm = opened.enter_context(
                LLM(
                    target,
                    draft,
                    executor=running.executor,
                    device=running.device,
                    options=LoadOptions(
                        draft_device=running.draft_device,
                        weights=running.weights,
                        draft_weights=running.draft_weights,
                        draft_window=running.draft_window,
                        cache_dtype=running.cache_dtype,
                        context_length=context_length,
                        max_num_batched_tokens=max_num_batched_tokens,
                        predictor=predictor,
                        keep_experience=keep_experience,
                        warm_up=warm_up,
                        max_batch=max_batch,
                        prefix_cache=False,  # every run prefills its prompt, so that TTFT is comparable
                    ),
                )
            )
            self.identity = {
                **model_facts("target", target),
                "target_identity": identity(target),
                **running.not_default(),
            }
            if draft is not None:
                self.identity |= {**model_facts("draft", draft), "draft_identity": identity(draft)}
            known = self._known("target_identity", self.llm.target_runner)
            self._records = Records(self.folder / "records", known, texts and texts / "records")
            self.draft = self._remembering(draft, opened)
            self.forecasts = self._recorded_signals(predictor, draft)
            self.target = ReplayedModel(known, self._memory("targets", known, opened), self.llm.target_runner)
            self.replays = ReplayedMethods(self.draft, self.forecasts, self.target)
            opened.callback(self.replays.close)
            self._opened = opened.pop_all()

    @property
    def prior(self) -> DraftEvaluation | None:
        """The draft's own evaluation, from which replays start as the loaded pair does."""
        return self.llm.core.experiences.prior

    @property
    def digest(self) -> str:
        """A short digest of target and draft, and of where and how they run."""
        names = sorted(name for name in self.identity if name.endswith("identity") or name in self._running)
        return sha256(" ".join(str(self.identity[name]) for name in names).encode()).hexdigest()[:16]

    def records(self, prompt: Prompt, workload: Workload) -> list[Record]:
        """Return the target's answers, turn by turn; record those that are missing."""
        messages: list[dict[str, Any]] = []
        found: list[Record] = []
        for turn, words in enumerate(prompt.turns):
            messages.append({"role": "user", "content": words})
            task = self._task(messages, workload, workload.seed_of(prompt, turn))
            found.append(self._records.find(task) or self._made(task, prompt))
            messages.append({"role": "assistant", "content": self.llm.tokenizer.decode(self._said(found[-1]))})
        return found

    def _made(self, task: Task, prompt: Prompt) -> Record:
        if self._texts is not None:
            raise BadParameter(
                f"--texts {self._texts} holds no text for prompt {prompt.id}: expected a target's answer to the "
                "same prompt, at the same --temperature, --max-tokens and --context. Record it there, or leave --texts "
                "out."
            )
        return self._records.make(task, self.llm)

    def record(self, asked: Sequence[tuple[Prompt, Workload]], progress: StepsDone) -> list[Record]:
        """Return the target's answers to several prompts, with progress."""
        found: list[Record] = []
        for done, (prompt, workload) in enumerate(asked):
            progress("Recording the target", done, len(asked))
            found += self.records(prompt, workload)
        progress("Recording the target", len(asked), len(asked))
        return found

    def has_room_for(self, prompt: Prompt, workload: Workload) -> bool:
        """True if prompt and answers fit the target's context."""
        asked = len(self.llm.tokenizer.chat(conversation(prompt.turns)))
        return asked + len(prompt.turns) * workload.max_tokens <= self.llm.context_length

    def close(self) -> None:
        """Release models and files."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _memory(self, kind: str, known: str, opened: ExitStack) -> ProposalStore:
        memory = ProposalStore(self.folder / kind / f"{known}.sqlite")
        opened.callback(memory.close)
        return memory

    def _remembering(self, name: str | None, opened: ExitStack) -> ReplayedModel | None:
        worker = self.llm.drafter
        if name is None or worker is None:
            return None
        known = self._known("draft_identity", worker.runner)
        memory = self._memory("drafts", known, opened)
        return ReplayedModel(f"{known} {self.identity['target_identity']}", memory, worker.runner)

    def _known(self, name: str, runner: Runner) -> str:
        """Return the key for a model's outputs; rounded weights or a rounded KV cache have their own."""
        stored, cached = stored_in(runner), cached_in(runner)
        rounded = [] if stored in ("float64", "float32", "bfloat16", "float16") else [stored]
        rounded += [f"{cached}-cache"] if cached != precision(runner) else []
        return "-".join((str(self.identity[name]), *rounded))

    def _recorded_signals(self, given: str | None, draft: str | None) -> RecordedSignals | None:
        """Return H-RAD's signals for the records. Without a predictor, policy "paper" uses confidence alone."""
        folder = Path(given) if given is not None else predictor_folder(draft)
        if folder is None or draft is None:
            return None
        try:
            predictor = Predictor.load(folder)
            predictor.check_pair(self.identity["target_identity"], self.identity.get("draft_identity"))
            return RecordedSignals(
                predictor,
                self.llm.target_runner,
                self.folder / "forecasts",
                self._known("target_identity", self.llm.target_runner),
            )
        except ModelError as error:
            log.warning("%s %s", error, ON)
            return None

    def _task(self, messages: list[dict[str, Any]], workload: Workload, seed: int) -> Task:
        tokenizer = self.llm.tokenizer
        return Task(tuple(tokenizer.chat(messages)), workload.params(), seed, tuple(tokenizer.eos_ids))

    def _said(self, record: Record) -> list[int]:
        """Return the answer without its end token."""
        return [token for token in record.tokens if token not in record.task.eos_ids]
