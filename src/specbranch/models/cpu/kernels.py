"""A matrix product for few rows on CPUs, as machine code: its LLVM text, and its launch on torch's threads.

BLAS repacks the weights if there is more than one row, which dominates a decode step of 2 to 16 rows. Here each weight
is read once for all rows. Weights are float32, or int8 with a scale for each output. int8 has a quarter of the bytes
and becomes float32 in registers; on processors that convert slowly, the same integers are stored as bfloat16. Owns
neither weights nor the choice of a kernel (`linear.py`).

Invariant: each element of the result is one chain of fused multiply-adds in a fixed order, for any number of rows and
threads. So a row has the same bits alone and among others.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from specbranch.models.cpu.machine_code import CannotCompile, Team, compile_text, host_features, loaded, torch_team
from specbranch.models.cpu.thread_pace import threads_now

WeightBits = Literal["float32", "bfloat16", "int8"]
WEIGHT_BYTES: dict[WeightBits, int] = {"float32": 4, "bfloat16": 2, "int8": 1}  # bytes of a weight

THREAD_BYTES = 1 << 18  # bytes of weights that a thread takes at a time; with fewer, more prefetched data is wasted
TILE_ROWS = 4  # rows of a tile; more rows read the tile's weights again, from the L1 cache

_Arguments = ctypes.c_int64 * 10
_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Machine:
    """The vector width, the outputs of a tile whose sums fit the registers, and the vectors of a row per loop turn."""

    lanes: int
    outs: int
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """Compiled code for y = x·Wᵀ + b on contiguous float32 rows and stored weights; its arguments are addresses."""

    engine: Any  # owns the code
    work: int
    alone: Callable[[Any], None]  # runs `work` on the calling thread
    team: Team | None  # runs `work` on all threads of torch's pool

    def __call__(
        self, x: int, weight: int, bias: int, y: int, rows: int, ins: int, outs: int, part: int, scale: int = 0
    ) -> None:
        """Write the product of the rows at `x` to `y`.

        `bias`: 0 for none. `part`: from `outputs_at_a_time`. `scale`: only of int8 weights.
        """
        # The first number counts the outputs taken so far. Threads take the next part, so a slow one delays no other.
        arguments = _Arguments(0, x, weight, bias, y, rows, ins, outs, part, scale)
        threads = threads_now()
        if self.team is None or threads == 1:
            self.alone(arguments)
        else:
            self.team(self.work, arguments, threads, 0)


def outputs_at_a_time(ins: int, outs: int, size: int = 4) -> int:
    """Return how many outputs a thread takes at once: whole tiles, and several turns for every thread.

    `size`: bytes of a weight.
    """
    return max(4, min(THREAD_BYTES // (size * ins), outs // (4 * torch.get_num_threads())) // 4 * 4)


@cache
def load_kernel(stored: WeightBits = "float32") -> Kernel | None:
    """Compile the kernel for this machine, once per process; None if that is impossible.

    Call it before weights are loaded: the compiler's memory is released at the end, and does not add to the peak.
    """
    try:
        machine = _machine(host_features(), stored)
        if machine is None:
            return None
        # No optimisation passes: the text needs none, and without them compiling takes 0.05 s.
        engine = compile_text(source(machine, stored), optimise=False)
    except CannotCompile:
        return None
    work = engine.get_function_address("work")
    return Kernel(engine, work, _Work(work), torch_team())


def _machine(features: dict[str, bool], stored: WeightBits = "float32") -> Machine | None:
    small = stored != "float32"  # 16 of them are one or two loads on every machine, then several vectors
    if is_arm():
        return {"float32": Machine(4, 4, turns=4), "bfloat16": Machine(8, 2), "int8": Machine(16, 1)}[stored]
    if not features.get("fma"):
        return None  # without FMA each multiply-add would be a library call
    if features.get("avx512f"):
        return Machine(lanes=16, outs=4)
    return Machine(lanes=16, outs=1) if small else Machine(lanes=8, outs=2)


def is_arm() -> bool:
    """True on a 64-bit ARM processor."""
    return platform.machine() in ("aarch64", "arm64")


def whole_numbers() -> WeightBits:
    """Return how to store int8 weights on this machine: as int8, or on ARM as bfloat16.

    An ARM core takes two cycles to convert a vector of int8 to floats, an x86 core half a cycle.
    """
    return "bfloat16" if is_arm() else "int8"


def source(machine: Machine, stored: WeightBits = "float32") -> str:
    """Write the kernel as LLVM text: tiles of every size, a loop over the rows, and the work of one thread."""
    lanes, wide = machine.lanes, machine.outs
    sizes = dict.fromkeys((wide, 1))
    tiles = [
        _Tile(outs, rows, lanes, stored, machine.turns).source() for outs in sizes for rows in range(1, TILE_ROWS + 1)
    ]
    return "\n".join([_DECLARATIONS.format(L=lanes), *tiles, *map(_all_rows, sizes), _work(wide, stored)])


_KINDS: dict[WeightBits, str] = {"float32": "float", "bfloat16": "i16", "int8": "i8"}  # in LLVM's language
_SUFFIXES: dict[WeightBits, str] = {"float32": "f32", "bfloat16": "i16", "int8": "i8"}  # of its functions


_DECLARATIONS = """
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <{L} x float> @llvm.fma.v{L}f32(<{L} x float>, <{L} x float>, <{L} x float>)
declare <{L} x i1> @llvm.get.active.lane.mask.v{L}i1.i64(i64, i64)
declare <{L} x float> @llvm.masked.load.v{L}f32.p0(ptr, i32, <{L} x i1>, <{L} x float>)
declare <{L} x i16> @llvm.masked.load.v{L}i16.p0(ptr, i32, <{L} x i1>, <{L} x i16>)
declare <{L} x i8> @llvm.masked.load.v{L}i8.p0(ptr, i32, <{L} x i1>, <{L} x i8>)
"""


@dataclass(frozen=True, slots=True)
class _Tile:
    """A function for a few outputs times a few rows, all sums in registers.

    In the templates, o counts outputs, r counts rows, and L is the number of vector lanes. Each sum is a vector of L
    partial sums over every L-th element, added in halves at the end. That order is the same for every tile size, which
    gives the invariant of this module.
    """

    outs: int
    rows: int
    lanes: int
    stored: WeightBits
    turns: int

    def source(self) -> str:
        arguments = "ptr %x, ptr %w, ptr %scale, ptr %bias, ptr %y, i64 %n, i64 %stride"
        head = f"define internal void @tile{self.outs}x{self.rows}({arguments}) {{"
        return "\n".join(
            [head, self._begin(), self._long_loop(), self._loop(), self._ragged_end(), self._fold(), self._store(), "}"]
        )

    def _each_out(self, template: str) -> str:
        return "\n".join(template.format(o=o, L=self.lanes) for o in range(self.outs))

    def _each_row(self, template: str) -> str:
        return "\n".join(template.format(r=r, L=self.lanes) for r in range(self.rows))

    def _each(self, template: str) -> str:
        return "\n".join(template.format(o=o, r=r, L=self.lanes) for o in range(self.outs) for r in range(self.rows))

    def _begin(self) -> str:
        return f"""begin:
  %whole = and i64 %n, {-self.lanes}
  %ahead = mul i64 %n, {self.outs}
{self._each_out("  %w.at{o} = mul i64 %n, {o}")}
{self._each_out(f"  %w{{o}} = getelementptr {_KINDS[self.stored]}, ptr %w, i64 %w.at{{o}}")}
{self._each_row("  %x.at{r} = mul i64 %n, {r}")}
{self._each_row("  %x{r} = getelementptr float, ptr %x, i64 %x.at{r}")}
  %far = and i64 %n, {-self.lanes * self.turns}
  %any.far = icmp sgt i64 %far, 0
  br i1 %any.far, label %long, label %short"""

    def _long_loop(self) -> str:
        """Write the loop over several vectors a turn, and the jump to the loop over the rest; both keep the order."""
        kind = _KINDS[self.stored]
        turns = "\n".join(self._turn(turn) for turn in range(self.turns))
        sums = f"phi <{{L}} x float> [zeroinitializer, %begin], [%sofar{{o}}.{{r}}.{self.turns}, %long]"
        return f"""long:
  %lk = phi i64 [0, %begin], [%lk.next, %long]
{self._each("  %sofar{o}.{r}.0 = " + sums)}
{self._each_out(f"  %lw{{o}} = getelementptr {kind}, ptr %w{{o}}, i64 %lk")}
{self._each_out(f"  %ln{{o}} = getelementptr {kind}, ptr %lw{{o}}, i64 %ahead")}
{self._each_out("  call void @llvm.prefetch.p0(ptr %ln{o}, i32 0, i32 2, i32 1)")}
{self._each_row("  %lx{r} = getelementptr float, ptr %x{r}, i64 %lk")}
{turns}
  %lk.next = add i64 %lk, {self.lanes * self.turns}
  %lk.more = icmp slt i64 %lk.next, %far
  br i1 %lk.more, label %long, label %short
