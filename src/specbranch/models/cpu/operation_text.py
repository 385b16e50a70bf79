"""LLVM text that all operations of a compiled step share: arguments, work items, and entries of the table of rows.

Owns the layout of an operation's arguments, of the table of rows and of a page. Invariant: every thread calls an
operation and takes items until none is left, so a slow thread delays no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specbranch.core.pages import PAGE
from specbranch.models.files.blocks import BLOCK
from specbranch.models.files.matrix import SCALE_BYTES

# Numbers of an operation: the address of its code, then its arguments. The first argument counts the items taken.
OPERATION_FIELDS = 16
# A row's entry in the table:
# - pages: the list of the addresses of its sequence's pages;
# - prefix: how many KV slots all rows of its sequence see;
# - slot: the address of its own KV slot;
# - count: how many tokens it sees;
# - path: the list of the addresses of the KV slots that it sees behind the prefix.
# The address of a KV slot is that of its key in the first head of the first layer.
ENTRY = ("pages", "prefix", "slot", "count", "path")


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The shape of heads and of the KV cache that code is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    size: Literal[4, 2, 1] = 4  # bytes of a number in the KV cache: float32, bfloat16, or int8 with a scale per head

    @property
    def row(self) -> int:
        """The numbers of a row's queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def kept(self) -> str:
        """The LLVM type of a number in the KV cache."""
        return {4: "float", 2: "i16", 1: "i8"}[self.size]

    @property
    def numbers(self) -> int:
        """The bytes of one head's numbers in a KV slot; in int8 their scale follows."""
        return self.head_dim * self.size

    @property
    def kv_slot(self) -> int:
        """The distance of two KV slots of a head within a page, in bytes."""
        return self.numbers + (SCALE_BYTES if self.size == 1 else 0)

    @property
    def head(self) -> int:
        """The distance of two heads within a page, in bytes."""
        return PAGE * self.kv_slot

    @property
    def values(self) -> int:
        """The distance from a layer's keys to its values, in bytes; the next layer is twice as far."""
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
    """Write an operation: load its arguments, run `before`, then take items until none is left.

    `%item` counts items from 0 to `many`. Every thread calls the operation, so a slow thread delays no other.
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
    """Write the conversion of a field's bits to a float32."""
    return f"""  %{name}.bits = trunc i64 %{name} to i32
  %{name}.float = bitcast i32 %{name}.bits to float"""


def rounded(floats: str, at: str, many: str) -> str:
    """Write the rounding of results for an integer product, which runs if the operation asks for it.

    It rounds `many` numbers from `at` on; both are whole blocks.
    """
    return f"""  %none = icmp eq ptr %rounded, null
  br i1 %none, label %rounded.done, label %round
round:
  %first.block = sdiv i64 {at}, {BLOCK}
  %many.blocks = sdiv i64 {many}, {BLOCK}
  call void @round_stretch(ptr {floats}, ptr %rounded, i64 %first.block, i64 %many.blocks)
  br label %rounded.done
rounded.done:"""


def entry(row: str) -> str:
    """Write the loads of a row's entry in the table."""
    kinds = {name: "ptr" if name in ("pages", "slot", "path") else "i64" for name in ENTRY}
    loads = "\n".join(
        f"  %{name}.at = getelementptr i64, ptr %entry, i64 {at}\n  %{name} = load {kind}, ptr %{name}.at"
        for at, (name, kind) in enumerate(kinds.items())
    )
    return f"""  %entry.at = mul i64 {row}, {len(ENTRY)}
  %entry = getelementptr i64, ptr %table, i64 %entry.at
{loads}"""
