"""Matrices in the blocks of a GGUF file, laid out so that integer instructions read them in order.

Owns the forms of blocks, and the conversion from a file's bytes to the layout and back to floats. Does not own the
products (`cpu/block_kernels.py`). Invariant: no number is rounded: `widened` returns what `encodings.py` returns for
the same bytes, up to the order of two products.

The layout has contiguous tiles of 8 outputs. For every block of 32 inputs a tile has, in this order:
- the scales of the 8 outputs as float16, two for each output if 16 inputs share one;
- their offsets, if the form has any;
- the numbers: four inputs of output 0, the same four of output 1, and so on, as one instruction multiplies them.
Two nibbles share a byte: input i of a block is the low one, input i + 16 the high one. If a form has supers, each 256
inputs begin with 8 float16 factors of their scales, and 8 of their offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specbranch.models.files.encodings import fields_of, halves_of, sixes_of, unpacked_bits
from specbranch.models.files.matrix import Matrix

BLOCK = 32  # inputs whose numbers lie together
SUPER = 256  # inputs whose scales share a factor
TILE = 8  # outputs that lie together
LOW_HALVES = 0x0F0F0F0F0F0F0F0F  # of eight bytes


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A layout of weights: numbers of 4 or 8 bits in groups that share a scale; no group: one scale per output."""

    bits: Literal[4, 8]
    group: Literal[16, 32] | None
    offsets: bool = False  # a group has an offset beside its scale; then its numbers are not negative
    supers: bool = False  # each 256 inputs have a factor of their scales, and one of their offsets

    @property
    def groups(self) -> int:
        """The number of scales of a block."""
        return BLOCK // self.group if self.group else 0

    @property
    def halves(self) -> int:
        """The number of float16 values of one output's block: scales, then offsets."""
        return self.groups + self.offsets

    @property
    def words(self) -> int:
        """The size of the numbers of one output's block, in words of four bytes."""
        return self.bits

    @property
    def block(self) -> int:
        """The bytes of one block of a tile."""
        return TILE * (2 * self.halves + 4 * self.words)

    @property
    def before(self) -> int:
        """The bytes of the factors before each 256 inputs of a tile."""
        return 2 * TILE * (1 + self.offsets) if self.supers else 0

    def tile_bytes(self, ins: int) -> int:
        """Return the bytes of a whole tile."""
        return ins // BLOCK * self.block + ins // SUPER * self.before


@dataclass(frozen=True, slots=True)
class Fields:
    """The contents of the blocks of some outputs."""

    numbers: Tensor  # bytes [outs, blocks, 4·words]
    halves: Tensor | None = None  # scales and offsets [outs, blocks, …]
    factors: Tensor | None = None  # of 256 inputs [outs, supers, 1 or 2]


def _q4_0(raw: Tensor) -> Fields:
    scale, numbers = fields_of(raw, 2, 16)
    return Fields(numbers ^ 0x88, halves_of(scale))  # nibbles from -8 to 7


def _q4_1(raw: Tensor) -> Fields:
    both, numbers = fields_of(raw, 4, 16)
    return Fields(numbers, halves_of(both))


def _q5_0(raw: Tensor) -> Fields:
    scale, high, low = fields_of(raw, 2, 4, 16)
    return Fields(_five(low, high) - 16, halves_of(scale))


def _q5_1(raw: Tensor) -> Fields:
    both, high, low = fields_of(raw, 4, 4, 16)
    return Fields(_five(low, high), halves_of(both))


def _five(low: Tensor, high: Tensor) -> Tensor:
    return torch.cat((low & 15, low >> 4), -1) | unpacked_bits(high, 1, 1) << 4


def _q8_0(raw: Tensor) -> Fields:
    scale, numbers = fields_of(raw, 2, 32)
    return Fields(numbers, halves_of(scale))


def _q4_k(raw: Tensor) -> Fields:
    factors, sixes, low = fields_of(raw, 4, 12, 128)
    # The low nibbles of 32 bytes are the first 32 of 64 inputs. Each block gets 16 bytes, with its second 16 inputs in
    # the high nibbles; eight bytes at a time.
    first, second = torch.unflatten(low.view(torch.int64), -1, (4, 2, 2)).unbind(2)
    early = (second & LOW_HALVES).bitwise_left_shift_(4).bitwise_or_(first & LOW_HALVES)
    late = (first >> 4).bitwise_and_(LOW_HALVES).bitwise_or_(second & ~LOW_HALVES)
    numbers = torch.stack((early, late), 2).view(torch.uint8)
    return Fields(numbers.view(-1, 8, 16), _scales_and_offsets(sixes), _signed(factors))


