"""LLVM text of attention from few rows to the pages of their sequences (flash decoding on a CPU).

Owns the text. The tokens that a row sees are cut at absolute multiples of SPLIT KV slots. An item is one cut of one row
and key head: it writes its maximum, its total and its weighted values to a table of parts. The thread that finishes a
row's last cut joins them, in their order. So all threads share a long context. Items of the same cut follow each other,
so keys that several rows share are loaded once.

Invariant: each element of the result is one chain of operations that depends only on the row and on the tokens it sees,
in their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from specbranch.core.pages import PAGE
from specbranch.models.cpu.operation_text import KernelShape, entry, fraction, operation, rounded
from specbranch.models.cpu.rounding_text import ROUND_STRETCH
from specbranch.models.cpu.text_writer import Writer, number

SPLIT = 128  # KV slots of a cut: one head's keys and values fit the L1 cache, and a short context has several cuts
KEYS = 4  # keys of a loop turn
FETCH_AHEAD = 4  # keys are prefetched this many turns before their use
FETCH_BYTES = 64  # bytes of a prefetch
LOWEST = -1e30  # below every score
FOUR = "<4 x float>"

assert PAGE % SPLIT == 0 and SPLIT % KEYS == 0


@dataclass(frozen=True, slots=True)
class Registers:
    """Register use on a machine: floats of a vector, queries computed together, and vectors of sums that fit."""

    lanes: int
    queries: int
    sums: int


def part_floats(shape: KernelShape) -> int:
    """Return the floats of one query in the table of parts: its sums, maximum and total, and two of padding."""
    return shape.head_dim + 4


def attention(shape: KernelShape, machine: Registers) -> str:
    """Write attention and its functions."""
    own = _Attention(shape, machine)
    return "\n".join((_DECLARATIONS, ROUND_STRETCH, own.cut(), own.joined(), _attend(shape)))


_DECLARATIONS = """
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <4 x float> @llvm.rint.v4f32(<4 x float>)
declare <4 x float> @llvm.maxnum.v4f32(<4 x float>, <4 x float>)
declare <4 x float> @llvm.fma.v4f32(<4 x float>, <4 x float>, <4 x float>)
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare <2 x float> @llvm.fma.v2f32(<2 x float>, <2 x float>, <2 x float>)
"""


def _exponential(w: Writer, x: str) -> str:
    """Write e^x of four x ≤ 0 as 2^whole · 2^rest; exactly 0 below -87.

    2^whole is made of its bits, 2^rest by its series to the 7th power (error below 1e-8).
    """
    series = [math.log(2) ** power / math.factorial(power) for power in range(8)]
    low = w.op(f"fcmp olt {FOUR} {x}, {_all(-87.0)}")
    safe = w.op(f"select <4 x i1> {low}, {FOUR} {_all(-87.0)}, {FOUR} {x}")
    turns = w.op(f"fmul {FOUR} {safe}, {_all(1 / math.log(2))}")
    whole = w.op(f"call {FOUR} @llvm.rint.v4f32({FOUR} {turns})")
    rest = w.op(f"fsub {FOUR} {turns}, {whole}")
    value = _all(series[7])
    for power in range(6, -1, -1):
        value = w.op(f"call {FOUR} @llvm.fma.v4f32({FOUR} {value}, {FOUR} {rest}, {FOUR} {_all(series[power])})")
    bits = w.op(f"add <4 x i32> {w.op(f'fptosi {FOUR} {whole} to <4 x i32>')}, splat (i32 127)")
    two = w.op(f"bitcast <4 x i32> {w.op(f'shl <4 x i32> {bits}, splat (i32 23)')} to {FOUR}")
    return w.op(f"select <4 x i1> {low}, {FOUR} zeroinitializer, {FOUR} {w.op(f'fmul {FOUR} {value}, {two}')}")


def _all(value: float) -> str:
    return f"splat (float {number(value)})"


def _sum(w: Writer, first: str, second: str) -> str:
    """Write the sums of neighbouring lanes of two vectors of four, those of the first one first."""
    even, odd = (
        w.op(f"shufflevector {FOUR} {first}, {FOUR} {second}, <4 x i32> <{', '.join(f'i32 {at}' for at in lanes)}>")
        for lanes in ((0, 2, 4, 6), (1, 3, 5, 7))
    )
    return w.op(f"fadd {FOUR} {even}, {odd}")


@dataclass(frozen=True, slots=True)
class _Attention:
    shape: KernelShape
    machine: Registers

    @property
    def group(self) -> int:
        """The number of queries that share a key head."""
        return self.shape.heads // self.shape.kv_heads

    @property
    def lanes(self) -> int:
        return math.gcd(self.machine.lanes, self.shape.head_dim)

    @property
    def vectors(self) -> int:
        """The number of vectors of a head."""
        return self.shape.head_dim // self.lanes

    @property
    def kind(self) -> str:
        return f"<{self.lanes} x float>"

    @property
    def tiles(self) -> list[range]:
        """The groups of queries that are computed together."""
        many = -(-self.group // self.machine.queries)
        ends = [self.group * at // many for at in range(many + 1)]
        return [range(start, end) for start, end in pairwise(ends)]

    def at_once(self, queries: range) -> int:
        """Return how many vectors of each query's sums are in registers during one pass over the values."""
        fitting = max(self.machine.sums // len(queries), 1)
        return max(many for many in range(1, fitting + 1) if self.vectors % many == 0)

    def cut(self) -> str:
        """Write the computation of one cut for all queries of a key head.

        `%at`: offset of this layer's and head's keys in a KV slot.
        """
        arguments = "ptr %q, ptr %pages, ptr %path, ptr %part, i64 %at, i64 %prefix, i64 %first, i64 %many"
        w = Writer()
        w.begin("begin")
        kv_slots = w.op(f"alloca [{SPLIT} x ptr], align 16")
        scores = w.op(f"alloca [{SPLIT * self.machine.queries} x float], align 16")
        padded = w.op(f"add i64 %many, {KEYS - 1}")
        turns = w.op(f"sdiv i64 {padded}, {KEYS}")
        self._find(w, kv_slots, turns)
        for queries in self.tiles:
            highest = self._score(w, queries, kv_slots, scores, turns, fetch=queries.start == 0)
            tops, totals = self._weigh(w, queries, kv_slots, scores, turns, highest)
            step = self.at_once(queries)
            for first in range(0, self.vectors, step):
                self._collect(w, queries, kv_slots, scores, turns, range(first, first + step))
            for query, top, total in zip(queries, tops, totals, strict=True):
                self._keep(w, query, top, total)
        w.do("ret void")
        return f"define internal void @cut({arguments}, float %scale) {{\n" + "\n".join(w.lines) + "\n}"

    def _find(self, w: Writer, kv_slots: str, turns: str) -> None:
        """Write the list of the keys' addresses: computed in the prefix, behind it from the row's entry `path`.

        The last key is repeated to fill the last turn.
        """
        page_at = w.op(f"sdiv i64 %first, {PAGE}")
        page = w.load("ptr", w.op(f"getelementptr ptr, ptr %pages, i64 {page_at}"), align=8)
        last = w.op("sub i64 %many, 1")

        def one(carried: list[str]) -> list[str]:
            number_ = w.op(f"call i64 @llvm.smin.i64(i64 {carried[0]}, i64 {last})")
            token = w.op(f"add i64 %first, {number_}")
            behind = w.op(f"sub i64 {token}, %prefix")
            node = w.op(f"call i64 @llvm.smax.i64(i64 {behind}, i64 0)")
            there = w.load("ptr", w.op(f"getelementptr ptr, ptr %path, i64 {node}"), align=8)
            inside = w.op(f"mul i64 {w.op(f'and i64 {token}, {PAGE - 1}')}, {self.shape.kv_slot}")
            early = w.op(f"icmp slt i64 {behind}, 0")
            kv_slot = w.op(f"select i1 {early}, ptr {w.at(page, inside)}, ptr {there}")
            to = w.op(f"getelementptr ptr, ptr {kv_slots}, i64 {carried[0]}")
            w.do(f"store ptr {w.at(kv_slot, '%at')}, ptr {to}, align 8")
            return [w.op(f"add i64 {carried[0]}, 1")]

        w.loop(w.op(f"mul i64 {turns}, {KEYS}"), [("i64", "0")], one)

    def _keys(self, w: Writer, kv_slots: str, turn: str) -> list[str]:
        """Write the loads of the next keys' addresses."""
        at = w.at(kv_slots, w.op(f"mul i64 {turn}, {8 * KEYS}"))
        return [w.load("ptr", at, 8 * key, 8) for key in range(KEYS)]

    def _cached(self, w: Writer, kv_slot: str, vector: int, further: int = 0) -> str:
        """Write the load of a vector of a key as floats; int8 numbers are not scaled yet.

        `further`: offset in bytes, from a key to its value.
        """
        size, lanes = self.shape.size, self.lanes
        found = w.load(f"<{lanes} x {self.shape.kept}>", kv_slot, vector * lanes * size + further, size)
        if size == 4:
            return found
        if size == 1:
            return w.op(f"sitofp <{lanes} x i8> {found} to {self.kind}")
        wide = w.op(f"zext <{lanes} x i16> {found} to <{lanes} x i32>")  # bfloat16 is the upper half of a float32
        return w.op(f"bitcast <{lanes} x i32> {w.op(f'shl <{lanes} x i32> {wide}, splat (i32 16)')} to {self.kind}")

    def _scales(self, w: Writer, keys: list[str], further: int = 0) -> str:
        """Write the loads of the scales of four keys, or, with `further`, of their values."""
        four = "poison"
        for lane, key in enumerate(keys):
            scale = w.load("float", key, self.shape.numbers + further, 1)
            four = w.op(f"insertelement {FOUR} {four}, float {scale}, i32 {lane}")
        return four

    def _score(self, w: Writer, queries: range, kv_slots: str, scores: str, turns: str, fetch: bool) -> list[str]:
        """Write the scores of some queries; returns their maxima, four for each query."""
        scale = self._spread(w, "%scale", 4)

        def turn(carried: list[str]) -> list[str]:
            at, highest = carried[0], carried[1:]
            keys = self._keys(w, kv_slots, at)
            ahead = self._ahead(w, kv_slots, at, turns) if fetch else []
            sums = self._products(w, queries, keys, ahead)
            seen = self._seen(w, at)
            by = w.op(f"fmul {FOUR} {self._scales(w, keys)}, {scale}") if self.shape.size == 1 else scale
            for number_, own in enumerate(sums):
                score = w.op(f"fmul {FOUR} {own}, {by}")
                score = w.op(f"select <4 x i1> {seen}, {FOUR} {score}, {FOUR} {_all(LOWEST)}")
                w.do(f"store {FOUR} {score}, ptr {self._scores(w, scores, number_, at)}, align 16")
                both = f"{FOUR} {highest[number_]}, {FOUR} {score}"
                highest[number_] = w.op(f"call {FOUR} @llvm.maxnum.v4f32({both})")
            return [w.op(f"add i64 {at}, 1"), *highest]

        return w.loop(turns, [("i64", "0"), *((FOUR, _all(LOWEST)) for _ in queries)], turn)[1:]

    def _ahead(self, w: Writer, kv_slots: str, turn: str, turns: str) -> list[str]:
        """Write the addresses of the keys some turns ahead, and of their values, to be prefetched.

        A turn is too long for the processor to look beyond it.
        """
        last = w.op(f"sub i64 {turns}, 1")
        ahead = w.op(f"call i64 @llvm.smin.i64(i64 {w.op(f'add i64 {turn}, {FETCH_AHEAD}')}, i64 {last})")
        keys = self._keys(w, kv_slots, ahead)
        both = [kv_slot for key in keys for kv_slot in (key, w.at(key, self.shape.values))]
        return [w.at(kv_slot, line) for kv_slot in both for line in range(0, self.shape.numbers, FETCH_BYTES)]

    def _products(self, w: Writer, queries: range, keys: list[str], ahead: list[str]) -> list[str]:
        """Write the products of queries with four keys: a vector of four for each query.

        In between it prefetches what is `ahead`, a little at a time, as few prefetches can be in flight.
        """
        sums: list[list[str]] = [[""] * KEYS for _ in queries]
        for vector in range(self.vectors):
            for kv_slot in ahead[vector :: self.vectors]:
                w.do(f"call void @llvm.prefetch.p0(ptr {kv_slot}, i32 0, i32 3, i32 1)")
            values = [self._cached(w, key, vector) for key in keys]
            for own, query in zip(sums, queries, strict=True):
                asked = w.load(self.kind, "%q", 4 * (query * self.shape.head_dim + vector * self.lanes), 4)
                for key, value in enumerate(values):
                    own[key] = self._fma(w, asked, value, own[key])
        return [self._folded(w, own) for own in sums]

    def _folded(self, w: Writer, sums: list[str]) -> str:
        """Write the sum of the lanes of four vectors, in halves."""
        width = self.lanes
        while width > 4:
            width //= 2
            halves = [[w.op(self._half(one, width, part)) for part in (0, 1)] for one in sums]
            sums = [w.op(f"fadd <{width} x float> {low}, {high}") for low, high in halves]
        if width < 4:  # heads with two dimensions
            wide, own = "<4 x i32> <i32 0, i32 1, i32 2, i32 2>", "<2 x float>"
            sums = [w.op(f"shufflevector {own} {one}, {own} zeroinitializer, {wide}") for one in sums]
        return _sum(w, _sum(w, sums[0], sums[1]), _sum(w, sums[2], sums[3]))

    def _half(self, vector: str, width: int, part: int) -> str:
        lanes = ", ".join(f"i32 {lane}" for lane in range(part * width, (part + 1) * width))
        whole = f"<{2 * width} x float>"
        return f"shufflevector {whole} {vector}, {whole} poison, <{width} x i32> <{lanes}>"

    def _seen(self, w: Writer, turn: str) -> str:
        """Write the mask of the four keys that exist: the last turn may have fewer."""
        before = w.op(f"mul i64 {turn}, {KEYS}")
        left = w.op(f"trunc i64 {w.op(f'sub i64 %many, {before}')} to i32")
        first = w.op(f"insertelement <4 x i32> poison, i32 {left}, i32 0")
        every = w.op(f"shufflevector <4 x i32> {first}, <4 x i32> poison, <4 x i32> zeroinitializer")
        return w.op(f"icmp sgt <4 x i32> {every}, <i32 0, i32 1, i32 2, i32 3>")

    def _scores(self, w: Writer, scores: str, number_: int, turn: str) -> str:
        """Write the address of four scores of a query."""
        return w.at(w.at(scores, 4 * SPLIT * number_), w.op(f"mul i64 {turn}, {4 * KEYS}"))

    def _weigh(
        self, w: Writer, queries: range, kv_slots: str, scores: str, turns: str, highest: list[str]
    ) -> tuple[list[str], list[str]]:
        """Write the conversion of scores to weights, times the scales of their values.

        Returns the maximum of each query and the total of its weights.
        """
        tops = [self._top(w, four) for four in highest]
        spread = [self._spread(w, top, 4) for top in tops]

        def turn(carried: list[str]) -> list[str]:
            at, totals = carried[0], carried[1:]
            scales = self._scales(w, self._keys(w, kv_slots, at), self.shape.values) if self.shape.size == 1 else ""
            for number_ in range(len(queries)):
                where = self._scores(w, scores, number_, at)
                below = w.op(f"fsub {FOUR} {w.load(FOUR, where, align=16)}, {spread[number_]}")
                weight = _exponential(w, below)
                scaled = w.op(f"fmul {FOUR} {weight}, {scales}") if scales else weight
                w.do(f"store {FOUR} {scaled}, ptr {where}, align 16")
                totals[number_] = w.op(f"fadd {FOUR} {totals[number_]}, {weight}")
            return [w.op(f"add i64 {at}, 1"), *totals]

        found = w.loop(turns, [("i64", "0"), *((FOUR, "zeroinitializer") for _ in queries)], turn)[1:]
        pairs = [_sum(w, one, one) for one in found]
        return tops, [w.op(f"extractelement {FOUR} {_sum(w, pair, pair)}, i32 0") for pair in pairs]

    def _top(self, w: Writer, four: str) -> str:
        for lanes in ((2, 3, 0, 1), (1, 0, 3, 2)):
            swapped = ", ".join(f"i32 {lane}" for lane in lanes)
            other = w.op(f"shufflevector {FOUR} {four}, {FOUR} poison, <4 x i32> <{swapped}>")
            four = w.op(f"call {FOUR} @llvm.maxnum.v4f32({FOUR} {four}, {FOUR} {other})")
        return w.op(f"extractelement {FOUR} {four}, i32 0")

    def _collect(self, w: Writer, queries: range, kv_slots: str, scores: str, turns: str, vectors: range) -> None:
        """Write the sums of weighted values for some vectors of each query, and their stores."""

        def turn(carried: list[str]) -> list[str]:
            at, sums = carried[0], carried[1:]
            keys = self._keys(w, kv_slots, at)
            weights = [w.load(FOUR, self._scores(w, scores, one, at), align=16) for one in range(len(queries))]
            for lane, key in enumerate(keys):
                spread = [self._lane(w, weight, lane) for weight in weights]
                for index, vector in enumerate(vectors):
                    value = self._cached(w, key, vector, self.shape.values)
                    for one, weight in enumerate(spread):
                        number_ = one * len(vectors) + index
                        sums[number_] = self._fma(w, value, weight, sums[number_])
            return [w.op(f"add i64 {at}, 1"), *sums]

        zeros = [(self.kind, "zeroinitializer") for _ in queries for _ in vectors]
        found = w.loop(turns, [("i64", "0"), *zeros], turn)[1:]
        for number_, total in enumerate(found):
            one, index = divmod(number_, len(vectors))
            to = w.at("%part", 4 * (queries[one] * part_floats(self.shape) + vectors[index] * self.lanes))
            w.do(f"store {self.kind} {total}, ptr {to}, align 4")

    def _keep(self, w: Writer, query: int, top: str, total: str) -> None:
        for behind, value in enumerate((top, total)):
            to = w.at("%part", 4 * (query * part_floats(self.shape) + self.shape.head_dim + behind))
            w.do(f"store float {value}, ptr {to}, align 4")

    def joined(self) -> str:
        """Write the function that joins a row's cuts for one key head."""
        w = Writer()
        w.begin("begin")
        size = 4 * part_floats(self.shape)

        def query(carried: list[str]) -> list[str]:
            part, out = carried
            self._join(w, part, out)
            return [w.at(part, size), w.at(out, 4 * self.shape.head_dim)]

        w.loop(str(self.group), [("ptr", "%part"), ("ptr", "%out")], query)
        w.do("ret void")
        return "define internal void @join(ptr %part, ptr %out, i64 %cuts) {\n" + "\n".join(w.lines) + "\n}"

    def _join(self, w: Writer, part: str, out: str) -> None:
        """Write the join of one query: its sums, rescaled to the greatest maximum, divided by the rescaled total."""
        step = 4 * part_floats(self.shape) * self.group
        top_at = w.at(part, 4 * self.shape.head_dim)

        def higher(carried: list[str]) -> list[str]:
            here = self._spread(w, w.load("float", carried[0], align=4), 4)
            return [w.at(carried[0], step), w.op(f"call {FOUR} @llvm.maxnum.v4f32({FOUR} {carried[1]}, {FOUR} {here})")]

        top = w.loop("%cuts", [("ptr", top_at), (FOUR, _all(LOWEST))], higher)[1]

        def add(carried: list[str]) -> list[str]:
            here, total, sums = carried[0], carried[1], carried[2:]
            own = self._spread(w, w.load("float", here, 4 * self.shape.head_dim, 4), 4)
            fade = _exponential(w, w.op(f"fsub {FOUR} {own}, {top}"))
            by = self._lane(w, fade, 0)
            total_here = self._spread(w, w.load("float", here, 4 * self.shape.head_dim + 4, 4), self.lanes)
            found = [w.load(self.kind, here, 4 * self.lanes * vector, 4) for vector in range(self.vectors)]
            grown = [self._fma(w, one, by, sum_) for one, sum_ in zip(found, sums, strict=True)]
            return [w.at(here, step), self._fma(w, total_here, by, total), *grown]

        zeros = [(self.kind, "zeroinitializer") for _ in range(self.vectors + 1)]
        _, total, *sums = w.loop("%cuts", [("ptr", part), *zeros], add)
        for vector, sum_ in enumerate(sums):
            share = w.op(f"fdiv {self.kind} {sum_}, {total}")
            w.do(f"store {self.kind} {share}, ptr {w.at(out, 4 * self.lanes * vector)}, align 4")

    def _spread(self, w: Writer, value: str, width: int) -> str:
        first = w.op(f"insertelement <{width} x float> poison, float {value}, i32 0")
        kind = f"<{width} x float>"
        return w.op(f"shufflevector {kind} {first}, {kind} poison, <{width} x i32> zeroinitializer")

    def _lane(self, w: Writer, four: str, lane: int) -> str:
        """Write a vector with one of four numbers in all lanes."""
        return w.op(f"shufflevector {FOUR} {four}, {FOUR} poison, <{self.lanes} x i32> splat (i32 {lane})")

    def _fma(self, w: Writer, first: str, second: str, added: str) -> str:
        """Write a fused multiply-add, or a product if there is nothing to add to."""
        kind = self.kind
        if not added:
            return w.op(f"fmul {kind} {first}, {second}")
        return w.op(f"call {kind} @llvm.fma.v{self.lanes}f32({kind} {first}, {kind} {second}, {kind} {added})")


def _attend(shape: KernelShape) -> str:
    """Write the operation; an item is one key head, cut and row."""
    width, part = shape.heads // shape.kv_heads * shape.head_dim, shape.heads // shape.kv_heads * part_floats(shape)
    arguments = "ptr %q.here, ptr %pages, ptr %path, ptr %part, i64 %at, i64 %prefix, i64 %first, i64 %many"
    arguments += ", float %scale.float"
    body = f"""  %in.head = mul i64 %rows, %cuts
  %head = udiv i64 %item, %in.head
  %of.head = urem i64 %item, %in.head
  %cut = udiv i64 %of.head, %rows
  %row = urem i64 %of.head, %rows
{entry("%row")}
  %first = mul i64 %cut, {SPLIT}
  %left = sub i64 %count, %first
  %some = icmp sgt i64 %left, 0
  br i1 %some, label %compute, label %next
compute:
  %many = call i64 @llvm.smin.i64(i64 %left, i64 {SPLIT})
  %q.row = mul i64 %row, {shape.row}
  %q.head = mul i64 %head, {width}
  %q.at = add i64 %q.row, %q.head
  %q.here = getelementptr float, ptr %q, i64 %q.at
  %layer.at = mul i64 %layer, {2 * shape.values}
  %head.at = mul i64 %head, {shape.head}
  %at = add i64 %layer.at, %head.at
  %own.row = mul i64 %row, {shape.kv_heads}
  %own = add i64 %own.row, %head
  %own.part = mul i64 %own, %most
  %own.at = mul i64 %own.part, {part}
  %own.parts = getelementptr float, ptr %parts, i64 %own.at
  %part.at = mul i64 %cut, {part}
  %part = getelementptr float, ptr %own.parts, i64 %part.at
{fraction("scale")}
  call void @cut({arguments})
  %arrived.p = getelementptr i64, ptr %arrived, i64 %own
  %before = atomicrmw add ptr %arrived.p, i64 1 acq_rel
  %full = add i64 %count, {SPLIT - 1}
  %all = sdiv i64 %full, {SPLIT}
  %last = sub i64 %all, 1
  %is.last = icmp eq i64 %before, %last
  br i1 %is.last, label %join, label %next
join:
  store i64 0, ptr %arrived.p
  %o.row = mul i64 %row, {shape.kv_heads * width}
  %o.at = add i64 %o.row, %q.head
  %o.here = getelementptr float, ptr %out, i64 %o.at
  call void @join(ptr %own.parts, ptr %o.here, i64 %all)
{rounded("%out", "%o.at", str(width))}"""
    pointers = ("q", "table", "out", "rounded", "parts", "arrived")
    begin = f"  %row.cuts = mul i64 %rows, %cuts\n  %items = mul i64 %row.cuts, {shape.kv_heads}"
    return operation("attend", pointers, ("rows", "cuts", "most", "layer", "scale"), "%items", body, before=begin)