short:
{self._each("  %start{o}.{r} = " + sums)}
  %any = icmp slt i64 %far, %whole
  br i1 %any, label %loop, label %looped"""

    def _turn(self, turn: int) -> str:
        kind, at = _KINDS[self.stored], turn * self.lanes
        fused = _fused(f"t{turn}w{{o}}", f"t{turn}x{{r}}", f"sofar{{o}}.{{r}}.{turn}")
        return f"""{self._each_out(f"  %t{turn}wp{{o}} = getelementptr {kind}, ptr %lw{{o}}, i64 {at}")}
{self._weights("load {kind}, ptr %t" + str(turn) + "wp{o}, align {bytes}", f"t{turn}w")}
{self._each_row(f"  %t{turn}xp{{r}} = getelementptr float, ptr %lx{{r}}, i64 {at}")}
{self._each_row(f"  %t{turn}x{{r}} = load <{{L}} x float>, ptr %t{turn}xp{{r}}, align 4")}
{self._each(f"  %sofar{{o}}.{{r}}.{turn + 1} = {fused}")}"""

    def _loop(self) -> str:
        # Prefetch the next tile's weights while this one's are in use: rows of weights are too short for the hardware
        # prefetcher. They go to the L2 cache (2), as L1 is full. Beyond the end of the memory a prefetch does nothing.
        return f"""loop:
  %k = phi i64 [%far, %short], [%k.next, %loop]
{self._each("  %old{o}.{r} = phi <{L} x float> [%start{o}.{r}, %short], [%new{o}.{r}, %loop]")}
{self._each_out(f"  %wp{{o}} = getelementptr {_KINDS[self.stored]}, ptr %w{{o}}, i64 %k")}
{self._weights("load {kind}, ptr %wp{o}, align {bytes}", "wv")}
{self._each_out(f"  %wn{{o}} = getelementptr {_KINDS[self.stored]}, ptr %wp{{o}}, i64 %ahead")}
{self._each_out("  call void @llvm.prefetch.p0(ptr %wn{o}, i32 0, i32 2, i32 1)")}
{self._each_row("  %xp{r} = getelementptr float, ptr %x{r}, i64 %k")}
{self._each_row("  %xv{r} = load <{L} x float>, ptr %xp{r}, align 4")}
{self._each("  %new{o}.{r} = " + _fused("wv{o}", "xv{r}", "old{o}.{r}"))}
  %k.next = add i64 %k, {self.lanes}
  %more = icmp slt i64 %k.next, %whole
  br i1 %more, label %loop, label %looped"""

    def _ragged_end(self) -> str:
        load = "call <{L} x float> @llvm.masked.load.v{L}f32.p0"
        masked = "i32 4, <{L} x i1> %mask, <{L} x float> zeroinitializer)"
        load_weights = f"call {{kind}} @llvm.masked.load.v{{L}}{_SUFFIXES[self.stored]}.p0"
        load_weights += "(ptr %wr{o}, i32 {bytes}, <{L} x i1> %mask, {kind} zeroinitializer)"
        return f"""looped:
{self._each("  %sum{o}.{r} = phi <{L} x float> [%start{o}.{r}, %short], [%new{o}.{r}, %loop]")}
  %ragged = icmp slt i64 %whole, %n
  br i1 %ragged, label %rest, label %fold
