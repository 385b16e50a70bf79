"""Llama shapes with random bfloat16 weights, made on the device they run on: what a model of that shape costs, and
nothing else."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from specbranch.config import WeightsName
from specbranch.core.pages import PAGE, Pool
from specbranch.lab.inflation.shapes import SHAPES
from specbranch.models.cache.kv_memory import Memory, Table
from specbranch.models.families.rotary import Rope
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import LayerWeights, Weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows

DTYPE = torch.bfloat16


class Shaped:
    """A decoder of a shape, and a pool for some sequences of it, filled with anything."""

    def __init__(
        self, name: str, device: torch.device, context: int, sequences: int, stored: WeightsName = "bfloat16"
    ) -> None:
        self.arch, self.context = architecture(name), context
        self.pool = Pool(sequences * (context // PAGE + 2))
        self.decoder = Decoder(self.arch, random_weights(self.arch, device, stored), context + PAGE)
        self.memory = Memory(self.arch, self.pool.pages + 1, device, DTYPE)
        self.memory.data.normal_()

    @property
    def matrix_bytes(self) -> int:
        """How much of the weights a step reads."""
        layers = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self.decoder.layers]
        matrices = [self.decoder.head, *chain(*layers)]
        parts = [getattr(matrix, name, None) for matrix in matrices for name in ("weight", "scale")]
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def spare(self) -> int:
        """The KV slot that padding is written to."""
        return self.pool.pages * PAGE

    def rows(self, count: int, sequences: int = 1) -> list[Rows]:
        """Return chains of rows behind the context, one a sequence."""
        found = []
        for _ in range(sequences):
            table = Table(self.pool)
            table.reach(self.context + count)
            seen = [(2 << row) - 1 for row in range(count)]
            found.append(Rows(table, list(range(1, count + 1)), self.context, self.context, seen))
        return found

    def lanes(self, count: int) -> list[Rows]:
        """Return rows of one sequence that follow its context side by side, as in a draft step."""
        table = Table(self.pool)
        table.reach(self.context + count)
        return [Rows(table, list(range(1, count + 1)), self.context, self.context, [1 << row for row in range(count)])]


def architecture(name: str) -> Architecture:
    """Return a Llama of one of the shapes."""
    shape = SHAPES[name]
    return Architecture(
        name=name, family="llama", layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate=shape.intermediate, vocabulary=shape.vocabulary, rms_eps=1e-5,
        rope=Rope(), qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False, tied=False, context_length=1 << 20,
        eos_ids=(), bos_id=None,
    )  # fmt: skip


def random_weights(arch: Architecture, device: torch.device, stored: WeightsName = "bfloat16") -> Weights:
    """Make weights on the device."""

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=DTYPE).normal_(std=shape[-1] ** -0.5)

    def matrix(*shape: int) -> Matrix:
        return Matrix(random(*shape)).stored_as(stored)

    def layer() -> LayerWeights:
        wide, ones = arch.heads * arch.head_dim, torch.ones(arch.hidden, device=device, dtype=DTYPE)
        qkv = matrix(wide + 2 * arch.kv_heads * arch.head_dim, arch.hidden)
        gate_up, down = matrix(2 * arch.intermediate, arch.hidden), matrix(arch.hidden, arch.intermediate)
        return LayerWeights(ones, qkv, None, None, matrix(arch.hidden, wide), ones, gate_up, down)

    layers = tuple(layer() for _ in range(arch.layers))
    norm = torch.ones(arch.hidden, device=device, dtype=DTYPE)
    return Weights(random(arch.vocabulary, arch.hidden), layers, norm, matrix(arch.vocabulary, arch.hidden))
