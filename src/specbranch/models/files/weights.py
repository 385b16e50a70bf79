"""The decoder's weights, read one tensor at a time into the buffers that it will use.

Owns which tensors form one matrix: q, k and v; gate and up. Does not own their names (`families/`). A tied head is
the embedding itself, or a quantised copy of it. Invariant: no tensor exists twice while reading, and each matrix is
quantised before the next one is read.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specbranch.config import WeightsName
from specbranch.errors import ModelError
from specbranch.models.families.operations import Experts, attention_of, experts_of
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.block_reader import BlockRows, halves_together, read_parts
from specbranch.models.files.blocks import AnyMatrix, BlockMatrix, fits_blocks, in_blocks
from specbranch.models.files.expert_weights import ExpertReader
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.head_columns import Columns
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.quantised.checkpoint import QuantisedCheckpoint
from specbranch.models.files.stored_rows import Embedding, StoredRows
from specbranch.models.files.tensor_file import TensorSource

log = logging.getLogger("specbranch")

NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "attention_after_norm", "mlp_after_norm")  # of a layer
D2T = "d2t"  # of a reduced head: by how much the token of each row lies above the row's number
WRAPPED = ("language_model.{}", "model.language_model.{}")  # names of the text part of a model of several inputs


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer."""

    attention_norm: Tensor
    qkv: AnyMatrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: AnyMatrix
    mlp_norm: Tensor
    gate_up: AnyMatrix  # of experts: those of one below those of another, each with its gates first
    down: AnyMatrix
    attention_after_norm: Tensor | None = None
    mlp_after_norm: Tensor | None = None
    sinks: Tensor | None = None  # [heads]
    router: Matrix | None = None  # of a layer with experts
    hidden_norm: Tensor | None = None  # of a layer that reads features

    @property
    def matrices(self) -> tuple[AnyMatrix, ...]:
        """The matrices of the layer."""
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class ReducedHead:
    """An output head over some tokens only; the model can never sample the others."""

    matrix: AnyMatrix  # [columns, hidden]
    columns: Columns


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model's weights."""

    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: AnyMatrix
    reduced: ReducedHead | None = None  # used instead of `head`

    @property
    def matrices(self) -> tuple[AnyMatrix, ...]:
        """All matrices that the decoder multiplies by."""
        head = self.reduced.matrix if self.reduced else self.head
        return (*(matrix for layer in self.layers for matrix in layer.matrices), head)

    def in_floats(self) -> tuple[Tensor, Matrix]:
        """Return the embedding and the head of a model that was read in floats; refuse one with a reduced head."""
        if self.reduced is not None:
            raise ModelError(
                f"The model's head scores {self.reduced.matrix.outs} tokens; expected all. It is a draft: name a model "
                "that scores its whole vocabulary."
            )
        assert isinstance(self.embedding, Tensor) and isinstance(self.head, Matrix)
        return self.embedding, self.head

    @property
    def stored(self) -> str:
        """How the layers' matrices are stored: "int4" or "stored" if any of them is, as not all may fit that."""
        kinds = [matrix.stored for layer in self.layers for matrix in layer.matrices]
        return next((kind for first in ("int4", "stored") for kind in kinds if kind.startswith(first)), kinds[0])


def read_weights(
    arch: Architecture,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    stored: WeightsName | None = None,
) -> Weights:
    """Read all tensors of the architecture; raises a ModelError if one is missing or has another shape.

    `stored`: how matrices are stored; None: in `dtype`. The head is read first: it is the largest, and little other
    memory is in use then.
    """
    reader = _Reader(arch, source, device, dtype, stored)
    embedding = reader.embedding()
    head = reader.head(embedding)
    reduced = reader.columns()
    layers = tuple(reader.layer(index) for index in range(arch.layers))
    norm = reader.vector("norm", arch.hidden)
    return Weights(embedding, layers, norm, head, None if reduced is None else ReducedHead(head, reduced))