def _q5_k(raw: Tensor) -> Fields:
    factors, sixes, high, low = fields_of(raw, 4, 12, 32, 128)
    numbers = unpacked_bits(low, 4, 32) | unpacked_bits(high, 1, 32) << 4  # [n, 256]
    return Fields(numbers.view(-1, 8, 32), _scales_and_offsets(sixes), _signed(factors))


def _q6_k(raw: Tensor) -> Fields:
    low, high, scales, factor = fields_of(raw, 128, 64, 16, 2)
    numbers = (unpacked_bits(low, 4, 64) | unpacked_bits(high, 2, 32) << 4) - 32  # [n, 256]
    return Fields(numbers.view(-1, 8, 32), scales.view(torch.int8).half().view(-1, 8, 2), halves_of(factor))


def _scales_and_offsets(sixes: Tensor) -> Tensor:
    """Return eight scales and eight offsets of a super as float16 [n, 8, 2]."""
    scales, offsets = sixes_of(sixes).unbind(2)
    return torch.stack((scales.flatten(1), offsets.flatten(1)), -1).half()


def _signed(factors: Tensor) -> Tensor:
    """Return a super's two factors; the second is negated, as minima are subtracted."""
    return halves_of(factors) * torch.tensor((1, -1), dtype=torch.float16)


FORMS: dict[str, tuple[BlockForm, Callable[[Tensor], Fields]]] = {
    "Q4_0": (BlockForm(4, 32), _q4_0),
    "Q4_1": (BlockForm(4, 32, offsets=True), _q4_1),
    "Q5_0": (BlockForm(8, 32), _q5_0),
    "Q5_1": (BlockForm(8, 32, offsets=True), _q5_1),
    "Q8_0": (BlockForm(8, 32), _q8_0),
    "Q4_K": (BlockForm(4, 32, offsets=True, supers=True), _q4_k),
    "Q5_K": (BlockForm(8, 32, offsets=True, supers=True), _q5_k),
    "Q6_K": (BlockForm(8, 16, supers=True), _q6_k),
}
ROW_FORM = BlockForm(8, None)  # int8 with a scale for each output


