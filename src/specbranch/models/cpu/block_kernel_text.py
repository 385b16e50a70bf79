"""LLVM text of the product of rounded rows with weights in blocks.

Owns the text; `files/blocks.py` owns the layout of weights, `rounding_text.py` that of rounded rows.

Invariant: each element of the result is one chain of operations in a fixed order, for any number of rows and threads.
Sums within a block are sums of integers, and exact.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specbranch.models.cpu.machine_code import loaded
from specbranch.models.cpu.rounding_text import ROUNDED
from specbranch.models.cpu.text_writer import Writer, number
from specbranch.models.files.blocks import BLOCK, SUPER, TILE, BlockForm

SUM_VECTORS = 8  # vectors of float sums that fit the registers, beside as many of integers

# Instructions that sum four products; smmla sums eight, for two outputs and two rows.
Dot = Literal["smmla", "sdot", "vnni", "avx2", "plain"]


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that text is written for: its dot product instruction, and how many sums that computes."""

    dot: Dot

    @property
    def lanes(self) -> int:
        """The number of sums of one instruction."""
        return 8 if self.dot in ("vnni", "avx2") else 4

    @property
    def vectors(self) -> int:
        """The number of vectors of a tile's outputs."""
        return TILE // self.lanes

    @property
    def rows(self) -> int:
        """The rows computed at once; more rows read the tile's weights again, from the L1 cache."""
        return SUM_VECTORS // self.vectors


def source(form: BlockForm, target: Target) -> str:
    """Write the product with one form of weights: tiles for 1 to `target.rows` rows, and the work of one thread."""
    tiles = [_BlockTile(form, target, rows).source() for rows in range(1, target.rows + 1)]
    return "\n".join([_DECLARATIONS, _DOTS[target.dot], *tiles, _all_rows(target), _work(form)])


