"""A small model's weights inside those of a larger model: the same function at the larger one's cost.

Owns the position and scale of every weight. The residual stream is padded with zeros, and nothing ever writes there.
The output of added heads, neurons and layers is multiplied by zero. Invariant: every unused weight is random, except
for zeros that keep the padding silent. Those are after the embedding, in queries outside the small head's dimensions,
and in the projections that write into the stream.

These rules keep the function (h, d: hidden size and head dimension of the small model; H, D: of the large one):

- A norm over H numbers, h of them live, has a mean square smaller by h/H. So ε is smaller by h/H, and norm weights by
  √(h/H).
- Attention divides by √D instead of √d, so queries are larger by √(D/d).
- Rotary pair i of a small head is pair i·D/d of a larger one: θ^(−2i/d) is the same number. Scaled frequencies are the
  small model's, each repeated D/d times.
- A norm of queries and keys over D numbers has the stream's ε; both are scaled so that its weight stays the same.
- Each query head sits where it reads its own key head. A key head is repeated if its group does not fit into one group
  of the large model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256

import torch
from torch import Tensor

from specbranch.errors import BadParameter, ModelError
from specbranch.lab.inflation.shapes import Shape
from specbranch.models.families.family import HUGGING_FACE
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import part_shape, read_part

WRITING = ("embedding", "out", "down")  # what puts numbers into the stream: zero but for the small model's own
# The vocabulary's head may be smaller in a shape.
GROWN = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate")


def shape_of(arch: Architecture) -> Shape:
    """Return the sizes of a model."""
    return Shape(**{name: getattr(arch, name) for name in Shape.__dataclass_fields__})


def inflated_architecture(small: Architecture, sizes: Shape, head_rows: int, name: str) -> Architecture:
    """Return the larger model's architecture; raise if the small one does not fit into it."""
    _refuse_what_does_not_fit(small, sizes, name)
    return replace(
        small,
        name=name,
        **{field: getattr(sizes, field) for field in GROWN},
        rms_eps=small.rms_eps * small.hidden / sizes.hidden,
        rope=replace(small.rope, times=sizes.head_dim // small.head_dim),
        tied=False,  # the embedding is padded with zeros, the head is not
        head_rows_charged=head_rows,
    )


def _refuse_what_does_not_fit(small: Architecture, sizes: Shape, name: str) -> None:
    short = [field for field in GROWN if getattr(sizes, field) < getattr(small, field)]
    if short:
        lacking = ", ".join(f"{field} {getattr(sizes, field)} of at least {getattr(small, field)}" for field in short)
        options = " ".join(f"--{field.replace('_', '-')} {getattr(small, field)}" for field in short)
        raise BadParameter(
            f"{name}: the shape is smaller than the model: {lacking}. Choose a larger shape, or add {options}."
        )
    if sizes.head_dim % small.head_dim:
        raise BadParameter(
            f"{name}: the head dimension is {sizes.head_dim}; expected a multiple of the model's {small.head_dim}, as "
            "its rotary frequencies must be among the shape's. Set --head-dim."
        )
    if sizes.heads % sizes.kv_heads:
        raise BadParameter(
            f"{name}: {sizes.heads} heads over {sizes.kv_heads} key heads; expected a multiple. Set --heads or "
            "--kv-heads."
        )
    group, copies = small.heads // small.kv_heads, _copies(small, sizes)
    if small.kv_heads * copies > sizes.kv_heads:
        raise BadParameter(
            f"{name}: each of the model's {small.kv_heads} key heads serves {group} query heads, so "
            f"{small.kv_heads * copies} key heads of {sizes.heads // sizes.kv_heads} query heads are needed; the shape "
            f"has {sizes.kv_heads}. Set --kv-heads."
        )


def _copies(small: Architecture, large: Architecture | Shape) -> int:
    """Return how many key heads of the large model each key head of the small one takes."""
    return -(-(small.heads // small.kv_heads) // (large.heads // large.kv_heads))


@dataclass(frozen=True, slots=True)
class LargeRows:
    """Where the rows of a part lie: `rows` of the small model at `at` of the large one; `silent` rows must give
    zero."""

    rows: Tensor
    at: Tensor
    silent: Tensor


class InflatedSource:
    """The tensors of an inflated model under Hugging Face's names; each is generated on its device when it is read."""

    def __init__(
        self,
        small: Architecture,
        source: TensorSource,
        large: Architecture,
        seed: int = 0,
        head_ids: Tensor | None = None,
    ) -> None:
        """`head_ids` are the tokens of a reduced head, whose rows come first."""
        self.small, self.large, self.seed = small, large, seed
        self._source, self._head_ids = source, head_ids
        counts = {part: large.layers if "{}" in stem else 1 for part, stem in HUGGING_FACE.items()}
        self._named = {
            HUGGING_FACE[part].format(layer): (part, layer) for part, count in counts.items() for layer in range(count)
        }

    @property
    def name(self) -> str:
        """The name for sentences."""
        return self.large.name

    def __contains__(self, tensor: str) -> bool:
        return tensor.rpartition(".")[0] in self._named

    @torch.inference_mode()
    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Generate a tensor on its device."""
        stem, _, suffix = tensor.rpartition(".")
        part, layer = self._named[stem]
        expected = part_shape(self.large, part)[: None if suffix == "weight" else 1]
        if tuple(into.shape) != expected:
            raise ModelError(
                f"{self.name}: tensor {tensor!r} has shape {list(expected)}; {list(into.shape)} was asked for."
            )
        self._fill(tensor, part, into)
        if layer < self.small.layers:  # the others add nothing
            self._place_live(part, layer, suffix, into)

    def _fill(self, tensor: str, part: str, into: Tensor) -> None:
        if part in WRITING:
            into.zero_()
            return
        seed = int.from_bytes(sha256(f"{self.seed} {tensor}".encode()).digest()[:7], "big")
        bounds = (0.5, 1.5) if part.endswith("norm") else (-self._bound, self._bound)
        into.uniform_(*bounds, generator=torch.Generator(into.device).manual_seed(seed))

    @property
    def _bound(self) -> float:
        """Return the bound of random weights that keeps the magnitude of their input."""
        return float((3 / self.large.hidden) ** 0.5)

    def _place_live(self, part: str, layer: int, suffix: str, into: Tensor) -> None:
        exact = torch.promote_types(into.dtype, torch.float32)  # scaled before it is rounded
        live = self._read(part, layer, suffix, into.device, exact) * self._scale(part)
        rows = self._large_rows(part, into.device)
        live = live.index_select(0, rows.rows)
        if into.dim() == 1:
            into[rows.silent] = 0
            into[rows.at] = live.to(into.dtype)
            return
        if part not in WRITING:
            self._soften(into, live, rows.at)
        columns = self._columns(part, into.device)
        into[rows.silent[:, None], columns] = 0
        into[rows.at[:, None], columns] = live.to(into.dtype)

    def _soften(self, into: Tensor, live: Tensor, at: Tensor) -> None:
        """Scale the random weights of a live row to its own magnitude, so that int8 steps are as fine as in the
        small model."""
        factors = torch.ones(into.shape[0], device=into.device, dtype=into.dtype)
        factors[at] = (live.abs().mean(-1) / self._bound).to(into.dtype)
        into.mul_(factors[:, None])

    def _read(self, part: str, layer: int, suffix: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        held = read_part(self.small, self._source, part, device, dtype, layer, suffix)
        return held if part != "head" or self._head_ids is None else held.index_select(0, self._head_ids.to(device))

    def _scale(self, part: str) -> float:
        wide, long = self.large.hidden / self.small.hidden, self.large.head_dim / self.small.head_dim
        if part in ("attention_norm", "mlp_norm", "norm"):
            return float(wide**-0.5)
        if self.small.qk_norm:  # ε weighs as much as before beside scaled queries and keys; √(D/d) is in the norms
            return float({"q": (long / wide) ** 0.5, "k": (long / wide) ** 0.5, "k_norm": long**-0.5}.get(part, 1.0))
        return float(long**0.5) if part == "q" else 1.0

    def _columns(self, part: str, device: torch.device) -> Tensor:
        """Return the columns of the small model's inputs."""
        if part == "out":
            return self._spots(self._query_heads, self._plain_dims).to(device)
        return torch.arange(part_shape(self.small, part)[1], device=device)

    def _large_rows(self, part: str, device: torch.device) -> LargeRows:
        """Where the small model's outputs of a matrix, or its numbers of a vector, lie."""
        rows, at, silent = self._rows(part)
        return LargeRows(rows.to(device), at.to(device), silent.to(device))

    def _rows(self, part: str) -> tuple[Tensor, Tensor, Tensor]:
        none = torch.empty(0, dtype=torch.int64)
        if part in ("q", "k"):
            heads = self._query_heads if part == "q" else self._key_heads
            at, whole = self._spots(heads, self._turned_dims), self._spots(heads, torch.arange(self.large.head_dim))
            # Keys may be anything where queries are zero, but their norm would depend on it.
            return (
                self._rows_of(heads),
                at,
                whole[~torch.isin(whole, at)] if part == "q" or self.small.qk_norm else none,
            )
        if part == "v":
            return self._rows_of(self._key_heads), self._spots(self._key_heads, self._plain_dims), none
        if part in ("q_norm", "k_norm"):
            return self._plain_dims, self._turned_dims, none
        count = part_shape(self.small, part)[0] if part != "head" or self._head_ids is None else len(self._head_ids)
        return torch.arange(count), torch.arange(count), none

    def _rows_of(self, heads: Tensor) -> Tensor:
        """Return the rows of heads of the small model."""
        return (heads[0, :, None] * self.small.head_dim + self._plain_dims).flatten()

    def _spots(self, heads: Tensor, dims: Tensor) -> Tensor:
        """Return the rows of some dimensions of the given heads."""
        return (heads[1, :, None] * self.large.head_dim + dims).flatten()

    @cached_property
    def _query_heads(self) -> Tensor:
        """Return which query head goes where [2, heads]."""
        group, room = self.small.heads // self.small.kv_heads, self.large.heads // self.large.kv_heads
        copies = _copies(self.small, self.large)
        heads = torch.arange(self.small.heads)
        key, within = heads // group, heads % group
        return torch.stack((heads, (key * copies + within // room) * room + within % room))

    @cached_property
    def _key_heads(self) -> Tensor:
        """Return which key head goes where [2, heads]; one may go to several."""
        at = torch.arange(self.small.kv_heads * (copies := _copies(self.small, self.large)))
        return torch.stack((at // copies, at))

    @property
    def _plain_dims(self) -> Tensor:
        return torch.arange(self.small.head_dim)

    @property
    def _turned_dims(self) -> Tensor:
        """Return the rotary dimensions of a head: pair i, of dimensions i and i + d/2, goes to pair i·D/d."""
        half, times = self.small.head_dim // 2, self.large.head_dim // self.small.head_dim
        pairs = torch.arange(half) * times
        return torch.cat((pairs, pairs + self.large.head_dim // 2))
