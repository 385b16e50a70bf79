"""Norm and attention for few rows on CPUs, as machine code (llvmlite): what torch does in ten small calls each, in one.

At one row a decoder's small operations cost as much in dispatch as a third of its matrices cost in memory traffic. Owns no memory and
chooses nothing; float32 only. Invariant: a row's result depends on that row and on the tokens it sees, in their order in the sequence:
not on the rows beside it, the number of threads, or where in the tail its tokens lie. So a token scored alone, in a chain or in a tree
gets the same bits.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specbranch.models.kernels import _forget_pages, _torch_team

BLOCK = 256  # tokens whose scores are held at a time
MOST_ROWS = 16
WORTH_A_TEAM = 512  # rows times tokens from which waking the other threads pays

_Numbers = ctypes.c_int64 * 16
_Norm = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64, ctypes.c_float)
_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Lines:
    """What each row of a sequence sees: the first `prefix` places, then its own line of places, `counts` tokens in all."""

    prefix: int
    places: Tensor  # int64 [rows, longest line]
    counts: Tensor  # int64 [rows]
    most: int  # the largest count


@dataclass(frozen=True, slots=True)
class RowKernels:
    """Compiled code for one head dimension."""

    engine: Any  # owns the code
    head_dim: int
    norm_code: Callable[..., None]
    work: int
    alone: Callable[[Any], None]
    team: Callable[[int, Any, int, int], None] | None

    def norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `added` to x in place, then return the RMS norm of x; all contiguous [rows, size]."""
        y = torch.empty_like(x)
        rows, size = x.shape
        self.norm_code(x.data_ptr(), 0 if added is None else added.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, size, eps)
        return y

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, lines: Lines) -> Tensor:
        """Attend with queries [rows, heads, head_dim] (rows may be apart) to keys and values [kv_heads, places, head_dim]."""
        rows, heads, head_dim = queries.shape
        out = queries.new_empty(rows, heads * head_dim)
        scale = struct.unpack("<i", struct.pack("<f", 1.0 / math.sqrt(head_dim)))[0]
        numbers = _Numbers(
            0,  # how many (row, head) pairs were taken: threads help themselves
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            lines.places.data_ptr(),
            lines.counts.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            heads // keys.shape[0],
            lines.prefix,
            queries.stride(0),
            keys.stride(0),
            lines.places.stride(0),
            scale,
        )
        threads = torch.get_num_threads()
        if self.team is None or threads == 1 or rows * lines.most < WORTH_A_TEAM:
            self.alone(numbers)
        else:
            self.team(self.work, numbers, threads, 0)
        return out


@cache
def load_row_kernels(head_dim: int) -> RowKernels | None:
    """Compile for this machine, once a process and head dimension; None where that cannot be done."""
    try:
        engine = _compile(source(head_dim))
    except (ImportError, OSError, RuntimeError, AttributeError):  # no LLVM, or one too old
        return None
    _forget_pages("libllvmlite")
    work = engine.get_function_address("work")
    return RowKernels(engine, head_dim, _Norm(engine.get_function_address("norm")), work, _Work(work), _torch_team())


def _compile(text: str) -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3)
    module = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return engine


def source(head_dim: int) -> str:
    """Write all functions in LLVM's language, as plain loops; its optimiser turns them into vectors."""
    return "\n".join((_DECLARATIONS, _exp(), _norm(), _one_head(head_dim), _work(head_dim)))


_DECLARATIONS = """
declare float @llvm.sqrt.f32(float)
declare float @llvm.rint.f32(float)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
"""
_LOOSE = "reassoc contract"  # sums may be split into lanes, products fused


