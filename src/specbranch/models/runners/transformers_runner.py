"""A Runner over any causal language model of transformers: for architectures that the native decoder does not know.

Tests compare the native runner with it. Owns the KV caches of its sequences, one `DynamicCache` for each path of a
tail. A node whose parent is not the end of a path gets a copy of the cache, cut behind that parent. So the model only
sees plain chains, and needs no mask and no positions from here. Invariant: every node of the tail lies on a path, and a
path's cache holds exactly the prefix and the path's nodes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specbranch.core.pages import chunks
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT, TAIL, Slots
from specbranch.errors import BadParameter, CacheFull, ModelError, not_finite
from specbranch.extras import ACCELERATE, Extra
from specbranch.models.files.rollback import active_window, refuse_if_cannot_roll_back
from specbranch.models.files.sources import made_model
from specbranch.models.runners.torch_runner import TorchRunner
from specbranch.models.sampling.logit_rows import TensorRow, rows_of

# Largest relative difference of logits that counts as rounding, by type; ROUGH for all other types.
SAME = {torch.float32: 0.01, torch.float64: 0.01}
ROUGH = 0.2
SPREADING = Extra("accelerate", "transformers", "Spreading a model over several GPUs")


def load_transformers(
    name: str | Path,
    *,
    context_length: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    tail: int = TAIL,
    shorten: bool = False,
    spread: bool = False,
) -> TransformersRunner:
    """Load a local folder, a GGUF file or a Hub id; no code from it is executed.

    `context_length`: None: the model's own, cut to its attention window. `dtype`: None: float32 on a CPU, bfloat16
    elsewhere. `shorten`: cut `context_length` to the model's own instead of refusing it. `spread`: distribute the
    layers over all GPUs of this machine.
    """
    device = torch.device("cuda" if spread else device)
    if spread:
        _check_spreading()
    source, options = _source(name)
    config = _loaded(AutoConfig, source, options, name)
    length = _checked_length(config, context_length, str(name), shorten)
    options["dtype"] = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    if device.type != "cpu" and ACCELERATE.is_installed:
        options["device_map"] = "auto" if spread else str(device)  # tensors go straight there
    model = _loaded(AutoModelForCausalLM, source, options, name)
    if spread:
        _check_spread(model, str(name))
    else:
        model = model.to(device)
    return TransformersRunner(model, length, tail=tail, name=str(name))


def _check_spreading() -> None:
    """Raise unless accelerate is installed and torch sees several GPUs."""
    SPREADING.require("or leave out --device-map")
    if (count := torch.cuda.device_count()) < 2:
        found = "one GPU" if count else "no GPU"
        raise BadParameter(
            f"device_map 'auto' spreads the target over several GPUs, and torch sees {found} here. Leave it out."
        )


def _check_spread(model: PreTrainedModel, name: str) -> None:
    """Raise a ModelError unless all layers lie on GPUs.

    What accelerate leaves on the host is copied to a GPU again for every token.
    """
    devices: dict[str, Any] = getattr(model, "hf_device_map", {})
    left_out = sorted({str(at) for at in devices.values()} & {"cpu", "disk", "meta"})
    if left_out:
        raise ModelError(
            f"{name} does not fit the {torch.cuda.device_count()} GPUs of this machine: part of it would lie on "
            f"{' and '.join(left_out)}. Choose a smaller model or a smaller --dtype."
        )


@dataclass(slots=True)
class _CachedPath:
    """A path of the tail, and the KV cache of the prefix and this path."""

    cache: DynamicCache = field(default_factory=DynamicCache)
    path: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    """An open sequence, and the KV caches of its paths."""

    slots: Slots
    cached_paths: list[_CachedPath] = field(default_factory=lambda: [_CachedPath()])

    def cached_at(self, node: int) -> _CachedPath:
        """Return the cached path that ends at `node`; if there is none, copy one that passes through it, cut there."""
        path = self.slots.path(node)
        passing = [cached for cached in self.cached_paths if cached.path[: len(path)] == path]
        if ending := next((cached for cached in passing if len(cached.path) == len(path)), None):
            return ending
        branch = _CachedPath(_copy(passing[0].cache, len(self.slots.prefix) + len(path)), path)
        self.cached_paths.append(branch)
        return branch

    def keep(self, nodes: Sequence[int], commit: int) -> None:
        """Commit `nodes[:commit]` and keep the other nodes in the tail.

        Drops paths that leave the committed nodes, and cuts the others to kept nodes. Drops a path that another goes on
        from.
        """
        self.slots.keep(nodes, commit)
        renumbered = {node: at - commit for at, node in enumerate(nodes)}
        kept: dict[tuple[int, ...], _CachedPath] = {}
        for cached in sorted(self.cached_paths, key=lambda cached: len(cached.path)):
            path = tuple(takewhile(renumbered.__contains__, cached.path))
            if path[:commit] == tuple(nodes[:commit]):
                kept.setdefault(path, cached)
        self.cached_paths = []
        for path, cached in kept.items():
            if not any(path == other[: len(path)] for other in kept if len(other) > len(path)):
                if surplus := len(cached.path) - len(path):
                    cached.cache.crop(-surplus)
                cached.path = [renumbered[node] for node in path[commit:]]
                self.cached_paths.append(cached)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of the prefix."""
        self.keep((), 0)
        if surplus := len(self.slots.prefix) - length:
            self.cached_paths[0].cache.crop(-surplus)
        self.slots.truncate(length)