rest:
  %mask = call <{self.lanes} x i1> @llvm.get.active.lane.mask.v{self.lanes}i1.i64(i64 %whole, i64 %n)
{self._each_out(f"  %wr{{o}} = getelementptr {_KINDS[self.stored]}, ptr %w{{o}}, i64 %whole")}
{self._weights(load_weights, "wm")}
{self._each_row("  %xr{r} = getelementptr float, ptr %x{r}, i64 %whole")}
{self._each_row("  %xm{r} = " + load + "(ptr %xr{r}, " + masked)}
{self._each("  %end{o}.{r} = " + _fused("wm{o}", "xm{r}", "sum{o}.{r}"))}
  br label %fold"""

    def _weights(self, load: str, name: str) -> str:
        """Write the loads of each output's next weights, converted to floats; `load` has fields for type and size."""
        kind = f"<{self.lanes} x {_KINDS[self.stored]}>"
        loaded = load.replace("{kind}", kind).replace("{bytes}", str(WEIGHT_BYTES[self.stored]))
        if self.stored == "float32":
            return self._each_out(f"  %{name}{{o}} = {loaded}")
        if self.stored == "bfloat16":  # the upper half of a float32
            return self._each_out(f"""  %{name}.small{{o}} = {loaded}
  %{name}.wide{{o}} = zext {kind} %{name}.small{{o}} to <{{L}} x i32>
  %{name}.bits{{o}} = shl <{{L}} x i32> %{name}.wide{{o}}, splat (i32 16)
  %{name}{{o}} = bitcast <{{L}} x i32> %{name}.bits{{o}} to <{{L}} x float>""")
        return self._each_out(f"""  %{name}.small{{o}} = {loaded}
  %{name}.whole{{o}} = sext {kind} %{name}.small{{o}} to <{{L}} x i32>
  %{name}{{o}} = sitofp <{{L}} x i32> %{name}.whole{{o}} to <{{L}} x float>""")

    def _fold(self) -> str:
        width = self.lanes
        lines = [
            "fold:",
            self._each("  %fold{o}.{r}.{L} = phi <{L} x float> [%sum{o}.{r}, %looped], [%end{o}.{r}, %rest]"),
        ]
        while width > 1:
            width //= 2
            lines += [self._halve(width)]
        return "\n".join([*lines, self._dots()])

    def _dots(self) -> str:
        only = "extractelement <1 x float> %fold{o}.{r}.1, i32 0"
        if self.stored == "float32":
            return self._each("  %dot{o}.{r} = " + only)
        return f"""{self._each("  %steps{o}.{r} = " + only)}
{self._each_out("  %scale.p{o} = getelementptr float, ptr %scale, i64 {o}")}
{self._each_out("  %scale{o} = load float, ptr %scale.p{o}, align 4")}
{self._each("  %dot{o}.{r} = fmul float %steps{o}.{r}, %scale{o}")}"""

    def _halve(self, half: int) -> str:
        whole = half * 2
        low, high = (", ".join(f"i32 {lane}" for lane in lanes) for lanes in (range(half), range(half, whole)))
        cut = f"<{whole} x float> %fold{{o}}.{{r}}.{whole}, <{whole} x float> poison, <{half} x i32>"
        return "\n".join(
            (
                self._each(f"  %low{{o}}.{{r}}.{half} = shufflevector {cut} <{low}>"),
                self._each(f"  %high{{o}}.{{r}}.{half} = shufflevector {cut} <{high}>"),
                self._each(
                    f"  %fold{{o}}.{{r}}.{half} = fadd <{half} x float> %low{{o}}.{{r}}.{half}, %high{{o}}.{{r}}.{half}"
                ),
            )
        )

    def _store(self) -> str:
        return f"""  %plain = icmp eq ptr %bias, null
  br i1 %plain, label %store, label %shift
shift:
{self._each_out("  %bp{o} = getelementptr float, ptr %bias, i64 {o}")}
{self._each_out("  %b{o} = load float, ptr %bp{o}, align 4")}
{self._each("  %shifted{o}.{r} = fadd float %dot{o}.{r}, %b{o}")}
  br label %store
store:
{self._each("  %v{o}.{r} = phi float [%dot{o}.{r}, %fold], [%shifted{o}.{r}, %shift]")}
{self._each_row("  %y.at{r} = mul i64 %stride, {r}")}
{self._each_row("  %y{r} = getelementptr float, ptr %y, i64 %y.at{r}")}
{self._each("  %yp{o}.{r} = getelementptr float, ptr %y{r}, i64 {o}")}
{self._each("  store float %v{o}.{r}, ptr %yp{o}.{r}, align 4")}
  ret void"""


