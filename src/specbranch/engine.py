"""`LLM`: load a pair once, then generate, stream and chat.

Owns loading and what users call. It does not own the way of a request: see `engine_core.py`. Invariant: `using` and
`modelled` load and copy no model; they return an `LLMView` on the same models.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from specbranch.answer import Answer, Chunk, Output, gather
from specbranch.assembly import (
    Parts,
    assemble,
    chosen_draft,
    chosen_target,
    cost_profile,
    draft_evaluation,
    executor_of,
)
from specbranch.clock.shipped import load_profile
from specbranch.config import OVERLAPPING, ExecutorName, LoadOptions, SamplingParams, SpeculativeConfig, WarmUpName
from specbranch.core.costs import MeasuredCosts
from specbranch.core.loop import DraftState, Loop
from specbranch.core.methods import find_method
from specbranch.core.orders import TokenLogprobs
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.runner import PadsForwards, ReceivesTrees, Runner, TimesForwards
from specbranch.core.scheduler import Scheduler
from specbranch.core.session import RoundWatcher
from specbranch.core.warm_up import count_late_from_now, save_kinds
from specbranch.decoding import Decoding, Speculative, resolve
from specbranch.draft_exchange import HowLoaded, NewDraft, load_new_draft, take_new_draft
from specbranch.engine_core import EngineCore, LoadedModels, PromptLike, experience_file, raise_failure
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.exec.forward_sizes import draft_sizes
from specbranch.experiences import Experiences
from specbranch.hrad.engine_predictor import EnginePredictor
from specbranch.older_names import with_older
from specbranch.pairs import chosen_models

if TYPE_CHECKING:
    from specbranch.text.chat_template import Message
    from specbranch.text.tokenizer import Tokenizer

__all__ = ["LLM", "Chunk", "LLMView", "Output"]

Params = SamplingParams | Mapping[str, Any] | None
Expected = PromptLike | None  # the text that an answer is expected to have, or its token ids
MAX_BATCH = 64  # the default of `max_batch`
# Prompt tokens of a round with decode rows until their cost is measured, if prompts may be cut anywhere. Otherwise it
# is one chunk.
FIRST_PROMPT_TOKENS = 256


class LLMView:
    """Loaded models and one way to decode on them: generate, stream, chat and score.

    An `LLM` is the view that loads the models. `using` and `modelled` return further views on the same models. All
    views of one `LLM` share its models, its KV cache and its queue of requests (`modelled` has a queue of its own).
    """

    def __init__(self, core: EngineCore, decoding: Decoding, max_batch: int) -> None:
        """Make a view on the models of `core` that decodes as `decoding` says.

        `max_batch`: how many prompts of a list are decoded at once.
        """
        self.core, self.decoding = core, decoding
        self.max_batch = max_batch

    @property
    def config(self) -> SpeculativeConfig:
        """The settings of the method, complete: `config.method` is never None."""
        return self.decoding.config

    @property
    def method(self) -> str:
        """The name of the decoding method, such as "specbranch"."""
        return self.decoding.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the target; the draft shares it."""
        return self.core.tokenizer

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a prompt and its answer together."""
        return self.core.context_length

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the target scores."""
        return self.core.vocabulary

    def using(self, method: str | None = None, *, speculative: Speculative = None) -> LLMView:
        """Return a view that decodes with another method on the same models. Closing one of the two closes both.

        `method` is the method's name, and `speculative` its settings: a `SpeculativeConfig`, or a mapping with its
        names. `method` wins over the method that `speculative` names. If neither names one, the view takes "specbranch"
        if there is a draft, else "auto". `speculative=False` is plain decoding, unless `method` is given.
        """
        config = resolve(speculative, method, self.core.models.has_draft)
        return LLMView(self.core, self.core.decoding(config, warm_up=True), self.max_batch)

    def modelled(self, clock: str) -> LLMView:
        """Return a view on the same models with a simulated clock, which charges the times of a cost profile.

        `clock` is the name or the file of the profile. Tokens and decisions are real, and the planner decides for the
        profile's costs. The view saves nothing that it learns. The draft has to live in this process.
        """
        core = self.core.modelled(load_profile(clock))
        return LLMView(core, core.decoding(self.config), self.max_batch)

    @overload
    def generate(self, prompts: str, params: Params = None, *, prediction: Expected = None) -> Output: ...  # type: ignore[overload-overlap] # a str is a Sequence

    @overload
    def generate(
        self, prompts: Sequence[PromptLike], params: Params = None, *, prediction: Expected = None
    ) -> list[Output]: ...

    def generate(
        self, prompts: str | Sequence[PromptLike], params: Params = None, *, prediction: Expected = None
    ) -> Output | list[Output]:
        """Answer one prompt, or a list of prompts; return one `Output`, or a list of them in the prompts' order.

        A prompt is a text or a list of token ids. `params` are `SamplingParams`, or a mapping with their names; the
        default is greedy decoding of up to 256 tokens. At most `max_batch` prompts of a list are decoded at once: as
        one ends, the next starts. If `seed` is set, all prompts use it; if not, each gets a random one. Either way an
        answer does not depend on the other prompts.
        `prediction` is the text that the answer is expected to have, or its token ids; of a list, every answer. Lookup
        proposes it to the target, so what is right of it comes sooner. It changes no answer.
        An error of a single prompt is raised. In a list, a prompt that fails leaves the others alone: its output has
        the finish reason "error", and the error.
        """
        if isinstance(prompts, str):
            return self._generate_one(self.core.encode(prompts), params, prediction)
        if not isinstance(prompts, Sequence) or any(isinstance(prompt, int) for prompt in prompts):
            raise BadParameter(
                f"prompts is {prompts!r:.60}; expected a text, or a list of texts and lists of token ids."
            )
        return list(self.outputs(prompts, params, prediction=prediction))

    def outputs(
        self, prompts: Sequence[PromptLike], params: Params = None, *, prediction: Expected = None
    ) -> Iterator[Output]:
        """Answer many prompts as `generate` does; yield each output as soon as it and all before it are finished.
        Closing the iterator cancels the rest."""
        sampling = as_sampling_params(params)  # mistakes are raised here, before the caller takes the first output
        core, predicted = self.core, self.core.encode_prediction(prediction)
        each = (core.make_samples(core.encode(prompt), sampling, self.decoding, predicted) for prompt in prompts)
        return self._run_all([answer for answers in each for answer in answers], sampling.n)

    def chat(
        self,
        messages: Sequence[Message],
        params: Params = None,
        *,
        prediction: Expected = None,
        continue_final_message: bool = False,
    ) -> Output:
        """Answer a conversation, `[{"role": "user", "content": "…"}, …]`, written by the model's chat template.

        `prediction` as in `generate`. With `continue_final_message` the last message, of the role assistant, is
        continued; the output has only the new text.
        """
        prompt = self.tokenizer.chat(messages, continue_final_message=continue_final_message)
        return self._generate_one(prompt, params, prediction)

    def stream(
        self,
        prompt: PromptLike,
        params: Params = None,
        on_round: RoundWatcher | None = None,
        *,
        prediction: Expected = None,
    ) -> Iterator[Chunk]:
        """Answer one prompt; yield its text as chunks, at most one a round. The last chunk carries the `Output`.

        Closing the iterator early cancels the request and frees its KV cache. A stream has one sample, so `n` has to
        be 1. `on_round` is called after each round with what both models did; then every round has a chunk, even one
        without text. `prediction` as in `generate`.
        """
        return self._stream(self.core.encode(prompt), params, on_round, prediction)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: Params = None,
        *,
        prediction: Expected = None,
        continue_final_message: bool = False,
    ) -> Iterator[Chunk]:
        """Answer a conversation as `chat` does; yield its text as `stream` does."""
        prompt = self.tokenizer.chat(messages, continue_final_message=continue_final_message)
        return self._stream(prompt, params, prediction=prediction)

    def score(self, prompt: PromptLike, top: int = 0) -> tuple[TokenLogprobs, ...]:
        """Return the target's log-probability of each token of a text but the first.

        Each entry also has the `top` most likely tokens at its position, none by default. A text of one token has no
        entries.
        """
        ids = self.core.encode(prompt)
        return self.run(self.core.make_scoring(ids, top)).logprobs or () if len(ids) > 1 else ()

    def run(self, answer: Answer) -> Output:
        """Run one unfinished answer to its end and return its output. Raise the error that ended it, if one did."""
        (output,) = self._run_all([answer], 1)
        raise_failure(output)
        return output

    def close(self) -> None:
        """Stop the draft process, if there is one, and save what was learned. Nothing can be generated afterwards."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _generate_one(self, prompt: list[int], params: Params, prediction: Expected) -> Output:
        (output,) = self.outputs([prompt], params, prediction=prediction)
        raise_failure(output)
        return output

    def _stream(
        self,
        prompt: list[int],
        params: Params,
        on_round: RoundWatcher | None = None,
        prediction: Expected = None,
    ) -> Iterator[Chunk]:
        # This is no generator: mistakes are raised here, before the caller takes the first chunk.
        predicted = self.core.encode_prediction(prediction)
        first, *others = self.core.make_samples(prompt, as_sampling_params(params), self.decoding, predicted)
        if others:
            raise BadParameter(f"n is {len(others) + 1}, but a stream carries one sample. Use generate, or n = 1.")
        first.session.on_round = on_round
        return self.core.run_stream(first)

    def _run_all(self, answers: list[Answer], n: int) -> Iterator[Output]:
        """Run answers to their ends. Yield one output for each `n` answers: the samples of one prompt."""
        samples: list[Output] = []
        for answer in self.core.run_all(answers, self.max_batch):
            samples.append(answer.output())
            if len(samples) == n:
                yield gather(samples)
                samples = []


class LLM(LLMView):
    """A loaded target, a draft if the method uses one, and the method that decodes on them.

    `with LLM(…) as llm:` closes it at the end of the block. One thread uses an `LLM` at a time; for several threads or
    tasks there is `AsyncLLM`.
    """

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
        warm_up: WarmUpName | None = None,
        options: LoadOptions | Mapping[str, Any] | None = None,
        **older: Any,
    ) -> None:
        """Load the models, and get them ready for the first answer.

        Args:
            target: a known name, a folder, a GGUF file or a Hub id. Default: the target of the default pair.
            draft: the same for the draft, or where a draft worker is: tcp://HOST:PORT, or ray://NAME. Default: no draft
                if a target is named.
            method: the decoding method. Default: "specbranch" with a draft, "auto" without one.
            pair: the name of a target with its draft, instead of both. Default: "smollm2-default".
            speculative: settings of the method, a `SpeculativeConfig` or a mapping with its names. False is plain
                decoding, unless `method` is given.
            executor: "serial" runs draft and target in turn; "process" runs the draft in a process of its own;
                "streams" runs both at once on GPUs.
            device: "cpu", "cuda" or "cuda:N". Default: a GPU if there is one.
            dtype: the precision of computing. Default: float32 on a CPU, bfloat16 on a GPU.
            warm_up: "full" compiles a GPU's kernels and captures its CUDA graphs now; "lazy" does so when a step first
                occurs, for scripts that ask once. Default: that of `options`, which is "full".
            options: all other options, a `LoadOptions` or a mapping with its names.
            older: names of `options` that were arguments once. They still work, with a DeprecationWarning.
        """
        load_options = with_older(LoadOptions, options, older, "LLM")
        if warm_up is not None:
            load_options = replace(load_options, warm_up=warm_up)
        self.target, draft_name = chosen_models(pair, target, draft)
        profile = cost_profile(load_options.clock, self.target, draft_name, load_options.force_profile)
        config = resolve(speculative, method, draft_name is not None)
        chosen = find_method(config.method or "", draft_name is not None)
        executor = executor_of(executor, draft_name if chosen.uses_draft else None)
        target_choice = chosen_target(self.target, device, dtype, load_options)
        draft_choice = chosen_draft(draft_name if chosen.uses_draft else None, target_choice, load_options)
        full = load_options.warm_up == "full"
        sizes = draft_sizes(chosen, config, load_options.max_batch or MAX_BATCH) if full else None
        parts = assemble(target_choice, draft_choice, executor, profile, sizes)
        self.cache_dtype = load_options.cache_dtype
        saves = load_options.keep_experience and profile is None
        self._how = HowLoaded(target_choice, load_options, executor, sizes, saves)
        file = experience_file(target_choice, draft_choice, executor, parts) if saves else None
        costs = profile or _learned_costs(parts.verifier.runner, executor in OVERLAPPING)
        predictor = EnginePredictor(load_options.predictor, self.target, draft_name, parts.verifier)
        max_batch = _batch_limit(load_options.max_batch, parts.verifier.runner)
        models = LoadedModels(parts, draft_choice is not None, predictor, warmed_sessions=max_batch if full else 0)
        experiences = Experiences(costs, models.has_draft, file, draft_evaluation(draft_choice, parts.executor))
        core = _core(models, experiences, load_options.max_num_batched_tokens)
        super().__init__(core, core.decoding(config, warm_up=True), max_batch)
        count_late_from_now(models.runners)  # a kernel that the draft's load compiled counted for the target
        # Python's full garbage collections skip what is there now, all modules above all: one would pause every
        # request for 0.1 to 0.3 s. `EngineCore.close` undoes it.
        gc.freeze()
        weakref.finalize(core.loop, gc.unfreeze)

    def exchange_draft(self, draft: str) -> None:
        """Load another draft of the same target and let it work from now on; the answers stay the same.

        `draft` is a folder, a file or the name of a pair. If it cannot be loaded or does not fit the target, an error
        says why, and the draft that works goes on. What was learned of the old draft is not used for the new one.
        """
        new = self.load_draft(draft)
        try:
            self.take_draft(new)
        except BaseException:
            new.discard()
            raise

    def load_draft(self, draft: str) -> NewDraft:
        """Do the first half of `exchange_draft`: check and load. Any thread may call it while requests run."""
        return load_new_draft(draft, self._how, self.core)

    def take_draft(self, new: NewDraft) -> None:
        """Do the second half of `exchange_draft`; the thread that makes the rounds calls it between two of them."""
        take_new_draft(new, self.core)

    @property
    def scheduler(self) -> Scheduler:
        """The queue of requests."""
        return self.core.scheduler

    @property
    def target_runner(self) -> Runner:
        """The target model itself: to measure it, or to load something that shares its weights."""
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
    def late_captures(self) -> int:
        """How often a CUDA graph was captured, or a kernel compiled, in the middle of an answer. On a CPU it is 0."""
        return self.core.late_captures

    @property
    def runner(self) -> str:
        """The runner of the target: "native" or "transformers"."""
        return self._parts.runner

    @property
    def dtype(self) -> str:
        """The precision the target computes in."""
        return self._parts.dtype

    @property
    def weights(self) -> str:
        """The format in which the target's weight matrices are stored."""
        return self._parts.weights

    @property
    def device(self) -> str:
        """The device that the target computes on."""
        return self._parts.device

    @property
    def _parts(self) -> Parts:
        return self.core.models.parts


