"""LLVM text of the decoder's small operations, as plain loops that LLVM's optimiser vectorises.

Owns the text of all operations but attention, and of the loop over a list of operations. Invariant: sums run over a
row's own numbers, in an order that depends neither on other rows nor on threads.
"""

from __future__ import annotations

import math

from specbranch.models.cpu.operation_text import OPERATION_FIELDS, KernelShape, entry, fraction, operation, rounded
from specbranch.models.cpu.rounding_text import ROUND_STRETCH, whole, whole_declarations
from specbranch.models.cpu.text_writer import number
from specbranch.models.cpu.waiting_text import CLOCK_IDS, waiting
from specbranch.models.files.blocks import BLOCK

STRETCH = 512  # numbers of a row that a thread takes at once; whole blocks


def source(shape: KernelShape) -> str:
    """Write all operations as plain loops; LLVM's optimiser vectorises them."""
    return "\n".join(
        (
            _DECLARATIONS,
            ROUND_STRETCH,
            _exp(),
            _norm(),
            _turn(shape),
            _gate(),
            _run(),
        )
    )


_DECLARATIONS = """
declare float @llvm.sqrt.f32(float)
declare float @llvm.rint.f32(float)
declare float @llvm.fabs.f32(float)
declare i64 @llvm.smin.i64(i64, i64)
"""
_LOOSE = "reassoc contract"  # allows sums to be split into lanes, and products to be fused


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


def _exp() -> str:
    """Write e^x for x ≤ 0 as 2^whole · 2^rest; exactly 0 below -87.

    2^whole is made of its bits, 2^rest by its series to the 7th power (error below 1e-8).
    """
    series = [math.log(2) ** power / math.factorial(power) for power in range(8)]
    lines = [f"  %p7 = fadd float {number(series[7])}, 0.0"]
    for power in range(6, -1, -1):
        lines += [f"  %m{power} = fmul contract float %p{power + 1}, %rest"]
        lines += [f"  %p{power} = fadd contract float %m{power}, {number(series[power])}"]
    horner = "\n".join(lines)
    return f"""define internal float @exp(float %x) alwaysinline {{
  %low = fcmp olt float %x, {number(-87.0)}
  %safe = select i1 %low, float {number(-87.0)}, float %x
  %turns = fmul float %safe, {number(1 / math.log(2))}
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
    row = f"""  %at = mul i64 %item, %n
  %xr = getelementptr float, ptr %x, i64 %at
  %ar = getelementptr float, ptr %added, i64 %at
  %yr = getelementptr float, ptr %y, i64 %at
  %size = sitofp i64 %n to float
{fraction("eps")}
  %plain = icmp eq ptr %added, null
  br i1 %plain, label %added.done, label %add
add:
{_loop("a", "0", "%n", add)}
  br label %added.done
added.done:
  store float 0.0, ptr %total
{_loop("s", "0", "%n", square)}
  %squares = load float, ptr %total
  %mean = fdiv float %squares, %size
  %safe = fadd float %mean, %eps.float
  %root = call float @llvm.sqrt.f32(float %safe)
  %by = fdiv float 1.0, %root
{_loop("w", "0", "%n", scale)}
{rounded("%y", "%at", "%n")}"""
    variables = _variables(a="i64", s="i64", w="i64", total="float")
    return operation("norm", ("x", "added", "weight", "y", "rounded"), ("rows", "n", "eps"), "%rows", row, variables)


def _turn(shape: KernelShape) -> str:
    """Write the rotation of a row's queries and keys, after their norm if the model has one; stores keys and values."""
    half, turned = f"<{shape.head_dim // 2} x float>", shape.heads + shape.kv_heads
    body = f"""{entry("%item")}
  %layer.at = mul i64 %layer, {2 * shape.values}
  %k = getelementptr i8, ptr %slot, i64 %layer.at
  %v = getelementptr i8, ptr %k, i64 {shape.values}
  %row.at = mul i64 %item, {shape.row}
  %row = getelementptr float, ptr %qkv, i64 %row.at
  %angle.at = mul i64 %item, {shape.head_dim}
  %cos.p = getelementptr float, ptr %cos, i64 %angle.at
  %c = load {half}, ptr %cos.p, align 4
  %sin.at = add i64 %angle.at, {shape.head_dim // 2}
  %sin.p = getelementptr float, ptr %sin, i64 %sin.at
  %s = load {half}, ptr %sin.p, align 4
{fraction("eps")}
{_loop("h", "0", str(turned), _turn_head(shape))}
{_loop("g", "0", str(shape.kv_heads), _store_value(shape))}"""
    declare = f"declare float @llvm.vector.reduce.fadd.v{shape.head_dim // 2}f32(float, {half})\n"
    if shape.size == 1 and shape.head_dim != BLOCK:  # those for 32 numbers are declared already
        declare += whole_declarations(shape.head_dim) + "\n"
    pointers, counts = ("qkv", "cos", "sin", "table", "q.norm", "k.norm"), ("rows", "layer", "eps")
    return declare + operation("turn", pointers, counts, "%rows", body, _variables(h="i64", g="i64", a=half, b=half))


