"""A layer's experts by Triton kernels: the router, its choice, and products that read the chosen experts' weights only.

Owns the buffers between these kernels, and the sizes of their grids. Does not own the kernels (`expert_kernels.py`).
Invariant: the number of rows alone decides every grid. A tile has TILE_PAIRS rows at most, whatever the number of
rows, so the order of a row's sums is always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbranch.models.cpu.linear import Linear, PlainLinear
from specbranch.models.families.operations import Activation, Experts
from specbranch.models.files.architecture import Architecture
from specbranch.models.forward.experts import ExpertLinears
from specbranch.models.forward.stored_linear import StoredLinear
from specbranch.models.gpu.attention import launch
from specbranch.models.gpu.layout import Views, power_of_two
from specbranch.models.gpu.products import ROW_TILE, Product, given_or, product_of, takes_matrix

TILE_PAIRS = ROW_TILE  # rows of one expert that a program multiplies
PLAN_BLOCK = (128, 1024)  # pairs that a program sorts at a time: least and most
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "bounded_swiglu": 2}
ROUTER_TILE = 16  # experts of a program of the router: few programs would read its weights slowly


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """One matrix of all experts: that of the first, and by how many numbers those of the others lie behind it."""

    first: Product
    bias: Tensor | None  # [experts, outs]
    scale: Tensor | None  # of all experts
    per_weight: int
    per_scale: int

    def how(self, early: bool) -> dict[str, Any]:
        """Return the constants of a kernel that multiplies tiles of TILE_PAIRS rows."""
        made = self.first.how(TILE_PAIRS, early)
        return {
            name: value for name, value in made.items() if name not in ("PARTS", "UNIT", "CHUNKS", "BOXED", "JOINED")
        }

    @property
    def scales(self) -> Tensor:
        """The scales; the weight stands in for missing ones, as a kernel needs some tensor."""
        return given_or(self.scale, self.first.weight)


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """The matrices of a layer with experts."""

    form: Experts
    router: Product
    gate_up: ExpertProduct
    down: ExpertProduct


class MixtureBuffers:
    """What the kernels of experts write, for steps of up to `most` rows; all layers use it in turn."""

    def __init__(self, form: Experts, hidden: int, most: int, device: torch.device, dtype: torch.dtype) -> None:
        pairs = most * form.active
        self.logits = torch.zeros(most, form.count, device=device, dtype=dtype)
        self.ids = torch.zeros(pairs, dtype=torch.int32, device=device)
        self.order = torch.zeros_like(self.ids)
        self.tiles = torch.zeros(most_expert_tiles(most, form), 3, dtype=torch.int32, device=device)
        self.used = torch.zeros(1, dtype=torch.int32, device=device)
        self.weights = torch.zeros(pairs, device=device)
        self.gated = torch.zeros(pairs, form.intermediate, device=device, dtype=dtype)
        self.changes = torch.zeros(pairs, hidden, device=device)


def most_expert_tiles(rows: int, form: Experts) -> int:
    """Return how many tiles rows can make: each expert has one that is not full."""
    pairs = rows * form.active
    return min(pairs, form.count + pairs // TILE_PAIRS)


class Mixture:
    """Launches the kernels of layers with experts."""

    def __init__(self, form: Experts, arch: Architecture, most: int, spare: int, like: Tensor, early: bool) -> None:
        """`spare`: the first KV slot of the page for padding. `like`: a tensor of the model's device and type."""
        from specbranch.models.gpu import expert_kernels, product_kernels

        self._kernels, self._product_kernels = expert_kernels, product_kernels
        self._form, self._eps, self._spare, self._early = form, arch.rms_eps, spare, early
        self._buffers = MixtureBuffers(form, arch.hidden, most, like.device, like.dtype)

    @property
    def changes(self) -> Tensor:
        """The outputs of the chosen experts, weighted [rows·active, hidden]."""
        return self._buffers.changes

    @property
    def ids(self) -> Tensor:
        """The chosen experts [rows·active], ascending for each row; negative: none."""
        return self._buffers.ids

    def run(
        self, products: ExpertProducts, x: Tensor, squares: Tensor, norms: int, step: Views, counts: Tensor, rows: int
    ) -> None:
        """Compute the outputs of the chosen experts for `rows` rows x, which are divided by the root of `squares`."""
        self._choose(products.router, x, squares, norms, step, counts, rows)
        self._multiply(products, x, squares, norms, rows)

    def _choose(
        self, router: Product, x: Tensor, squares: Tensor, norms: int, step: Views, counts: Tensor, rows: int
    ) -> None:
        form, held, how = self._form, self._buffers, launch(self._early)
        self._product_kernels.scored[router.grid(rows)](
            x, router.weight, router.tensors()[1], squares, held.logits, self._eps, rows, router.outs, router.ins,
            bias=router.bias, NORMS=norms, **router.how(rows, self._early),
        )  # fmt: skip
        self._kernels.route[(rows,)](
            held.logits, step.slots, counts, held.ids, held.weights, self._spare, COUNT=form.count, ACTIVE=form.active,
            WIDTH=power_of_two(form.count), PLACES=power_of_two(form.active), ALL_FIRST=form.routing == "all_first",
            TO_ONE=form.weights_sum_to_one, EARLY=self._early, num_warps=1, **how,
        )  # fmt: skip
        pairs = rows * form.active
        least, most = PLAN_BLOCK
        self._kernels.plan[(form.count,)](
            held.ids, held.order, held.tiles, held.used, pairs, COUNT=form.count, WIDTH=power_of_two(form.count + 1),
            BLOCK=min(max(power_of_two(pairs), least), most), ROWS=TILE_PAIRS, EARLY=self._early, num_warps=4, **how,
        )  # fmt: skip

    def _multiply(self, products: ExpertProducts, x: Tensor, squares: Tensor, norms: int, rows: int) -> None:
        form, held, gate_up, down = self._form, self._buffers, products.gate_up, products.down
        tiles, places = most_expert_tiles(rows, form), (held.order, held.tiles, held.used)
        inner, hidden = form.intermediate, down.first.outs
        self._kernels.gated_by_expert[(tiles, -(-inner * 2 // gate_up.first.cut.tile))](
            x, gate_up.first.weight, gate_up.bias, gate_up.scales, squares, *places, held.gated, self._eps, inner,
            gate_up.first.ins, gate_up.per_weight, gate_up.per_scale, ACTIVE=form.active,
            ACTIVATION=ACTIVATIONS[form.activation], NORMS=norms, **gate_up.how(self._early),
        )  # fmt: skip
        self._kernels.down_by_expert[(tiles, -(-hidden // down.first.cut.tile))](
            held.gated, down.first.weight, down.bias, down.scales, held.weights, *places, held.changes, hidden, inner,
            down.per_weight, down.per_scale, **down.how(self._early),
        )  # fmt: skip


def expert_products(experts: ExpertLinears, arch: Architecture) -> ExpertProducts:
    """Make the matrices of a layer with experts ready for the kernels."""
    router = product_of("router", experts.router, arch)
    cut = replace(router.cut, tile=ROUTER_TILE, swap=False) if router.stored == "plain" else router.cut
    return ExpertProducts(
        experts.form,
        replace(router, cut=cut, wide=()),
        _all_experts(experts.gate_up, arch),
        _all_experts(experts.down, arch),
    )


def _all_experts(linears: Sequence[Linear], arch: Architecture) -> ExpertProduct:
    products = [product_of("expert", linear, arch) for linear in linears]
    first = products[0]
    scales = [product.scale for product in products if product.scale is not None]
    biases = [product.bias for product in products if product.bias is not None]
    scale = torch.stack(scales) if scales else None
    return ExpertProduct(
        replace(first, wide=()),
        torch.stack(biases) if biases else None,
        scale,
        first.weight.numel(),
        0 if scale is None else scale[0].numel(),
    )


def takes_experts(experts: ExpertLinears) -> bool:
    """True if the kernels multiply by these experts: known matrices of one kind, one behind the other in memory."""
    sides = (experts.gate_up, experts.down)
    whole = experts.form.intermediate % 64 == 0
    return whole and takes_matrix(experts.router) and all(_in_a_row(side) for side in sides)


def _in_a_row(linears: Sequence[Linear]) -> bool:
    first = linears[0]
    if not all(takes_matrix(linear) for linear in linears) or not isinstance(first, PlainLinear | StoredLinear):
        return False
    begin, size = first.weight.data_ptr(), first.weight.nbytes
    return all(
        isinstance(linear, PlainLinear | StoredLinear)
        and linear.weight.dtype is first.weight.dtype
        and linear.weight.data_ptr() == begin + number * size
        and (linear.bias is None) == (first.bias is None)
        for number, linear in enumerate(linears)
    )
