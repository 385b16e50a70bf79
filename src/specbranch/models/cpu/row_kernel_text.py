"""The decoder's small operations in LLVM's language, written as plain loops that its optimiser turns into vectors.

Owns the text, the layout of an operation's arguments and that of the table of rows. Invariant: sums run over a row's
own numbers, and over the tokens it sees in their order in the sequence, in an order that depends on neither the rows
beside it nor the threads.
"""

from __future__ import annotations

import math
import platform
import struct
from dataclasses import dataclass

from specbranch.core.pages import PAGE
from specbranch.models.cpu.rounding_text import ROUND_STRETCH
from specbranch.models.files.blocks import BLOCK

# numbers an operation takes: the address of its code, then its arguments, the first of them counting what was taken
FIELDS = 16
# A row's entry in the table: where the addresses of its sequence's pages are listed, how many places the rows of its
# sequence all see, the address of its own place, how many tokens it sees, and where the addresses of those behind the
# prefix are listed. An address is that of a place's key in the first head of the first layer.
ENTRY = ("pages", "prefix", "slot", "count", "line")
SPINS = 4096  # looks at the barrier before a thread offers its core to others


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What the code is specialised to."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def row(self) -> int:
        """How many numbers the queries, keys and values of a row are."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def head(self) -> int:
        """How far apart in a page the numbers of two heads are."""
        return PAGE * self.head_dim

    @property
    def values(self) -> int:
        """How far behind the keys of a layer its values are; another layer is twice as far."""
        return self.kv_heads * self.head


def source(shape: KernelShape) -> str:
    """Write all operations in LLVM's language, as plain loops; its optimiser turns them into vectors."""
    return "\n".join(
        (
            _DECLARATIONS,
            ROUND_STRETCH,
            _exp(),
            _norm(),
            _turn(shape),
            _head_group(shape),
            _attend(shape),
            _gate(),
            _run(),
        )
    )


_DECLARATIONS = """
declare float @llvm.sqrt.f32(float)
declare float @llvm.rint.f32(float)
declare float @llvm.fabs.f32(float)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare i32 @sched_yield()
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


def _operation(
    name: str, pointers: tuple[str, ...], counts: tuple[str, ...], many: str, body: str, variables: str = ""
) -> str:
    """Write an operation: read its arguments, then take items (%item, from 0 to `many`) until none is left.

    Every thread calls it and helps itself, so a slow one holds nobody up.
    """
    fields = [("ptr", field) for field in pointers] + [("i64", field) for field in counts]
    loads = "\n".join(
        f"  %{field}.field = getelementptr i64, ptr %numbers, i64 {at}\n  %{field} = load {kind}, ptr %{field}.field"
        for at, (kind, field) in enumerate(fields, start=1)
    )
    return f"""define void @{name}(ptr %numbers) {{
{variables}
{loads}
  br label %next
next:
  %item = atomicrmw add ptr %numbers, i64 1 monotonic
  %any = icmp slt i64 %item, {many}
  br i1 %any, label %take, label %end
take:
{body}
  br label %next
end:
  ret void
}}"""


def _fraction(name: str) -> str:
    """Read a field as a float32: its bits."""
    return f"""  %{name}.bits = trunc i64 %{name} to i32
  %{name}.float = bitcast i32 %{name}.bits to float"""


def _variables(**kinds: str) -> str:
    return "\n".join(f"  %{name} = alloca {kind}" for name, kind in kinds.items())


def _number(value: float) -> str:
    """A float32 as LLVM wants it: the bits of the same value in double precision."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


def _exp() -> str:
    """Write e^x for x ≤ 0: 2^whole by its bits, 2^rest by its series to the 7th power (error below 1e-8); exactly 0
    below -87."""
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
    row = f"""  %at = mul i64 %item, %n
  %xr = getelementptr float, ptr %x, i64 %at
  %ar = getelementptr float, ptr %added, i64 %at
  %yr = getelementptr float, ptr %y, i64 %at
  %size = sitofp i64 %n to float
{_fraction("eps")}
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
{_rounded("%y", "%at", "%n")}"""
    variables = _variables(a="i64", s="i64", w="i64", total="float")
    return _operation("norm", ("x", "added", "weight", "y", "rounded"), ("rows", "n", "eps"), "%rows", row, variables)


