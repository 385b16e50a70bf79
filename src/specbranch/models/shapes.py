"""Sizes of well-known decoders of the Llama family, by a short name.

Owns the table; what is made in a shape is decided elsewhere. Invariant: a shape is a decoder that exists, but for `tiny`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """All that decides what a step of a decoder costs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """How many numbers its matrices have, the embedding and a head of its own included."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (attention + 3 * self.intermediate) + 2 * self.vocabulary * self.hidden

    def sizes(self) -> dict[str, int]:
        """Its numbers by name."""
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
