"""What all operations of a compiled step share, in LLVM's language: how they take their arguments and help themselves
to items, and how rows are told apart.

Owns the layout of an operation's arguments, of the table of rows and of a page. Invariant: every thread calls an
operation and takes items until none is left, so a slow one holds nobody up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specbranch.core.pages import PAGE
from specbranch.models.files.blocks import BLOCK
from specbranch.models.kv import SCALE

# numbers an operation takes: the address of its code, then its arguments, the first of them counting what was taken
FIELDS = 16
# A row's entry in the table: where the addresses of its sequence's pages are listed, how many KV slots the rows of its
# sequence all see, the address of its own KV slot, how many tokens it sees, and where the addresses of those behind the
# prefix are listed. An address is that of a KV slot's key in the first head of the first layer.
ENTRY = ("pages", "prefix", "slot", "count", "line")


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What the code is specialised to."""

    heads: int
    kv_heads: int
    head_dim: int
    size: Literal[4, 2, 1] = 4  # bytes of a number in the cache: float32, bfloat16, or int8 with a scale for a head

    @property
    def row(self) -> int:
        """How many numbers the queries, keys and values of a row are."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def kept(self) -> str:
        """A number in the cache, in LLVM's language."""
        return {4: "float", 2: "i16", 1: "i8"}[self.size]

    @property
    def numbers(self) -> int:
        """How many bytes the numbers of a head are at a KV slot; a scale is behind them."""
        return self.head_dim * self.size

    @property
    def kv_slot(self) -> int:
        """How many bytes of a page two KV slots of a head are apart."""
        return self.numbers + (SCALE if self.size == 1 else 0)

    @property
    def head(self) -> int:
        """The same for two heads."""
        return PAGE * self.kv_slot

    @property
    def values(self) -> int:
        """How many bytes behind the keys of a layer its values are; another layer is twice as far."""
        return self.kv_heads * self.head


def operation(
    name: str,
    pointers: tuple[str, ...],
    counts: tuple[str, ...],
    many: str,
    body: str,
    variables: str = "",
    before: str = "",
) -> str:
    """Write an operation: read its arguments, do what comes `before`, then take items (%item, from 0 to `many`) until
    none is left.

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
{before}
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


def fraction(name: str) -> str:
    """Read a field as a float32: its bits."""
    return f"""  %{name}.bits = trunc i64 %{name} to i32
  %{name}.float = bitcast i32 %{name}.bits to float"""


def rounded(floats: str, at: str, many: str) -> str:
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


def entry(row: str) -> str:
    """Read a row's entry in the table."""
    kinds = {name: "ptr" if name in ("pages", "slot", "line") else "i64" for name in ENTRY}
    loads = "\n".join(
        f"  %{name}.at = getelementptr i64, ptr %entry, i64 {at}\n  %{name} = load {kind}, ptr %{name}.at"
        for at, (name, kind) in enumerate(kinds.items())
    )
    return f"""  %entry.at = mul i64 {row}, {len(ENTRY)}
  %entry = getelementptr i64, ptr %table, i64 %entry.at
{loads}"""