def as_sampling_params(params: Params) -> SamplingParams:
    """Return `SamplingParams`: those given, those of a mapping, or the defaults."""
    if isinstance(params, Mapping):
        return SamplingParams.from_dict(params)
    if params is not None and not isinstance(params, SamplingParams):
        raise BadParameter(f"params is {params!r:.60}; expected SamplingParams or a mapping.")
    return params or SamplingParams()


def _core(models: LoadedModels, experiences: Experiences, most: int | None) -> EngineCore:
    """Put a queue in front of loaded models; `most`: decode rows and prompt tokens of a round, None: as measured."""
    runner = models.parts.verifier.runner
    table = runner if isinstance(runner, TimesForwards) else None
    loop = Loop(models.parts.executor, costs=experiences.learned, limits=_round_limits(runner, most), table=table)
    weakref.finalize(loop, experiences.write, last=True)  # on the loop, which all views of `using` share
    weakref.finalize(loop, _save_kinds_of, models)
    return EngineCore(models, Scheduler(loop), experiences)


def _save_kinds_of(models: LoadedModels) -> None:
    """Save the kinds of steps of the models that are loaded at the end: a draft may have been exchanged."""
    save_kinds(models.runners)


def _round_limits(runner: Runner, most: int | None) -> RoundLimits:
    """Return what a round may hold; `most` as for `_core`."""
    chunk = runner.prefill_chunk
    limits = RoundLimits(
        prefill_chunk=chunk,
        prompt_tokens=chunk if chunk > 1 else FIRST_PROMPT_TOKENS,
        prompt_tokens_alone=runner.most_prefill,
        batched_tokens=most,
    )
    return limits if most is None else replace(limits, rows=min(limits.rows, most))


def _learned_costs(model: Runner, overlap: bool) -> MeasuredCosts:
    """Return the cost model before anything is timed."""
    padded = model.padded if isinstance(model, PadsForwards) else None
    return MeasuredCosts(overlap, padded, launches_ahead=isinstance(model, ReceivesTrees))


def _batch_limit(max_batch: int | None, model: Runner) -> int:
    """Return how many prompts of a list are decoded at once. The default of a runner without a KV page pool is 1."""
    if max_batch is not None:
        return max_batch
    return MAX_BATCH if model.kv_slots is not None else 1
