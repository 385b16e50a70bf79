"""Transformers' own decoding methods on the same weights: `generate`, assisted generation and prompt lookup.

Owns the models that transformers runs, and their timing. A model is loaded at its first answer, on our target's device
and in its precision, and runs in this process with the same threads. All else is transformers' default: 20 draft tokens
a round, ended below a confidence of 0.4. Prompt lookup has the value of its documentation, 10 tokens. Decoding is
greedy at temperature 0. Above it transformers samples with its own random numbers, so texts cannot be compared with
ours. Invariants: a model's own generation settings are ignored. Timing starts with the prompt as token ids and ends
with the last token.

A draft made by `specbranch distill` becomes an assistant of our target's class. It has the draft's layers and last
norm, and the target's embedding and head. A reduced head scores only its own tokens and gives −∞ to all others, as in
our engine. Weights stored in int8 are expanded to the target's precision, because transformers has no kernel for them.
Inflated models and their drafts run on our own weights, in place (`transformers_weights`).
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
from specbranch.assembly import ModelChoice, fetched
from specbranch.errors import BadParameter, unknown
from specbranch.extras import ACCELERATE
from specbranch.lab.bench.methods import TRANSFORMERS
from specbranch.lab.inflation.recipe import is_inflation
from specbranch.lab.replay.record import Record
from specbranch.models.drafts.draft_name import is_draft_folder
from specbranch.pairs import draft_path

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

    from specbranch.lab.bench.recorded_pair import RecordedPair
    from specbranch.models.drafts.draft_folder import DraftFile

LOOKED_UP = 10  # tokens per round of prompt lookup, as in transformers' documentation


def check_target(name: str) -> None:
    """Raise, before anything runs, if transformers cannot run a target."""
    if is_inflation(name):
        from specbranch.lab.bench.other_engines.transformers_weights import refuse_other_families
        from specbranch.models.files.locate import locate
        from specbranch.models.loading import open_model

        refuse_other_families(open_model(locate(name))[0])
        return
    if fetched(ModelChoice(name)).lower().endswith(".gguf"):
        ACCELERATE.require(f"or leave {', '.join(TRANSFORMERS)} out of --methods")


class Transformers:
    """Answers the prompts of records with transformers."""

    def __init__(self, recorded: RecordedPair) -> None:
        self._llm, self._models = recorded.llm, recorded.models

    def answer(self, method: str, record: Record) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Answer a record's prompt; return the tokens and the statistics of the turn."""
        import torch

        model: Any = self.target
        options = self._options(method)
        settings = self._settings(record, options.pop("lookup", None))
        prompt = torch.tensor([record.task.prompt], device=model.device)
        with _counted(model) as watch, _in_silence(), torch.random.fork_rng(_gpu(prompt)), torch.inference_mode():
            torch.manual_seed(record.task.seed & 0xFFFFFFFF)
            watch.start()
            ids = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=settings, streamer=watch, **options
            )
        tokens = tuple(ids[0, prompt.shape[1] :].tolist())
        return tokens, watch.stats(len(tokens))

    @cached_property
    def target(self) -> PreTrainedModel:
        """Our target as a model of transformers; an inflated one shares our weights in memory."""
        name = self._models[0]
        return self._mirrored(self._llm.target_runner) if is_inflation(name) else self._load(name)

    @cached_property
    def assistant(self) -> PreTrainedModel:
        """Our draft as a model of transformers, likewise."""
        name = self._models[1]
        if name is None:
            raise BadParameter(
                "Method 'hf-assisted' needs a draft model, and none was given. Name a --pair, or leave it out of "
                "--methods."
            )
        path = draft_path(name)
        if is_inflation(path) or is_inflation(self._models[0]):
            found = self._mirrored(self._drafting)
        else:
            found = self._distilled(path) if is_draft_folder(path) else self._load(path)
        sizes = [model.config.get_text_config().vocab_size for model in (self.target, found)]
        if sizes[0] != sizes[1]:
            raise BadParameter(
                f"transformers' assisted generation wants one vocabulary, but the target has {sizes[0]} tokens and "
                f"the draft {sizes[1]}. Leave 'hf-assisted' out of --methods."
            )
        return found

    def _options(self, method: str) -> dict[str, Any]:
        if method not in TRANSFORMERS:
            raise unknown("method of transformers", method, TRANSFORMERS)
        if method == "hf-assisted":
            return {"assistant_model": self.assistant}
        return {"lookup": LOOKED_UP} if method == "hf-lookup" else {}

    def _settings(self, record: Record, looked_up: int | None) -> GenerationConfig:
        """Return the generation settings of the record's task; transformers' other defaults are switched off."""
        from transformers import GenerationConfig

        params = record.task.params
        eos = [] if params.ignore_eos else [*record.task.eos_ids, *params.stop_token_ids]
        room = self._llm.context_length - len(record.task.prompt)
        drawing = {"temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p}
        return GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=min(params.max_tokens, room),
            min_new_tokens=params.min_tokens or None,
            do_sample=params.temperature > 0,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,  # one prompt is never padded, but without it transformers warns
            prompt_lookup_num_tokens=looked_up,
            **(drawing if params.temperature else {}),
        )

    def _load(self, name: str) -> PreTrainedModel:
        from specbranch.models.runners.transformers_runner import load_transformers

        with _in_silence(), redirect_stderr(io.StringIO()):  # its progress bars would disturb ours
            loaded = load_transformers(fetched(ModelChoice(name)), device=self._device, dtype=self._dtype, shorten=True)
        return _plain(loaded.model)

    @property
    def _drafting(self) -> Any:
        """The draft's runner, if it is in this process."""
        worker = self._llm.drafter
        if worker is None:
            raise BadParameter(
                "The draft is in a process of its own, where transformers cannot share it. Leave 'hf-assisted' out."
            )
        return worker.runner

    def _mirrored(self, runner: Any) -> PreTrainedModel:
        from specbranch.lab.bench.other_engines.transformers_weights import as_transformers

        return _plain(as_transformers(runner.decoder))

    def _distilled(self, folder: str) -> PreTrainedModel:
        from specbranch.models.drafts.draft_folder import read_draft

        return _plain(assistant_of(self.target, read_draft(folder)))

    @property
    def _device(self) -> torch.device:
        runner: Any = self._llm.target_runner
        device: torch.device = runner.device if hasattr(runner, "device") else runner.model.device
        return device

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self._llm.dtype)
        return dtype


