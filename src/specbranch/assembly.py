"""From names to running parts: which file a model is, which runner fits it, which workers an executor gets.

Owns the choice of parts, not their behaviour. Heavy modules are imported when they are needed. Invariant: a
`ModelChoice` is plain data, so a draft process can load the same model for itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from specbranch.clock.profile import CostProfile
from specbranch.clock.shipped import load_profile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import (
    DeviceMap,
    ExecutorName,
    LoadOptions,
    RunnerName,
    WeightsName,
    check_draft_window,
    check_loading,
)
from specbranch.core.draft_evaluation import NOT_EVALUATED, DraftEvaluation
from specbranch.core.loop import Executor
from specbranch.core.runner import Runner
from specbranch.core.slots import TAIL
from specbranch.core.warm_up import ForwardSizes, warming
from specbranch.errors import BadParameter, ModelError, UnsupportedArchitecture, unknown
from specbranch.exec.address import is_link
from specbranch.exec.dialling import Dial, TargetVocabulary
from specbranch.exec.drafter import Drafter
from specbranch.exec.finding import Finder, finder_of
from specbranch.exec.messages import Recipe, Served
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.pairs import draft_path

if TYPE_CHECKING:
    from specbranch.models.files.fetch import Progress
    from specbranch.models.runners.torch_runner import TorchRunner
    from specbranch.models.runners.translating import TranslatingRunner
    from specbranch.text.tokenizer import Tokenizer
    from specbranch.text.translation import Translation

log = logging.getLogger("specbranch")

EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
TOKENIZERS = "tokenizers"  # in the cache folder: the converted ones
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model and how to run it, as plain data."""

    name: str  # a known name, a folder (with a model, or its recipe), a .gguf file or a Hub id
    runner: RunnerName = "auto"
    device: str | None = None  # None: a GPU if there is one
    dtype: str | None = None  # None: float32 on a CPU, bfloat16 on a GPU
    context_length: int | None = None
    threads: int | None = None
    shares: str | None = None  # the target whose embedding and head a draft made by `distill` runs on
    # the target whose token ids a draft takes and gives that has another vocabulary; None: it has the target's
    speaks_for: str | None = None
    # True if a model whose context is shorter than `context_length` is taken as it is: beyond, nothing is drafted
    shorten: bool = False
    tail: int = TAIL  # nodes that the KV cache of a sequence holds behind the committed prefix
    cache_tokens: int | None = None  # KV slots for all requests together; None: what fits in memory
    cache_dtype: str | None = None  # of stored keys and values; None: `dtype`
    # how matrices are stored; None: in `dtype`, or in int8 for a draft whose file is
    weights: WeightsName | None = None
    draft_window: int | None = None  # last positions that a draft attends to besides the first few; None: all
    device_map: DeviceMap | None = None  # auto: over all GPUs, by the transformers runner; None: on one device
    prefix_cache: bool = True  # keep the KV pages of prompts for prompts with the same beginning

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise BadParameter(
                f"A model is named {self.name!r}; expected a folder, a .gguf file, a Hub id or a known name."
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise unknown("dtype", str(self.dtype), DTYPES)
        check_loading(self.runner, self.weights, self.context_length, self.cache_tokens)
        check_draft_window(self.draft_window)
        if self.device_map is not None:
            self._check_device_map()

    def _check_device_map(self) -> None:
        if self.device_map != "auto":
            raise unknown("device map", str(self.device_map), ("auto",))
        if self.runner == "native":
            raise BadParameter("device_map 'auto' needs the transformers runner; the native one runs on one device.")
        if self.device not in (None, "cuda"):
            raise BadParameter(
                f"device_map 'auto' takes all GPUs, and device {self.device!r} was asked for. Leave one of the two out."
            )


def chosen_target(name: str, device: str | None, dtype: str | None, options: LoadOptions) -> ModelChoice:
    """Return the choice of the target by `LLM`'s arguments."""
    return ModelChoice(
        name,
        options.runner,
        device,
        dtype,
        options.context_length,
        cache_tokens=options.cache_tokens,
        cache_dtype=options.cache_dtype,
        weights=options.weights,
        device_map=options.device_map,
        prefix_cache=options.prefix_cache,
    )


def chosen_draft(name: str | None, target: ModelChoice, options: LoadOptions) -> ModelChoice | None:
    """Return the choice of the draft: it runs as the target does, except for its own options."""
    from specbranch.models.families.heads import refuse_head_as_draft

    if not name:
        if options.draft_window is not None:
            log.warning("draft_window is %d, but no draft is loaded: it has no effect.", options.draft_window)
        return None
    refuse_head_as_draft(name)
    device = options.draft_device or target.device
    stored = draft_cache_dtype(options.cache_dtype, device)
    own: dict[str, Any] = {"weights": options.draft_weights, "cache_dtype": stored}
    own["draft_window"] = options.draft_window
    return replace(target, name=name, device=device, shorten=True, device_map=None, **own)


def _no_draft_window(window: int, reason: str) -> BadParameter:
    """Build the error for a draft that cannot have a window."""
    return BadParameter(f"draft_window is {window}, but {reason}. Leave --draft-window out here.")


@dataclass(frozen=True, slots=True)
class Parts:
    """What an LLM runs on."""

    tokenizer: Tokenizer
    verifier: Verifier
    executor: Executor
    runner: RunnerName
    dtype: str
    weights: str
    cache_dtype: str
    device: str
    captures: bool  # a step of a new size is first captured as a CUDA graph


def assemble(
    target: ModelChoice,
    draft: ModelChoice | None,
    executor: ExecutorName,
    clock: CostProfile | None = None,
    warm_up: ForwardSizes | None = None,
) -> Parts:
    """Load both models and make their workers and executor. A `clock` gives the executor simulated time.

    `warm_up`: the sizes that a draft in another process is warmed up for; None: it is not.
    """
    if executor not in EXECUTORS:
        raise unknown("executor", str(executor), EXECUTORS)
    if clock is not None and executor != "serial":
        raise BadParameter(
            f"A clock models how draft and target overlap, so executor {executor!r} has no place beside it. Leave one "
            "out."
        )
    if executor == "streams" and torch_device(target) == "cpu":
        raise _needs_gpu_target("on the CPU")
    if draft is not None and is_link(draft.name):
        if draft.draft_window is not None:
            loaded = f"the worker at {draft.name} has loaded its draft: give the option to `specbranch draft-worker`"
            raise _no_draft_window(draft.draft_window, loaded)
        return _linked(target, finder_of(draft.name))
    draft = draft and fitted_to_target(draft, target.name)
    if draft is not None:
        _refuse_features(draft, executor)
    if draft is not None and executor == "process":
        target, draft = (replace(choice, threads=half_the_threads()) for choice in (target, draft))
    tokenizer = load_tokenizer(target)
    shared = None if draft is None else common_vocabulary(tokenizer, draft)
    if draft is not None and draft.speaks_for:
        log.warning("%s", translation(draft).sentence())
    verifier = make_verifier(target)
    described = _described(verifier.runner)
    captures = any(torch_device(choice) == "cuda" for choice in (target, draft) if choice is not None)
    made = make_executor(executor, verifier, draft, shared, clock, warm_up)
    return Parts(tokenizer, verifier, made, *described, captures)


def _refuse_features(draft: ModelChoice, executor: ExecutorName) -> None:
    """Refuse a draft that reads its target's hidden states with a window, or where it drafts while the target works."""
    from specbranch.models.drafts.draft_name import feature_layout

    if feature_layout(draft.name) is None:
        return
    _refuse_window_of_features(draft)
    if executor != "serial":
        raise BadParameter(
            f"The draft in {draft.name} reads its target's hidden states, so it works after the target; executor "
            f"{executor!r} lets both work at once. Leave --executor out, or take a plain draft (`specbranch distill` "
            "without --kind features)."
        )


def _refuse_window_of_features(draft: ModelChoice) -> None:
    """Refuse a window for a draft that reads its target's hidden states."""
    if draft.draft_window is not None:
        reads = f"the draft in {draft.name} reads its target's hidden states, and attends to all positions"
        raise _no_draft_window(draft.draft_window, reads)


def _linked(target: ModelChoice, where: Finder) -> Parts:
    """Load the target, and reach a draft worker. On one machine both share the threads."""
    if where.is_local:
        target = replace(target, threads=target.threads or half_the_threads())
    tokenizer = load_tokenizer(target)
    Dial(where, target_vocabulary(tokenizer, tokenizer.vocabulary_size)).check()  # before a large target is loaded
    verifier = make_verifier(target)
    made = Process(verifier, Dial(where, target_vocabulary(tokenizer, verifier.runner.vocabulary)))
    return Parts(tokenizer, verifier, made, *_described(verifier.runner), torch_device(target) == "cuda")


def target_vocabulary(tokenizer: Tokenizer, scored: int) -> TargetVocabulary:
    """Return what a draft worker's vocabulary is compared with; `scored`: the ids that the target scores."""
    from specbranch.text.vocabulary import compare_tokens

    def compare(size: int, tokens: Mapping[int, str]) -> int:
        return min(compare_tokens(tokenizer.vocabulary(), tokens, min(tokenizer.vocabulary_size, size)), scored)

    return TargetVocabulary(tokenizer.fingerprint, min(tokenizer.vocabulary_size, scored), compare)


def executor_of(executor: ExecutorName, draft: str | None) -> ExecutorName:
    """Return the executor for a draft: one on a network works beside the target, as in a process of its own."""
    if not is_link(draft):
        return executor
    if executor == "streams":
        raise BadParameter(
            f"Executor 'streams' runs both models in one process, and the draft is at {draft}. Leave --executor out."
        )
    return "process"


def fitted_to_target(draft: ModelChoice, target: str) -> ModelChoice:
    """Return the choice of a draft with the folder of a pair's name. A draft made by `distill` shares the target's
    embedding and head; one with another vocabulary than the target's speaks for it."""
    from specbranch.models.drafts.draft_name import is_draft_folder
    from specbranch.text.vocabulary import compare_vocabularies

    found = replace(draft, name=draft_path(draft.name))
    if is_draft_folder(found.name):
        return replace(found, shares=target)
    same = compare_vocabularies(load_tokenizer(ModelChoice(target)), load_tokenizer(found)) is not None
    return found if same else replace(found, speaks_for=target)


def translation(draft: ModelChoice, size: int | None = None) -> Translation:
    """Return the translation between a draft with another vocabulary and its target, or raise VocabularyMismatch.

    `size`: how many ids the draft's model knows; None: all that its tokenizer has.
    """
    ours, theirs = load_tokenizer(ModelChoice(str(draft.speaks_for))), load_tokenizer(draft)
    return _translation(ours, theirs, None if size is None or size >= theirs.vocabulary_size else size)


@lru_cache(maxsize=1)  # one pair at a time; it takes a second
def _translation(target: Tokenizer, draft: Tokenizer, size: int | None) -> Translation:
    from specbranch.text.translation import Translation

    return Translation(target, draft, size)


def draft_evaluation(draft: ModelChoice | None, executor: Executor | None = None) -> DraftEvaluation | None:
    """Return the evaluation that a draft's folder carries, or its worker on a network has sent to the `executor`; None
    if there is none. A damaged one is ignored with a warning."""
    from specbranch.models.drafts.evaluation_file import read_evaluation

    try:
        if draft is not None and is_link(draft.name):
            return executor.evaluation if isinstance(executor, Process) else None
        return None if draft is None else read_evaluation(draft_path(draft.name))
    except ModelError as error:
        log.warning("%s Until it is measured again, the planner starts with built-in figures.", error)
        return None


def fetched(choice: ModelChoice, progress: Progress | None = None) -> str:
    """Return the path or id to load a model from, fetching a known one first if it is not here."""
    from specbranch.models.files import store
    from specbranch.models.files.sources import made_model

    if is_link(choice.name):
        raise BadParameter(
            f"{choice.name} is a draft worker, and this needs the draft's own files. Name a model; `generate`, `chat`, "
            "`serve` and `doctor` can use a worker."
        )
    if (made := made_model(choice.name)) is not None:
        fetched(replace(choice, name=made.base), progress)
        return choice.name
    if choice.name not in store.KNOWN or Path(choice.name).exists():
        return choice.name
    return str(store.pull(choice.name, progress or store.quiet))


def load_runner(choice: ModelChoice, target_runner: Runner | None = None) -> TorchRunner:
    """Load a model with its KV cache. A draft made by `distill` shares weights with `target_runner`."""
    import torch

    if choice.threads:
        torch.set_num_threads(choice.threads)
    device = chosen_device(choice.device)
    dtype = getattr(torch, choice.dtype) if choice.dtype else None
    if choice.shares:
        from specbranch.models.drafts.draft_name import feature_layout

        target = fetched(replace(choice, name=choice.shares))
        asked: dict[str, Any] = {
            "context_length": choice.context_length,
            "device": device,
            "dtype": dtype,
            "tail": choice.tail,
        }
        asked |= {"cache_tokens": choice.cache_tokens, "cache_dtype": choice.cache_dtype, "weights": choice.weights}
        if feature_layout(choice.name) is not None:
            _refuse_window_of_features(choice)
            from specbranch.models.drafts.feature_load import load_feature_draft

            return load_feature_draft(choice.name, target, target_runner=target_runner, **asked)
        from specbranch.models.drafts.load import load_draft

        asked["draft_window"] = choice.draft_window
        return load_draft(choice.name, target, target_runner=target_runner, **asked)
    source = fetched(choice)
    asked = {
        "context_length": choice.context_length,
        "device": device,
        "dtype": dtype,
        "shorten": choice.shorten,
        "tail": choice.tail,
    }
    if choice.runner in ("auto", "native") and choice.device_map is None:
        from specbranch.models.loading import load_native

        try:
            own: dict[str, Any] = {"cache_tokens": choice.cache_tokens, "cache_dtype": choice.cache_dtype}
            own |= {"weights": choice.weights, "draft_window": choice.draft_window}
            return load_native(source, **own, **asked)
        except UnsupportedArchitecture as reason:
            if choice.runner == "native":
                raise
            log.warning("%s Using the transformers runner instead, which is slower.", reason)
    from specbranch.models.runners.precision import resolve_single_dtype

    if choice.cache_dtype is not None:
        raise BadParameter(
            f"cache_dtype is {choice.cache_dtype!r}, but the transformers runner stores keys and values in what it "
            "computes in. Leave --cache-dtype out."
        )
    if choice.draft_window is not None:
        raise _no_draft_window(choice.draft_window, f"{choice.name} runs by the transformers runner, which has none")
    asked["dtype"] = resolve_single_dtype(dtype, choice.weights, "transformers")
    from specbranch.models.runners.transformers_runner import load_transformers

    return load_transformers(source, spread=choice.device_map is not None, **asked)


def draft_cache_dtype(cache_dtype: str | None, device: str | None) -> str | None:
    """Return the dtype of a draft's keys and values: the target's on a CPU. None, on a GPU, is the draft's dtype."""
    return cache_dtype if cache_dtype is not None and chosen_device(device) == "cpu" else None


def load_tokenizer(choice: ModelChoice) -> Tokenizer:
    """Load a model's tokenizer."""
    return _tokenizer(*_tokenizer_file(choice))


def tokenizer_folder(choice: ModelChoice) -> Path:
    """Return the folder with a model's tokenizer.json: the model's own, or the one it was converted into."""
    from specbranch.models.files.store import cache_folder
    from specbranch.text.conversion import TOKENIZER

    path, key = _tokenizer_file(choice)
    load_tokenizer(choice)  # converts it if that has not been done
    return path if (path / TOKENIZER).is_file() else cache_folder() / TOKENIZERS / key


def _tokenizer_file(choice: ModelChoice) -> tuple[Path, str]:
    """Return where a model's tokenizer is, and the name of its conversion, which changes with its files."""
    from specbranch.models.files.locate import locate, stored_base
    from specbranch.text.conversion import file_key, folder_key

    found = stored_base(locate(fetched(choice)))
    return found.path, (file_key if found.kind == "gguf" else folder_key)(found.path)


@lru_cache(maxsize=2)  # those of one pair
def _tokenizer(path: Path, key: str) -> Tokenizer:
    """Load a tokenizer; `key` changes with its files."""
    from specbranch.models.files.store import cache_folder
    from specbranch.text.tokenizer import Tokenizer

    load = Tokenizer.from_folder if path.is_dir() else Tokenizer.from_gguf
    return load(path, cache_folder() / TOKENIZERS)


def make_drafter(choice: ModelChoice, vocabulary: int, target_runner: Runner | None = None) -> Drafter:
    """Make a draft worker that proposes only the first `vocabulary` ids of the target."""
    own = load_runner(choice if target_runner is None else as_long(choice, target_runner), target_runner)
    runner = _translating(own, choice) if choice.speaks_for else own
    runner.limit(vocabulary)
    runner.prefix_cache = choice.prefix_cache
    return Drafter(runner)


def as_long(draft: ModelChoice, target_runner: Runner) -> ModelChoice:
    """Return the choice of a draft, with its target's context length if a window lets it go beyond its own."""
    if draft.draft_window is None or draft.context_length is not None:
        return draft
    return replace(draft, context_length=target_runner.context_length)


def _translating(own: TorchRunner, choice: ModelChoice) -> TranslatingRunner:
    """Return a runner that speaks the target's ids, over that of a draft that has others."""
    from specbranch.models.runners.translating import TranslatingRunner

    return TranslatingRunner(own, translation(choice, own.vocabulary))


def drafter_recipe(choice: ModelChoice, vocabulary: int, warm_up: ForwardSizes | None = None) -> Recipe:
    """Return the recipe by which a draft process makes the same worker. It imports the same sources of tensors
    first."""
    from specbranch.models.files.sources import source_modules

    given: dict[str, Any] = {"choice": asdict(choice), "vocabulary": vocabulary}
    if warm_up is not None:
        given["warm_up"] = asdict(warm_up)
    return Recipe("specbranch.assembly:make_drafter_by", given, source_modules())


def make_drafter_by(choice: Mapping[str, Any], vocabulary: int, warm_up: Mapping[str, Any] | None = None) -> Drafter:
    """Make a draft worker from plain values, in a process of its own, and warm it up."""
    drafter = make_drafter(ModelChoice(**choice), vocabulary)
    if warm_up is not None:
        for runner in warming((drafter.runner,)):
            runner.warm_up(ForwardSizes(**warm_up))
    return drafter


@dataclass(frozen=True, slots=True)
class ServedDraft:
    """A draft for a worker on a network: the worker, what it says of itself, and its tokens by id."""

    drafter: Drafter
    served: Served
    tokens: Mapping[int, str]
    evaluation: DraftEvaluation = NOT_EVALUATED


def make_served_draft(
    choice: ModelChoice, target: str, vocabulary: int | None = None, warm_up: ForwardSizes | None = None
) -> ServedDraft:
    """Load a draft for targets elsewhere; one made by `distill` computes with the embedding and head of `target`.

    It drafts ids below `vocabulary`, by default all of its own. Targets with other tokens are refused when they join:
    nothing is translated here.
    """
    from specbranch.models.drafts.draft_name import is_draft_folder

    choice = replace(choice, name=draft_path(choice.name))
    choice = replace(choice, shares=target) if is_draft_folder(choice.name) else choice
    tokenizer = load_tokenizer(replace(choice, name=choice.shares) if choice.shares else choice)
    drafter = make_drafter(choice, min(tokenizer.vocabulary_size, vocabulary or tokenizer.vocabulary_size))
    size = min(tokenizer.vocabulary_size, vocabulary or tokenizer.vocabulary_size, drafter.runner.vocabulary)
    if warm_up is not None:
        for runner in warming((drafter.runner,)):
            runner.warm_up(warm_up)
    device = _device_name(choice.device)
    served = Served(Path(choice.name).name, identity(choice.name), device, tokenizer.fingerprint, size)
    return ServedDraft(drafter, served, tokenizer.vocabulary(), draft_evaluation(choice) or NOT_EVALUATED)


def make_verifier(choice: ModelChoice) -> Verifier:
    """Make the target's worker."""
    runner = load_runner(choice)
    runner.prefix_cache = choice.prefix_cache
    return Verifier(runner)


def common_vocabulary(target: Tokenizer, draft: ModelChoice) -> int:
    """Return the number of the target's ids that a draft may propose; refuse one that cannot be translated."""
    if draft.shares:
        return target.vocabulary_size
    if draft.speaks_for:
        return translation(draft).vocabulary
    from specbranch.text.vocabulary import compare_vocabularies

    common = compare_vocabularies(target, load_tokenizer(draft))
    return target.vocabulary_size if common is None else common


def make_executor(
    name: ExecutorName,
    verifier: Verifier,
    draft: ModelChoice | None,
    shared: int | None,
    clock: CostProfile | None = None,
    warm_up: ForwardSizes | None = None,
) -> Executor:
    """Make the executor of that name, or one with a virtual clock. The draft proposes only the first `shared` ids.

    `warm_up`: the sizes that a draft in another process is warmed up for.
    """
    if draft is None or shared is None:
        return Serial(verifier) if clock is None else VirtualClock(verifier, None, clock)
    vocabulary = min(shared, verifier.runner.vocabulary)
    if name == "process":
        return Process(verifier, drafter_recipe(as_long(draft, verifier.runner), vocabulary, warm_up))
    if name == "streams" and getattr(verifier.runner, "note", None) is None:
        raise _needs_gpu_target(f"by {type(verifier.runner).__name__}")
    drafter = make_drafter(draft, vocabulary, verifier.runner)
    if clock is None:
        return (Streams if name == "streams" else Serial)(verifier, drafter)
    return VirtualClock(verifier, MeteredDrafter(drafter.runner), clock)


def _needs_gpu_target(how: str) -> BadParameter:
    """Build the error for executor 'streams' with a target that does not run on a GPU."""
    return BadParameter(
        f"Executor 'streams' drafts while the target works by itself on a GPU; this target is run {how}. "
        "Run it on a GPU by the native runner (--device cuda), or use --executor process."
    )


def cost_profile(clock: str | None, target: str, draft: str | None, force: bool = False) -> CostProfile | None:
    """Return the cost profile that a clock names. Unless forced, refuse one that was measured with other models."""
    profile = None if clock is None else load_profile(clock)
    if profile is not None and not force and (profile.target_identity or profile.draft_identity):
        profile.check_pair(identity(target), None if draft is None else identity(draft))
    return profile


def identity(name: str) -> str:
    """Return a digest of a model's files; `name` may be a pair, for its draft."""
    from specbranch.models.files.identity import model_identity

    return model_identity(fetched(ModelChoice(draft_path(name))))


def experience_key(
    target: ModelChoice, draft: ModelChoice | None, executor: ExecutorName, parts: Parts
) -> dict[str, Any]:
    """Return the key of learned statistics: everything that decides what a pair's rounds cost on this machine."""
    import torch

    from specbranch import __version__

    served = parts.executor.served if isinstance(parts.executor, Process) else None
    return {
        "version": __version__,
        "torch": torch.__version__,
        "target": identity(target.name),
        **_draft_key(draft, served),
        "device": _device_name(target.device),
        "runner": parts.runner,
        "dtype": parts.dtype,
        "weights": parts.weights,
        "draft_weights": None if draft is None else draft.weights,
        **({} if draft is None or draft.draft_window is None else {"draft_window": draft.draft_window}),
        "compiled": getattr(parts.verifier.runner, "compiled", False),
        "threads": torch.get_num_threads(),
        "executor": executor,
        **({} if parts.cache_dtype == parts.dtype else {"cache_dtype": parts.cache_dtype}),
        **({} if target.device_map is None else {"device_map": target.device_map}),
    }


def _draft_key(draft: ModelChoice | None, served: Served | None) -> dict[str, Any]:
    if served is not None:
        return {"draft": served.identity, "draft_device": f"{served.device} over a link"}
    if draft is None:
        return {"draft": None, "draft_device": None}
    return {"draft": identity(draft.name), "draft_device": _device_name(draft.device)}


def _device_name(device: str | None) -> str:
    """Return the model name of a device."""
    import torch

    from specbranch.models.cpu.machine_code import processor_name

    chosen = torch.device(chosen_device(device))
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else processor_name()


def chosen_device(name: str | None) -> str:
    """Return the device of that name. None is a GPU if there is one, else the CPU."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelError(f"Unknown device {name!r}; expected 'cpu', 'cuda' or 'cuda:N'.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"Device {name!r} was asked for, but torch sees no GPU here. Use --device cpu, or install a CUDA build of "
            "torch."
        )
    return name


def torch_device(choice: ModelChoice) -> str:
    """Return the kind of device that a model runs on: "cpu" or "cuda"."""
    return chosen_device(choice.device).partition(":")[0]


def _described(runner: Runner) -> tuple[RunnerName, str, str, str, str]:
    """Return a runner's name, its dtype, the storage of its weights, the dtype of its KV cache, and its device."""
    from specbranch.models.runners.native import NativeRunner

    dtype, device = str(getattr(runner, "dtype", None)).removeprefix("torch."), str(getattr(runner, "device", "cpu"))
    if isinstance(runner, NativeRunner):
        return "native", dtype, runner.weights, runner.cache_dtype, device
    return "transformers", dtype, dtype, dtype, device


def half_the_threads() -> int:
    """Return how many CPU threads each of two models gets that compute at once. With all threads for both, they would
    wait for each other."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(usable // 2, 1)
