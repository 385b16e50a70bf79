"""`LLM`: load a pair once, then generate, stream and chat.

Owns loading, and what users call; the way of a request is in `engine_core.py`. Invariant: `using` and
`modelled` load and copy no model: they return an `LLMView` on the same ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from specbranch.answer import Answer, Chunk, Output, gather
from specbranch.assembly import ModelChoice, Parts, assemble, chosen_draft, chosen_target, circumstances, cost_profile
from specbranch.clock.profile import CostProfile
from specbranch.clock.shipped import load_profile
from specbranch.config import AT_ONCE, ExecutorName, LoadOptions, SamplingParams, SpeculativeConfig
from specbranch.core.costs import LearnedCosts
from specbranch.core.loop import DraftState, Loop, RoundLimits
from specbranch.core.methods import find_method
from specbranch.core.orders import TokenLogprobs
from specbranch.core.runner import PadsForwards, ReceivesTrees, Runner
from specbranch.core.scheduler import Scheduler
from specbranch.core.session import RoundWatcher
from specbranch.decoding import Decoding, Speculative, resolve
from specbranch.engine_core import EngineCore, LoadedModels, PromptLike, raise_failure
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.experiences import ExperienceFile, Experiences, experience_folder
from specbranch.hrad.foretelling import Foretelling
from specbranch.older_names import with_older
from specbranch.pairs import chosen_models

if TYPE_CHECKING:
    from specbranch.text.chat_template import Message
    from specbranch.text.tokenizer import Tokenizer

__all__ = ["LLM", "Chunk", "LLMView", "Output"]

Params = SamplingParams | Mapping[str, Any] | None
MAX_BATCH = 64  # requests decoded at once, unless it is given


class LLMView:
    """Loaded models and one way to decode on them: generate, stream, chat and score. An `LLM` loads its own models;
    `using` and `modelled` return further views on them."""

    def __init__(self, core: EngineCore, decoding: Decoding, max_batch: int) -> None:
        self.core, self.decoding = core, decoding
        self.max_batch = max_batch  # prompts of a list that are decoded at once

    @property
    def config(self) -> SpeculativeConfig:
        """The settings of the method."""
        return self.decoding.config

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.decoding.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self.core.tokenizer

    @property
    def context_length(self) -> int:
        """How many tokens prompt and answer may have together."""
        return self.core.context_length

    @property
    def vocabulary(self) -> int:
        """How many token ids the target scores."""
        return self.core.vocabulary

    def using(self, method: str | None = None, *, speculative: Speculative = None) -> LLMView:
        """Return a view that decodes with another method on the same models; closing one of the two closes both."""
        config = resolve(speculative, method, self.core.models.has_draft)
        return LLMView(self.core, self.core.decoding(config), self.max_batch)

    def modelled(self, clock: str) -> LLMView:
        """Return a view on the same models whose time is that of a cost profile: its decisions are real, and made for
        that profile; nothing it learns is kept. The draft has to live in this process."""
        core = self.core.modelled(load_profile(clock))
        return LLMView(core, core.decoding(self.config), self.max_batch)

    @overload
    def generate(self, prompts: str, params: Params = None) -> Output: ...  # type: ignore[overload-overlap] # a str is a Sequence

    @overload
    def generate(self, prompts: Sequence[PromptLike], params: Params = None) -> list[Output]: ...

    def generate(self, prompts: str | Sequence[PromptLike], params: Params = None) -> Output | list[Output]:
        """Answer one prompt, or many (texts or lists of token ids), `max_batch` at a time: as one ends the next starts.

        A seed is used for each prompt alike: a prompt's answer does not depend on the others. Of many prompts, one that
        fails does not take the others with it: its output has the finish reason "error", and the error.
        """
        if isinstance(prompts, str):
            return self._one(self.core.ids(prompts), params)
        if not isinstance(prompts, Sequence) or any(isinstance(prompt, int) for prompt in prompts):
            raise BadParameter(
                f"prompts is {prompts!r:.60}; expected a text, or a list of texts and lists of token ids."
            )
        return list(self.outputs(prompts, params))

    def outputs(self, prompts: Sequence[PromptLike], params: Params = None) -> Iterator[Output]:
        """Answer many prompts as `generate` does; yield each output as soon as it and all before it are there. Closing
        the iterator cancels the rest."""
        asked = checked(params)  # what is wrong is raised before the first output is asked for
        each = (self.core.samples(self.core.ids(prompt), asked, self.decoding) for prompt in prompts)
        return self._gathered([answer for answers in each for answer in answers], asked.n)

    def chat(self, messages: Sequence[Message], params: Params = None) -> Output:
        """Answer a conversation: `[{"role": "user", "content": "…"}, …]`."""
        return self._one(self.tokenizer.chat(messages), params)

    def stream(
        self, prompt: PromptLike, params: Params = None, on_round: RoundWatcher | None = None
    ) -> Iterator[Chunk]:
        """Answer one prompt a round at a time; closing the iterator early frees everything. One sample only.

        `on_round` is called with what both models did in each round; then every round has its chunk, also one without
        text.
        """
        return self._stream(self.core.ids(prompt), params, on_round)

    def stream_chat(self, messages: Sequence[Message], params: Params = None) -> Iterator[Chunk]:
        """Answer a conversation a round at a time."""
        return self._stream(self.tokenizer.chat(messages), params)

    def score(self, prompt: PromptLike, top: int = 0) -> tuple[TokenLogprobs, ...]:
        """Return how likely the target finds each token of a text but the first, with the `top` likeliest tokens at
        each position."""
        ids = self.core.ids(prompt)
        return self.made(self.core.scoring(ids, top)).logprobs or () if len(ids) > 1 else ()

    def made(self, answer: Answer) -> Output:
        """Make one answer; raise the error that ended it, if one did."""
        (output,) = self._gathered([answer], 1)
        raise_failure(output)
        return output

    def close(self) -> None:
        """Stop a draft process, if there is one; nothing can be generated afterwards."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _one(self, prompt: list[int], params: Params) -> Output:
        (output,) = self.outputs([prompt], params)
        raise_failure(output)
        return output

    def _stream(self, prompt: list[int], params: Params, on_round: RoundWatcher | None = None) -> Iterator[Chunk]:
        # The answer is made now, so that a bad prompt is refused before the first chunk is asked for.
        first, *others = self.core.samples(prompt, checked(params), self.decoding)
        if others:
            raise BadParameter(f"n is {len(others) + 1}, but a stream carries one sample. Use generate, or n = 1.")
        first.session.on_round = on_round
        return self.core.streamed(first)

    def _gathered(self, answers: list[Answer], n: int) -> Iterator[Output]:
        samples: list[Output] = []
        for answer in self.core.finished(answers, self.max_batch):
            samples.append(answer.output())
            if len(samples) == n:
                yield gather(samples)
                samples = []