def fits_blocks(ins: int) -> bool:
    """True if this many inputs are whole blocks."""
    return ins % BLOCK == 0


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Some outputs of a matrix in one form: tiles [⌈outs/8⌉, bytes], the last of them padded with zeros."""

    form: BlockForm
    tiles: Tensor
    outs: int
    ins: int
    scale: Tensor | None = None  # [8·tiles]: scales of a form without groups

    @classmethod
    def empty(cls, form: BlockForm, outs: int, ins: int) -> BlockPart:
        """Allocate tiles for this many outputs."""
        many = -(-outs // TILE)
        tiles = torch.empty(many, form.tile_bytes(ins), dtype=torch.uint8)
        if outs % TILE:
            tiles[-1] = 0
        return cls(form, tiles, outs, ins, None if form.group else torch.zeros(TILE * many))

    def split(self, count: int) -> list[BlockPart] | None:
        """Return `count` parts of equally many outputs, which share this one's memory; None unless tiles are whole."""
        size = self.outs // count
        if self.outs % count or size % TILE:
            return None
        tiles = torch.split(self.tiles, size // TILE)
        scales = [None] * count if self.scale is None else list(torch.split(self.scale, size))
        return [BlockPart(self.form, some, size, self.ins, scale) for some, scale in zip(tiles, scales, strict=True)]

    def put(self, start: int, fields: Fields) -> None:
        """Write outputs from `start` on, which must be a multiple of 8."""
        outs = fields.numbers.numel() * 8 // (self.form.bits * self.ins)
        full = outs // TILE * TILE
        for first, last in ((0, full), (full, outs)):  # whole tiles, then what is left
            if last > first:
                self._put(
                    start + first,
                    *(
                        None if part is None else part.view(outs, -1)[first:last]
                        for part in (fields.numbers.contiguous(), fields.halves, fields.factors)
                    ),
                )

    def _put(self, start: int, numbers: Tensor | None, halves: Tensor | None, factors: Tensor | None) -> None:
        assert numbers is not None
        lanes = min(TILE, numbers.shape[0])
        fields = self._fields_in(self.tiles[start // TILE : start // TILE + numbers.shape[0] // lanes])
        for field, part in zip(fields, (numbers.view(torch.int32), halves, factors), strict=True):
            if part is not None:
                # the field is [tiles, …, 8]
                field[..., :lanes].copy_(part.reshape(field.shape[0], lanes, *field.shape[1:-1]).movedim(1, -1))

    def _fields_in(self, tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the fields of some tiles.

        Words of the numbers: [tiles, blocks, words, 8]; halves: [tiles, blocks, halves, 8]; factors: [tiles, supers, 1
        or 2, 8].
        """
        form, many = self.form, tiles.shape[0]
        supers = self.ins // SUPER if form.supers else 1
        whole = tiles.view(many, supers, -1)
        blocks = torch.unflatten(whole[..., form.before :], -1, (-1, form.block))
        cut = 2 * TILE * form.halves
        words = torch.unflatten(blocks[..., cut:].view(torch.int32), -1, (form.words, TILE))
        halves = torch.unflatten(blocks[..., :cut].view(torch.float16), -1, (form.halves, TILE))
        own = whole[..., : form.before].view(torch.float16)
        factors = torch.unflatten(own, -1, (form.before // (2 * TILE), TILE))
        return words, halves, factors

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights [outs, ins] in floats."""
        return self.rows(torch.arange(self.outs), dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights of some outputs [ids, ins] in floats."""
        tile, lane = ids // TILE, ids % TILE
        at = torch.arange(len(ids))
        words, halves, factors = (
            field[tile].movedim(-1, 1)[at, lane].contiguous() for field in self._fields_in(self.tiles)
        )  # [ids, supers, blocks, …]
        numbers = self._numbers(words).to(dtype)  # [ids, supers, blocks, 32]
        if self.scale is not None:
            return numbers.view(len(ids), -1) * self.scale[ids].to(dtype).unsqueeze(-1)
        form, halves = self.form, halves.to(dtype)
        own = factors.to(dtype).unsqueeze(2) if form.supers else halves.new_ones(1, 1, 1, 2)  # [ids, supers, 1, 2]
        scales = halves[..., : form.groups] * own[..., :1]
        out = torch.unflatten(numbers, -1, (form.groups, -1)) * scales.unsqueeze(-1)
        if form.offsets:
            out = out + (halves[..., form.groups :] * own[..., 1:]).unsqueeze(-1)
        return out.reshape(len(ids), self.ins)

    def _numbers(self, words: Tensor) -> Tensor:
        packed = words.view(torch.uint8)
        if self.form.bits == 8:
            return packed.view(torch.int8)
        numbers = torch.cat((packed & 15, packed >> 4), -1)
        return numbers if self.form.offsets else (numbers ^ 8).to(torch.int8) - 8


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix in blocks: parts one below the other, and one bias for all."""

    parts: tuple[BlockPart, ...]
    bias: Tensor | None = None
    stored: Literal["stored"] = "stored"

    @property
    def ins(self) -> int:
        """How many inputs there are."""
        return self.parts[0].ins

    @property
    def outs(self) -> int:
        """How many outputs there are."""
        return sum(part.outs for part in self.parts)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [outs, ins] in floats."""
        return torch.cat([part.widened(dtype) for part in self.parts])

    def split(self, count: int) -> tuple[BlockMatrix, ...]:
        """Return `count` matrices of equally many parts each."""
        assert self.bias is None
        size = len(self.parts) // count
        return tuple(BlockMatrix(self.parts[at : at + size]) for at in range(0, count * size, size))

    def rows(self, ids: Tensor) -> Matrix:
        """Return some of the outputs, in float32."""
        ends = torch.tensor([0, *(part.outs for part in self.parts)]).cumsum(0)
        weight = torch.empty(len(ids), self.ins)
        for part, start, end in zip(self.parts, ends[:-1], ends[1:], strict=True):
            here = (ids >= start) & (ids < end)
            weight[here] = part.rows(ids[here] - start)
        return Matrix(weight, None if self.bias is None else self.bias[ids])


AnyMatrix = Matrix | BlockMatrix


def in_blocks(matrix: Matrix) -> BlockMatrix:
    """Lay out an int8 matrix in blocks."""
    assert matrix.stored == "int8" and matrix.scale is not None
    outs, ins = matrix.weight.shape
    part = BlockPart.empty(ROW_FORM, outs, ins)
    part.put(0, Fields(matrix.weight.view(torch.uint8).view(outs, -1, BLOCK)))
    assert part.scale is not None
    part.scale[:outs] = matrix.scale
    return BlockMatrix((part,), matrix.bias)
