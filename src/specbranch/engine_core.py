"""`EngineCore`: loaded models with a queue of requests. It turns prompts into answers, a round at a time.

Owns the numbering of sessions and the way from a prompt to a ticket in the scheduler. It does not load models: `LLM`
does. Invariant: however an answer ends (finished, closed early, Ctrl-C), the pages of its KV cache are freed.
"""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from specbranch.answer import Answer, Chunk, Output
from specbranch.assembly import ModelChoice, Parts, experience_key
from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import ExecutorName, SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS, PLAIN, find_method
from specbranch.core.prediction import Prediction
from specbranch.core.rehearsal import rehearse, rehearsed, take_table
from specbranch.core.request import Request
from specbranch.core.runner import Runner, TimesForwards
from specbranch.core.scheduler import Scheduler, Ticket
from specbranch.core.warm_up import WarmsUp, ended_compiling, late_captures, not_late, save_kinds, warming
from specbranch.decoding import Decoding
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.exec.forward_sizes import draft_sizes, target_sizes
from specbranch.exec.process import Process
from specbranch.exec.verifier import Verifier
from specbranch.experiences import ExperienceFile, Experiences, experience_folder
from specbranch.grammar.compiler import Grammars
from specbranch.hrad.engine_predictor import EnginePredictor

if TYPE_CHECKING:
    from specbranch.text.tokenizer import Tokenizer

PromptLike = str | Sequence[int]  # text, or token ids
REHEARSAL_SECONDS = 0.9  # warm-up at load: time steps of a pair whose costs are not known on this machine


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Both models as they were loaded; several `EngineCore`s may share them."""

    parts: Parts
    has_draft: bool
    predictor: EnginePredictor
    numbers: Iterator[int] = field(default_factory=count)  # of sessions: unique on these models
    warmed_sessions: int = 0  # the batch size that a warm-up prepares for; 0: there is no warm-up
    grammars: Grammars = field(init=False)  # compiles what answers follow

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammars", Grammars(self.parts.tokenizer))

    @property
    def runners(self) -> tuple[Runner, ...]:
        """The target, and the draft if it works in this process."""
        drafter = self.drafter
        return (self.parts.verifier.runner, *(() if drafter is None else (drafter.runner,)))

    @property
    def drafter(self) -> Drafter | None:
        """The draft's worker, if it works in this process."""
        worker = getattr(self.parts.executor, "draft", None)  # executors with a draft in this process have it
        return worker if isinstance(worker, Drafter) else None