def _gpu(tensor: torch.Tensor) -> list[int]:
    """Return the devices whose random state must be restored, besides the CPU."""
    return [tensor.get_device()] if tensor.is_cuda else []


def assistant_of(target: PreTrainedModel, draft: DraftFile) -> PreTrainedModel:
    """Build a distilled draft as a model of the target's class."""
    config = deepcopy(target.config)
    config.num_hidden_layers = len(draft.info.layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in draft.info.layers]
    config.tie_word_embeddings = False  # both are set below
    family: Any = type(target)
    model = family(config).to(device=target.device, dtype=target.dtype)
    own = {name: draft.tensor(name) for name in model.state_dict() if name in draft}
    missing = set(model.load_state_dict(own, strict=False).missing_keys)
    lacking = ", ".join(sorted(missing - {"model.embed_tokens.weight", "lm_head.weight"}))
    if lacking:
        raise BadParameter(f"The draft in {draft.folder} lacks {lacking}, so transformers cannot run it.")
    model.set_input_embeddings(target.get_input_embeddings())
    model.set_output_embeddings(_head(target, draft))
    return model.eval()  # type: ignore[no-any-return]


def _head(target: PreTrainedModel, draft: DraftFile) -> torch.nn.Module:
    """Return the target's head; for a reduced head, its rows spread over the whole vocabulary."""
    import torch

    from specbranch.models.files.head_columns import Columns

    head: Any = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    if draft.head_ids is None:
        return head  # type: ignore[no-any-return]
    columns = Columns(draft.head_ids.to(head.weight.device), head.weight.shape[0])

    class Reduced(torch.nn.Linear):
        """Scores some tokens; to the others it gives no chance."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return columns.spread(super().forward(hidden))

    weight = head.weight
    reduced = Reduced(head.in_features, len(columns.ids), bias=False, device=weight.device, dtype=weight.dtype)
    reduced.weight.data.copy_(head.weight.data[columns.ids])
    return reduced


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """Drop a model's own sampling settings: the task alone decides."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    return model


class _TokenClock:
    """A streamer that records times. Transformers passes it the prompt, then one or several tokens at a time."""

    def __init__(self) -> None:
        self.forwards = 0
        self._before_first = 0  # forwards up to the first token: the prefill
        self._times: list[float] = []

    def start(self) -> None:
        """Start the clock."""
        self._times = [time.perf_counter()]

    def put(self, tokens: object) -> None:
        """Record when tokens arrived; the first call passes the prompt."""
        self._times.append(time.perf_counter())
        if len(self._times) == 3:
            self._before_first = self.forwards

    def end(self) -> None:
        """Do nothing; there is nothing to close."""

    def stats(self, tokens: int) -> dict[str, Any]:
        """Return the statistics of a turn.

        If the first round yields several tokens, all but one count as decoded in no time. That favours transformers, by
        less than a round.
        """
        start, _, first, *_ = self._times
        decode, forwards = self._times[-1] - first, self.forwards - self._before_first
        return {
            "tokens": tokens,
            "ttft_seconds": first - start,
            "decode_seconds": decode,
            "tokens_per_second": (tokens - 1) / decode if decode > 0 else None,
            "target_forwards": forwards,
            "tokens_per_forward": (tokens - 1) / forwards if forwards else None,
        }


@contextmanager
def _in_silence() -> Iterator[None]:
    """Suppress transformers' warnings about its own deprecated calls."""
    import logging as levels

    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(levels.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _counted(model: PreTrainedModel) -> Iterator[_TokenClock]:
    """Count the model's forwards."""
    watch = _TokenClock()

    def count(*_: object) -> None:
        watch.forwards += 1

    hook = model.register_forward_pre_hook(count)
    try:
        yield watch
    finally:
        hook.remove()