def _fused(first: str, second: str, added: str) -> str:
    """Write a fused multiply-add of vectors, as a template."""
    kind = "<{L} x float>"
    return f"call {kind} @llvm.fma.v{{L}}f32({kind} %{first}, {kind} %{second}, {kind} %{added})"


def _all_rows(outs: int) -> str:
    """Write a function that computes a tile's outputs for all rows, a few rows at a time."""
    sizes = range(1, TILE_ROWS + 1)
    targets = " ".join(f"i64 {rows}, label %take{rows}" for rows in sizes)
    call = "(ptr %xr, ptr %w, ptr %scale, ptr %bias, ptr %yr, i64 %n, i64 %stride)"
    takes = "\n".join(f"take{rows}:\n  call void @tile{outs}x{rows}{call}\n  br label %taken" for rows in sizes)
    arguments = "ptr %x, ptr %w, ptr %scale, ptr %bias, ptr %y, i64 %n, i64 %stride, i64 %rows"
    return f"""define internal void @rows{outs}({arguments}) {{
begin:
  br label %next
next:
  %r = phi i64 [0, %begin], [%r.next, %taken]
  %left = sub i64 %rows, %r
  %some = call i64 @llvm.smin.i64(i64 %left, i64 {TILE_ROWS})
  %x.at = mul i64 %r, %n
  %xr = getelementptr float, ptr %x, i64 %x.at
  %y.at = mul i64 %r, %stride
  %yr = getelementptr float, ptr %y, i64 %y.at
  switch i64 %some, label %end [{targets}]
{takes}
taken:
  %r.next = add i64 %r, %some
  br label %next
end:
  ret void
}}"""