def _rounded(floats: str, at: str, many: str) -> str:
    """Write the rounding of what was computed, for integer products, where that is asked for: `many` numbers from `at`
    on, both whole blocks."""
    return f"""  %none = icmp eq ptr %rounded, null
  br i1 %none, label %rounded.done, label %round
round:
  %first.block = sdiv i64 {at}, {BLOCK}
  %many.blocks = sdiv i64 {many}, {BLOCK}
  call void @round_stretch(ptr {floats}, ptr %rounded, i64 %first.block, i64 %many.blocks)
  br label %rounded.done
rounded.done:"""


def _entry(row: str) -> str:
    """Read a row's entry in the table."""
    kinds = {name: "ptr" if name in ("pages", "slot", "line") else "i64" for name in ENTRY}
    loads = "\n".join(
        f"  %{name}.at = getelementptr i64, ptr %entry, i64 {at}\n  %{name} = load {kind}, ptr %{name}.at"
        for at, (name, kind) in enumerate(kinds.items())
    )
    return f"""  %entry.at = mul i64 {row}, {len(ENTRY)}
  %entry = getelementptr i64, ptr %table, i64 %entry.at
{loads}"""


def _turn(shape: KernelShape) -> str:
    """Write the turning of a row's queries and keys by its position, after their norm if there is one; keys and
    values go to the cache."""
    half, turned = f"<{shape.head_dim // 2} x float>", shape.heads + shape.kv_heads
    body = f"""{_entry("%item")}
  %layer.at = mul i64 %layer, {2 * shape.values}
  %k = getelementptr float, ptr %slot, i64 %layer.at
  %v = getelementptr float, ptr %k, i64 {shape.values}
  %row.at = mul i64 %item, {shape.row}
  %row = getelementptr float, ptr %qkv, i64 %row.at
  %angle.at = mul i64 %item, {shape.head_dim}
  %cos.p = getelementptr float, ptr %cos, i64 %angle.at
  %c = load {half}, ptr %cos.p, align 4
  %sin.at = add i64 %angle.at, {shape.head_dim // 2}
  %sin.p = getelementptr float, ptr %sin, i64 %sin.at
  %s = load {half}, ptr %sin.p, align 4
{_fraction("eps")}
{_loop("h", "0", str(turned), _turn_head(shape))}
{_loop("g", "0", str(shape.kv_heads), _store_value(shape))}"""
    declare = f"declare float @llvm.vector.reduce.fadd.v{shape.head_dim // 2}f32(float, {half})\n"
    pointers, counts = ("qkv", "cos", "sin", "table", "q.norm", "k.norm"), ("rows", "layer", "eps")
    return declare + _operation("turn", pointers, counts, "%rows", body, _variables(h="i64", g="i64", a=half, b=half))


def _turn_head(shape: KernelShape) -> str:
    middle, half = shape.head_dim // 2, f"<{shape.head_dim // 2} x float>"
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
  %stored = getelementptr float, ptr %k, i64 %key.at
  %to = select i1 %is.q, ptr %from, ptr %stored
  %to.b = getelementptr float, ptr %to, i64 {middle}
  store {half} %new.a, ptr %to, align 4
  store {half} %new.b, ptr %to.b, align 4"""


def _norm_head(shape: KernelShape) -> str:
    middle, half = shape.head_dim // 2, f"<{shape.head_dim // 2} x float>"
    reduce = f"call {_LOOSE} float @llvm.vector.reduce.fadd.v{middle}f32(float -0.0, {half} %"
    return f"""  %sq.a = fmul {half} %raw.a, %raw.a
  %sq.b = fmul {half} %raw.b, %raw.b
  %sum.a = {reduce}sq.a)
  %sum.b = {reduce}sq.b)
  %sum = fadd float %sum.a, %sum.b
  %mean = fdiv float %sum, {_number(shape.head_dim)}
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
  %v.p = getelementptr float, ptr %v, i64 %v.at
  store {kind} %value, ptr %v.p, align 4"""


def _head_group(shape: KernelShape) -> str:
    """Write attention of the queries that share a key head: pages of tokens in their order in the sequence, with
    running maxima.

    A page's keys and values are used by every query while they are cached: a long context is fetched from memory once.
    `%at` tells where in a place its keys of this layer and head are.
    """
    group, kind = shape.heads // shape.kv_heads, f"<{shape.head_dim} x float>"
    arguments = ", ".join(f"ptr noalias %{name}" for name in ("q", "pages", "line", "out"))
    counters = dict.fromkeys(("b", "g", "j", "c", "e", "u", "z", "f"), "i64")
    of_group = f"[{group} x float]"
    return f"""declare float @llvm.vector.reduce.fadd.v{shape.head_dim}f32(float, {kind})