class LLM(LLMView):
    """A target, perhaps a draft, and a method to decode with."""

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        method: str | None = None,
        *,
        pair: str | None = None,
        speculative: Speculative = None,
        executor: ExecutorName = "serial",
        device: str | None = None,
        dtype: str | None = None,
        options: LoadOptions | Mapping[str, Any] | None = None,
        **older: Any,
    ) -> None:
        """Load the models: a `pair` by its name, or `target` and `draft` as known names, folders, GGUF files or Hub
        ids; the default pair if nothing is named.

        Without `method` the best fit is taken; `speculative` has its settings. `device` is "cpu", "cuda" or "cuda:N",
        a GPU if there is one and none is named. `dtype` is the precision of computing. All else is in `options`, a
        `LoadOptions` or a mapping with its names. `older`: names of options were arguments once; they still work, with
        a DeprecationWarning.
        """
        chosen = with_older(LoadOptions, options, older, "LLM")
        self.target, named = chosen_models(pair, target, draft)
        profile = cost_profile(chosen.clock, self.target, named, chosen.force_profile)
        config = resolve(speculative, method, named is not None)
        uses_draft = find_method(config.method or "", named is not None).uses_draft
        model = chosen_target(self.target, device, dtype, chosen)
        drafting = chosen_draft(named, model, chosen) if uses_draft else None
        parts = assemble(model, drafting, executor, profile)
        self.cache_dtype = chosen.cache_dtype
        keeps = chosen.keep_experience and profile is None
        file = _experience_file(model, drafting, executor, parts) if keeps else None
        costs = profile or _learned_costs(parts.verifier.runner, executor in AT_ONCE)
        foretelling = Foretelling(chosen.predictor, self.target, named, parts.verifier)
        core = _core(LoadedModels(parts, drafting is not None, foretelling), costs, file)
        super().__init__(core, core.decoding(config), _most_at_once(chosen.max_batch, parts.verifier.runner))

    @property
    def scheduler(self) -> Scheduler:
        """The queue of requests."""
        return self.core.scheduler

    @property
    def target_runner(self) -> Runner:
        """The target model itself, to measure it or to load something beside it."""
        return self.core.verifier.runner

    @property
    def drafter(self) -> Drafter | None:
        """The draft's worker, if it works in this process."""
        return self.core.models.drafter

    @property
    def draft_state(self) -> DraftState:
        """What the draft can do now: "ready", "starting", "busy", "lost", or "none" if there is no draft."""
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
    def _parts(self) -> Parts:
        return self.core.models.parts


def checked(params: Params) -> SamplingParams:
    """Return sampling parameters, made of a mapping if that is given."""
    if isinstance(params, Mapping):
        return SamplingParams.from_dict(params)
    if params is not None and not isinstance(params, SamplingParams):
        raise BadParameter(f"params is {params!r:.60}; expected SamplingParams or a mapping.")
    return params or SamplingParams()


def _core(models: LoadedModels, costs: CostProfile | LearnedCosts, file: ExperienceFile | None) -> EngineCore:
    """Put a queue before loaded models."""
    experiences = Experiences(costs, models.has_draft, file)
    chunk = models.parts.verifier.runner.prefill_chunk
    limits = RoundLimits(prefill_chunk=chunk, prompt_tokens=chunk)
    loop = Loop(models.parts.executor, costs=experiences.learned, limits=limits)
    weakref.finalize(loop, experiences.write, last=True)  # of the loop, which all views share
    return EngineCore(models, Scheduler(loop), experiences)


def _experience_file(
    target: ModelChoice, draft: ModelChoice | None, executor: ExecutorName, parts: Parts
) -> ExperienceFile | None:
    folder = experience_folder()
    return ExperienceFile(folder, circumstances(target, draft, executor, parts)) if folder else None


def _learned_costs(model: Runner, overlap: bool) -> LearnedCosts:
    """Return what is known of the costs before anything is timed."""
    padded = model.padded if isinstance(model, PadsForwards) else None
    return LearnedCosts(overlap, padded, launches_ahead=isinstance(model, ReceivesTrees))


def _most_at_once(max_batch: int | None, model: Runner) -> int:
    """Return how many prompts of a list are decoded at once; a runner that does not count its memory gets one."""
    if max_batch is not None:
        return max_batch
    return MAX_BATCH if model.kv_slots is not None else 1
