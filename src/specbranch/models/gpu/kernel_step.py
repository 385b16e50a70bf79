"""A decoder's forward in Triton kernels, near memory bandwidth; a row has the same bits in any batch.

It runs the operations that a family lists for each layer; Llama's are six kernels a layer. Owns the buffers between
kernels, and their order. Does not own the kernels (`product_kernels.py`, `family_kernels.py`), the tiling of products
(`products.py`), or experts (`mixture_step.py`). Invariant: the number of rows of a step only decides how many rows
share a program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbranch.core.pages import PAGE
from specbranch.models.cache.kv_memory import Memory
from specbranch.models.cpu.linear import Linear
from specbranch.models.families.operations import (
    Activation,
    Attention,
    Experts,
    GatedMlp,
    LayerForm,
    Residual,
    attention_of,
    experts_of,
    layer_form,
)
from specbranch.models.forward.arithmetic import normed
from specbranch.models.forward.decoder import Decoder, Layer
from specbranch.models.gpu.attention import begins_early, computed_by_kernels, launch, triton_works
from specbranch.models.gpu.layout import MOST_STEP_ROWS, MOST_TOTAL_ROWS, SPREAD_COUNT, Views, power_of_two
from specbranch.models.gpu.mixture_step import ACTIVATIONS, Mixture, expert_products, takes_experts
from specbranch.models.gpu.products import (
    ROW_TILE,
    WIDEST,
    Product,
    alike_in,
    given_or,
    product_of,
    takes_matrix,
)
from specbranch.models.gpu.small import PLAIN_FUNCTIONS
from specbranch.models.gpu.step import GpuStep

PRODUCT_NAMES = ("qkv", "out", "gate_up", "down")
FUSED_HEADS = (64, 128)  # sizes of heads that a tile of a product holds, so that it turns them itself
TURNED_HEADS = (256,)  # sizes of heads that a kernel of their own turns


class KernelStep(GpuStep):
    """A `GpuStep` by Triton kernels; results differ by rounding only."""

    lasting = True
    moves = True
    only_kernels = True

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        # the small functions are not used here, and compiled ones take seconds to import
        super().__init__(decoder, memory, small=PLAIN_FUNCTIONS)
        from specbranch.models.gpu import family_kernels, product_kernels

        self._kernels, self._family_kernels = product_kernels, family_kernels
        arch, device, dtype = decoder.arch, memory.data.device, memory.data.dtype
        self._early = begins_early(device)
        self._fused = arch.head_dim in FUSED_HEADS
        self._products = [
            {name: product_of(self._purpose(name), linear, arch) for name, linear in linears_of(layer).items()}
            for layer in decoder.layers
        ]
        self._experts = [None if one.experts is None else expert_products(one.experts, arch) for one in decoder.layers]
        self._head = product_of("head", decoder.head, arch)
        self.takes_chunks = all(product.wide for products in self._products for product in products.values())
        most = MOST_TOTAL_ROWS if self.takes_chunks else MOST_STEP_ROWS
        wide = arch.heads * arch.head_dim
        self._stream, self._scaled = torch.zeros(2, most, arch.hidden, device=device, dtype=dtype)
        self._queries, self._attended = torch.zeros(2, most, wide, device=device, dtype=dtype)
        dense = any("down" in products for products in self._products)
        self._gated = torch.zeros(most, arch.intermediate if dense else 0, device=device, dtype=dtype)
        self._no_counts = torch.zeros(SPREAD_COUNT + 1, dtype=torch.int32, device=device)
        cuts = {name: one[name].cut for name in ("out", "down") for one in reversed(self._products) if name in one}
        self._norms = {
            name: power_of_two(-(-arch.hidden // cuts[name].tile)) if name in cuts else 1 for name in ("out", "down")
        }
        self._squares = {name: torch.zeros(most, count, device=device) for name, count in self._norms.items()}
        widest = -(-arch.hidden // WIDEST["out"]) * WIDEST["out"]
        self._parts = torch.zeros(MOST_STEP_ROWS * widest * max(cut.parts for cut in cuts.values()), device=device)
        self._arrived = torch.zeros(
            MOST_STEP_ROWS // ROW_TILE * max(-(-arch.hidden // cut.tile) for cut in cuts.values()), device=device
        ).int()
        self._scored: dict[int, Tensor] = {}  # by rows
        self._make_further(most)

    def _make_further(self, most: int) -> None:
        """Make what Llama's layers do not need: heads before they are turned, changes before a norm, experts."""
        arch, memory = self.decoder.arch, self.memory.data
        outs = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
        self._raw = memory.new_zeros(0 if self._fused else most, outs)
        after = any(residual.after for layer in self.decoder.layers for residual in layer.form)
        self._changes = torch.zeros(most if after else 0, arch.hidden, device=memory.device)
        form = next((found for layer in self.decoder.layers if (found := experts_of(layer.form))), None)
        spare = (memory.shape[0] - 1) * PAGE
        self._mixture = None if form is None else Mixture(form, arch, most, spare, memory, self._early)

    def _purpose(self, name: str) -> str:
        return "raw" if name == "qkv" and not self._fused else name

    def pin(self) -> None:
        """Do nothing: no sum depends on the size of a step."""

    def forward(self, step: Views, tapped: int = 0) -> tuple[Tensor, Tensor | None]:
        """Run all layers and write keys and values; see `GpuStep.forward`.

        Of rows of prompts the last layer computes keys and values only.
        """
        decoder, seen, rows, total = self.decoder, list[Tensor](), len(step.shared), len(step.tokens)
        untapped, layers = len(decoder.layers) - tapped + 1, len(decoder.layers)
        taps = self.features.fuse.taps if self.features is not None else ()
        stream = dict[int, Tensor]()
        self._embed(step, total)
        for index, layer in enumerate(decoder.layers):
            if tapped and index >= untapped:
                seen.append(self._stream[:rows].clone())
            if index in taps:
                stream[index] = self._stream[:total].clone()
            count = total if index + 1 < layers or layers in taps else rows
            for residual, norm in zip(layer.form, self._next_norms[index], strict=True):
                self._run(index, residual, norm, step, count)
        if self.features is not None:
            stream[layers] = self._stream[:total]
            self.features.write(step.slots.long(), [stream[tap] for tap in taps])
        logits = self._score(rows)
        if not tapped:
            return logits, None
        last = normed(self._stream[:rows], decoder.norm, decoder.arch.rms_eps)
        return logits, torch.cat((*seen, last), -1)

    def _run(self, index: int, residual: Residual, norm: Tensor, step: Views, rows: int) -> None:
        """Run one operation for `rows` rows, and write their input to the next one, which `norm` multiplies."""
        operation, products = residual.operation, self._products[index]
        after = None if residual.after is None else self.decoder.layers[index].norm(residual.after)
        if isinstance(operation, Experts):
            self._mix(index, operation, after, norm, step, rows)
            return
        if isinstance(operation, Attention):
            name, x = "out", self._attend(index, operation, step, rows)
        else:
            self._gate(products["gate_up"], operation.activation, step, rows)
            name, x = "down", self._gated
        if after is None:
            self._add(name, products[name], x, norm, step, rows)
            return
        self._add(name, products[name], x, norm, step, rows, self._changes)
        self._settle(name, self._changes, None, 1, after, norm, rows)

    def _embed(self, step: Views, rows: int) -> None:
        arch, norm, memory = self.decoder.arch, self.decoder.layers[0].attention_norm, self.memory.data
        counts, moves = (
            (step.tokens, step.tokens[None]) if step.counts is None or step.moves is None else (step.counts, step.moves)
        )
        side = arch.kv_heads * arch.head_dim
        self._kernels.embed[(rows + (0 if step.moves is None else 2 * arch.layers),)](
            step.tokens, self.picks, counts, moves, self.decoder.embedding, norm, self._stream, self._scaled,
            self._squares["down"], memory, rows, arch.hidden, moves.stride(0), memory.stride(0),
            WIDTH=power_of_two(arch.hidden), NORMS=self._norms["down"], PIECE=power_of_two(side), SIDE=side, PAGE=PAGE,
            DIM=arch.head_dim, SCALE=self.decoder.embedding_scale, EARLY=self._early, num_warps=8,
            **launch(self._early),
        )  # fmt: skip

    def _attend(self, index: int, attention: Attention, step: Views, count: int) -> Tensor:
        """Write keys and values of all rows, and attend from the first `count` of them."""
        rows, (keys, values) = len(step.tokens), self._sides[index]
        (self._turn if self._fused else self._turn_apart)(index, attention, step, keys, values)
        queries = self._queries[:rows].view(rows, self.decoder.arch.heads, self.decoder.arch.head_dim)
        attended: Tensor = self._attended
        if attention.is_plain:
            self.attend(queries, keys, values, step, attended, count < rows)
        else:
            sinks = self.decoder.layers[index].sinks
            self.attend(queries, keys, values, step, attended, count < rows, attention, sinks)
        return attended

    def _turn(self, index: int, attention: Attention, step: Views, keys: Tensor, values: Tensor) -> None:
        """Compute queries, keys and values of all rows, and write them where they belong."""
        arch, product, rows = self.decoder.arch, self._products[index]["qkv"], len(step.tokens)
        norm = self.decoder.layers[index].qk_norm
        x, weight = product.operands(self._scaled, product.tiles(rows))
        self._kernels.qkv[product.grid(rows)](
            x, weight, *product.tensors(), self._squares["down"], given_or(norm, product.weight),
            *self.decoder.tables[attention.table], step.positions, step.slots, self._counts(step), self._queries, keys,
            values, keys.stride(0), arch.rms_eps, rows, arch.hidden, HEADS=arch.heads, KV_HEADS=arch.kv_heads,
            DIM=arch.head_dim, PAGE=PAGE, BIASED=product.bias is not None, NORMED=norm is not None,
            NORMS=self._norms["down"], **product.how(rows, self._early, step.tiles is not None),
        )  # fmt: skip

    def _turn_apart(self, index: int, attention: Attention, step: Views, keys: Tensor, values: Tensor) -> None:
        """Do as `_turn` in two kernels: the product, then each head of each row."""
        arch, product, rows = self.decoder.arch, self._products[index]["qkv"], len(step.tokens)
        self._normed_product(product, self._raw, step, rows)
        self._family_kernels.turn[(rows, arch.heads + 2 * arch.kv_heads)](
            self._raw, self.decoder.layers[index].qk_norm, *self.decoder.tables[attention.table], step.positions,
            step.slots, self._queries, keys, values, keys.stride(0), arch.rms_eps, HEADS=arch.heads,
            KV_HEADS=arch.kv_heads, DIM=arch.head_dim, HALF=power_of_two(arch.head_dim // 2), PAGE=PAGE,
            EARLY=self._early, num_warps=1, **launch(self._early),
        )  # fmt: skip

    def _add(
        self, name: str, product: Product, x: Tensor, norm: Tensor, step: Views, rows: int, into: Tensor | None = None
    ) -> None:
        """Add a product to the residual stream, or store it in `into`."""
        of_x, weight = product.operands(x, product.tiles(rows))
        self._kernels.added[(*product.grid(rows), product.parts(rows))](
            of_x, weight, *product.tensors(), given_or(into, self._stream), self._scaled, norm, self._squares[name],
            self._parts, self._arrived, self._counts(step), rows, product.outs, product.ins,
            BIASED=product.bias is not None, ONTO=into is None, NORMS=self._norms[name], NORM_TILE=product.cut.tile,
            **product.how(rows, self._early, step.tiles is not None),
        )  # fmt: skip

    def _gate(self, product: Product, activation: Activation, step: Views, rows: int) -> None:
        outs = product.outs // 2
        x, weight = product.operands(self._scaled, product.tiles(rows), pair=True)
        self._kernels.gated[product.grid(rows, outs)](
            x, weight, *product.tensors(), self._squares["out"], self._gated, self._counts(step),
            self.decoder.arch.rms_eps, rows, outs, product.ins, BIASED=product.bias is not None,
            ACTIVATION=ACTIVATIONS[activation], NORMS=self._norms["out"],
            **product.how(rows, self._early, step.tiles is not None),
        )  # fmt: skip

    def _mix(self, index: int, form: Experts, after: Tensor | None, norm: Tensor, step: Views, rows: int) -> None:
        """Add the outputs of the chosen experts to the residual stream."""
        mixture, products = self._mixture, self._experts[index]
        assert mixture is not None and products is not None
        counts = self._counts(step)
        mixture.run(products, self._scaled, self._squares["out"], self._norms["out"], step, counts, rows)
        self._settle("down", mixture.changes, mixture.ids, form.active, after, norm, rows)

    def _settle(
        self, name: str, changes: Tensor, ids: Tensor | None, active: int, after: Tensor | None, norm: Tensor, rows: int
    ) -> None:
        """Add changes to the residual stream, through the norm `after` if there is one."""
        arch = self.decoder.arch
        self._family_kernels.settle[(rows,)](
            changes, ids, self._stream, self._scaled, after, norm, self._squares[name], arch.rms_eps, arch.hidden,
            ACTIVE=active, WIDTH=power_of_two(arch.hidden), NORMS=self._norms[name], EARLY=self._early, num_warps=8,
            **launch(self._early),
        )  # fmt: skip

    def _counts(self, step: Views) -> Tensor:
        return given_or(step.counts, self._no_counts)

    def _score(self, rows: int) -> Tensor:
        product = self._head
        if rows not in self._scored:
            self._scored[rows] = torch.zeros(-(-rows // ROW_TILE) * ROW_TILE, product.outs, device=self._stream.device)[
                :rows
            ]
        out, (_, scale) = self._scored[rows], product.tensors()
        x, weight = product.operands(self._scaled, product.tiles(rows))
        self._kernels.scored[product.grid(rows)](
            x, weight, scale, self._squares["down"], out, self.decoder.arch.rms_eps, rows, product.outs, product.ins,
            SOFTCAP=self.decoder.arch.logit_softcap or 0.0, NORMS=self._norms["down"],
            **product.how(rows, self._early),
        )  # fmt: skip
        return out

    def _normed_product(self, product: Product, out: Tensor, step: Views, rows: int) -> None:
        """Multiply normed rows, and store the product."""
        x, weight = product.operands(self._scaled, product.tiles(rows))
        self._kernels.scored[product.grid(rows)](
            x, weight, product.tensors()[1], self._squares["down"], out, self.decoder.arch.rms_eps, rows, product.outs,
            product.ins, bias=product.bias, counts=self._counts(step), NORMS=self._norms["down"],
            **product.how(rows, self._early, step.tiles is not None),
        )  # fmt: skip


def linears_of(layer: Layer) -> dict[str, Linear]:
    """Return the matrices of a layer by name, without those of experts."""
    found = {name: getattr(layer, name) for name in PRODUCT_NAMES}
    return {name: linear for name, linear in found.items() if linear is not None}


def kernels_fit(decoder: Decoder, memory: Memory) -> bool:
    """True if the kernels support this model: half precision, known matrices and sizes, and attention by Triton."""
    arch, device, dtype = decoder.arch, memory.data.device, memory.data.dtype
    heads = FUSED_HEADS if decoder.plain else (*FUSED_HEADS, *TURNED_HEADS)
    suits = (
        dtype in (torch.bfloat16, torch.float16)
        and arch.head_dim in heads
        and arch.hidden % 64 == 0 == arch.intermediate % 64
        and isinstance(decoder.embedding, Tensor)
        and all(_takes_form(layer.form) for layer in decoder.layers)
    )
    if not suits or not _matrices_fit(decoder):
        return False
    forms = {replace(attention_of(layer.form), table=0) for layer in decoder.layers}
    return all(triton_works(device, dtype, arch.heads, arch.kv_heads, arch.head_dim, form) for form in forms)


def _takes_form(form: LayerForm) -> bool:
    """True if this step computes all that a layer says; a field that it does not know would be left out."""
    attention = computed_by_kernels(attention_of(form))
    return form == layer_form(attention, _mlp_of(form), norms_after=form[0].after is not None)


def _mlp_of(form: LayerForm) -> GatedMlp | Experts:
    operation = form[1].operation
    assert not isinstance(operation, Attention)
    return operation


def _matrices_fit(decoder: Decoder) -> bool:
    """True if the kernels multiply by all matrices, and those of one name are stored alike in all layers."""
    linears: list[dict[str, Any]] = [linears_of(layer) for layer in decoder.layers]
    if not all(takes_matrix(linear) for linear in (decoder.head, *(one for some in linears for one in some.values()))):
        return False
    experts = [layer.experts for layer in decoder.layers if layer.experts is not None]
    if not all(takes_experts(one) for one in experts):
        return False
    kinds: Iterable[set[Any]] = ({alike_in(some[name]) for some in linears if name in some} for name in PRODUCT_NAMES)
    return all(len(found) <= 1 for found in kinds)


def step_of(decoder: Decoder, memory: Memory) -> GpuStep:
    """Return the step of a model: by Triton kernels if they support it, else in torch."""
    return KernelStep(decoder, memory) if kernels_fit(decoder, memory) else GpuStep(decoder, memory)