_DECLARATIONS = """
declare i64 @llvm.smin.i64(i64, i64)
declare <4 x float> @llvm.fma.v4f32(<4 x float>, <4 x float>, <4 x float>)
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""
_SDOT = "declare <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)"
_DOTS: dict[Dot, str] = {
    "smmla": f"{_SDOT}\ndeclare <4 x i32> @llvm.aarch64.neon.smmla.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)",
    "sdot": _SDOT,
    "vnni": "declare <8 x i32> @llvm.x86.avx512.vpdpbusd.256(<8 x i32>, <32 x i8>, <32 x i8>)",
    "avx2": """declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8>, <32 x i8>)
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
declare <32 x i8> @llvm.x86.avx2.psign.b(<32 x i8>, <32 x i8>)
declare <32 x i8> @llvm.abs.v32i8(<32 x i8>, i1)""",
    "plain": "",
}


@dataclass(frozen=True, slots=True)
class _BlockTile:
    """A function for a tile of outputs and a few rows, all sums in registers."""

    form: BlockForm
    target: Target
    rows: int

    @property
    def floats(self) -> str:
        return f"<{self.target.lanes} x float>"

    @property
    def whole(self) -> str:
        return f"<{self.target.lanes} x i32>"

    @property
    def bytes(self) -> str:
        return f"<{4 * self.target.lanes} x i8>"

    @property
    def shift(self) -> int:
        """How many bits the numbers are shifted left in the product: signed nibbles stay in the high half of a byte."""
        return 4 if self.form.bits == 4 and not self.form.offsets else 0

    @property
    def sums(self) -> range:
        return range(self.target.vectors * self.rows)

    @property
    def pairs(self) -> int:
        """The number of pairs of rows that are multiplied together; 0: each row by itself.

        The last row of an odd number is paired with itself.
        """
        return -(-self.rows // 2) if self.target.dot == "smmla" and self.rows > 1 else 0

    def source(self) -> str:
        arguments = "ptr %x, ptr %w, ptr %scale, ptr %bias, ptr %y, i64 %blocks, i64 %stride, i64 %left"
        w = Writer()
        w.begin("begin")
        length = w.op(f"mul i64 %blocks, {ROUNDED}")
        xs = ["%x"]
        for _ in range(1, self.rows):
            xs.append(w.at(xs[-1], length))
        zeros = [(self.floats, "zeroinitializer") for _ in self.sums]
        totals = self._supers(w, xs, zeros) if self.form.supers else self._blocks(w, "%w", xs, "%blocks", zeros, 1)[2]
        self._store(w, totals)
        return f"define internal void @tile{self.rows}({arguments}) {{\n" + "\n".join(w.lines) + "\n}"

    def _supers(self, w: Writer, xs: list[str], zeros: list[tuple[str, str]]) -> list[str]:
        """Write the loop over supers of 256 inputs, each with its own sums."""
        turns = w.op(f"sdiv i64 %blocks, {SUPER // BLOCK}")

        def turn(values: list[str]) -> list[str]:
            at, here, totals = values[0], values[1 : 1 + self.rows], values[1 + self.rows :]
            factors = self._halves(w, at, 1 + self.form.offsets)
            fields = zeros * (1 + self.form.offsets)
            start, ends, sums = self._blocks(w, w.at(at, self.form.before), here, str(SUPER // BLOCK), fields, 2)
            for part in range(1 + self.form.offsets):
                own = sums[part * len(self.sums) :]
                totals = [self._fma(w, own[at], factors[part][at // self.rows], totals[at]) for at in self.sums]
            return [start, *ends, *totals]

        carried = [("ptr", "%w"), *(("ptr", x) for x in xs), *zeros]
        return w.loop(turns, carried, turn)[1 + self.rows :]

    def _blocks(
        self, w: Writer, at: str, xs: list[str], count: str, zeros: list[tuple[str, str]], sides: int
    ) -> tuple[str, list[str], list[str]]:
        """Write the loop over blocks; returns the next addresses of weights and rows, and the sums.

        With two `sides` the sums of the offsets are separate.
        """

        def turn(values: list[str]) -> list[str]:
            here, rows, sums = values[0], values[1 : 1 + self.rows], values[1 + self.rows :]
            sums = self._block(w, here, rows, sums, sides)
            return [w.at(here, self.form.block), *(w.at(row, ROUNDED) for row in rows), *sums]

        found = w.loop(count, [("ptr", at), *(("ptr", x) for x in xs), *zeros], turn)
        return found[0], found[1 : 1 + self.rows], found[1 + self.rows :]

    def _halves(self, w: Writer, at: str, many: int) -> list[list[str]]:
        """Write the loads of `many` times 8 float16 values as floats; returns the vectors of each."""
        half, size = f"<{self.target.lanes} x half>", 2 * self.target.lanes
        places = [[2 * TILE * one + size * part for part in range(self.target.vectors)] for one in range(many)]
        return [[w.op(f"fpext {half} {w.load(half, at, place)} to {self.floats}") for place in some] for some in places]

    def _block(self, w: Writer, at: str, xs: list[str], sums: list[str], sides: int) -> list[str]:
        form = self.form
        scales = self._halves(w, at, form.halves)
        tails = [w.load("<4 x float>", x, BLOCK, 4) for x in xs]
        by = [self._spread(w, tail, 0) for tail in tails]
        groups = BLOCK // (form.group or BLOCK)
        dots = self._dots(w, w.at(at, 16 * form.halves), xs, tails, groups)
        many, sums = len(self.sums), list(sums)
        for group in range(groups):
            for one in self.sums:
                part, row = divmod(one, self.rows)
                scale = w.op(f"fmul {self.floats} {scales[group][part]}, {by[row]}") if form.group else by[row]
                sums[one] = self._fma(w, scale, dots[group][one], sums[one])
        if form.offsets:
            also = [self._spread(w, tail, 1) for tail in tails]
            for one in self.sums:
                part, row = divmod(one, self.rows)
                to = one + (many if sides == 2 else 0)
                sums[to] = self._fma(w, scales[groups][part], also[row], sums[to])
        return sums

    def _dots(self, w: Writer, at: str, xs: list[str], tails: list[str], groups: int) -> list[list[str]]:
        """Write the sums of integer products, as floats, for each group of the block."""
        if self.pairs:
            return self._paired_dots(w, at, xs, groups)
        starts = [self._starts(w, tail, groups) for tail in tails]
        sums = [[starts[one % self.rows][group] for one in self.sums] for group in range(groups)]
        activations = [[w.load("<4 x i32>", x, 16 * half, 4) for half in (0, 1)] for x in xs]
        for word, numbers in self._numbers(w, at):
            group = word * 4 // (BLOCK // groups)
            for part in range(self.target.vectors):
                for row in range(self.rows):
                    one = part * self.rows + row
                    x = self._spread_word(w, activations[row][word // 4], word % 4)
                    sums[group][one] = self._dot(w, sums[group][one], numbers[part], x)
        return [[self._as_float(w, one) for one in some] for some in sums]

    def _paired_dots(self, w: Writer, at: str, xs: list[str], groups: int) -> list[list[str]]:
        """Write the sums of integer products for pairs of rows: one instruction sums for two outputs and two rows.

        The integers are the same as for single rows, and so are all results.
        """
        start = self._starts(w, "", groups)[0]
        sums = [[[start] * self.pairs for _ in range(2 * self.target.vectors)] for _ in range(groups)]
        activations = [self._pair(w, xs[2 * pair], xs[min(2 * pair + 1, self.rows - 1)]) for pair in range(self.pairs)]
        for word, numbers in self._numbers(w, at):
            own = sums[word * 4 // (BLOCK // groups)]
            for outs, some in enumerate(numbers):
                for pair, x in enumerate(activations):
                    given = f"<4 x i32> {own[outs][pair]}, <16 x i8> {x[word // 2]}, <16 x i8> {some}"
                    own[outs][pair] = w.op(f"call <4 x i32> @llvm.aarch64.neon.smmla.v4i32.v16i8({given})")
        return [[self._as_float(w, self._row_of(w, own, *divmod(one, self.rows))) for one in self.sums] for own in sums]

    def _pair(self, w: Writer, first: str, second: str) -> list[str]:
        """Write the loads of two rows, eight inputs of each in a vector."""
        found = []
        for half in (0, 16):
            both = [w.load("<2 x i64>", x, half, 4) for x in (first, second)]
            for lane in (0, 1):
                lanes = f"<2 x i32> <i32 {lane}, i32 {2 + lane}>"
                eights = w.op(f"shufflevector <2 x i64> {both[0]}, <2 x i64> {both[1]}, {lanes}")
                found.append(w.op(f"bitcast <2 x i64> {eights} to <16 x i8>"))
        return found

    def _row_of(self, w: Writer, sums: list[list[str]], part: int, row: int) -> str:
        """Write the selection of one row's sums of four outputs."""
        lanes = ", ".join(f"i32 {lane + 2 * (row % 2)}" for lane in (0, 1, 4, 5))
        both = ", ".join(f"<4 x i32> {sums[2 * part + side][row // 2]}" for side in (0, 1))
        return w.op(f"shufflevector {both}, <4 x i32> <{lanes}>")

    def _numbers(self, w: Writer, at: str) -> Iterator[tuple[int, list[str]]]:
        """Write the unpacking of a block's numbers, lazily: for four inputs a vector of bytes per part of the tile.

        For pairs of rows it is two vectors for every eight inputs. Both nibbles of a byte come in turn, so that few
        vectors are in registers at a time.
        """
        for word in range(0, self.form.words, 2 if self.pairs else 1):
            raw = self._paired(w, at, word) if self.pairs else self._raw(w, at, word)
            if self.form.bits == 8:
                yield word, raw
                continue
            low, high = ("shl", "and") if self.shift else ("and", "lshr")
            by = {"and": f"splat (i8 {-16 if self.shift else 15})", "shl": "splat (i8 4)", "lshr": "splat (i8 4)"}
            yield word, [w.op(f"{low} {self.bytes} {one}, {by[low]}") for one in raw]
            yield word + 4, [w.op(f"{high} {self.bytes} {one}, {by[high]}") for one in raw]

    def _raw(self, w: Writer, at: str, word: int) -> list[str]:
        size, parts = 4 * self.target.lanes, range(self.target.vectors)
        return [w.load(self.bytes, at, 4 * TILE * word + size * part) for part in parts]

    def _paired(self, w: Writer, at: str, word: int) -> list[str]:
        """Write the loads of twice four inputs of each output, with those of one output side by side."""
        found = []
        for both in zip(self._raw(w, at, word), self._raw(w, at, word + 1), strict=True):
            first, second = (w.op(f"bitcast <16 x i8> {one} to <4 x i32>") for one in both)
            for lanes in ("i32 0, i32 4, i32 1, i32 5", "i32 2, i32 6, i32 3, i32 7"):
                eights = w.op(f"shufflevector <4 x i32> {first}, <4 x i32> {second}, <4 x i32> <{lanes}>")
                found.append(w.op(f"bitcast <4 x i32> {eights} to <16 x i8>"))
        return found

    @property
    def _zero(self) -> float:
        """The start value of a sum: a float whose last bit counts one, so that integers can be added to its bits."""
        return 1.5 * 2.0 ** (23 - self.shift)

    def _starts(self, w: Writer, tail: str, groups: int) -> list[str]:
        """Write the start values of the sums of each group."""
        bits = struct.unpack("<i", struct.pack("<f", self._zero))[0]
        start = f"splat (i32 {bits})"
        if self.target.dot != "vnni" or self.form.offsets:
            return [start] * groups
        # Weights have 128 added, as vnni takes them unsigned.
        lanes, words = self.target.lanes, w.op(f"bitcast <4 x float> {tail} to <4 x i32>")
        own = [
            w.op(f"shufflevector <4 x i32> {words}, <4 x i32> poison, <{lanes} x i32> splat (i32 {lane})")
            for lane in ((2,) if groups == 1 else (3, 2))
        ]
        if groups == 2:
            own[1] = w.op(f"sub {self.whole} {own[1]}, {own[0]}")
        more = [w.op(f"shl {self.whole} {one}, splat (i32 7)") for one in own]
        return [w.op(f"sub {self.whole} {start}, {one}") for one in more]

    def _as_float(self, w: Writer, sum_: str) -> str:
        floats = w.op(f"bitcast {self.whole} {sum_} to {self.floats}")
        return w.op(f"fsub {self.floats} {floats}, splat (float {number(self._zero)})")

    def _dot(self, w: Writer, sum_: str, weights: str, x: str) -> str:
        i, b, n = self.whole, self.bytes, 4 * self.target.lanes
        if self.target.dot in ("smmla", "sdot"):
            return w.op(f"call {i} @llvm.aarch64.neon.sdot.v4i32.v16i8({i} {sum_}, {b} {weights}, {b} {x})")
        if self.target.dot == "vnni":
            if not self.form.offsets:
                weights = w.op(f"xor {b} {weights}, splat (i8 -128)")
            return w.op(f"call {i} @llvm.x86.avx512.vpdpbusd.256({i} {sum_}, {b} {weights}, {b} {x})")
        if self.target.dot == "avx2":
            return self._dot_avx2(w, sum_, weights, x)
        wide = [w.op(f"sext {b} {one} to <{n} x i32>") for one in (weights, x)]
        products = w.op(f"mul <{n} x i32> {wide[0]}, {wide[1]}")
        for step in range(4):
            lanes = ", ".join(f"i32 {4 * lane + step}" for lane in range(self.target.lanes))
            some = w.op(f"shufflevector <{n} x i32> {products}, <{n} x i32> poison, {i} <{lanes}>")
            sum_ = w.op(f"add {i} {sum_}, {some}")
        return sum_

    def _dot_avx2(self, w: Writer, sum_: str, weights: str, x: str) -> str:
        i, b = self.whole, self.bytes
        if not self.form.offsets:
            signed = w.op(f"call {b} @llvm.x86.avx2.psign.b({b} {x}, {b} {weights})")
            weights, x = w.op(f"call {b} @llvm.abs.v32i8({b} {weights}, i1 false)"), signed
        pairs = w.op(f"call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw({b} {weights}, {b} {x})")
        fours = w.op(f"call {i} @llvm.x86.avx2.pmadd.wd(<16 x i16> {pairs}, <16 x i16> splat (i16 1))")
        return w.op(f"add {i} {sum_}, {fours}")

    def _spread_word(self, w: Writer, words: str, lane: int) -> str:
        lanes = self.target.lanes
        spread = w.op(f"shufflevector <4 x i32> {words}, <4 x i32> poison, <{lanes} x i32> splat (i32 {lane})")
        return w.op(f"bitcast {self.whole} {spread} to {self.bytes}")

    def _spread(self, w: Writer, tail: str, lane: int) -> str:
        lanes = self.target.lanes
        return w.op(f"shufflevector <4 x float> {tail}, <4 x float> poison, <{lanes} x i32> splat (i32 {lane})")

    def _fma(self, w: Writer, first: str, second: str, added: str) -> str:
        kind = self.floats
        name = f"@llvm.fma.v{self.target.lanes}f32"
        return w.op(f"call {kind} {name}({kind} {first}, {kind} {second}, {kind} {added})")

    def _store(self, w: Writer, totals: list[str]) -> None:
        """Write the last steps: scales of outputs, bias, and stores; fewer outputs at the matrix's end."""
        lanes = self.target.lanes
        if self.form.group is None:
            own = [w.load(self.floats, "%scale", 4 * lanes * part, 4) for part in range(self.target.vectors)]
            totals = [w.op(f"fmul {self.floats} {total}, {own[at // self.rows]}") for at, total in enumerate(totals)]
        own = [w.load(self.floats, "%bias", 4 * lanes * part, 4) for part in range(self.target.vectors)]
        totals = [w.op(f"fadd {self.floats} {total}, {own[at // self.rows]}") for at, total in enumerate(totals)]
        whole = w.op(f"icmp sge i64 %left, {TILE}")
        w.do(f"br i1 {whole}, label %all, label %some")
        w.begin("all")
        self._store_at(w, totals, "%y", "%stride")
        w.do("ret void")
        w.begin("some")
        held = w.op(f"alloca [{TILE * self.rows} x float]")
        self._store_at(w, totals, held, str(4 * TILE))
        end = w.op("icmp sgt i64 %left, 0")
        w.do(f"br i1 {end}, label %copy, label %done")
        w.begin("copy")

        def one(copied: list[str]) -> list[str]:
            at = w.op(f"shl i64 {copied[0]}, 2")
            for row in range(self.rows):
                value = w.load("float", w.at(held, at), 4 * TILE * row, 4)
                to = w.at(w.at("%y", w.op(f"mul i64 %stride, {row}")), at)
                w.do(f"store float {value}, ptr {to}, align 4")
            return [w.op(f"add i64 {copied[0]}, 1")]

        w.loop("%left", [("i64", "0")], one)
        w.do("br label %done")
        w.begin("done")
        w.do("ret void")

    def _store_at(self, w: Writer, totals: list[str], y: str, stride: str) -> None:
        for at, total in enumerate(totals):
            part, row = divmod(at, self.rows)
            to = w.at(w.at(y, w.op(f"mul i64 {stride}, {row}")), 4 * self.target.lanes * part)
            w.do(f"store {self.floats} {total}, ptr {to}, align 4")


