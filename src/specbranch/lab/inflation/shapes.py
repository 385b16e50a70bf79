"""Sizes of well-known decoders of the Llama family, by short name.

Owns the table. Invariant: every shape except `tiny` is that of a real decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from specbranch.errors import BadParameter, unknown


@dataclass(frozen=True, slots=True)
class Shape:
    """All sizes that decide the cost of a decode step."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Return the number of weights, including the embedding and a head of its own."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (attention + 3 * self.intermediate) + 2 * self.vocabulary * self.hidden

    def sizes(self) -> dict[str, int]:
        """Return its sizes by name."""
        return asdict(self)


SHAPES: dict[str, Shape] = {  # hidden, layers, heads, kv heads, head dim, intermediate, vocabulary
    "68m": Shape(768, 2, 12, 12, 64, 3072, 32000),
    "135m": Shape(576, 30, 9, 3, 64, 1536, 49152),
    "1b": Shape(2048, 16, 32, 8, 64, 8192, 128256),
    "1.3b": Shape(2048, 24, 16, 16, 128, 5504, 32256),
    "1.5b": Shape(1536, 28, 12, 2, 128, 8960, 151936),
    "7b": Shape(4096, 32, 32, 32, 128, 11008, 32000),
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256),
    "13b": Shape(5120, 40, 40, 40, 128, 13824, 32000),
    "33b": Shape(7168, 62, 56, 8, 128, 19200, 32256),
    "tiny": Shape(64, 2, 4, 2, 16, 128, 500),
}


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """A requested shape: a name, single sizes, or both; without a name the other sizes are the model's own."""

    name: str | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name is not None and self.name not in SHAPES:
            raise unknown("shape", self.name, SHAPES)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse '7b', 'hidden=64,layers=3' or '7b,layers=40'."""
        first, *rest = text.split(",")
        named = "=" not in first
        parts = [part.partition("=") for part in (rest if named else (first, *rest))]
        known = Shape.__dataclass_fields__
        for key, _, value in parts:
            if key not in known or not value.isdigit() or int(value) < 1:
                wanted = f"expected a name such as 7b, NUMBER=VALUE, or both with commas; numbers: {', '.join(known)}"
                raise BadParameter(
                    f"The shape {text!r} has the part {key + (f'={value}' if value else '')!r}; {wanted}."
                )
        return cls(first if named else None, {key: int(value) for key, _, value in parts})

    @property
    def title(self) -> str:
        """Return its name and the sizes given besides."""
        others = ", ".join(f"{name} {value}" for name, value in self.numbers.items())
        return " with ".join(part for part in (self.name, others) if part) or "itself"

    @property
    def short(self) -> str:
        """Return the same as part of a file name."""
        return (
            "-".join((self.name or "", *(f"{value}{name}" for name, value in self.numbers.items()))).strip("-") or "own"
        )

    def over(self, own: Shape) -> Shape:
        """Return all sizes; missing ones are those of the model."""
        return replace(SHAPES[self.name] if self.name is not None else own, **self.numbers)
