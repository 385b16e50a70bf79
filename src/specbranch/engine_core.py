"""`EngineCore`: loaded models with a queue of requests; it turns prompts into answers, a round at a time.

Owns the numbering of sessions and the way from a prompt to a ticket in the scheduler. It does not load models: `LLM`
does. Invariant: whatever way an answer is left (finished, closed early, Ctrl-C), its session holds no KV cache then.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from specbranch.answer import Answer, Chunk, Output
from specbranch.assembly import Parts
from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS, PLAIN, find_method
from specbranch.core.rehearsal import rehearse, rehearsed
from specbranch.core.request import Request
from specbranch.core.scheduler import Scheduler, Ticket
from specbranch.decoding import Decoding
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.exec.verifier import Verifier
from specbranch.experiences import Experiences
from specbranch.hrad.foretelling import Foretelling

if TYPE_CHECKING:
    from specbranch.text.tokenizer import Tokenizer

PromptLike = str | Sequence[int]  # text, or token ids
REHEARSAL_SECONDS = 0.9  # at load, to time a pair of which nothing is known here


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Both models as they were loaded; several `EngineCore`s may share them."""

    parts: Parts
    has_draft: bool
    foretelling: Foretelling
    numbers: Iterator[int] = field(default_factory=count)  # of sessions: no two on the same models have the same

    @property
    def drafter(self) -> Drafter | None:
        """The draft's worker, if it works in this process."""
        worker = getattr(self.parts.executor, "draft", None)
        return worker if isinstance(worker, Drafter) else None


