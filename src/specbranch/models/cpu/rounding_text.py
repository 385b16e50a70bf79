"""LLVM text that rounds rows to int8.

Owns the text and the layout of rounded rows. Every 32 inputs are a block of 48 bytes: first the numbers, then their
scale and the scale times their sum (both float32), then their sum and the sum of the first 16 (both integers).
Invariant: the greatest number of a block becomes 127, and a block's sums are exact.
"""

from __future__ import annotations

from specbranch.models.cpu.machine_code import loaded
from specbranch.models.cpu.text_writer import number
from specbranch.models.files.blocks import BLOCK

ROUNDED = 48  # bytes of a block of a rounded row
BLOCKS_AT_ONCE = 64  # blocks of a row that a thread takes at once


def whole_declarations(many: int) -> str:
    """Write the declarations that the rounding of `many` numbers needs."""
    return f"""declare <{many} x float> @llvm.fabs.v{many}f32(<{many} x float>)
declare <{many} x float> @llvm.roundeven.v{many}f32(<{many} x float>)
declare float @llvm.vector.reduce.fmaximum.v{many}f32(<{many} x float>)
declare <{many} x i32> @llvm.fptosi.sat.v{many}i32.v{many}f32(<{many} x float>)"""


def whole(name: str, many: int) -> str:
    """Write the rounding of `many` numbers %name to integers up to 127.

    Results are %name.wide, in bytes %name.small, and %name.scale. A NaN makes the scale NaN, and so the result; if all
    numbers are 0, the scale is 0.
    """
    floats, own = f"<{many} x float>", f"%{name}"
    return f"""  {own}.sizes = call {floats} @llvm.fabs.v{many}f32({floats} {own})
  {own}.greatest = call float @llvm.vector.reduce.fmaximum.v{many}f32({floats} {own}.sizes)
  {own}.scale = fdiv float {own}.greatest, {number(127.0)}
  {own}.inverse = fdiv float {number(127.0)}, {own}.greatest
  {own}.some = fcmp one float {own}.greatest, 0.0
  {own}.by = select i1 {own}.some, float {own}.inverse, float 0.0
  {own}.first = insertelement {floats} poison, float {own}.by, i32 0
  {own}.bys = shufflevector {floats} {own}.first, {floats} poison, <{many} x i32> zeroinitializer
  {own}.scaled = fmul {floats} {own}, {own}.bys
  {own}.near = call {floats} @llvm.roundeven.v{many}f32({floats} {own}.scaled)
  {own}.wide = call <{many} x i32> @llvm.fptosi.sat.v{many}i32.v{many}f32({floats} {own}.near)
  {own}.small = trunc <{many} x i32> {own}.wide to <{many} x i8>"""


_ROUNDING_DECLARATIONS = f"""
{whole_declarations(BLOCK)}
declare i32 @llvm.vector.reduce.add.v32i32(<32 x i32>)
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""
_FIRST_HALF = ", ".join(f"i32 {at}" for at in range(BLOCK // 2))
_ROUND_BLOCK = f"""  %values = load <32 x float>, ptr %from, align 4
{whole("values", BLOCK)}
  store <32 x i8> %values.small, ptr %to, align 4
  %sum = call i32 @llvm.vector.reduce.add.v32i32(<32 x i32> %values.wide)
  %sum.float = sitofp i32 %sum to float
  %scaled.sum = fmul float %sum.float, %values.scale
  %scale.p = getelementptr i8, ptr %to, i64 32
  store float %values.scale, ptr %scale.p, align 4
  %scaled.sum.p = getelementptr i8, ptr %to, i64 36
  store float %scaled.sum, ptr %scaled.sum.p, align 4
  %sum.p = getelementptr i8, ptr %to, i64 40
  store i32 %sum, ptr %sum.p, align 4
  %early = shufflevector <32 x i32> %values.wide, <32 x i32> poison, <16 x i32> <{_FIRST_HALF}>
  %early.sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %early)
  %early.p = getelementptr i8, ptr %to, i64 44
  store i32 %early.sum, ptr %early.p, align 4"""

# Rounds some blocks of the row at %x, from a given block on.
ROUND_STRETCH = f"""{_ROUNDING_DECLARATIONS}
define internal void @round_stretch(ptr %x, ptr %y, i64 %first, i64 %many) {{
begin:
  %last = add i64 %first, %many
  br label %each
each:
  %at = phi i64 [%first, %begin], [%next, %each]
  %x.at = mul i64 %at, {4 * BLOCK}
  %from = getelementptr i8, ptr %x, i64 %x.at
  %y.at = mul i64 %at, {ROUNDED}
  %to = getelementptr i8, ptr %y, i64 %y.at
{_ROUND_BLOCK}
  %next = add i64 %at, 1
  %more = icmp slt i64 %next, %last
  br i1 %more, label %each, label %end
end:
  ret void
}}"""


def rounding() -> str:
    """Write the operation that rounds rows; an item is a part of a row."""
    fields = (("ptr", "x"), ("ptr", "y"), ("i64", "rows"), ("i64", "blocks"))
    return f"""declare i64 @llvm.smin.i64(i64, i64)
{ROUND_STRETCH}
define void @round(ptr %arguments) {{
begin:
{loaded(fields)}
  %more = add i64 %blocks, {BLOCKS_AT_ONCE - 1}
  %stretches = sdiv i64 %more, {BLOCKS_AT_ONCE}
  %items = mul i64 %rows, %stretches
  br label %next
next:
  %item = atomicrmw add ptr %arguments, i64 1 monotonic
  %any = icmp slt i64 %item, %items
  br i1 %any, label %take, label %end
take:
  %row = sdiv i64 %item, %stretches
  %stretch = srem i64 %item, %stretches
  %first = mul i64 %stretch, {BLOCKS_AT_ONCE}
  %full = add i64 %first, {BLOCKS_AT_ONCE}
  %last = call i64 @llvm.smin.i64(i64 %full, i64 %blocks)
  %before = mul i64 %row, %blocks
  %at = add i64 %before, %first
  %many = sub i64 %last, %first
  call void @round_stretch(ptr %x, ptr %y, i64 %at, i64 %many)
  br label %next
end:
  ret void
}}"""
