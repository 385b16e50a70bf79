"""The weights of a layer with experts: the router, and the experts' matrices one below the other.

Owns the three layouts of files: tensors for each expert, one tensor for all (GGUF), and gpt-oss's transposed tensors,
in floats or in MXFP4. Invariant: whatever the layout, expert e has rows e·2·intermediate on of `gate_up`, its gates
before its ups, and rows e·hidden on of `down`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specbranch.errors import ModelError
from specbranch.models.families.operations import Experts
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.block_reader import BlockRows, read_parts
from specbranch.models.files.blocks import BlockMatrix, BlockPart
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.quantised.checkpoint import QuantisedCheckpoint
from specbranch.models.files.tensor_file import TensorSource

Name = Callable[[str, str, int, int], str]  # of a part, with a suffix, in a layer, of an expert
# The values of a nibble in MXFP4: a sign, two bits of exponent, one of mantissa. 32 of them share a power of two.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_GROUP, EXPONENT_BIAS = 32, 127


@dataclass(frozen=True, slots=True)
class ExpertReader:
    """Reads the parts of a layer with experts."""

    arch: Architecture
    experts: Experts
    source: TensorSource
    device: torch.device
    dtype: torch.dtype  # that matrices are read in
    name: Name

    def router(self, layer: int, dtype: torch.dtype) -> Matrix:
        """Read the router [experts, hidden]."""
        weight = self._read("router", ".weight", layer, (self.experts.count, self.arch.hidden), dtype)
        biased = self.experts.biased
        return Matrix(weight, self._read("router", ".bias", layer, (self.experts.count,), dtype) if biased else None)

    def in_blocks(self, layer: int) -> tuple[BlockMatrix | None, BlockMatrix | None]:
        """Read both matrices in a GGUF file's blocks; None where it has none, or they are no whole tiles."""
        inner, hidden = self.experts.intermediate, self.arch.hidden
        sides = [self._blocks(part, layer, inner, hidden) for part in ("expert_gate", "expert_up")]
        down = self._blocks("expert_down", layer, hidden, inner)
        gate_up = None
        if (gates := sides[0]) is not None and (ups := sides[1]) is not None:
            gate_up = BlockMatrix(tuple(part for pair in zip(gates, ups, strict=True) for part in pair))
        return gate_up, None if down is None else BlockMatrix(tuple(down))

    def _blocks(self, part: str, layer: int, outs: int, ins: int) -> list[BlockPart] | None:
        assert isinstance(self.source, GgufFile)
        count = self.experts.count
        rows = BlockRows(self.name(part, ".weight", layer, 0), count * outs, matrices=count)
        found = read_parts(self.source, [rows], ins, leading=False)
        return None if found is None else found[0].split(count)

    def as_stored(self, layer: int) -> tuple[Matrix | None, Matrix | None]:
        """Read both matrices as a quantised checkpoint stores them; None where it does not, or differs by expert."""
        if not isinstance(self.source, QuantisedCheckpoint) or self.arch.of_family.expert_files != "separate":
            return None, None
        inner, hidden = self.experts.intermediate, self.arch.hidden
        gate_up = {self._module(part, layer, one): inner for one in self._all for part in ("expert_gate", "expert_up")}
        down = {self._module("expert_down", layer, one): hidden for one in self._all}
        source, device = self.source, self.device
        return source.matrix(gate_up, hidden, device), source.matrix(down, inner, device)

    @property
    def _all(self) -> range:
        return range(self.experts.count)

    def _module(self, part: str, layer: int, expert: int) -> str:
        return self.name(part, ".weight", layer, expert).removesuffix(".weight")

    def gate_up(self, layer: int) -> Matrix:
        """Read gates and ups [experts·2·intermediate, hidden]."""
        count, inner, hidden = self.experts.count, self.experts.intermediate, self.arch.hidden
        if self.arch.of_family.expert_files == "gpt_oss":
            # gates and ups take turns
            parted = self._transposed("expert_gate_up", layer, 2 * inner, hidden).view(count, inner, 2, hidden)
            bias = self._read("expert_gate_up", "_bias", layer, (count, 2 * inner)).view(count, inner, 2)
            return Matrix(_flat(parted.transpose(1, 2)), bias.transpose(1, 2).flatten())
        whole = self._empty((count, 2, inner, hidden))
        for side, part in enumerate(("expert_gate", "expert_up")):
            self._read_each(part, layer, whole[:, side])
        return Matrix(_flat(whole))

    def down(self, layer: int) -> Matrix:
        """Read the matrices behind the gates [experts·hidden, intermediate]."""
        count, inner, hidden = self.experts.count, self.experts.intermediate, self.arch.hidden
        if self.arch.of_family.expert_files == "gpt_oss":
            bias = self._read("expert_down", "_bias", layer, (count, hidden)).flatten()
            return Matrix(_flat(self._transposed("expert_down", layer, hidden, inner)), bias)
        whole = self._empty((count, hidden, inner))
        self._read_each("expert_down", layer, whole)
        return Matrix(_flat(whole))

    def _read_each(self, part: str, layer: int, into: Tensor) -> None:
        """Read a part of all experts [experts, outs, ins]."""
        if isinstance(self.source, GgufFile):
            into.copy_(self._read(part, ".weight", layer, tuple(into.shape)))
            return
        for expert, matrix in enumerate(into):
            self.source.read(self.name(part, ".weight", layer, expert), matrix)

    def _transposed(self, part: str, layer: int, outs: int, ins: int) -> Tensor:
        """Read a part that gpt-oss stores as [experts, ins, outs], or in MXFP4 as [experts, outs, ins]."""
        if self.name(part, "_blocks", layer, 0) in self.source:
            return self._from_mxfp4(part, layer, outs, ins)
        return self._read(part, "", layer, (self.experts.count, ins, outs)).transpose(1, 2)

    def _from_mxfp4(self, part: str, layer: int, outs: int, ins: int) -> Tensor:
        if ins % MXFP4_GROUP:
            raise ModelError(
                f"{self.source.name} stores {part} of {ins} inputs in MXFP4; expected a multiple of {MXFP4_GROUP}, the "
                "numbers that share a scale. The file may be damaged: fetch it again."
            )
        groups = ins // MXFP4_GROUP
        whole = self._empty((self.experts.count, outs, groups, MXFP4_GROUP))
        shape = (self.experts.count, outs, groups)
        blocks = self._read(part, "_blocks", layer, (*shape, MXFP4_GROUP // 2), torch.uint8)
        scales = self._read(part, "_scales", layer, shape, torch.uint8)
        values = torch.tensor(FP4, device=self.device)
        for expert in range(self.experts.count):  # one at a time: float32 takes eight times the room of MXFP4
            nibbles = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), -1).flatten(-2).long()
            whole[expert] = torch.ldexp(values[nibbles], scales[expert].int().sub_(EXPONENT_BIAS).unsqueeze(-1))
        return whole.flatten(-2)

    def _read(
        self, part: str, suffix: str, layer: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        into = self._empty(shape, dtype)
        self.source.read(self.name(part, suffix, layer, 0), into)
        return into

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)


def _flat(whole: Tensor) -> Tensor:
    """Put the matrices of all experts one below the other."""
    return whole.reshape(-1, whole.shape[-1]).contiguous()