class TransformersRunner(TorchRunner):
    """One transformers model, with a KV cache for each path of each sequence; each forward serves one path."""

    def __init__(
        self, model: PreTrainedModel, context_length: int, *, tail: int = TAIL, name: str = "the model"
    ) -> None:
        self._model: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]
        self._context_length = context_length
        self.dtype = model.dtype
        self._tail = tail
        self._sequences: dict[int, _Sequence] = {}
        self._checked_layers: set[int] = set()  # layer counts that `check_layers` has tried
        self._skips_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._vocabulary = _probe(self, name)
        super().__init__(self._vocabulary, model.device)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model scores."""
        return self._vocabulary

    @property
    def context_length(self) -> int:
        """How many tokens one sequence may hold."""
        return self._context_length

    @property
    def model(self) -> PreTrainedModel:
        """The model itself; callers must not change it."""
        return self._model

    def check_layers(self, layers: int) -> None:
        """Raise a ModelError unless the model returns the hidden states of this many layers; runs one token to see."""
        if layers == 0 or layers in self._checked_layers:
            return
        try:
            states = self._forward(DynamicCache(), (1,), output_hidden_states=True).hidden_states
            width = self.embedded((1,)).shape[-1]
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            raise ModelError(
                f"The hidden states of this {self._model.config.model_type} model cannot be reached: {error}."
            ) from None
        if states is None or len(states) < layers or any(state.shape[-1] != width for state in states[-layers:]):
            found = 0 if states is None else len(states)
            raise ModelError(
                f"This {self._model.config.model_type} model gives {found} hidden states; the last {layers} were "
                "asked for, all as wide as "
                "its embedding."
            )
        self._checked_layers.add(layers)

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Return the input embeddings of tokens [tokens, hidden]."""
        table: Any = self._model.get_input_embeddings().weight
        found: Tensor = table.detach()[torch.tensor(tokens, device=table.device)]
        return found

    def _open(self, seq: int) -> None:
        # Capacity is context plus tail: a tree near the end of the context has more nodes than positions.
        self._sequences[seq] = _Sequence(Slots(self._context_length + self._tail, self._tail))

    def slots(self, seq: int) -> Slots:
        """Return the sequence's committed prefix and the nodes of its tail; callers must not change them."""
        return self._sequences[seq].slots

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Prefill tokens in chunks that end at multiples of `prefill_chunk`."""
        sequence = self._sequences[seq]
        self._demand(len(sequence.slots.prefix) + len(tokens))
        kv_slots = sequence.slots.extend(tokens)
        with self._forgetting(seq):
            cache = sequence.cached_at(ROOT).cache
            for start, stop in chunks(kv_slots, self.prefill_chunk):
                self.forward(cache, tokens[start - kv_slots.start : stop - kv_slots.start], last_row_only=True)

    def _score(self, work: Sequence[Feed]) -> list[list[TensorRow]]:
        """Compute the logits of new nodes, one row for each; one forward for each chain among them."""
        for item in work:
            self._demand(_longest_path(self._sequences[item.seq].slots, item))
        return [self._feed(self._sequences[item.seq], item) for item in work]

    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        self._sequences[seq].keep(nodes, commit)

    def _rewind(self, seq: int, length: int) -> None:
        self._sequences[seq].rewind(length)

    def _close(self, seq: int) -> None:
        del self._sequences[seq]

    @contextmanager
    def _forgetting(self, seq: int) -> Iterator[None]:
        """Empty the sequence if a forward in this context fails, as its caches may be half written.

        The worker will compute it again.
        """
        try:
            yield
        except BaseException:
            self._sequences[seq] = _Sequence(Slots(self._context_length + self._tail, self._tail))
            raise

    @torch.inference_mode()
    def forward(self, cache: DynamicCache, tokens: Sequence[int], last_row_only: bool = False) -> Tensor:
        """Append tokens to the cache, and return their logits [tokens, vocabulary].

        `last_row_only`: return the last row alone if the model can.
        """
        options = {"logits_to_keep": 1} if last_row_only and self._skips_rows else {}
        logits: Tensor = self._forward(cache, tokens, **options).logits[0]
        return logits

    @torch.inference_mode()
    def _forward(self, cache: DynamicCache, tokens: Sequence[int], **options: Any) -> Any:
        ids = torch.tensor([tokens], device=self._model.device)
        return self._model(input_ids=ids, past_key_values=cache, use_cache=True, **options)

    def _rows_with_states(self, cache: DynamicCache, tokens: Sequence[int]) -> list[TensorRow]:
        if not self.state_layers:
            return rows_of(self.forward(cache, tokens))
        output = self._forward(cache, tokens, output_hidden_states=True)
        states = torch.cat([state[0] for state in output.hidden_states[-self.state_layers :]], dim=-1)
        return rows_of(output.logits[0], states=states)

    def _feed(self, sequence: _Sequence, item: Feed) -> list[TensorRow]:
        nodes = sequence.slots.grow(item.tokens, item.parents)
        rows: dict[int, TensorRow] = {}
        with self._forgetting(item.seq):
            for run in _runs(nodes, item.parents):
                cached = sequence.cached_at(sequence.slots.parents[run[0]])
                tokens = [sequence.slots.tokens[node] for node in run]
                rows.update(zip(run, self._rows_with_states(cached.cache, tokens), strict=True))
                cached.path.extend(run)
        return [rows[node] for node in nodes]

    def _demand(self, length: int) -> None:
        if length > self._context_length:
            raise CacheFull(
                f"A sequence of {length} tokens does not fit the context of {self._context_length}. "
                "Shorten the prompt, lower max_tokens, or raise context_length if the model allows it."
            )


def _runs(nodes: range, parents: Sequence[int]) -> list[list[int]]:
    """Cut a forest of new nodes into chains.

    The parent of a chain's first node is an older node, or a node of an earlier chain.
    """
    runs: list[list[int]] = []
    by_end: dict[int, list[int]] = {}
    for node, parent in zip(nodes, parents, strict=True):
        run = by_end.pop(parent, None)
        if run is None:
            runs.append(run := [])
        run.append(node)
        by_end[node] = run
    return runs


def _longest_path(slots: Slots, item: Feed) -> int:
    """Return the length that the longest path of the sequence, prefix included, has with these nodes; 0: no nodes."""
    start = len(slots.tokens)
    lengths: list[int] = []
    for parent in item.parents:
        lengths.append(1 + (lengths[parent - start] if parent >= start else slots.position(parent) + 1))
    return max(lengths, default=0)


def _copy(cache: DynamicCache, length: int) -> DynamicCache:
    """Copy the first `length` tokens of a cache."""
    copy = DynamicCache()
    if length:
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            copy.update(layer.keys[..., :length, :].clone(), layer.values[..., :length, :].clone(), index)
    return copy


def _source(name: str | Path) -> tuple[str, dict[str, Any]]:
    """Return the source and the options for `from_pretrained`; of a GGUF file that is its folder and its name."""
    path = Path(name)
    if (made := made_model(path)) is not None:
        raise ModelError(f"{name} is {made.how}: its weights are made by the native runner alone. Use --runner native.")
    options: dict[str, Any] = {"trust_remote_code": False}
    if path.suffix.lower() != ".gguf":
        return str(name), options
    if not path.is_file():
        raise ModelError(f"There is no file {name}. Give the path of a GGUF file, of a model folder, or a Hub id.")
    ACCELERATE.require("or give runner='native'")
    return str(path.parent), options | {"gguf_file": path.name}


def _loaded(factory: Any, source: str, options: dict[str, Any], name: str | Path) -> Any:
    try:
        return factory.from_pretrained(source, **options)
    except Exception as error:
        # transformers raises errors of all kinds if a download, a file or a configuration is wrong
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelError(
            f"transformers cannot load {name}: {reason}. Expected a causal language model it knows."
        ) from error


def _checked_length(config: Any, asked: int | None, name: str, shorten: bool = False) -> int:
    if asked is not None and asked < 1:
        raise BadParameter(f"context_length is {asked}; expected a whole number ≥ 1.")
    text = config.get_text_config(decoder=True)
    most = getattr(text, "max_position_embeddings", None)
    own = min((n for n in (most, active_window(text.to_dict())) if n), default=None)
    length = own if asked is None else min(asked, own or asked) if shorten else asked
    if length is None:
        raise BadParameter(f"{name} does not say how long its context is. Give context_length.")
    if most and length > most:
        raise BadParameter(f"context_length is {length}; {name} was made for at most {most} tokens.")
    refuse_if_cannot_roll_back(text.to_dict(), length, name)
    return int(length)


def _probe(runner: TransformersRunner, name: str) -> int:
    """Return the size of the vocabulary; raise a ModelError if the model cannot roll back its KV cache."""
    text = (1, 2, 3, 4, 5)
    cache, fresh = DynamicCache(), DynamicCache()
    try:
        whole = runner.forward(fresh, text)
        runner.forward(cache, (*text[:3], 6, 7))
        _refuse_odd_layers(cache, 5, name)
        cache.crop(-2)
        again = runner.forward(cache, text[3:])
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ModelError(f"{name} does not work with a cache of keys and values that can be cut: {error}") from error
    difference = float((again[-1] - whole[-1]).float().norm() / whole[-1].float().norm().clamp(min=1e-9))
    if math.isnan(difference):
        raise not_finite(name)
    if not difference <= SAME.get(runner.model.dtype, ROUGH):
        raise ModelError(f"{name} cannot take tokens back: after a rollback its logits are off by {difference:.0%}.")
    return int(whole.shape[-1])


def _refuse_odd_layers(cache: DynamicCache, length: int, name: str) -> None:
    layers: list[Any] = cache.layers
    odd = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if odd:
        raise ModelError(f"{name} keeps part of its past in {', '.join(sorted(odd))}, which cannot take tokens back.")
    if not layers or any(layer.get_seq_length() != length for layer in layers):
        raise ModelError(f"{name} does not keep its past in the cache it is given, so tokens cannot be taken back.")