def _loop(name: str, start: str, stop: str, body: str, step: int = 1) -> str:
    """Write a loop whose counter is %name.i; it needs `%name = alloca i64` at the top of its function."""
    return f"""  store i64 {start}, ptr %{name}
  br label %{name}.test
{name}.test:
  %{name}.i = load i64, ptr %{name}
  %{name}.go = icmp slt i64 %{name}.i, {stop}
  br i1 %{name}.go, label %{name}.body, label %{name}.end
{name}.body:
{body}
  %{name}.next = add i64 %{name}.i, {step}
  store i64 %{name}.next, ptr %{name}
  br label %{name}.test
{name}.end:"""


def _variables(**kinds: str) -> str:
    return "\n".join(f"  %{name} = alloca {kind}" for name, kind in kinds.items())


def _number(value: float) -> str:
    """A float32 as LLVM wants it: the bits of the same value in double precision."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


def _exp() -> str:
    """Write e^x for x ≤ 0: 2^whole by its bits, 2^rest by its series to the 7th power (error below 1e-8); exactly 0 below -87."""
    series = [math.log(2) ** power / math.factorial(power) for power in range(8)]
    lines = [f"  %p7 = fadd float {_number(series[7])}, 0.0"]
    for power in range(6, -1, -1):
        lines += [f"  %m{power} = fmul contract float %p{power + 1}, %rest"]
        lines += [f"  %p{power} = fadd contract float %m{power}, {_number(series[power])}"]
    horner = "\n".join(lines)
    return f"""define internal float @exp(float %x) alwaysinline {{
  %low = fcmp olt float %x, {_number(-87.0)}
  %safe = select i1 %low, float {_number(-87.0)}, float %x
  %turns = fmul float %safe, {_number(1 / math.log(2))}
  %whole = call float @llvm.rint.f32(float %turns)
  %rest = fsub float %turns, %whole
{horner}
  %power = fptosi float %whole to i32
  %biased = add i32 %power, 127
  %bits = shl i32 %biased, 23
  %two = bitcast i32 %bits to float
  %value = fmul float %p0, %two
  %y = select i1 %low, float 0.0, float %value
  ret float %y
}}"""


def _norm() -> str:
    add = """  %xa = getelementptr float, ptr %xr, i64 %a.i
  %xav = load float, ptr %xa
  %ap = getelementptr float, ptr %ar, i64 %a.i
  %av = load float, ptr %ap
  %sum = fadd float %xav, %av
  store float %sum, ptr %xa"""
    square = f"""  %xs = getelementptr float, ptr %xr, i64 %s.i
  %xv = load float, ptr %xs
  %sq = fmul {_LOOSE} float %xv, %xv
  %old = load float, ptr %total
  %new = fadd {_LOOSE} float %old, %sq
  store float %new, ptr %total"""
    scale = """  %xw = getelementptr float, ptr %xr, i64 %w.i
  %xwv = load float, ptr %xw
  %wp = getelementptr float, ptr %weight, i64 %w.i
  %wv = load float, ptr %wp
  %scaled = fmul float %xwv, %by
  %weighed = fmul float %scaled, %wv
  %yp = getelementptr float, ptr %yr, i64 %w.i
  store float %weighed, ptr %yp"""
    row = f"""  %at = mul i64 %r.i, %n
  %xr = getelementptr float, ptr %x, i64 %at
  %ar = getelementptr float, ptr %added, i64 %at
  %yr = getelementptr float, ptr %y, i64 %at
  br i1 %plain, label %added.done, label %add
add:
{_loop("a", "0", "%n", add)}
  br label %added.done
