"""Some of a target's layers as a trainable batch model, and the distillation loss.

Owns the forward over packed batches and the divergence between two stacks. Invariants: embedding and head are the
target's own tensors, never copied and never trained. With all layers and no gradient, a stack gives the logits of the
native decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm

from specbranch.core.draft_evaluation import JudgedPosition
from specbranch.errors import BadParameter, UnsupportedArchitecture
from specbranch.models.families.operations import Attention, Experts, GatedMlp, LayerForm, attention_of
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import NORMS, LayerWeights, Weights
from specbranch.models.forward import rope
from specbranch.models.forward.arithmetic import gated
from specbranch.training.distill.attention import AttendPacked, attention
from specbranch.training.distill.material import Batch

SCORED_ROWS = 4096  # rows whose scores of the whole vocabulary exist at once


class TrainedLayer(nn.Module):
    """The weights of one layer. Trained ones are copies in float32 or better; frozen ones are the target's own."""

    def __init__(self, layer: LayerWeights, trained: bool) -> None:
        super().__init__()
        named = {name: getattr(layer, name) for name in NORMS}
        for name in ("qkv", "out", "gate_up", "down"):
            matrix: Matrix = getattr(layer, name)
            named |= {f"{name}_weight": matrix.weight, f"{name}_bias": matrix.bias}
        for name, tensor in named.items():
            self.register_parameter(name, None if tensor is None else _parameter(tensor, trained))

    def weights(self) -> LayerWeights:
        """Return the layer in the form of the forward."""
        named = {name: None if one is None else one.detach() for name, one in self._parameters.items()}
        matrices = {
            name: Matrix(named[f"{name}_weight"], named[f"{name}_bias"])  # type: ignore[arg-type]
            for name in ("qkv", "out", "gate_up", "down")
        }
        vectors = {name: named[name] for name in NORMS}
        return LayerWeights(**vectors, **matrices)  # type: ignore[arg-type]

    def apply_matrix(self, name: str, x: Tensor) -> Tensor:
        """Multiply in the precision of `x`, whatever the type of the weights."""
        bias = self._parameters[f"{name}_bias"]
        return linear(x, self._parameters[f"{name}_weight"].to(x.dtype), None if bias is None else bias.to(x.dtype))  # type: ignore[union-attr]