def _all_rows(target: Target) -> str:
    """Write a function that computes a tile's outputs for all rows, a few rows at a time."""
    sizes = range(1, target.rows + 1)
    targets = " ".join(f"i64 {rows}, label %take{rows}" for rows in sizes)
    call = "(ptr %xr, ptr %w, ptr %scale, ptr %bias, ptr %yr, i64 %blocks, i64 %stride, i64 %left)"
    takes = "\n".join(f"take{rows}:\n  call void @tile{rows}{call}\n  br label %taken" for rows in sizes)
    arguments = "ptr %x, ptr %w, ptr %scale, ptr %bias, ptr %y, i64 %blocks, i64 %stride, i64 %rows, i64 %left"
    return f"""define internal void @rows({arguments}) {{
begin:
  %row = mul i64 %blocks, {ROUNDED}
  br label %next
next:
  %r = phi i64 [0, %begin], [%r.next, %taken]
  %remain = sub i64 %rows, %r
  %some = call i64 @llvm.smin.i64(i64 %remain, i64 {target.rows})
  %x.at = mul i64 %r, %row
  %xr = getelementptr i8, ptr %x, i64 %x.at
  %y.at = mul i64 %r, %stride
  %yr = getelementptr i8, ptr %y, i64 %y.at
  switch i64 %some, label %end [{targets}]
{takes}
taken:
  %r.next = add i64 %r, %some
  br label %next
end:
  ret void
}}"""