added.done:
  store float 0.0, ptr %total
{_loop("s", "0", "%n", square)}
  %squares = load float, ptr %total
  %mean = fdiv float %squares, %size
  %safe = fadd float %mean, %eps
  %root = call float @llvm.sqrt.f32(float %safe)
  %by = fdiv float 1.0, %root
{_loop("w", "0", "%n", scale)}"""
    return f"""define void @norm(ptr noalias %x, ptr noalias %added, ptr noalias %weight, ptr noalias %y, i64 %rows, i64 %n, float %eps) {{
{_variables(r="i64", a="i64", s="i64", w="i64", total="float")}
  %size = sitofp i64 %n to float
  %plain = icmp eq ptr %added, null
{_loop("r", "0", "%rows", row)}
  ret void
}}"""


def _one_head(head_dim: int) -> str:
    """Write attention of one query: blocks of tokens in their order in the sequence, with a running maximum."""
    kind = f"<{head_dim} x float>"
    arguments = ", ".join(f"ptr noalias %{name}" for name in ("q", "k", "v", "line", "out"))
    return f"""declare float @llvm.vector.reduce.fadd.v{head_dim}f32(float, {kind})
define internal void @head({arguments}, i64 %prefix, i64 %count, float %scale) {{
{_variables(b="i64", j="i64", c="i64", e="i64", u="i64", top="float", total="float", best="float")}
{_variables(scores=f"[{BLOCK} x float]", sums=kind)}
  store float {_number(-1e30)}, ptr %top
  store float 0.0, ptr %total
  store {kind} zeroinitializer, ptr %sums
  %query = load {kind}, ptr %q, align 4
{_loop("b", "0", "%count", _block(head_dim), step=BLOCK)}
  %all = load float, ptr %total
{_spread("whole", "%all", head_dim)}
  %end = load {kind}, ptr %sums
  %shares = fdiv {kind} %end, %whole
  store {kind} %shares, ptr %out, align 4
  ret void
}}"""


def _spread(name: str, value: str, width: int) -> str:
    """Write a vector of one number repeated."""
    kind = f"<{width} x float>"
    return f"""  %{name}.one = insertelement {kind} poison, float {value}, i32 0
  %{name} = shufflevector {kind} %{name}.one, {kind} poison, <{width} x i32> zeroinitializer"""


_EXPONENTIAL = f"""  %ep = getelementptr float, ptr %scores, i64 %e.i
  %es = load float, ptr %ep
  %below = fsub float %es, %new.top
  %weight = call float @exp(float %below)
  store float %weight, ptr %ep
  %part.old = load float, ptr %total
  %part.new = fadd {_LOOSE} float %part.old, %weight
  store float %part.new, ptr %total"""


def _place(counter: str) -> str:
    """Find the place of the token numbered %first + counter: in the prefix its own number, behind it what the line says."""
    return f"""  %{counter}.token = add i64 %b.i, %{counter}.i
  %{counter}.behind = sub i64 %{counter}.token, %prefix
  %{counter}.node = call i64 @llvm.smax.i64(i64 %{counter}.behind, i64 0)
  %{counter}.lp = getelementptr i64, ptr %line, i64 %{counter}.node
  %{counter}.there = load i64, ptr %{counter}.lp
  %{counter}.early = icmp slt i64 %{counter}.behind, 0
  %{counter}.place = select i1 %{counter}.early, i64 %{counter}.token, i64 %{counter}.there"""


def _block(head_dim: int) -> str:
    """Write what is done with the tokens of one block: scores, their maximum, their exponentials, the weighted values."""
    kind = f"<{head_dim} x float>"
    score = f"""{_place("j")}
  %k.at = mul i64 %j.place, {head_dim}
  %kp = getelementptr float, ptr %k, i64 %k.at
  %key = load {kind}, ptr %kp, align 4
  %products = fmul {_LOOSE} {kind} %query, %key
  %dot = call {_LOOSE} float @llvm.vector.reduce.fadd.v{head_dim}f32(float -0.0, {kind} %products)
  %score = fmul float %dot, %scale
  %sp = getelementptr float, ptr %scores, i64 %j.i
  store float %score, ptr %sp"""
    highest = """  %cp = getelementptr float, ptr %scores, i64 %c.i
  %cv = load float, ptr %cp
  %was = load float, ptr %best
  %higher = fcmp nnan nsz ogt float %cv, %was
  %is = select nnan nsz i1 %higher, float %cv, float %was
  store float %is, ptr %best"""
    collect = f"""{_place("u")}
  %v.at = mul i64 %u.place, {head_dim}
  %vp = getelementptr float, ptr %v, i64 %v.at
  %value = load {kind}, ptr %vp, align 4
  %up = getelementptr float, ptr %scores, i64 %u.i
  %uw = load float, ptr %up
{_spread("weights", "%uw", head_dim)}
  %so.far = load {kind}, ptr %sums
  %weighed = fmul contract {kind} %weights, %value
  %grown = fadd contract {kind} %so.far, %weighed
  store {kind} %grown, ptr %sums"""
    return f"""  %left = sub i64 %count, %b.i
  %here = call i64 @llvm.smin.i64(i64 %left, i64 {BLOCK})
{_loop("j", "0", "%here", score)}
  %old.top = load float, ptr %top
  store float %old.top, ptr %best
{_loop("c", "0", "%here", highest)}
  %new.top = load float, ptr %best
  store float %new.top, ptr %top
  %drop = fsub float %old.top, %new.top
  %fade = call float @exp(float %drop)
  %total.old = load float, ptr %total
  %total.faded = fmul float %total.old, %fade
  store float %total.faded, ptr %total
{_loop("e", "0", "%here", _EXPONENTIAL)}
{_spread("fades", "%fade", head_dim)}
  %sums.old = load {kind}, ptr %sums
  %sums.faded = fmul {kind} %sums.old, %fades
  store {kind} %sums.faded, ptr %sums
{_loop("u", "0", "%here", collect)}"""


def _work(head_dim: int) -> str:
    """Write what a thread does: take pairs of a head and a row until none is left; rows of one head share what is cached."""
    pointers = ("q", "k", "v", "lines", "counts", "out")
    counts = ("rows", "heads", "group", "prefix", "q.stride", "head.stride", "line.stride", "scale")
    fields = [("ptr", name) for name in pointers] + [("i64", name) for name in counts]
    loads = "\n".join(
        f"  %{name}.p = getelementptr i64, ptr %numbers, i64 {at}\n  %{name} = load {kind}, ptr %{name}.p"
        for at, (kind, name) in enumerate(fields, start=1)
    )
    return f"""define void @work(ptr %numbers) {{
{loads}
  %pairs = mul i64 %rows, %heads
  %scale.short = trunc i64 %scale to i32
  %scale.float = bitcast i32 %scale.short to float
  br label %next
next:
  %pair = atomicrmw add ptr %numbers, i64 1 monotonic
  %any = icmp slt i64 %pair, %pairs
  br i1 %any, label %take, label %end
take:
  %head = udiv i64 %pair, %rows
  %row = urem i64 %pair, %rows
  %kv = udiv i64 %head, %group
  %q.row = mul i64 %row, %q.stride
  %q.head = mul i64 %head, {head_dim}
  %q.at = add i64 %q.row, %q.head
  %q.here = getelementptr float, ptr %q, i64 %q.at
  %kv.at = mul i64 %kv, %head.stride
  %k.here = getelementptr float, ptr %k, i64 %kv.at
  %v.here = getelementptr float, ptr %v, i64 %kv.at
  %line.at = mul i64 %row, %line.stride
  %line.here = getelementptr i64, ptr %lines, i64 %line.at
  %count.p = getelementptr i64, ptr %counts, i64 %row
  %count = load i64, ptr %count.p
  %o.row = mul i64 %row, %heads
  %o.head = add i64 %o.row, %head
  %o.at = mul i64 %o.head, {head_dim}
  %o.here = getelementptr float, ptr %out, i64 %o.at
  call void @head(ptr %q.here, ptr %k.here, ptr %v.here, ptr %line.here, ptr %o.here, i64 %prefix, i64 %count, float %scale.float)
  br label %next
end:
  ret void
}}"""
