"""Linear layers on weights in GGUF blocks, by integer instructions: activations are rounded to int8 in blocks of 32.

Owns the compiled code, its launch on torch's threads, and the reference in plain torch (`BlockTwin`).
`block_kernel_text.py` owns the LLVM text. Invariant: a row's result depends on that row alone, at any number of rows
and threads.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specbranch.models.cpu.block_kernel_text import Dot, Target, source
from specbranch.models.cpu.kernels import THREAD_BYTES, is_arm
from specbranch.models.cpu.linear import forced_kind
from specbranch.models.cpu.machine_code import CannotCompile, Team, compile_text, host_features, torch_team
from specbranch.models.cpu.rounding_text import ROUNDED, rounding
from specbranch.models.cpu.thread_pace import threads_now
from specbranch.models.files.blocks import BLOCK, SUPER, TILE, BlockForm, BlockMatrix, BlockPart, Fields

ROWS_AT_ONCE = 1 << 19  # bytes of rounded rows that are multiplied at once: they stay in the L2 cache
# Features of ARM processors on Linux: the entry in the auxiliary vector, and its bit.
DOTPROD, I8MM = (16, 1 << 20), (26, 1 << 13)
# Features that LLVM does not detect itself.
DOT_FEATURES: dict[Dot, str] = {"smmla": "+dotprod,+i8mm", "sdot": "+dotprod"}

_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Numbers = ctypes.c_int64 * 11


@dataclass(frozen=True, slots=True)
class BlockCode:
    """Compiled code that threads run together; its first argument counts the items taken."""

    engine: Any  # owns the code
    address: int
    alone: Callable[[Any], None]
    team: Team | None

    def __call__(self, *arguments: int) -> None:
        """Run the code on all threads of torch's pool."""
        numbers, threads = _Numbers(0, *arguments), threads_now()
        if self.team is None or threads == 1:
            self.alone(ctypes.addressof(numbers))
        else:
            self.team(self.address, numbers, threads, 0)