# Arguments of the work: rounded rows, weights, biases, results, counts, scales of outputs, bytes from row to row.
WORK_FIELDS = (
    *(("ptr", name) for name in ("x", "w", "bias", "y")),
    *(("i64", name) for name in ("rows", "blocks", "outs", "part")),
    ("ptr", "scale"),
    ("i64", "stride"),
)


def _work(form: BlockForm) -> str:
    """Write the work of a thread: take tiles and compute them until none is left."""
    return f"""define void @work(ptr %arguments) {{
begin:
{loaded(WORK_FIELDS)}
  %padded = add i64 %outs, {TILE - 1}
  %tiles = sdiv i64 %padded, {TILE}
  %numbers = mul i64 %blocks, {form.block}
  %supers = sdiv i64 %blocks, {SUPER // BLOCK}
  %more = mul i64 %supers, {form.before}
  %tile.bytes = add i64 %numbers, %more
  br label %next
next:
  %start = atomicrmw add ptr %arguments, i64 %part monotonic
  %any = icmp slt i64 %start, %tiles
  br i1 %any, label %take, label %end
take:
  %full = add i64 %start, %part
  %stop = call i64 @llvm.smin.i64(i64 %full, i64 %tiles)
  br label %each
each:
  %t = phi i64 [%start, %take], [%t.next, %each]
  %t.at = mul i64 %t, %tile.bytes
  %w.t = getelementptr i8, ptr %w, i64 %t.at
  %o = mul i64 %t, {TILE}
  %left = sub i64 %outs, %o
  %scale.t = getelementptr float, ptr %scale, i64 %o
  %bias.t = getelementptr float, ptr %bias, i64 %o
  %y.t = getelementptr float, ptr %y, i64 %o
  call void @rows(ptr %x, ptr %w.t, ptr %scale.t, ptr %bias.t, ptr %y.t, i64 %blocks, i64 %stride, i64 %rows, i64 %left)
  %t.next = add i64 %t, 1
  %t.more = icmp slt i64 %t.next, %stop
  br i1 %t.more, label %each, label %next
end:
  ret void
}}"""
