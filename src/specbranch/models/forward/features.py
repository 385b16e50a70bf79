"""Features: what a draft reads of its target's hidden states, one vector for each KV slot.

Owns the formula, fc(hidden states after some layers), and when it is written. Does not own the memory
(`cache/kv_memory.py`), or who reads it (`runners/feature_runner.py`). Invariant: every row that a target computes has
its feature written with its keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbranch.models.cache.kv_memory import FeatureMemory
from specbranch.models.cpu.linear import Linear
from specbranch.models.forward.arithmetic import normed


@dataclass(frozen=True, slots=True)
class Fuse:
    """fc(hidden states after the layers `taps`, side by side); tap n is the stream behind n layers, 0 the embedding.

    `norms`: one for each tap (`fc_norm`); `input_norm`: of all of them together.
    """

    taps: tuple[int, ...]
    fc: Linear
    hidden: int  # of a feature
    eps: float = 1e-6
    norms: tuple[Tensor, ...] = ()
    input_norm: Tensor | None = None

    def __call__(self, states: Sequence[Tensor]) -> Tensor:
        """Return the features [rows, hidden] of the hidden states behind each tap."""
        if self.norms:
            states = [normed(state, norm, self.eps) for state, norm in zip(states, self.norms, strict=True)]
        joined = torch.cat(tuple(states), dim=-1)
        return self.fc(joined if self.input_norm is None else normed(joined, self.input_norm, self.eps))


@dataclass(frozen=True, slots=True)
class FeatureWriter:
    """Writes the features of a target's rows to its memory."""

    fuse: Fuse
    memory: FeatureMemory

    def write(self, kv_slots: Tensor, states: Sequence[Tensor]) -> None:
        """Write the features of rows; `kv_slots` [rows]: of the pool. `states`: one for each tap."""
        self.memory.put(kv_slots, self.fuse(states))

    def write_of(self, kv_slots: Tensor, stream: Sequence[Tensor]) -> None:
        """Do as `write`; `stream`: the hidden states behind 0, 1, 2 … layers."""
        self.write(kv_slots, [stream[tap] for tap in self.fuse.taps])

    def needs_all(self, layers: int) -> bool:
        """True if the output of the last layer is a tap: then prefill has to compute that layer, too."""
        return layers in self.fuse.taps