@dataclass(frozen=True, slots=True)
class EngineCore:
    """Loaded models, the scheduler that runs requests on them, and what was learned of them."""

    models: LoadedModels
    scheduler: Scheduler
    experiences: Experiences

    @property
    def loop(self) -> Loop:
        """The loop that makes the rounds."""
        return self.scheduler.loop

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self.models.parts.tokenizer

    @property
    def verifier(self) -> Verifier:
        """The target's worker."""
        return self.models.parts.verifier

    @property
    def context_length(self) -> int:
        """How many tokens prompt and answer may have together."""
        return self.verifier.runner.context_length

    @property
    def vocabulary(self) -> int:
        """How many token ids the target scores."""
        return self.verifier.runner.vocabulary

    def decoding(self, config: SpeculativeConfig) -> Decoding:
        """Make the decoding of resolved settings. If its planner needs costs that nobody has timed, the pair is timed
        first."""
        method = find_method(config.method or PLAIN, self.models.has_draft)
        made = Decoding(config, method, self.experiences, self.models.foretelling.serves(method, config))
        self._rehearse(made)
        return made

    def modelled(self, profile: CostProfile) -> EngineCore:
        """Make another core on the same models whose time is that of a cost profile. What it learns is not kept."""
        models, drafter = self.models, self.models.drafter
        if models.has_draft and drafter is None:
            raise BadParameter(
                "The draft lives in a process of its own, where time cannot be modelled. Use executor serial."
            )
        draft = MeteredDrafter(drafter.runner) if drafter else None
        clock = VirtualClock(Verifier(self.verifier.runner), draft, profile)
        scheduler = Scheduler(Loop(clock, limits=self.loop.limits), first=self.scheduler.first or self.scheduler)
        return EngineCore(models, scheduler, Experiences(profile, models.has_draft))

    def ids(self, prompt: PromptLike) -> list[int]:
        """Return a prompt as token ids."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        whole = isinstance(prompt, Sequence) and all(
            isinstance(token, int) and 0 <= token < self.vocabulary for token in prompt
        )
        if not whole:
            raise BadParameter(
                f"The prompt is {prompt!r:.60}; expected a text, or token ids from 0 to {self.vocabulary - 1}."
            )
        return list(prompt)

    def check_length(self, prompt: Sequence[int]) -> None:
        """Refuse an empty prompt, and one that leaves no token for the answer."""
        if not prompt:
            raise BadParameter("The prompt is empty; give at least one token.")
        if len(prompt) >= self.context_length:
            raise BadParameter(
                f"The prompt has {len(prompt)} tokens, but the context holds {self.context_length}, one of which is "
                "needed for the answer. Shorten the prompt or raise context_length (--context-length)."
            )

    def samples(self, prompt: list[int], params: SamplingParams, decoding: Decoding) -> list[Answer]:
        """Return the n answers to be made to one prompt: the same seed, numbered samples."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return [self.answer(prompt, params, decoding, seed, sample) for sample in range(params.n)]

    def answer(
        self,
        prompt: list[int],
        params: SamplingParams,
        decoding: Decoding,
        seed: int,
        sample: int = 0,
        forced: tuple[int, ...] = (),
        most: int | None = None,
    ) -> Answer:
        """Return one answer to be made. It starts with the `forced` tokens, and has `most` tokens at most."""
        self.check_length(prompt)
        rule, ends = decoding.config.rule, self.tokenizer.eos_ids
        request = Request(params, seed, len(prompt), sample, rule, ends, decoding.wants_forecast)
        limit = self.context_length if most is None else min(self.context_length, len(prompt) + most)
        return Answer(next(self.models.numbers), prompt, request, limit, self.tokenizer, decoding, forced)

    def scoring(self, ids: list[int], top: int) -> Answer:
        """Return an answer whose tokens are all forced: a text without its first token, wanted for its
        log-probabilities."""
        self.check_length(ids)
        first, said = ids[:1], tuple(ids[1:])
        request = Request(SamplingParams(max_tokens=len(said), ignore_eos=True, logprobs=top), 0, 1)
        plain = Decoding(SpeculativeConfig(method=PLAIN), METHODS[PLAIN], self.experiences)
        return Answer(next(self.models.numbers), first, request, self.context_length, self.tokenizer, plain, said)

    def enqueue(self, answer: Answer, priority: int = 0, within: float | None = None, counted: bool = True) -> Ticket:
        """Put an answer in the queue of the scheduler, whose steps make it; see `Scheduler.submit`."""
        if self.loop.closed:
            raise BadParameter("This LLM was closed; make a new one.")
        return self.scheduler.submit(answer.session, answer.start, priority, within, counted)

    def streamed(self, answer: Answer) -> Iterator[Chunk]:
        """Make one answer, and yield its text a round at a time; closing the iterator early frees everything."""
        session, ticket = answer.session, self.enqueue(answer, counted=False)
        try:
            over = False
            while not over:
                # another stream's round may have finished it, or others hold all memory for a while
                waits = not session.finished and not self.scheduler.step()
                chunk = answer.chunk()
                raise_failure(chunk.output)
                over = chunk.output is not None
                if chunk.pieces or over or session.on_round or waits:
                    yield chunk
        finally:
            self.scheduler.cancel(ticket)
            self.experiences.write()

    def finished(self, answers: Sequence[Answer], max_batch: int) -> Iterator[Answer]:
        """Make answers, `max_batch` at a time; yield each as soon as it and all before it are finished."""
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
        """Stop a draft process, if there is one, and write down what was learned."""
        self.loop.close()
        self.experiences.write(last=True)

    def _rehearse(self, decoding: Decoding) -> None:
        """Time the pair if the method plans by costs and too little is known of them."""
        costs, has_draft = self.experiences.learned, self.models.has_draft
        if not decoding.method.plans(decoding.config) or costs is None or self.loop.closed:
            return
        if not rehearsed(costs, has_draft):
            captures = self.models.parts.captures
            rehearse(self.loop.executor, costs, self.vocabulary, has_draft, REHEARSAL_SECONDS, set_up=captures)


def raise_failure(output: Output | None) -> None:
    """Raise the error that ended an answer, if one did."""
    if output is not None and output.error is not None:
        raise output.error
