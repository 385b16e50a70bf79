"""The state of a training run in one safetensors file: weights, optimiser moments, random states, and notes as JSON.

Owns the file. Invariants: it appears as a whole or not at all. Loaded values equal the saved ones bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save as as_safetensors
from torch import Tensor, nn

from specbranch.errors import ModelError
from specbranch.models.files.disk import read_tensors, write_durably

CHECKPOINT_FORMAT = "specbranch-checkpoint-1"
NOTES = ("identity", "where", "groups")


def write_checkpoint(
    path: Path, student: nn.Module, optimiser: torch.optim.Optimizer, notes: Mapping[str, Any]
) -> None:
    """Write everything that a run needs to resume; `notes` holds its other values, as JSON."""
    state = optimiser.state_dict()
    tensors = {f"student.{name}": tensor for name, tensor in student.state_dict().items()}
    tensors |= {
        f"optimiser.{index}.{name}": tensor for index, held in state["state"].items() for name, tensor in held.items()
    }
    tensors |= {f"random.{name}": tensor for name, tensor in _random_states().items()}
    notes_text = json.dumps({**notes, "groups": state["param_groups"]})
    held = {name: one.contiguous().cpu() for name, one in tensors.items()}
    write_durably(path, as_safetensors(held, {"format": CHECKPOINT_FORMAT, "notes": notes_text}))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a checkpoint file."""

    path: Path
    tensors: Mapping[str, Tensor]
    notes: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a checkpoint; raise if it is damaged."""
        try:
            tensors, metadata = read_tensors(path, CHECKPOINT_FORMAT)
            notes = json.loads(metadata["notes"])
            return cls(path, tensors, {name: notes[name] for name in NOTES})
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from None

    def load(self, student: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Restore weights, moments and random states."""
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self._under("optimiser").items():
            index, _, kind = name.partition(".")
            moments.setdefault(int(index), {})[kind] = tensor
        try:
            student.load_state_dict(dict(self._under("student")))
            optimiser.load_state_dict({"state": moments, "param_groups": self.notes["groups"]})
            _set_random_states(self._under("random"))
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise _damaged(self.path, error) from None

    def _under(self, part: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(f"{part}."): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(f"{part}.")
        }


def _damaged(path: Path, error: Exception) -> ModelError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ModelError(
        f"The checkpoint {path} is damaged ({reason}). Delete it and run again to begin the training anew."
    )


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
