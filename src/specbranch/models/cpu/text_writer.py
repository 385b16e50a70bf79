"""A writer of LLVM text: operations, labels and loops.

Owns the names of results and labels; knows nothing of what is computed. Invariant: a name is defined once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field


def number(value: float) -> str:
    """Format a float32 for LLVM: the bits of the same value in double precision."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


@dataclass(slots=True)
class Writer:
    """LLVM text under construction; each operation's result gets its own name."""

    lines: list[str] = field(default_factory=list)
    label: str = "begin"
    _names: int = 0

    def op(self, text: str) -> str:
        """Write an operation, and return the name of its result."""
        self._names += 1
        self.lines.append(f"  %v{self._names} = {text}")
        return f"%v{self._names}"

    def do(self, text: str) -> None:
        """Write an operation without a result."""
        self.lines.append(f"  {text}")

    def at(self, pointer: str, offset: int | str) -> str:
        """Write an address at an offset in bytes from another, and return its name."""
        return pointer if offset == 0 else self.op(f"getelementptr i8, ptr {pointer}, i64 {offset}")

    def load(self, kind: str, pointer: str, offset: int | str = 0, align: int = 2) -> str:
        """Write a load, and return the name of the value."""
        return self.op(f"load {kind}, ptr {self.at(pointer, offset)}, align {align}")

    def begin(self, label: str) -> None:
        """Begin a basic block."""
        self.lines.append(f"{label}:")
        self.label = label

    def loop(self, count: str, carried: list[tuple[str, str]], body: Callable[[list[str]], list[str]]) -> list[str]:
        """Write a loop of at least one turn; `carried`: types and first values of its loop variables."""
        self._names += 1
        name, before = f"loop{self._names}", self.label
        self.do(f"br label %{name}")
        self.begin(name)
        first = len(self.lines)
        olds = [f"%{name}.{at}" for at in range(len(carried))]
        news = body(olds)
        self.do(f"%{name}.next = add i64 %{name}.i, 1")
        more = self.op(f"icmp slt i64 %{name}.next, {count}")
        self.do(f"br i1 {more}, label %{name}, label %{name}.end")
        counted = f"  %{name}.i = phi i64 [0, %{before}], [%{name}.next, %{self.label}]"
        phis = [
            f"  {old} = phi {kind} [{start}, %{before}], [{new}, %{self.label}]"
            for old, new, (kind, start) in zip(olds, news, carried, strict=True)
        ]
        self.lines[first:first] = [counted, *phis]
        self.begin(f"{name}.end")
        return news