define internal void @group({arguments}, i64 %at, i64 %prefix, i64 %count, float %scale) {{
{_variables(**counters, total="float", best="float", sums=kind)}
{_variables(scores=f"[{PAGE} x float]", tops=of_group, totals=of_group, sums_of=f"[{group} x {kind}]")}
{_loop("z", "0", str(group), _begin_head(kind))}
  %at.value = add i64 %at, {shape.values}
{_loop("b", "0", "%count", _block(shape.head_dim, group), step=PAGE)}
{_loop("f", "0", str(group), _finish_head(shape.head_dim))}
  ret void
}}"""


def _begin_head(kind: str) -> str:
    return f"""  %z.top = getelementptr float, ptr %tops, i64 %z.i
  store float {_number(-1e30)}, ptr %z.top
  %z.total = getelementptr float, ptr %totals, i64 %z.i
  store float 0.0, ptr %z.total
  %z.sums = getelementptr {kind}, ptr %sums_of, i64 %z.i
  store {kind} zeroinitializer, ptr %z.sums"""


def _finish_head(head_dim: int) -> str:
    kind = f"<{head_dim} x float>"
    return f"""  %f.total = getelementptr float, ptr %totals, i64 %f.i
  %all = load float, ptr %f.total
{_spread("whole", "%all", head_dim)}
  %f.sums = getelementptr {kind}, ptr %sums_of, i64 %f.i
  %end = load {kind}, ptr %f.sums
  %shares = fdiv {kind} %end, %whole
  %f.at = mul i64 %f.i, {head_dim}
  %f.out = getelementptr float, ptr %out, i64 %f.at
  store {kind} %shares, ptr %f.out, align 4"""


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


def _place(counter: str, head_dim: int) -> str:
    """Find the place of the token so far behind the page's first: in the prefix by its number, behind it by what the
    line says."""
    return f"""  %{counter}.token = add i64 %b.i, %{counter}.i
  %{counter}.behind = sub i64 %{counter}.token, %prefix
  %{counter}.node = call i64 @llvm.smax.i64(i64 %{counter}.behind, i64 0)
  %{counter}.lp = getelementptr ptr, ptr %line, i64 %{counter}.node
  %{counter}.there = load ptr, ptr %{counter}.lp
  %{counter}.in = mul i64 %{counter}.i, {head_dim}
  %{counter}.here = getelementptr float, ptr %page, i64 %{counter}.in
  %{counter}.early = icmp slt i64 %{counter}.behind, 0
  %{counter}.place = select i1 %{counter}.early, ptr %{counter}.here, ptr %{counter}.there"""


def _block(head_dim: int, group: int) -> str:
    """Write what is done with the tokens of one page for every head: scores, their maximum, exponentials, the
    weighted values."""
    kind = f"<{head_dim} x float>"
    score = f"""{_place("j", head_dim)}
  %kp = getelementptr float, ptr %j.place, i64 %at
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
    collect = f"""{_place("u", head_dim)}
  %vp = getelementptr float, ptr %u.place, i64 %at.value
  %value = load {kind}, ptr %vp, align 4
  %up = getelementptr float, ptr %scores, i64 %u.i
  %uw = load float, ptr %up
{_spread("weights", "%uw", head_dim)}
  %so.far = load {kind}, ptr %sums
  %weighed = fmul contract {kind} %weights, %value
  %grown = fadd contract {kind} %so.far, %weighed
  store {kind} %grown, ptr %sums"""
    head = f"""  %q.at = mul i64 %g.i, {head_dim}
  %qp = getelementptr float, ptr %q, i64 %q.at
  %query = load {kind}, ptr %qp, align 4
{_loop("j", "0", "%here", score)}
  %top.p = getelementptr float, ptr %tops, i64 %g.i
  %old.top = load float, ptr %top.p
  store float %old.top, ptr %best
{_loop("c", "0", "%here", highest)}
  %new.top = load float, ptr %best
  store float %new.top, ptr %top.p
  %drop = fsub float %old.top, %new.top
  %fade = call float @exp(float %drop)
  %total.p = getelementptr float, ptr %totals, i64 %g.i
  %total.old = load float, ptr %total.p
  %total.faded = fmul float %total.old, %fade
  store float %total.faded, ptr %total
{_loop("e", "0", "%here", _EXPONENTIAL)}
  %total.new = load float, ptr %total
  store float %total.new, ptr %total.p
{_spread("fades", "%fade", head_dim)}
  %sums.p = getelementptr {kind}, ptr %sums_of, i64 %g.i
  %sums.old = load {kind}, ptr %sums.p
  %sums.faded = fmul {kind} %sums.old, %fades
  store {kind} %sums.faded, ptr %sums
{_loop("u", "0", "%here", collect)}
  %sums.new = load {kind}, ptr %sums
  store {kind} %sums.new, ptr %sums.p"""
    return f"""  %page.number = sdiv i64 %b.i, {PAGE}
  %page.p = getelementptr ptr, ptr %pages, i64 %page.number
  %page = load ptr, ptr %page.p
  %left = sub i64 %count, %b.i
  %here = call i64 @llvm.smin.i64(i64 %left, i64 {PAGE})
{_loop("g", "0", str(group), head)}"""


