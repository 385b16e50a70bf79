"""`TargetForecaster`: runs a predictor on a target's hidden states and returns the chances of the next draft.

Owns the step from hidden states to features. It trains nothing: see `training/hrad`. Invariant: it needs no forward of
its own; it uses what the target computed for the verdict. Whatever is wrong, decoding continues without it, and one
warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specbranch.core.forecast import Signal
from specbranch.core.runner import Feed, Runner
from specbranch.hrad.predictor import Predictor, PredictorError

log = logging.getLogger("specbranch")
ON = "Decoding goes on by the draft's confidence alone."


@runtime_checkable
class Transparent(Runner, Protocol):
    """A Runner whose hidden states can be reached."""

    def probe(self, layers: int, network: Callable[[Tensor], Tensor] | None) -> None:
        """Have each verdict carry a network's result for the `features` of the row that led to its token [1, width].
        Only requests with `wants_forecast` get one."""
        ...

    def show(self, work: Sequence[Feed], layers: int) -> Tensor:
        """Compute new nodes; return the hidden states of the last layers at each [nodes, layers·hidden]."""
        ...

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Return the input embeddings of tokens [tokens, hidden]."""
        ...


def reached(runner: object) -> Transparent:
    """Return the runner if its hidden states can be reached; else raise a PredictorError."""
    if not isinstance(runner, Transparent):
        raise PredictorError(
            f"The hidden states of {type(runner).__name__} cannot be reached, so no predictor can be used with it."
        )
    return runner


def features(states: Tensor, tokens: Sequence[int], runner: Transparent) -> Tensor:
    """Return the input of the network: hidden states, each with the embedding of its next token [rows, width]."""
    return torch.cat((states, runner.embedded(tokens)), dim=-1)


class TargetForecaster:
    """A `core.forecast.Forecaster` for a target whose hidden states can be reached. It becomes the target's probe."""

    def __init__(self, predictor: Predictor, runner: object) -> None:
        self._runner = reached(runner)
        about, sample = predictor.about, self._runner.embedded((0,))
        if sample.shape[-1] != about.hidden:
            raise PredictorError(
                f"The predictor reads hidden states of {about.hidden} numbers, this target's have {sample.shape[-1]}. "
                "Train one for this pair with `specbranch train-predictor`."
            )
        self.longest = about.longest
        self._network = predictor.network.to(sample.device)
        self._warned: set[str] = set()
        self._runner.probe(about.layers, self._steps)

    def reaches(self, length: int) -> bool:
        """Return True if the predictor covers drafts of `length` tokens; if not, warn once."""
        if length > self.longest:
            limit = (
                f"The predictor foretells drafts of up to {self.longest} tokens; num_speculative_tokens is "
                f"{length}. Lower it, or train one"
            )
            self._warn(f"{limit} with --longest {length}.")
        return length <= self.longest

    def signal(self, said: tuple[float, ...] | None, position: int) -> Signal | None:
        """Return the forecast for a draft by the network's result at the verdict before it; None if there is none."""
        if said is None:
            return None
        found = Signal.of(said)
        if found.sound:
            return found
        self._warn("The target's hidden states hold numbers that are not finite, so H-RAD says nothing there.")
        return None

    def along(self, states: Tensor, tokens: Sequence[int]) -> list[Signal | None]:
        """Return the forecast for a draft behind each of some tokens, by the hidden states that led to them."""
        said = self._steps(features(states, tokens, self._runner)).tolist()
        return [self.signal(tuple(row), at) for at, row in enumerate(said)]

    @torch.inference_mode()
    def _steps(self, seen: Tensor) -> Tensor:
        return self._network.steps(seen)

    def _warn(self, words: str) -> None:
        """Log a warning, once."""
        if words not in self._warned:
            log.warning("%s %s", words, ON)
            self._warned.add(words)