def read_layers(
    arch: Architecture,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    stored: WeightsName | None,
) -> tuple[tuple[LayerWeights, ...], Tensor]:
    """Read the layers and the last norm only.

    Matrices that are quantised afterwards are read in float32, so that int8 numbers of the file come out unchanged.
    """
    reader = _Reader(arch, source, device, dtype, stored, torch.float32 if stored else dtype)
    return tuple(reader.layer(index) for index in range(arch.layers)), reader.vector("norm", arch.hidden)


def read_part(
    arch: Architecture,
    source: TensorSource,
    part: str,
    device: torch.device,
    dtype: torch.dtype,
    layer: int = 0,
    suffix: str = "weight",
) -> Tensor:
    """Read one tensor by its name here, with its rows in the decoder's order; a tied head is the embedding."""
    reader, (rows, *inner) = _Reader(arch, source, device, dtype, None), part_shape(arch, part)
    if part in ("embedding", "head"):
        return reader.vocabulary_matrix("embedding" if arch.tied else part, rows)
    return reader.stacked({part: rows}, tuple(inner) if suffix == "weight" else (), suffix, layer)


def part_shape(arch: Architecture, part: str) -> tuple[int, ...]:
    """Return the shape of a part's weight; its bias has the first dimension only."""
    if part.endswith("norm"):
        return (arch.head_dim if part in ("q_norm", "k_norm") else arch.hidden,)
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    rows = {"q": q, "k": kv, "v": kv, "gate": arch.intermediate, "up": arch.intermediate}
    rows |= {"embedding": arch.vocabulary, "head": arch.head_rows}
    return rows.get(part, arch.hidden), {"out": q, "down": arch.intermediate}.get(part, arch.hidden)


