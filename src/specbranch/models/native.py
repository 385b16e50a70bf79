"""The native Runner: one decoder, a cache for every open sequence, several sequences in one forward.

Owns which sequence has which cache. Invariant: a sequence's `Slots` and its cache agree after every call, also one that fails.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT, TAIL, Slots
from specbranch.errors import BadParameter, ModelError
from specbranch.models.cpu.fused_step import STEP_ROWS, FusedStep, fuse
from specbranch.models.decoder import Cache, Decoder
from specbranch.models.files.architecture import Architecture, token_ids
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.locate import Located, locate
from specbranch.models.files.tensor_file import TensorSource, open_folder
from specbranch.models.files.weights import read_weights
from specbranch.models.rows import TensorRow
from specbranch.models.steps import Planner, Rows, dealt, rows_of_chunk, rows_of_nodes

log = logging.getLogger("specbranch")

CHUNK = 256  # tokens of a prompt in one forward
READ_COMPILED = 16  # a chunk of at most so many is read by the compiled step; torch is faster above, behind a long text


@dataclass(frozen=True, slots=True)
class Held:
    """An open sequence: its bookkeeping and its memory."""

    slots: Slots
    cache: Cache


class NativeRunner:
    """A `core.runner.Runner` over the native decoder. Rows are `TensorRow`s, in float32 or better."""

    def __init__(self, decoder: Decoder, context_length: int, tail: int = TAIL) -> None:
        self.decoder = decoder
        self.architecture = decoder.arch
        self.device, self.dtype = decoder.norm.device, decoder.norm.dtype
        self.tail = tail
        self._context_length = context_length
        self._planner = Planner(self.device, self.dtype, self.architecture.heads // self.architecture.kv_heads)
        self._fused = self._trusted(fuse(decoder))
        self._open: dict[int, Held] = {}
        self._spare: list[Cache] = []
        self._tapped = 0  # layers whose hidden states rows carry

    @property
    def vocabulary(self) -> int:
        """How many token ids the model scores."""
        return self.architecture.vocabulary

    @property
    def context_length(self) -> int:
        """How many tokens one sequence may hold."""
        return self._context_length

    @property
    def compiled(self) -> bool:
        """Whether few rows run as one compiled step."""
        return self._fused is not None

    def tap(self, layers: int) -> None:
        """Let rows carry the hidden states of the last layers from now on; of 0 layers, none."""
        if not 0 <= layers <= self.architecture.layers:
            raise ModelError(f"{self.architecture.name} has {self.architecture.layers} layers; the last {layers} of them were asked for.")
        self._tapped = layers

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """The input embeddings of tokens [tokens, hidden]."""
        return self.decoder.embedding[torch.tensor(tokens, device=self.device)]

    def open(self, seq: int) -> None:
        """Make room for a new, empty sequence, in the memory of a closed one if there is any."""
        if seq in self._open:
            raise ValueError(f"sequence {seq} is open already")
        capacity = self._context_length + self.tail
        cache = self._spare.pop() if self._spare else self._new_cache(capacity)
        self._open[seq] = Held(Slots(capacity, self.tail), cache)

    def slots(self, seq: int) -> Slots:
        """The sequence's places."""
        return self._open[seq].slots

    @torch.inference_mode()
    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Append tokens to the prefix, in chunks that end at multiples of CHUNK, without scoring the vocabulary."""
        self._check_ids(tokens)
        held = self._open[seq]
        places = held.slots.extend(tokens)
        try:
            for start, stop in _chunks(places):
                chunk = tokens[start - places.start : stop - places.start]
                self._store(rows_of_chunk(held.cache, chunk, start))
        except BaseException:
            held.slots.truncate(places.start)
            raise

    @torch.inference_mode()
    def feed(self, work: Sequence[Feed]) -> list[list[TensorRow]]:
        """Score new nodes of several sequences in one forward; beyond what a compiled step takes, in several, one after the other."""
        sizes = {feed.seq: len(self._open[feed.seq].slots.tokens) for feed in work}
        try:
            block, states = self._score([self._grow(feed) for feed in work])
        except BaseException:
            self._shrink(sizes)
            raise
        rows = iter(range(block.shape[0]))
        return [[TensorRow(block, next(rows), self.decoder.columns, states) for _ in feed.tokens] for feed in work]

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail, the first `commit` of them as prefix."""
        held = self._open[seq]
        moves = held.slots.keep(nodes, commit)
        if moves:
            sources, targets = torch.tensor(moves).T.contiguous().to(self.device, non_blocking=True)
            held.cache.move(sources, targets)

    def rewind(self, seq: int, length: int) -> None:
        """Forget the tail, and the prefix beyond its first `length` tokens; what lies at their places is written over later."""
        self._open[seq].slots.truncate(length)

    def close(self, seq: int) -> None:
        """Forget the sequence; its memory serves the next one opened."""
        self._spare.append(self._open.pop(seq).cache)

    def _new_cache(self, capacity: int) -> Cache:
        return Cache(self.architecture, self._planner.places(capacity), self.device, self.dtype)

    @torch.inference_mode()
    def _trusted(self, fused: FusedStep | None) -> FusedStep | None:
        """Return the compiled step if it scores a small tree as the plain one does: it may never have run on such a processor."""
        if fused is None:
            return None
        slots, cache = Slots(4, 4), self._new_cache(4)
        rows = rows_of_nodes(cache, slots, slots.grow((0, 0, 0), (ROOT, 0, 0)))
        compiled = fused.logits(self._planner.step([rows], compiled=True))
        plain = self.decoder.logits(self.decoder.forward(self._planner.step([rows])))
        if torch.allclose(compiled, plain, rtol=1e-3, atol=1e-3 * plain.abs().max().item(), equal_nan=True):
            return fused
        log.warning("The compiled step disagrees with the plain one on this machine; decoding goes on with the plain one.")
        return None

    def _check_ids(self, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < self.vocabulary)
            raise BadParameter(f"Token id {wrong} is outside the vocabulary of {self.architecture.name} (0 to {self.vocabulary - 1}).")

    def _grow(self, feed: Feed) -> Rows:
        self._check_ids(feed.tokens)
        held = self._open[feed.seq]
        return rows_of_nodes(held.cache, held.slots, held.slots.grow(feed.tokens, feed.parents))

    def _shrink(self, sizes: dict[int, int]) -> None:
        """Take back nodes that were added for a forward that failed."""
        for seq, size in sizes.items():
            slots = self._open[seq].slots
            del slots.tokens[size:], slots.parents[size:]

    def _store(self, rows: Rows) -> None:
        """Read a chunk by the code that suits its own size, so that its bits depend on nothing else."""
        if self._fused and len(rows.tokens) <= READ_COMPILED:
            self._fused.store(self._planner.step([rows], compiled=True))
        else:
            self.decoder.forward(self._planner.step([rows]))

    def _score(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        """Score all rows; returns logits and, where they are tapped, hidden states."""
        work = [rows for rows in work if rows.tokens]
        if not work:
            return torch.empty(0, self.vocabulary), None
        if self._fused is None:
            return self._score_plainly(work)
        steps = [self._planner.step(some, compiled=True) for some in dealt(work, STEP_ROWS)]
        logits, states = zip(*(self._fused.logits_and_states(step, self._tapped) for step in steps), strict=True)
        return _joined(logits), _joined(states) if self._tapped else None

    def _score_plainly(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        seen: list[Tensor] | None = [] if self._tapped else None
        hidden = self._planner.counted(work, self.decoder.forward(self._planner.step(work), seen))
        logits = self.decoder.logits(hidden)
        states = None if seen is None else self._states(work, seen, hidden)
        return logits.float() if logits.dtype.itemsize < 4 else logits, states

    def _states(self, work: list[Rows], seen: list[Tensor], hidden: Tensor) -> Tensor:
        """The last layers' hidden states side by side, the last of them normed [rows, layers·hidden]."""
        before = [self._planner.counted(work, one) for one in seen[len(seen) - self._tapped + 1 :]]
        return torch.cat((*before, self.decoder.normed(hidden)), dim=-1)


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(tuple(blocks))


def load_native(
    model: str | Path | Located,
    *,
    context_length: int | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tail: int = TAIL,
    shorten: bool = False,
) -> NativeRunner:
    """Load a model folder, a GGUF file or a Hub id. No device: the CPU; no dtype: float32 on a CPU, bfloat16 elsewhere."""
    located = model if isinstance(model, Located) else locate(str(model))
    place = torch.device(device or "cpu")
    precision = _dtype(dtype, place)
    arch, source = open_model(located)
    context = arch.choose_context(context_length, shorten=shorten)
    weights = read_weights(arch, source, place, precision)
    return NativeRunner(Decoder(arch, weights, context + tail), context, tail)


def open_model(located: Located) -> tuple[Architecture, TensorSource]:
    """Read what a model is, and open its weights without reading them."""
    if located.kind == "gguf":
        file = GgufFile(located.path)
        return Architecture.from_gguf(file), file
    arch = Architecture.from_config(_read_json(located.path / "config.json"), str(located.path))
    generation = located.path / "generation_config.json"
    if generation.is_file():  # instruct models often name a second end token here only
        ends = token_ids(_read_json(generation).get("eos_token_id"))
        arch = replace(arch, eos_ids=tuple(dict.fromkeys((*arch.eos_ids, *ends))))
    return arch, open_folder(located.path)


def _dtype(asked: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if asked is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise BadParameter(f"dtype is {asked!r}; expected float32, float64, bfloat16 or float16.")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} could not be read: {error}. Fetch the model again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object. Fetch the model again.")
    return value


def _chunks(places: range) -> Iterator[tuple[int, int]]:
    """Cut places at absolute multiples of CHUNK, so that a prompt is cut alike however much of it was there before."""
    start = places.start
    while start < places.stop:
        stop = min((start // CHUNK + 1) * CHUNK, places.stop)
        yield start, stop
        start = stop