def _attend(shape: KernelShape) -> str:
    """Write attention; an item is a key head and a row, rows of one head after each other, as they share what is
    cached."""
    width = shape.heads // shape.kv_heads * shape.head_dim
    arguments = "ptr %q.here, ptr %pages, ptr %line, ptr %o.here, i64 %at, i64 %prefix, i64 %count, float %scale.float"
    body = f"""  %head = udiv i64 %item, %rows
  %row = urem i64 %item, %rows
{_entry("%row")}
  %q.row = mul i64 %row, {shape.row}
  %q.head = mul i64 %head, {width}
  %q.at = add i64 %q.row, %q.head
  %q.here = getelementptr float, ptr %q, i64 %q.at
  %layer.at = mul i64 %layer, {2 * shape.values}
  %head.at = mul i64 %head, {shape.head}
  %at = add i64 %layer.at, %head.at
  %o.row = mul i64 %row, {shape.kv_heads * width}
  %o.at = add i64 %o.row, %q.head
  %o.here = getelementptr float, ptr %out, i64 %o.at
{_fraction("scale")}
  call void @group({arguments})
{_rounded("%out", "%o.at", str(width))}"""
    return _operation("attend", ("q", "table", "out", "rounded"), ("rows", "items", "layer", "scale"), "%items", body)


def _gate() -> str:
    """Write silu(gate)·up, a row an item; e^-|x| keeps the exponential small on both sides."""
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
    body = f"""  %y.at = mul i64 %item, %n
  %g.at = mul i64 %y.at, 2
  %u.at = add i64 %g.at, %n
  %gr = getelementptr float, ptr %both, i64 %g.at
  %ur = getelementptr float, ptr %both, i64 %u.at
  %yr = getelementptr float, ptr %y, i64 %y.at
{_loop("i", "0", "%n", each)}
{_rounded("%y", "%y.at", "%n")}"""
    return _operation("gate", ("both", "y", "rounded"), ("rows", "n"), "%rows", body, _variables(i="i64"))


def _run() -> str:
    """Write the going through a list: do an operation together, wait for each other, go on."""
    # A core that says it waits leaves what it shares to the other thread on it.
    pause, argument = (
        ("llvm.aarch64.hint", "i32") if platform.machine() in ("aarch64", "arm64") else ("llvm.x86.sse2.pause", "")
    )
    each = f"""  %at = mul i64 %o.i, {FIELDS}
  %code.p = getelementptr i64, ptr %list, i64 %at
  %code = load ptr, ptr %code.p
  %numbers = getelementptr i64, ptr %code.p, i64 1
  call void %code(ptr %numbers)
  %ordinal = add i64 %o.i, 1
  %expected = mul i64 %ordinal, %threads
  %before = atomicrmw add ptr %header, i64 1 acq_rel
  br label %wait
wait:
  %spin = phi i64 [0, %o.body], [%spin.next, %again]
  %arrived = load atomic i64, ptr %header acquire, align 8
  %all = icmp sge i64 %arrived, %expected
  br i1 %all, label %onwards, label %patience
patience:
  call void @{pause}({argument and "i32 1"})
  %spin.next = add i64 %spin, 1
  %turn = urem i64 %spin.next, {SPINS}
  %long = icmp eq i64 %turn, 0
  br i1 %long, label %yield, label %again
yield:
  %ignored = call i32 @sched_yield()
  br label %again
again:
  br label %wait
onwards:"""
    return f"""declare void @{pause}({argument})
define void @run(ptr %header) {{
{_variables(o="i64")}
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
  ret void
}}"""