@dataclass(frozen=True, slots=True)
class _Reader:
    arch: Architecture
    source: TensorSource
    device: torch.device
    dtype: torch.dtype
    stored: WeightsName | None
    read_in: torch.dtype | None = None  # type that the layers' matrices are read in; None: `dtype`

    def quantised(self, matrix: Matrix) -> AnyMatrix:
        """Return a matrix as `stored` asks."""
        if self.stored == "stored":
            # What a file has in floats stays in floats. A draft's floats were int8 in its file, and are so again.
            return matrix if isinstance(self.source, (GgufFile, QuantisedCheckpoint)) else whole_rows(matrix)
        return matrix if self.stored is None else matrix.stored_as(self.stored)

    def embedding(self) -> Embedding:
        name = self._name("embedding", "weight", 0)
        if self.stored == "stored" and isinstance(self.source, GgufFile):
            self.source.checked(name, (self.arch.vocabulary, self.arch.hidden), leading=True)
            return StoredRows(self.source, name, self.arch.vocabulary)
        return self.vocabulary_matrix("embedding", self.arch.vocabulary)

    def head(self, embedding: Embedding) -> AnyMatrix:
        part, rows = "embedding" if self.arch.tied else "head", self.arch.head_tokens or self.arch.head_rows
        if (blocks := self.blocks({part: rows}, self.arch.hidden, 0, leading=True)) is not None:
            return blocks
        if not self.arch.tied and (small := self.small({part: rows}, self.arch.hidden, 0, leading=True)) is not None:
            return small
        tied = embedding if self.arch.tied and isinstance(embedding, Tensor) else None
        return self.quantised(Matrix(self.vocabulary_matrix(part, rows) if tied is None else tied))

    def columns(self) -> Columns | None:
        """Read which tokens a reduced head scores; None if it scores all."""
        if self.arch.head_tokens is None:
            return None
        above = torch.empty(self.arch.head_tokens, dtype=torch.int64)
        self.source.read(D2T, above)
        ids = above + torch.arange(len(above))
        return Columns(ids.to(self.device), self.arch.vocabulary)

    def blocks(self, parts: dict[str, int], ins: int, layer: int, *, leading: bool = False) -> BlockMatrix | None:
        """Read a matrix in its file's blocks; None unless `stored` asks for that and the file has blocks."""
        if self.stored != "stored" or not isinstance(self.source, GgufFile):
            return None
        paired = self.arch.head_dim if self._interleaved else None
        wanted = [
            BlockRows(self._name(part, "weight", layer), rows, paired if part in ("q", "k") else None)
            for part, rows in parts.items()
        ]
        found = read_parts(self.source, wanted, ins, leading=leading)
        return None if found is None else BlockMatrix(found)

    def small(self, parts: dict[str, int], ins: int, layer: int, *, leading: bool = False) -> Matrix | None:
        """Read a matrix as a quantised checkpoint stores it; None unless `stored` asks for that and all parts fit."""
        if self.stored is None or not isinstance(self.source, QuantisedCheckpoint):
            return None
        modules = {self._name(part, "weight", layer).removesuffix(".weight"): rows for part, rows in parts.items()}
        return self._as_stored(self.source.matrix(modules, ins, self.device, leading=leading))

    def _as_stored(self, found: Matrix | None) -> Matrix | None:
        return found if found is None or self.stored in ("stored", found.stored) else None

    def layer(self, index: int) -> LayerWeights:
        a, done = self.arch, index + 1
        log.info("layer %d of %d of %s", done, a.layers, a.name, extra={"done": done, "of": a.layers})
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        form = a.of_family.layer(a, index)
        after, experts, joins = [residual.after for residual in form], experts_of(form), form[0].join is not None
        router, gate_up, down = (None, *self.mlp(index)) if experts is None else self.experts(experts, index)
        return LayerWeights(
            attention_norm=self.vector("attention_norm", a.hidden, index),
            qkv=self.matrix({"q": q, "k": kv, "v": kv}, a.hidden * 2 if joins else a.hidden, a.qkv_bias, index),
            q_norm=self.vector("q_norm", a.head_dim, index) if a.qk_norm else None,
            k_norm=self.vector("k_norm", a.head_dim, index) if a.qk_norm else None,
            out=self.matrix({"out": a.hidden}, q, a.out_bias, index),
            mlp_norm=self.vector("mlp_norm", a.hidden, index),
            gate_up=gate_up,
            down=down,
            attention_after_norm=self.vector(after[0], a.hidden, index) if after[0] else None,
            mlp_after_norm=self.vector(after[1], a.hidden, index) if after[1] else None,
            sinks=self.sinks(index) if attention_of(form).sinks else None,
            router=router,
            hidden_norm=self.vector("hidden_norm", a.hidden, index) if joins else None,
        )

    def mlp(self, index: int) -> tuple[AnyMatrix, AnyMatrix]:
        a = self.arch
        return (
            self.matrix({"gate": a.intermediate, "up": a.intermediate}, a.hidden, a.mlp_bias, index),
            self.matrix({"down": a.hidden}, a.intermediate, a.mlp_bias, index),
        )

    def experts(self, experts: Experts, index: int) -> tuple[Matrix, AnyMatrix, AnyMatrix]:
        """Read the router, and the experts' matrices one below the other."""
        reader = ExpertReader(self.arch, experts, self.source, self.device, self.read_in or self.dtype, self._named)
        gate_up, down = self._stored_experts(reader, index)
        return (
            reader.router(index, self.dtype),
            gate_up or self._of_experts(reader.gate_up(index)),
            down or self._of_experts(reader.down(index)),
        )

    def _stored_experts(self, reader: ExpertReader, index: int) -> tuple[AnyMatrix | None, AnyMatrix | None]:
        """Read the experts' matrices as their file stores them; None where `stored` asks for something else."""
        if self.stored == "stored" and isinstance(self.source, GgufFile):
            return reader.in_blocks(index)
        if self.stored is None:
            return None, None
        gate_up, down = reader.as_stored(index)
        return self._as_stored(gate_up), self._as_stored(down)

    def _of_experts(self, matrix: Matrix) -> Matrix:
        """Store experts that were read in floats; as blocks they would not share one matrix, so they become int8."""
        if self.stored == "stored":
            return matrix if isinstance(self.source, QuantisedCheckpoint) else matrix.stored_as("int8")
        return matrix if self.stored is None else matrix.stored_as(self.stored)

    def sinks(self, index: int) -> Tensor:
        """Read the score of each head that has no value."""
        sinks = self._empty((self.arch.heads,), self.dtype)
        self.source.read(self._named("sinks", "", index), sinks)
        return sinks

    def vector(self, part: str, size: int, layer: int = 0) -> Tensor:
        """Read the weight of a norm; one that multiplies by 1 + weight is kept as the sum, in float32 or better."""
        if not self.arch.of_family.norm_adds_one:
            return self.stacked({part: size}, (), "weight", layer)
        whole = self.stacked({part: size}, (), "weight", layer, torch.promote_types(self.dtype, torch.float32))
        return whole if isinstance(self.source, GgufFile) else whole.add_(1.0)

    def matrix(self, parts: dict[str, int], columns: int, bias: bool, layer: int) -> AnyMatrix:
        shift = self.stacked(parts, (), "bias", layer) if bias else None
        if (blocks := self.blocks(parts, columns, layer)) is not None:
            return replace(blocks, bias=shift)
        if (small := self.small(parts, columns, layer)) is not None:
            return replace(small, bias=shift)
        return self.quantised(Matrix(self.stacked(parts, (columns,), "weight", layer, self.read_in), shift))

    def vocabulary_matrix(self, part: str, rows: int) -> Tensor:
        """Read a matrix with one row for each token, without the padding rows that a file may have."""
        matrix = self._empty((rows, self.arch.hidden), self.dtype)
        self.source.read(self._name(part, "weight", 0), matrix, leading=True)
        return matrix

    def stacked(
        self,
        parts: dict[str, int],
        inner: tuple[int, ...],
        suffix: str,
        layer: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read several tensors into one, one below the other."""
        whole = self._empty((sum(parts.values()), *inner), dtype or self.dtype)
        for part, rows in zip(parts, torch.split(whole, list(parts.values())), strict=True):
            self.source.read(self._name(part, suffix, layer), rows)
            if part in ("q", "k") and self._interleaved:
                rows.copy_(halves_together(rows, self.arch.head_dim))
        return whole

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(shape, device=self.device, dtype=dtype)
        except RuntimeError:  # out of memory, on the host or on a GPU
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise ModelError(
                f"{self.arch.name} has a matrix of shape {list(shape)}, and there is no room for its {size:.1f} GiB on "
                f"{self.device}. Choose a smaller model, or check its configuration."
            ) from None

    def _name(self, part: str, suffix: str, layer: int) -> str:
        return self._named(part, f".{suffix}", layer)

    def _named(self, part: str, suffix: str, layer: int, expert: int = 0) -> str:
        """Return the tensor's name in the file; a model of several kinds of input has a prefix of its own."""
        stem = self.arch.of_family.name_of(part, isinstance(self.source, GgufFile))
        name = f"{stem.format(layer, expert=expert)}{suffix}"
        wrapped = (WRAPPED[0].format(name), WRAPPED[1].format(name.removeprefix("model.")))
        return next((one for one in (name, *wrapped) if one in self.source), name)

    @property
    def _interleaved(self) -> bool:
        """True if rows of q and k pair dimension 2i with 2i + 1, as llama.cpp stores this family."""
        return isinstance(self.source, GgufFile) and self.arch.of_family.interleaved_gguf


def whole_rows(matrix: Matrix) -> AnyMatrix:
    """Quantise a matrix to int8 with a scale for each output, in blocks for integer products.

    If its inputs are not whole blocks, it stays a plain int8 matrix.
    """
    return in_blocks(matrix.stored_as("int8")) if fits_blocks(matrix.ins) else matrix.stored_as("int8")