def _turn_head(shape: KernelShape) -> str:
    middle, half = shape.head_dim // 2, f"<{shape.head_dim // 2} x float>"
    both = ", ".join(f"i32 {at}" for at in range(shape.head_dim))
    return f"""  %from.at = mul i64 %h.i, {shape.head_dim}
  %from = getelementptr float, ptr %row, i64 %from.at
  %from.b = getelementptr float, ptr %from, i64 {middle}
  %raw.a = load {half}, ptr %from, align 4
  %raw.b = load {half}, ptr %from.b, align 4
  store {half} %raw.a, ptr %a
  store {half} %raw.b, ptr %b
  %is.q = icmp slt i64 %h.i, {shape.heads}
  %norm = select i1 %is.q, ptr %q.norm, ptr %k.norm
  %as.is = icmp eq ptr %norm, null
  br i1 %as.is, label %ready, label %normed
normed:
{_norm_head(shape)}
  br label %ready
ready:
  %va = load {half}, ptr %a
  %vb = load {half}, ptr %b
  %ac = fmul contract {half} %va, %c
  %bs = fmul contract {half} %vb, %s
  %new.a = fsub contract {half} %ac, %bs
  %bc = fmul contract {half} %vb, %c
  %as = fmul contract {half} %va, %s
  %new.b = fadd contract {half} %bc, %as
  %key = sub i64 %h.i, {shape.heads}
  %key.at = mul i64 %key, {shape.head}
  %stored = getelementptr i8, ptr %k, i64 %key.at
  br i1 %is.q, label %asks, label %keeps
asks:
  store {half} %new.a, ptr %from, align 4
  store {half} %new.b, ptr %from.b, align 4
  br label %turned
keeps:
  %new = shufflevector {half} %new.a, {half} %new.b, <{shape.head_dim} x i32> <{both}>
{_keep(shape, "new", "stored")}
  br label %turned
turned:"""


def _keep(shape: KernelShape, value: str, to: str) -> str:
    """Write the store of a head's numbers to the KV cache; smaller types round to nearest, ties to even."""
    many = shape.head_dim
    if shape.size == 4:
        return f"  store <{many} x float> %{value}, ptr %{to}, align 4"
    if shape.size == 1:
        return f"""{whole(value, many)}
  store <{many} x i8> %{value}.small, ptr %{to}, align 1
  %{value}.behind = getelementptr i8, ptr %{to}, i64 {shape.numbers}
  store float %{value}.scale, ptr %{value}.behind, align 1"""
    bits = f"<{many} x i32>"
    return f"""  %{value}.bits = bitcast <{many} x float> %{value} to {bits}
  %{value}.upper = lshr {bits} %{value}.bits, splat (i32 16)
  %{value}.odd = and {bits} %{value}.upper, splat (i32 1)
  %{value}.half = add {bits} %{value}.odd, splat (i32 32767)
  %{value}.near = add {bits} %{value}.bits, %{value}.half
  %{value}.kept = lshr {bits} %{value}.near, splat (i32 16)
  %{value}.small = trunc {bits} %{value}.kept to <{many} x i16>
  store <{many} x i16> %{value}.small, ptr %{to}, align 2"""


def _norm_head(shape: KernelShape) -> str:
    middle, half = shape.head_dim // 2, f"<{shape.head_dim // 2} x float>"
    reduce = f"call {_LOOSE} float @llvm.vector.reduce.fadd.v{middle}f32(float -0.0, {half} %"
    return f"""  %sq.a = fmul {half} %raw.a, %raw.a
  %sq.b = fmul {half} %raw.b, %raw.b
  %sum.a = {reduce}sq.a)
  %sum.b = {reduce}sq.b)
  %sum = fadd float %sum.a, %sum.b
  %mean = fdiv float %sum, {number(shape.head_dim)}
  %safe = fadd float %mean, %eps.float
  %root = call float @llvm.sqrt.f32(float %safe)
  %by = fdiv float 1.0, %root
{_spread("scale", "%by", middle)}
  %norm.b = getelementptr float, ptr %norm, i64 {middle}
  %weight.a = load {half}, ptr %norm, align 4
  %weight.b = load {half}, ptr %norm.b, align 4
  %scaled.a = fmul {half} %raw.a, %scale
  %scaled.b = fmul {half} %raw.b, %scale
  %normed.a = fmul {half} %scaled.a, %weight.a
  %normed.b = fmul {half} %scaled.b, %weight.b
  store {half} %normed.a, ptr %a
  store {half} %normed.b, ptr %b"""