class BlockLinear:
    """x ↦ x·Wᵀ + b by the compiled code, at any number of rows."""

    kind = "blocks"

    def __init__(self, matrix: BlockMatrix) -> None:
        self.matrix, self.outs, self.ins = matrix, matrix.outs, matrix.ins
        self._round = _rounding()
        self._parts = [(_code(part.form), part, bias) for part, bias in zip(matrix.parts, _biases(matrix), strict=True)]

    @property
    def blocks(self) -> int:
        """The number of blocks of inputs."""
        return self.ins // BLOCK

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        flat = x.reshape(-1, self.ins).contiguous()
        y = torch.empty(flat.shape[0], self.outs)
        some = max(ROWS_AT_ONCE // (self.blocks * ROUNDED), 1)
        for rows, out in zip(torch.split(flat, some), torch.split(y, some), strict=True):
            self._apply(rows, out)
        return y.view(*x.shape[:-1], self.outs)

    def _apply(self, x: Tensor, y: Tensor) -> None:
        rounded = torch.empty(x.shape[0], self.blocks * ROUNDED, dtype=torch.uint8)
        code, *arguments = self.rounding(x.data_ptr(), rounded.data_ptr(), x.shape[0])
        code(*arguments)
        for code, *arguments in self.products(rounded.data_ptr(), y.data_ptr(), x.shape[0]):
            code(*arguments)

    def rounding(self, x: int, rounded: int, rows: int) -> tuple[Any, ...]:
        """Return the code that rounds the rows at address `x`, and its arguments."""
        return self._round, x, rounded, rows, self.blocks

    def products(self, rounded: int, y: int, rows: int) -> Iterator[tuple[Any, ...]]:
        """Yield the codes that multiply the rows at address `rounded`, in order, each with its arguments."""
        for code, part, bias in self._parts:
            scale = 0 if part.scale is None else part.scale.data_ptr()
            yield (
                code, rounded, part.tiles.data_ptr(), bias.data_ptr(), y, rows, self.blocks, part.outs,
                tiles_at_a_time(part), scale, 4 * self.outs,
            )  # fmt: skip
            y += 4 * part.outs


class BlockTwin:
    """The reference in plain torch: rounded rows and weights, both converted to floats."""

    kind = "torch"

    def __init__(self, matrix: BlockMatrix) -> None:
        self.matrix = matrix

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return F.linear(rounded_rows(x), self.matrix.widened(torch.float32), self.matrix.bias)


def rounded_rows(x: Tensor) -> Tensor:
    """Return rows after rounding to int8, as floats."""
    blocks = torch.unflatten(x, -1, (-1, BLOCK))
    greatest = blocks.abs().amax(-1, keepdim=True)
    numbers = (blocks * torch.where(greatest == 0, 0.0, 127 / greatest)).round()
    return (numbers * (greatest / 127)).flatten(-2)


def block_linear(matrix: BlockMatrix) -> BlockLinear | BlockTwin:
    """Return the linear layer of a matrix in blocks."""
    compiled = runs_blocks(torch.device("cpu"), (part.form for part in matrix.parts))
    return BlockLinear(matrix) if compiled else BlockTwin(matrix)


def tiles_at_a_time(part: BlockPart) -> int:
    """Return how many tiles a thread takes at once, so that every thread has several turns."""
    tiles, size = part.tiles.shape
    return max(1, min(THREAD_BYTES // size, tiles // (4 * torch.get_num_threads())))


def runs_blocks(device: torch.device, forms: Iterable[BlockForm]) -> bool:
    """True if integer products of these forms run on this device."""
    return device.type == "cpu" and forced_kind() in (None, "llvm") and all(map(multiplies, forms))


def multiplies(form: BlockForm) -> bool:
    """True if this machine has correct code for a form; tested, as it may never have run on such a processor."""
    try:
        _code(form), _rounding()
    except CannotCompile:
        return False
    return _right(form)


@cache
def _right(form: BlockForm) -> bool:
    """Compare the code with the reference on a small matrix."""
    outs, ins, made = 2 * TILE + 3, SUPER, torch.Generator().manual_seed(0)
    part = BlockPart.empty(form, outs, ins)
    numbers = torch.randint(
        0, 256 if form.bits == 4 or not form.offsets else 128, (outs, ins // BLOCK, 4 * form.words), generator=made
    )
    halves = torch.randn(outs, ins // BLOCK, form.halves, generator=made).half() if form.halves else None
    factors = torch.randn(outs, 1, 1 + form.offsets, generator=made).half() if form.supers else None
    part.put(0, Fields(numbers.to(torch.uint8), halves, factors))
    if part.scale is not None:
        part.scale[:] = torch.randn(len(part.scale), generator=made)
    matrix, x = BlockMatrix((part,), torch.randn(outs, generator=made)), torch.randn(5, ins, generator=made)
    exact = BlockTwin(matrix)(x)
    return torch.allclose(BlockLinear(matrix)(x), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


def _biases(matrix: BlockMatrix) -> list[Tensor]:
    """Return the bias of each part, padded to whole tiles."""
    whole = torch.zeros(matrix.outs) if matrix.bias is None else matrix.bias
    own = torch.split(whole, [part.outs for part in matrix.parts])
    return [F.pad(bias, (0, -len(bias) % TILE)).contiguous() for bias in own]


@cache
def _code(form: BlockForm) -> BlockCode:
    """Compile the product for this machine, once per process and form."""
    errors = []
    for dot in _dots():
        try:
            return _compiled(source(form, Target(dot)), "work", DOT_FEATURES.get(dot, ""))
        except CannotCompile as error:  # an older LLVM has other names for some instructions
            errors.append(str(error))
    raise CannotCompile("; ".join(errors))


@cache
def _rounding() -> BlockCode:
    return _compiled(rounding(), "round")


def _compiled(text: str, name: str, more: str = "") -> BlockCode:
    engine = compile_text(text, optimise=False, more=more)
    address = engine.get_function_address(name)
    return BlockCode(engine, address, _Work(address), torch_team())


def _dots() -> tuple[Dot, ...]:
    """Return the dot product instructions of this machine, the best first."""
    if is_arm():
        several: tuple[Dot, ...] = ("smmla",) if _has(I8MM, "FEAT_I8MM") else ()
        return (*several, "sdot", "plain") if _has(DOTPROD, "FEAT_DotProd") else ("plain",)
    features = host_features()
    if not (features.get("avx2") and features.get("fma") and features.get("f16c")):
        return ()
    new = features.get("avxvnni") or (features.get("avx512vnni") and features.get("avx512vl"))
    return ("vnni", "avx2") if new else ("avx2",)


def integer_products() -> str:
    """Return the name of the integer dot product instruction in use; empty if there is none."""
    try:
        return next(iter(_dots()), "")
    except CannotCompile:
        return ""


def _has(bit: tuple[int, int], name: str) -> bool:
    """True if this ARM processor has a feature: by its bit on Linux, or by its name on macOS."""
    if platform.system() == "Darwin":
        value, size = ctypes.c_int(0), ctypes.c_size_t(4)
        asked = f"hw.optional.arm.{name}".encode()
        failed = ctypes.CDLL(None).sysctlbyname(asked, ctypes.byref(value), ctypes.byref(size), None, 0)
        return not failed and bool(value.value)
    if not Path("/proc/self/auxv").exists():
        return False
    look = ctypes.CDLL(None).getauxval
    look.argtypes, look.restype = (ctypes.c_ulong,), ctypes.c_ulong
    return bool(look(bit[0]) & bit[1])
