"""`LLM`: load a pair once, then generate, stream and chat.

Owns the loaded parts and the numbering of sessions. Invariant: whatever way an answer is left (finished, closed early,
Ctrl-C), its session holds no cache any more.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from specbranch.answer import Answer, Chunk, Output, gather
from specbranch.assembly import DeviceMap, ModelChoice, RunnerName, assemble, circumstances, cost_profile, kept_by_draft
from specbranch.clock.shipped import load_profile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import AT_ONCE, ExecutorName, SamplingParams, SpeculativeConfig, WeightsName
from specbranch.core.costs import LearnedCosts
from specbranch.core.loop import DraftState, Loop, RoundLimits
from specbranch.core.methods import PLAIN, MethodRounds, best_fit, find_method
from specbranch.core.orders import TokenLogprobs
from specbranch.core.rehearsal import rehearse, rehearsed
from specbranch.core.request import Request
from specbranch.core.rounds import given
from specbranch.core.runner import PadsForwards, ReceivesTrees, Runner
from specbranch.core.scheduler import Scheduler, Ticket
from specbranch.core.session import RoundWatcher
from specbranch.core.trace import Trace
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.exec.verifier import Verifier
from specbranch.experiences import ExperienceFile, Experiences, experience_folder
from specbranch.hrad.foretelling import Foretelling
from specbranch.pairs import chosen_models

if TYPE_CHECKING:
    from specbranch.text.chat_template import Message

__all__ = ["LLM", "Chunk", "Output"]

PromptLike = str | Sequence[int]  # text, or token ids
Params = SamplingParams | Mapping[str, Any] | None
Speculative = SpeculativeConfig | Mapping[str, Any] | Literal[False] | None  # of one request; False: plain decoding
MOST = 64  # requests decoded at once, unless it is said
REHEARSAL = 0.9  # seconds at load to time a pair of which nothing is known here


class LLM:
    """A target, perhaps a draft, and a method to decode with."""

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        method: str | None = None,
        *,
        pair: str | None = None,
        speculative: SpeculativeConfig | Mapping[str, Any] | None = None,
        executor: ExecutorName = "serial",
        runner: RunnerName = "auto",
        device: str | None = None,
        draft_device: str | None = None,
        device_map: DeviceMap | None = None,
        dtype: str | None = None,
        weights: WeightsName | None = None,
        draft_weights: WeightsName | None = None,
        context_length: int | None = None,
        cache_tokens: int | None = None,
        cache_dtype: str | None = None,
        max_batch: int | None = None,
        clock: str | None = None,
        force_profile: bool = False,
        predictor: str | None = None,
        keep_experience: bool = True,
        prefix_cache: bool = True,
    ) -> None:
        """Load the models: a `pair` by its name, or `target` and `draft` as known names, folders, GGUF files or Hub
        ids; the default pair where nothing is named.

        Without `method` the best fit is taken. With a `clock`, the name or file of a cost profile, decisions are real
        and time is modelled: all seconds in the statistics are those the profile charges. A profile measured with
        another pair is refused, unless forced. `predictor`: a folder that `specbranch train-predictor` wrote, for
        policy "paper"; the pairs known by name have one of their own. `dtype`: the precision of computing. `weights`,
        `draft_weights`: how matrices are stored, "float32", "bfloat16", "int8", "int4" or "stored" (as in a quantised
        GGUF file; the default for one on a CPU unless a dtype is given). The last three are another, coarser model, of
        which every method still gives exactly the text that plain decoding gives. `cache_tokens`:
        KV slots in each model's cache for all requests together; nothing: what there is room for. `max_batch`: prompts
        of a list that are decoded at once, 64 unless it is given; fewer where memory allows fewer, and one with the
        transformers runner, which gains nothing by more. `cache_dtype`:
        "bfloat16" or "int8" stores keys and values in a half or about a quarter of the memory, on a CPU; that, too, is
        another model. `device_map`: "auto"
        spreads the target over all GPUs, by the transformers runner; the draft stays on one device. What is learned of
        a pair (costs, how far the draft's word goes) is taken up from earlier processes and kept for later ones in the
        cache folder, unless `keep_experience` is false. `prefix_cache`: what was read of a prompt is kept, as long as
        there is room, and not read again for one that begins alike.
        """
        self.target, named = chosen_models(pair, target, draft)
        profile = cost_profile(clock, self.target, named, force_profile)
        self._overlap = executor in AT_ONCE or (profile is not None and profile.overlap)
        self._take_method(_config(speculative, method), named is not None)
        most = batch_size(MOST if max_batch is None else max_batch)
        choice = ModelChoice(
            self.target,
            runner,
            device,
            dtype,
            context_length,
            cache_tokens=cache_tokens,
            cache_dtype=cache_dtype,
            weights=weights,
            device_map=device_map,
            prefix_cache=prefix_cache,
        )
        self.cache_dtype = cache_dtype
        beside = draft_device or device
        own: dict[str, Any] = {"weights": draft_weights, "cache_dtype": kept_by_draft(cache_dtype, beside)}
        other = replace(choice, device=beside, shorten=True, device_map=None, **own)
        drafting = replace(other, name=named) if named and self._method.uses_draft else None
        self._has_draft = drafting is not None
        self._parts = assemble(choice, drafting, executor, profile)
        folder = experience_folder() if keep_experience and profile is None else None
        file = ExperienceFile(folder, circumstances(choice, drafting, executor, self._parts)) if folder else None
        self.tokenizer = self._parts.tokenizer
        self._verifier = self._parts.verifier
        counts_memory = self._verifier.runner.kv_slots is not None
        self.max_batch = most if counts_memory or max_batch is not None else 1
        self._experiences = Experiences(profile or self._costs(), self._has_draft, file)
        prefill_chunk = self._verifier.runner.prefill_chunk
        limits = RoundLimits(prefill_chunk=prefill_chunk, prompt_tokens=prefill_chunk)
        self._loop = Loop(self._parts.executor, costs=self._experiences.learned, limits=limits)
        self.scheduler = Scheduler(self._loop)
        weakref.finalize(self._loop, self._experiences.write, last=True)  # of the loop, for `using` shares it
        self._numbers = count()
        self._foretelling = Foretelling(predictor, self.target, named, self._verifier)
        self._wants_forecast = self._foretelling.serves(self._method, self.config)
        self._rehearse()

    def using(
        self, method: str | None = None, *, speculative: SpeculativeConfig | Mapping[str, Any] | None = None
    ) -> LLM:
        """Return an LLM that decodes with another method on the same loaded models; closing one of the two closes
        both."""
        other = copy(self)
        other._take_method(_config(speculative, method), self._has_draft)
        other._wants_forecast = other._foretelling.serves(other._method, other.config)
        other._rehearse()
        return other

    def modelled(self, clock: str) -> LLM:
        """Return an LLM on the same loaded models whose time is that of a cost profile: its decisions are real, and
        made for that profile; nothing it learns is kept. The draft has to live in this process."""
        if self._has_draft and self.drafter is None:
            raise BadParameter(
                "The draft lives in a process of its own, where time cannot be modelled. Use executor serial."
            )
        other, profile = copy(self), load_profile(clock)
        other._overlap = profile.overlap
        other._experiences = Experiences(profile, self._has_draft)
        draft = MeteredDrafter(self.drafter.runner) if self.drafter else None
        other._loop = Loop(VirtualClock(Verifier(self.target_runner), draft, profile), limits=self._loop.limits)
        other.scheduler = Scheduler(other._loop, first=self.scheduler.first or self.scheduler)
        return other

    @property
    def context_length(self) -> int:
        """How many tokens prompt and answer may have together."""
        return self._verifier.runner.context_length

    @property
    def target_runner(self) -> Runner:
        """The target model itself, to measure it or to load something beside it."""
        return self._verifier.runner

    @property
    def drafter(self) -> Drafter | None:
        """The draft's worker, where it works in this process."""
        worker = getattr(self._parts.executor, "draft", None)
        return worker if isinstance(worker, Drafter) else None

    @property
    def draft_state(self) -> DraftState:
        """What the draft can do now: "ready", "starting", "busy", "lost", or "none" where there is no draft."""
        return self._parts.executor.draft_state

    @property
    def runner(self) -> str:
        """Which runner the target has: native or transformers."""
        return self._parts.runner

    @property
    def dtype(self) -> str:
        """The precision the target computes in."""
        return self._parts.dtype

    @property
    def weights(self) -> str:
        """How the target's matrices are stored."""
        return self._parts.weights

    @property
    def device(self) -> str:
        """The device that the target computes on."""
        return self._parts.device

    @property
    def vocabulary(self) -> int:
        """How many token ids the target scores."""
        return self._verifier.runner.vocabulary

    @overload
    def generate(self, prompts: str, params: Params = None) -> Output: ...  # type: ignore[overload-overlap] # a str is a Sequence

    @overload
    def generate(self, prompts: Sequence[PromptLike], params: Params = None) -> list[Output]: ...

    def generate(self, prompts: str | Sequence[PromptLike], params: Params = None) -> Output | list[Output]:
        """Answer one prompt, or many (texts or lists of token ids), `max_batch` of them at a time: as one ends the
        next begins.

        A seed is used for each prompt alike: a prompt's answer does not depend on the others. Of many prompts, one that
        fails does not take the others with it: its output has the finish reason "error", and the error.
        """
        if isinstance(prompts, str):
            return self._one(self.ids(prompts), params)
        if not isinstance(prompts, Sequence) or any(isinstance(prompt, int) for prompt in prompts):
            raise BadParameter(
                f"prompts is {prompts!r:.60}; expected a text, or a list of texts and lists of token ids."
            )
        return list(self.outputs(prompts, params))

    def outputs(self, prompts: Sequence[PromptLike], params: Params = None) -> Iterator[Output]:
        """Answer many prompts as `generate` does; each output is yielded as soon as it and all before it are there.
        Closing the iterator cancels the rest."""
        asked = checked(params)  # what is wrong is raised before the first output is asked for
        answers = [answer for prompt in prompts for answer in self.samples(self.ids(prompt), asked)]
        return self._gathered(answers, asked.n)

    def chat(self, messages: Sequence[Message], params: Params = None) -> Output:
        """Answer a conversation: `[{"role": "user", "content": "…"}, …]`."""
        return self._one(self.tokenizer.chat(messages), params)

    def stream(
        self, prompt: PromptLike, params: Params = None, on_round: RoundWatcher | None = None
    ) -> Iterator[Chunk]:
        """Answer one prompt a round at a time; closing the iterator early frees everything. One sample only.
        `on_round` is told what both models did in each; then each has its chunk, also where there is no text yet."""
        return self._stream(self.ids(prompt), params, on_round)

    def stream_chat(self, messages: Sequence[Message], params: Params = None) -> Iterator[Chunk]:
        """Answer a conversation a round at a time."""
        return self._stream(self.tokenizer.chat(messages), params)

    def score(self, prompt: PromptLike, top: int = 0) -> tuple[TokenLogprobs, ...]:
        """Return how likely the target finds each token of a text but the first, with the `top` likeliest in its
        KV slot."""
        ids = self.ids(prompt)
        if len(ids) < 2:
            return ()
        answer = self.scoring(ids, top)
        (output,) = self._gathered([answer], 1)
        _raise_failure(output)
        return output.logprobs or ()

    def repeat(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        sample: int,
        given: tuple[int, ...] = (),
        most: int | None = None,
    ) -> Output:
        """Answer a prompt again with the noise of an earlier answer. The answer starts with the `given` tokens, and
        has `most` tokens at most."""
        request = replace(self._request(prompt, params, seed), sample=sample)
        answer = self._answer(list(prompt), request, given, most)
        (output,) = self._gathered([answer], 1)
        _raise_failure(output)
        return output

    def margin(self, tokens: Sequence[int], request: Request, first: int, second: int) -> float:
        """Return how far apart two candidates for the token after `tokens` are for the target, in logits."""
        number = next(self._numbers)
        self._verifier.open(number, request)
        try:
            return self._verifier.margin(number, tokens, first, second)
        finally:
            self._verifier.leave(number)

    def step_seconds(self, prompt: Sequence[int]) -> float:
        """Measure one forward of the target over one token after a prompt, in seconds."""
        from specbranch.training.distill.agreement import step_seconds

        return step_seconds(self._verifier.runner, prompt)

    def record(self) -> Trace:
        """Start recording what both models do, and return the record."""
        self._loop.trace = Trace()
        return self._loop.trace

    def keep_experience(self) -> None:
        """Write down what was learned, now and then."""
        self._experiences.write()

    def close(self) -> None:
        """Stop a draft process, if there is one; nothing can be generated afterwards."""
        self._loop.close()
        self._experiences.write(last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _costs(self) -> LearnedCosts:
        """What is known of the costs before anything is timed."""
        model = self._verifier.runner
        padded = model.padded if isinstance(model, PadsForwards) else None
        return LearnedCosts(self._overlap, padded, begins_ahead=isinstance(model, ReceivesTrees))

    def _rehearse(self) -> None:
        """Time the pair if the method plans by costs and too little is known of them."""
        costs = self._experiences.learned
        if (
            self._method.plans(self.config)
            and costs is not None
            and not rehearsed(costs, self._has_draft)
            and not self._loop.closed
        ):
            rehearse(
                self._loop.executor, costs, self.vocabulary, self._has_draft, REHEARSAL, set_up=self._parts.captures
            )

    def _take_method(self, config: SpeculativeConfig, has_draft: bool) -> None:
        self.method, self.config = best_fit(config, has_draft)
        self._method = find_method(self.method, has_draft)
        _refuse_oracle(self.config)

    def resolved(self, method: str | None, speculative: Speculative) -> SpeculativeConfig:
        """Return how a request would be decoded: as by this LLM where nothing is said; `speculative` False is plain
        decoding. Raises a BadParameter for what cannot be done with these models."""
        if method is None and speculative is None:
            return self.config
        plain = PLAIN if speculative is False else None
        _, config = best_fit(_config(speculative or None, method or plain), self._has_draft)
        _refuse_oracle(config)
        return config

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

    def _stream(self, prompt: list[int], params: Params, on_round: RoundWatcher | None = None) -> Iterator[Chunk]:
        # The answer is made now, so that a bad prompt is refused before the first chunk is asked for.
        first, *others = self.samples(prompt, checked(params))
        if others:
            raise BadParameter(f"n is {len(others) + 1}, but a stream carries one sample. Use generate, or n = 1.")
        first.session.on_round = on_round
        return self._rounds(first)

    def _rounds(self, answer: Answer) -> Iterator[Chunk]:
        session, ticket = answer.session, self.enqueue(answer, counted=False)
        try:
            over = False
            while not over:
                # another stream's round may have finished it, or others hold all memory for a while
                waits = not session.finished and not self.scheduler.step()
                chunk = answer.chunk()
                _raise_failure(chunk.output)
                over = chunk.output is not None
                if chunk.pieces or over or session.on_round or waits:
                    yield chunk
        finally:
            self.scheduler.cancel(ticket)
            self._experiences.write()

    def _one(self, prompt: list[int], params: Params) -> Output:
        (output,) = self.outputs([prompt], params)
        _raise_failure(output)
        return output

    def _gathered(self, answers: list[Answer], n: int) -> Iterator[Output]:
        samples: list[Output] = []
        for answer in self._in_order(answers):
            samples.append(answer.output())
            if len(samples) == n:
                yield gather(samples)
                samples = []

    def _in_order(self, answers: list[Answer]) -> Iterator[Answer]:
        """Make answers, and yield each as soon as it and all before it are finished."""
        self.scheduler.most, self.scheduler.blocking = self.max_batch, True
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
            self._experiences.write()

    def enqueue(self, answer: Answer, priority: int = 0, within: float | None = None, counted: bool = True) -> Ticket:
        """Put an answer in the queue of the scheduler, whose steps make it; see `Scheduler.submit`."""
        if self._loop.closed:
            raise BadParameter("This LLM was closed; make a new one.")

        def free() -> MethodRounds:
            return self._method.start(answer.session, self.config, self._experiences.of(self.config))

        def start() -> MethodRounds:
            return given(answer.session, answer.given, free) if answer.given else free()

        return self.scheduler.submit(answer.session, start, priority, within, counted)

    def samples(self, prompt: list[int], params: SamplingParams) -> list[Answer]:
        """Return n answers to be made to one prompt: the same seed, numbered samples."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        first = self._request(prompt, params, seed)
        return [self._answer(prompt, replace(first, sample=sample)) for sample in range(params.n)]

    def scoring(self, ids: list[int], top: int) -> Answer:
        """Return an answer to be made that is the text itself, but for its first token: what is wanted of it are its
        log-probabilities."""
        self.check_length(ids)
        first, said = ids[:1], tuple(ids[1:])
        params = SamplingParams(max_tokens=len(said), ignore_eos=True, logprobs=top)
        return Answer(
            next(self._numbers), first, Request(params, 0, 1), self.context_length, self.tokenizer, PLAIN, said
        )

    def _request(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> Request:
        return Request(params, seed, len(prompt), 0, self.config.rule, self.tokenizer.eos_ids, self._wants_forecast)

    def _answer(
        self, prompt: list[int], request: Request, given: tuple[int, ...] = (), most: int | None = None
    ) -> Answer:
        self.check_length(prompt)
        limit = self.context_length if most is None else min(self.context_length, len(prompt) + most)
        return Answer(next(self._numbers), prompt, request, limit, self.tokenizer, self.method, given)

    def check_length(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that leaves no room for an answer, and an empty one."""
        if not prompt:
            raise BadParameter("The prompt is empty; give at least one token.")
        if len(prompt) >= self.context_length:
            raise BadParameter(
                f"The prompt has {len(prompt)} tokens, but the context holds {self.context_length}, one of which is "
                "needed for the answer. Shorten the prompt or raise context_length (--context-length)."
            )


def _raise_failure(output: Output | None) -> None:
    if output is not None and output.error is not None:
        raise output.error


def _refuse_oracle(config: SpeculativeConfig) -> None:
    if config.policy == "oracle":
        raise BadParameter(
            "Policy 'oracle' knows the target's text beforehand, which only a replay does: `specbranch bench run "
            "--clock`."
        )


def _config(given: SpeculativeConfig | Mapping[str, Any] | None, method: str | None) -> SpeculativeConfig:
    """Resolve the configuration; `method` beats the one in it."""
    if given is not None and not isinstance(given, (SpeculativeConfig, Mapping)):
        raise BadParameter(f"speculative is {given!r:.60}; expected a SpeculativeConfig or a mapping.")
    config = given if isinstance(given, SpeculativeConfig) else SpeculativeConfig.from_dict(given or {})
    return replace(config, method=method) if method is not None else config


def checked(params: Params) -> SamplingParams:
    """Return sampling parameters, made of a mapping if that is given."""
    if isinstance(params, Mapping):
        return SamplingParams.from_dict(params)
    if params is not None and not isinstance(params, SamplingParams):
        raise BadParameter(f"params is {params!r:.60}; expected SamplingParams or a mapping.")
    return params or SamplingParams()


def batch_size(given: int) -> int:
    """Return how many requests may be decoded at once, or refuse it."""
    if not isinstance(given, int) or given < 1:
        raise BadParameter(f"max_batch is {given!r}; expected a whole number ≥ 1.")
    return given