class Stack(nn.Module):
    """Layers between the target's embedding and its head; `head_ids` keeps only these rows of the head."""

    embedding: Tensor
    head: Tensor
    head_ids: Tensor | None

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        layers: Sequence[int] | None = None,
        *,
        trained: bool = False,
        head_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        chosen = range(len(weights.layers)) if layers is None else layers
        check_layers(chosen, len(weights.layers))
        check_trainable(arch)
        self.arch = arch
        forms = arch.of_family.layers(arch, arch.layers)
        self.forms = tuple(forms[index] for index in chosen)
        self.blocks = nn.ModuleList(TrainedLayer(weights.layers[index], trained) for index in chosen)
        self.norm = _parameter(weights.norm, trained)
        # Buffers that are not persistent: no checkpoint stores the target's matrices again.
        embedding, whole = weights.in_floats()
        self.register_buffer("embedding", embedding, persistent=False)
        head = whole if head_ids is None else whole.rows(head_ids.to(whole.weight.device))
        self.register_buffer("head", head.weight, persistent=False)
        self.register_buffer("head_ids", head_ids, persistent=False)
        self._tables: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, batch: Batch) -> Tensor:
        """Return the normed hidden states [batch, length, hidden] for the head; a token sees its own segment up to
        itself."""
        return self.states(batch)[0]

    def states(self, batch: Batch, taps: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Return what `forward` returns, then the residual stream after so many layers for each of `taps`."""
        x = embedding(batch.tokens, self.embedding)
        if (scale := self.arch.embedding_scale) is not None:
            x = x * torch.tensor(scale, dtype=x.dtype, device=x.device)
        turns = self._turns(batch.positions)
        attends = {window: attention(batch, x.dtype, window) for window in set(map(_window, self.forms))}
        passed = {0: x}
        for number, (block, form) in enumerate(zip(self.blocks, self.forms, strict=True), 1):
            assert isinstance(block, TrainedLayer)
            for residual in form:
                h, operation = self._normed(x, getattr(block, residual.norm)), residual.operation
                if isinstance(operation, Attention):
                    change = self._attention(block, h, operation, turns[operation.table], attends[operation.window])
                else:
                    change = _mlp(block, operation, h)
                after = residual.after
                x = x + (change if after is None else self._normed(change, getattr(block, after)))
            if number in taps:
                passed[number] = x
        return self._normed(x, self.norm), *(passed[tap] for tap in taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the tokens of the head."""
        return linear(hidden, self.head)

    def _attention(
        self, block: TrainedLayer, h: Tensor, operation: Attention, turns: tuple[Tensor, Tensor], attend: AttendPacked
    ) -> Tensor:
        a = self.arch
        qkv = block.apply_matrix("qkv", h).view(*h.shape[:-1], -1, a.head_dim)  # [batch, length, heads, head_dim]
        queries, keys, values = torch.split(qkv, [a.heads, a.kv_heads, a.kv_heads], dim=-2)
        if isinstance(block.q_norm, Tensor) and isinstance(block.k_norm, Tensor):
            queries, keys = self._scaled(queries, block.q_norm), self._scaled(keys, block.k_norm)
        queries, keys = rope.turn(queries, *turns), rope.turn(keys, *turns)
        if operation.scale is not None:  # attention itself multiplies by 1 / √head_dim
            queries = queries * (operation.scale * a.head_dim**0.5)
        # Keys are repeated by hand: on GPUs the masked kernels know no head groups and would fall back to the slowest
        # one.
        keys, values = (x.repeat_interleave(a.heads // a.kv_heads, dim=-2) for x in (keys, values))
        return block.apply_matrix("out", attend(queries, keys, values).flatten(-2))

    def _scaled(self, heads: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(heads, (self.arch.head_dim,), weight.to(heads.dtype), self.arch.rms_eps)

    def _normed(self, x: Tensor, weight: Any) -> Tensor:
        return rms_norm(x, (self.arch.hidden,), weight.to(x.dtype), self.arch.rms_eps)

    def _turns(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return cos and sin of each rotary table."""
        length = positions.shape[1]  # a position is never greater than its index in the row
        if self._tables is None or self._tables[0][0].shape[0] < length:
            device, dtype = self.embedding.device, self.embedding.dtype
            self._tables = [rope.tables(one, self.arch.head_dim, length, device, dtype) for one in self.arch.ropes]
        return [(cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)) for cos, sin in self._tables]


def check_trainable(arch: Architecture) -> None:
    """Raise unless drafts can be made of this target's layers."""
    what = "experts" if arch.experts else "bounded logits" if arch.logit_softcap or arch.attention_softcap else None
    if what is not None:
        raise UnsupportedArchitecture(
            f"{arch.name} has layers with {what}; expected dense layers, of which a draft can be made. Use a smaller "
            "model of its family as the draft (--draft)."
        )


def _window(form: LayerForm) -> int | None:
    return attention_of(form).window


def check_layers(chosen: Sequence[int], held: int) -> None:
    """Raise if the target lacks one of the layers."""
    if not chosen or any(not 0 <= index < held for index in chosen):
        raise BadParameter(
            f"A draft of the layers {list(chosen)} was asked for; the target has {held}, numbered 0 to {held - 1}."
        )


def spread_layers(count: int, held: int) -> tuple[int, ...]:
    """Return evenly spaced layers, including the target's first and last; a better start than the outer ones alone."""
    if not 1 <= count <= held:
        raise BadParameter(f"A draft of {count} layers was asked for; expected 1 to {held}, as many as the target has.")
    return tuple((2 * index * (held - 1) + count - 1) // (2 * max(count - 1, 1)) for index in range(count))


@dataclass(frozen=True, slots=True)
class CountedRows:
    """The weighted positions of a batch: the hidden states of target and draft there, and their weights."""

    teacher: Tensor  # [rows, hidden]
    student: Tensor  # [rows, hidden]
    weight: Tensor  # [rows], float

    def chunks(self, size: int = SCORED_ROWS) -> list[CountedRows]:
        """Split into chunks whose scores fit into memory."""
        parts = (torch.split(one, size) for one in (self.teacher, self.student, self.weight))
        return [CountedRows(*part) for part in zip(*parts, strict=True)]


@dataclass(frozen=True, slots=True)
class DeepRows:
    """The weighted positions of a batch, each predicted by every depth of a draft.

    Depth d predicts after a token having drafted the last d tokens itself; a plain draft has depth 0 alone. A row of
    depth d goes on from the row before it at depth d - 1 if it `follows` that.
    """

    teacher: Tensor  # [rows, hidden]
    student: Tensor  # [depths, rows, hidden]
    weight: Tensor  # [depths, rows], float; 0 where a depth has no prediction
    follows: Tensor  # [rows], bool, on the CPU: True if the row before is of the token before

    def depth(self, depth: int) -> CountedRows:
        """Return the rows of one depth, those without a prediction, too."""
        return CountedRows(self.teacher, self.student[depth], self.weight[depth])

    @property
    def depths(self) -> int:
        """The number of depths."""
        return self.student.shape[0]


def counted(teacher: Tensor, students: Sequence[Tensor], weights: Sequence[Tensor]) -> DeepRows:
    """Keep only the positions [batch, length] that depth 0 weighs: the head is the most expensive part, and padding
    needs none.

    The state of depth d for a position stands d places before it, where the draft began to feed itself. Weights stay
    on the CPU, because finding the positions on the device would wait for all earlier work.
    """
    flat = [weight.flatten() for weight in weights]
    positions = flat[0].nonzero().squeeze(-1)
    follows = torch.zeros(len(positions), dtype=torch.bool)
    follows[1:] = positions.diff() == 1
    device = teacher.device
    rows = [
        student.flatten(0, 1)[sent((positions - depth).clamp(min=0), device)] for depth, student in enumerate(students)
    ]
    kept = sent(torch.stack([weight[positions] for weight in flat]), device)
    return DeepRows(teacher.flatten(0, 1)[sent(positions, device)], torch.stack(rows), kept, follows)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for running work there."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if tensor.device.type == "cpu" and device.type == "cuda" else tensor).to(
        device, non_blocking=True
    )


def divergence(rows: DeepRows, head: Tensor, chunk: int = SCORED_ROWS) -> Tensor:
    """Return the weighted sum over depths and rows of KL(teacher ‖ student), both over the tokens of `head`."""
    total: Tensor = _Divergence.apply(rows.student, rows.teacher, rows.weight, head, chunk)  # type: ignore[no-untyped-call]
    return total


class _Divergence(torch.autograd.Function):
    """Computes the gradient with the loss: with a frozen head it is weight·(q − p)·head, so no scores are kept. The
    teacher's are computed once for all depths."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weight: Tensor, head: Tensor, chunk: int) -> Tensor:
        gradient = torch.empty_like(student)
        total = torch.zeros((), device=student.device, dtype=_wide(student.dtype))
        for start in range(0, teacher.shape[0], chunk):
            rows = slice(start, start + chunk)
            p = _log_odds(teacher[rows], head)
            likely = p.exp()
            for depth in range(student.shape[0]):
                scale = weight[depth, rows].to(p.dtype).unsqueeze(-1)
                q = _log_odds(student[depth, rows], head)
                total += ((p - q) * likely * scale).sum()
                odds = q.exp_().sub_(likely).mul_(scale)
                torch.matmul(odds.to(head.dtype), head, out=gradient[depth, rows])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None


@dataclass(frozen=True, slots=True)
class Scores:
    """The agreement of a draft with its target over some rows, as sums; tokens outside a reduced head count as
    missed."""

    rows: float
    divergence: float  # over the head's tokens, the target's probabilities renormalised to them
    top1: float
    top3: float
    outside: float  # probability the target gives to tokens that the head lacks

    def __add__(self, other: Scores) -> Scores:
        return Scores(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def means(self) -> dict[str, float]:
        """Return each figure per row."""
        return {name: getattr(self, name) / max(self.rows, 1e-9) for name in ("divergence", "top1", "top3", "outside")}


NO_SCORES = Scores(0.0, 0.0, 0.0, 0.0, 0.0)


class Headed(Protocol):
    """A draft's output head."""

    @property
    def head(self) -> Tensor:
        """The rows of the target's head that the draft scores [tokens, hidden]."""

    @property
    def head_ids(self) -> Tensor | None:
        """The tokens of these rows; None: all."""


@torch.no_grad()
def compare(rows: CountedRows, student: Headed, head: Tensor, chunk: int = SCORED_ROWS) -> Scores:
    """Compare with the target's whole `head`, weighting each row."""
    return sum((_compare(chunk_rows, student, head) for chunk_rows in rows.chunks(chunk)), NO_SCORES)


@torch.no_grad()
def judge(rows: DeepRows, student: Headed, head: Tensor, candidates: int) -> list[list[JudgedPosition | None]]:
    """Return for each depth and row the draft's best candidates, compared with the target's choice by its whole
    `head`; None where drafting would not have come: a first choice before was not the target's."""
    judged, reached = [], rows.weight[0].cpu() > 0
    for depth in range(rows.depths):
        said, hits = _candidates(rows.depth(depth), student, head, candidates)
        judged.append(
            [
                JudgedPosition(tuple(odds), right.index(True) if True in right else None) if here else None
                for odds, right, here in zip(said.tolist(), hits.tolist(), reached.tolist(), strict=True)
            ]
        )
        if depth + 1 < rows.depths:
            reached = (reached & hits[:, 0]).roll(1, 0) & rows.follows & (rows.weight[depth + 1].cpu() > 0)
    return judged


def _candidates(rows: CountedRows, student: Headed, head: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the best candidates [rows, candidates], and which are the target's choice."""
    found = []
    for part in rows.chunks():
        q = _log_odds(part.student, student.head)
        log_odds, hits = _best(q, student.head_ids, _scores(part.teacher, head), candidates)
        found.append((log_odds.exp().cpu(), hits.cpu()))
    said, hits = (torch.cat(parts) for parts in zip(*found, strict=True))
    return said, hits


def _compare(rows: CountedRows, student: Headed, head: Tensor) -> Scores:
    whole, q = _log_odds(rows.teacher, head), _log_odds(rows.student, student.head)
    ids = student.head_ids
    p = whole if ids is None else whole[:, ids]
    inside = p.logsumexp(-1)
    _, hits = _best(q, ids, whole, 3)
    p = p - inside.unsqueeze(-1)
    figures = (
        torch.ones_like(inside),
        (p.exp() * (p - q)).sum(-1),
        hits[:, 0],
        hits.any(-1),
        (1 - inside.exp()).clamp(min=0),
    )
    return Scores(*((figure * rows.weight).sum().item() for figure in figures))


def _best(q: Tensor, ids: Tensor | None, whole: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the draft's highest log-probabilities [rows, count], and which of them are the target's best token by its
    scores `whole`; `ids`: the tokens of a reduced head."""
    found = q.topk(min(count, q.shape[-1]), -1)
    tokens = found.indices if ids is None else ids[found.indices]
    return found.values, tokens == whole.argmax(-1, keepdim=True)


def _log_odds(hidden: Tensor, head: Tensor) -> Tensor:
    return _scores(hidden, head).log_softmax(-1)


def _scores(hidden: Tensor, head: Tensor) -> Tensor:
    """Score the head's tokens in float32 or better: in bfloat16, scores near 20 would have steps of an eighth."""
    if hidden.device.type == "cuda" and hidden.dtype.itemsize < 4:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)  # sums are in float32 anyway; this only keeps them
    scores = linear(hidden, head)
    return scores.to(_wide(scores.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _parameter(tensor: Tensor, trained: bool) -> nn.Parameter:
    if not trained:
        return nn.Parameter(tensor, requires_grad=False)
    return nn.Parameter(tensor.detach().to(_wide(tensor.dtype), copy=True))


def _mlp(block: TrainedLayer, operation: GatedMlp | Experts, h: Tensor) -> Tensor:
    return block.apply_matrix("down", gated(block.apply_matrix("gate_up", h), operation.activation))