def _work(outs: int, stored: WeightBits) -> str:
    """Write the work of a thread: take parts of the outputs until none is left.

    It computes a part in wide tiles first, then in single outputs.
    """
    pointers, numbers = ("x", "w", "bias", "y"), ("rows", "n", "outs", "part")
    fields = [*(("ptr", name) for name in pointers), *(("i64", name) for name in numbers), ("ptr", "scale")]
    return f"""define void @work(ptr %arguments) {{
begin:
{loaded(fields)}
  %plain = icmp eq ptr %bias, null
  br label %next
next:
  %start = atomicrmw add ptr %arguments, i64 %part monotonic
  %any = icmp slt i64 %start, %outs
  br i1 %any, label %take, label %end
take:
  %full = add i64 %start, %part
  %stop = call i64 @llvm.smin.i64(i64 %full, i64 %outs)
  br label %wide
{_stretch("wide", outs, stored, "%start", "take", then="single")}
{_stretch("single", 1, stored, "%wide.o", "wide", then="next")}
end:
  ret void
}}"""


def _stretch(name: str, step: int, stored: WeightBits, start: str, before: str, then: str) -> str:
    """Write a loop over outputs from `start` to %stop in whole steps."""
    own = ", ".join(f"ptr %{name}.{part}" for part in ("w", "scale", "b", "y"))
    return f"""{name}:
  %{name}.o = phi i64 [{start}, %{before}], [%{name}.next, %{name}.go]
  %{name}.next = add i64 %{name}.o, {step}
  %{name}.fits = icmp sle i64 %{name}.next, %stop
  br i1 %{name}.fits, label %{name}.go, label %{then}
{name}.go:
  %{name}.at = mul i64 %{name}.o, %n
  %{name}.w = getelementptr {_KINDS[stored]}, ptr %w, i64 %{name}.at
  %{name}.scale = getelementptr float, ptr %scale, i64 %{name}.o
  %{name}.shift = getelementptr float, ptr %bias, i64 %{name}.o
  %{name}.b = select i1 %plain, ptr null, ptr %{name}.shift
  %{name}.y = getelementptr float, ptr %y, i64 %{name}.o
  call void @rows{step}(ptr %x, {own}, i64 %n, i64 %outs, i64 %rows)
  br label %{name}"""