@dataclass(frozen=True, slots=True)
class EngineCore:
    """Loaded models, the scheduler that runs requests on them, and the statistics learned of them."""

    models: LoadedModels
    scheduler: Scheduler
    experiences: Experiences

    @property
    def loop(self) -> Loop:
        """The loop that makes the rounds."""
        return self.scheduler.loop

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the target."""
        return self.models.parts.tokenizer

    @property
    def verifier(self) -> Verifier:
        """The target's worker."""
        return self.models.parts.verifier

    @property
    def tends_draft(self) -> bool:
        """True if the draft is a worker on a network: it may be lost and come back also while nobody decodes."""
        executor = self.loop.executor
        return isinstance(executor, Process) and executor.tends_draft

    def tend_draft(self) -> None:
        """Notice that such a worker is lost, and reach it again; for pauses between rounds."""
        executor = self.loop.executor
        if isinstance(executor, Process):
            executor.tend()

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a prompt and its answer together."""
        return self.verifier.runner.context_length

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the target scores."""
        return self.verifier.runner.vocabulary

    @property
    def late_captures(self) -> int:
        """How often the models captured a CUDA graph or compiled a kernel in the middle of an answer."""
        return late_captures(self.models.runners)

    def decoding(self, config: SpeculativeConfig, warm_up: bool = False) -> Decoding:
        """Make the `Decoding` of resolved settings. If its planner needs costs that nobody has timed, time the pair
        first.

        `warm_up`: first get the models ready for all steps of this method, unless they were loaded without warm-up.
        """
        method = find_method(config.method or PLAIN, self.models.has_draft)
        made = Decoding(config, method, self.experiences, self.models.predictor.serves(method, config))
        with not_late(self.models.runners):
            if warm_up:
                self._warm_up(made)
            self._rehearse(made)
        return made

    def modelled(self, profile: CostProfile) -> EngineCore:
        """Make another core on the same models with a simulated clock. What it learns is not saved."""
        models, drafter = self.models, self.models.drafter
        if models.has_draft and drafter is None:
            raise BadParameter(
                "The draft lives in a process of its own, where time cannot be modelled. Use executor serial."
            )
        draft = MeteredDrafter(drafter.runner) if drafter else None
        clock = VirtualClock(Verifier(self.verifier.runner), draft, profile)
        scheduler = Scheduler(Loop(clock, limits=self.loop.limits), first=self.scheduler.first or self.scheduler)
        return EngineCore(models, scheduler, Experiences(profile, models.has_draft, prior=self.experiences.prior))

    def encode(self, prompt: PromptLike) -> list[int]:
        """Return a prompt as token ids. Token ids that the target does not have are refused."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if (ids := self._as_ids(prompt)) is None:
            raise BadParameter(
                f"The prompt is {prompt!r:.60}; expected a text, or token ids from 0 to {self.vocabulary - 1}."
            )
        return ids

    def check_length(self, prompt: Sequence[int]) -> None:
        """Refuse an empty prompt, and one that leaves no token for the answer."""
        if not prompt:
            raise BadParameter("The prompt is empty; give at least one token.")
        if len(prompt) >= self.context_length:
            raise BadParameter(
                f"The prompt has {len(prompt)} tokens, but the context holds {self.context_length}, one of which is "
                "needed for the answer. Shorten the prompt or raise context_length (--context-length)."
            )

    def encode_prediction(self, prediction: PromptLike | None) -> tuple[int, ...]:
        """Return the text that a caller expects as token ids; none for None."""
        if prediction is None:
            return ()
        given = prediction
        ids = self.tokenizer.encode(given, add_special=False) if isinstance(given, str) else self._as_ids(given)
        if ids is None:
            raise BadParameter(
                f"prediction is {prediction!r:.60}; expected a text, or token ids from 0 to {self.vocabulary - 1}."
            )
        if len(ids) > self.context_length:
            raise BadParameter(
                f"prediction has {len(ids)} tokens, but the context holds {self.context_length}. Shorten it."
            )
        return tuple(ids)

    def make_samples(
        self,
        prompt: list[int],
        params: SamplingParams,
        decoding: Decoding,
        predicted: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> list[Answer]:
        """Make the n unfinished answers of one prompt: they share the seed, and each has its sample number.

        `predicted`: the tokens that the caller expects; lookup proposes them. `shown`: special tokens that are part of
        the text.
        """
        seed = secrets.randbits(63) if params.seed is None else params.seed
        samples = [self.make_answer(prompt, params, decoding, seed, sample, shown=shown) for sample in range(params.n)]
        for answer in samples if predicted else ():
            answer.session.prediction = Prediction(predicted)
        return samples

    def make_answer(
        self,
        prompt: list[int],
        params: SamplingParams,
        decoding: Decoding,
        seed: int,
        sample: int = 0,
        forced: tuple[int, ...] = (),
        max_new_tokens: int | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> Answer:
        """Make one unfinished answer. It starts with the `forced` tokens, and has at most `max_new_tokens` tokens. Its
        text has the special tokens `shown`, and no others."""
        self.check_length(prompt)
        rule, ends = decoding.config.rule, self.tokenizer.eos_ids
        request = Request(params, seed, len(prompt), sample, rule, ends, decoding.wants_forecast)
        if params.is_constrained:
            request = replace(request, constraint=self.models.grammars.constraint(params, request.ending_ids))
        limit = self.context_length
        if max_new_tokens is not None:
            limit = min(limit, len(prompt) + max_new_tokens)
        return Answer(next(self.models.numbers), prompt, request, limit, self.tokenizer, decoding, forced, shown)

    def make_scoring(self, ids: list[int], top: int) -> Answer:
        """Make an unfinished answer that scores a text: its prompt is the first token, and all others are forced."""
        self.check_length(ids)
        first, forced = ids[:1], tuple(ids[1:])
        params = SamplingParams(max_tokens=len(forced), ignore_eos=True, logprobs=top)
        request = Request(params, seed=0, prompt_length=1)
        plain = Decoding(SpeculativeConfig(method=PLAIN), METHODS[PLAIN], self.experiences)
        return Answer(next(self.models.numbers), first, request, self.context_length, self.tokenizer, plain, forced)

    def enqueue(self, answer: Answer, priority: int = 0, timeout: float | None = None, counted: bool = True) -> Ticket:
        """Put an answer in the scheduler's queue. `counted`: it counts towards `max_batch`; see `Scheduler.submit`."""
        if self.loop.closed:
            raise BadParameter("This LLM was closed; make a new one.")
        return self.scheduler.submit(answer.session, answer.start, priority, timeout, counted)

    def run_stream(self, answer: Answer) -> Iterator[Chunk]:
        """Run one answer; yield its text a round at a time. Closing the iterator early frees its KV cache."""
        session, ticket = answer.session, self.enqueue(answer, counted=False)
        try:
            over = False
            while not over:
                # Another stream's round may have finished this session. If no round can run, because other streams
                # hold all KV pages, yield an empty chunk: the caller may then advance those streams.
                blocked = False
                if not session.finished:
                    blocked = not self.scheduler.step()
                chunk = answer.chunk()
                raise_failure(chunk.output)
                over = chunk.output is not None
                if chunk.pieces or over or session.on_round or blocked:
                    yield chunk
        finally:
            self.scheduler.cancel(ticket)
            self.experiences.write()

    def run_all(self, answers: Sequence[Answer], max_batch: int) -> Iterator[Answer]:
        """Run answers, `max_batch` at a time; yield each as soon as it and all before it are finished."""
        # The scheduler is shared by all views: each call sets its own batch size. While it runs, no other caller makes
        # rounds, so the scheduler must not wait for the memory of others.
        self.scheduler.most, self.scheduler.blocking = max_batch, True
        tickets: list[Ticket] = []
        try:
            tickets += [self.enqueue(answer) for answer in answers]
            for answer in answers:
                while not answer.session.finished:
                    self.scheduler.step()
                yield answer
        finally:
            self.scheduler.blocking = False
            for ticket in tickets:
                self.scheduler.cancel(ticket)
            self.experiences.write()

    def close(self) -> None:
        """Stop the draft process, if there is one, and save what was learned."""
        save_kinds(self.models.runners)
        self.loop.close()
        self.experiences.write(last=True)
        gc.unfreeze()

    def _as_ids(self, given: object) -> list[int] | None:
        """Return token ids as a list; None if the target does not have them all."""
        if not isinstance(given, Sequence):
            return None
        whole = all(isinstance(token, int) and 0 <= token < self.vocabulary for token in given)
        return list(given) if whole else None

    def _warm_up(self, decoding: Decoding) -> None:
        """Get both models ready for all steps that the method can order."""
        sessions, (target, *drafts) = self.models.warmed_sessions, self.models.runners
        if not sessions:
            return
        method, config = decoding.method, decoding.config
        of_target = target_sizes(method, config, sessions, decoding.wants_forecast)
        of_draft = draft_sizes(method, config, sessions)
        draft = next(iter(warming(drafts)), None) if method.uses_draft else None
        with not_late(self.models.runners), ended_compiling(self.models.runners):
            # kernels of both models compile together; each `warm_up` waits for its own
            if isinstance(target, WarmsUp):
                target.start_compiling(of_target, draft)
            if draft is not None:
                draft.start_compiling(of_draft)
            if isinstance(target, WarmsUp):
                target.warm_up(of_target)
            if draft is not None:
                draft.warm_up(of_draft)
            if isinstance(target, WarmsUp):
                target.warm_up_receiver(draft)

    def _rehearse(self, decoding: Decoding) -> None:
        """Time the pair if the method plans by costs and too few of them are known."""
        costs, has_draft = self.experiences.learned, self.models.has_draft
        if not decoding.method.plans(decoding.config) or costs is None or self.loop.closed:
            return
        if not rehearsed(costs, has_draft):
            captures = self.models.parts.captures
            rehearse(self.loop.executor, costs, self.vocabulary, has_draft, REHEARSAL_SECONDS, set_up=captures)
            if isinstance(self.verifier.runner, TimesForwards):
                take_table(costs, self.verifier.runner)


def raise_failure(output: Output | None) -> None:
    """Raise the error that ended an answer, if one did."""
    if output is not None and output.error is not None:
        raise output.error


def experience_file(
    target: ModelChoice, draft: ModelChoice | None, executor: ExecutorName, parts: Parts
) -> ExperienceFile | None:
    """Return the file of what is learned of a pair on this machine; None: it is not to be saved."""
    folder = experience_folder()
    return ExperienceFile(folder, experience_key(target, draft, executor, parts)) if folder else None