def _store_value(shape: KernelShape) -> str:
    kind = f"<{shape.head_dim} x float>"
    return f"""  %value.head = add i64 %g.i, {shape.heads + shape.kv_heads}
  %value.at = mul i64 %value.head, {shape.head_dim}
  %value.p = getelementptr float, ptr %row, i64 %value.at
  %value = load {kind}, ptr %value.p, align 4
  %v.at = mul i64 %g.i, {shape.head}
  %v.p = getelementptr i8, ptr %v, i64 %v.at
{_keep(shape, "value", "v.p")}"""


def _spread(name: str, value: str, width: int) -> str:
    """Write a vector with one number in all lanes."""
    kind = f"<{width} x float>"
    return f"""  %{name}.one = insertelement {kind} poison, float {value}, i32 0
  %{name} = shufflevector {kind} %{name}.one, {kind} poison, <{width} x i32> zeroinitializer"""


def _gate() -> str:
    """Write silu(gate)·up; an item is a part of a row, so threads share a row. Uses e^-|x|, which cannot overflow."""
    each = """  %gp = getelementptr float, ptr %gr, i64 %i.i
  %g = load float, ptr %gp
  %up = getelementptr float, ptr %ur, i64 %i.i
  %u = load float, ptr %up
  %size = call float @llvm.fabs.f32(float %g)
  %minus = fneg float %size
  %e = call float @exp(float %minus)
  %below = fadd float %e, 1.0
  %positive = fcmp oge float %g, 0.0
  %above = select i1 %positive, float 1.0, float %e
  %sigmoid = fdiv float %above, %below
  %silu = fmul float %g, %sigmoid
  %gated = fmul float %silu, %u
  %yp = getelementptr float, ptr %yr, i64 %i.i
  store float %gated, ptr %yp"""
    body = f"""  %row = udiv i64 %item, %stretches
  %stretch = urem i64 %item, %stretches
  %first = mul i64 %stretch, {STRETCH}
  %left = sub i64 %n, %first
  %many = call i64 @llvm.smin.i64(i64 %left, i64 {STRETCH})
  %y.row = mul i64 %row, %n
  %y.at = add i64 %y.row, %first
  %g.row = mul i64 %y.row, 2
  %g.at = add i64 %g.row, %first
  %u.at = add i64 %g.at, %n
  %gr = getelementptr float, ptr %both, i64 %g.at
  %ur = getelementptr float, ptr %both, i64 %u.at
  %yr = getelementptr float, ptr %y, i64 %y.at
{_loop("i", "0", "%many", each)}
{rounded("%y", "%y.at", "%many")}"""
    before = f"""  %n.more = add i64 %n, {STRETCH - 1}
  %stretches = sdiv i64 %n.more, {STRETCH}
  %items = mul i64 %rows, %stretches"""
    return operation("gate", ("both", "y", "rounded"), ("rows", "n"), "%items", body, _variables(i="i64"), before)


def _run() -> str:
    """Write the loop over a list: all threads run an operation, wait at the barrier, and go on to the next.

    At the end each thread adds the time in which it could have run but had no core to the header's last number.
    """
    each = f"""  %at = mul i64 %o.i, {OPERATION_FIELDS}
  %code.p = getelementptr i64, ptr %list, i64 %at
  %code = load ptr, ptr %code.p
  %numbers = getelementptr i64, ptr %code.p, i64 1
  call void %code(ptr %numbers)
  %ordinal = add i64 %o.i, 1
  %expected = mul i64 %ordinal, %threads
  call void @meet(ptr %header, i64 %expected)"""
    wall, own = CLOCK_IDS
    return f"""{waiting()}
define void @run(ptr %header) {{
{_variables(o="i64")}
  %wall.start = call i64 @now(i32 {wall})
  %own.start = call i64 @now(i32 {own})
  %many.p = getelementptr i64, ptr %header, i64 1
  %many = load i64, ptr %many.p
  %list.p = getelementptr i64, ptr %header, i64 2
  %list = load ptr, ptr %list.p
  %size.p = getelementptr i64, ptr %header, i64 3
  %size = load ptr, ptr %size.p
  %single = icmp eq ptr %size, null
  br i1 %single, label %counted, label %ask
ask:
  %team = call i32 %size()
  %team.long = sext i32 %team to i64
  br label %counted
counted:
  %threads = phi i64 [1, %0], [%team.long, %ask]
{_loop("o", "0", "%many", each)}
  %own.end = call i64 @now(i32 {own})
  %wall.end = call i64 @now(i32 {wall})
  %wall = sub i64 %wall.end, %wall.start
  %own = sub i64 %own.end, %own.start
  %lost = sub i64 %wall, %own
  %lost.p = getelementptr i64, ptr %header, i64 4
  %lost.before = atomicrmw add ptr %lost.p, i64 %lost monotonic
  ret void
}}"""
