"""The predictor at work beside a target: from the row that led to a token to the chances of the next draft.

Owns the step from rows to features. Invariant: no pass of the target is made for it; what it needs was computed with the row. Whatever is
wrong with it, decoding goes on without it, and that is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specbranch.core.orders import Signal
from specbranch.core.runner import Row
from specbranch.hrad.predictor import Predictor, PredictorError
from specbranch.models.rows import TensorRow

log = logging.getLogger("specbranch")
ON = "Decoding goes on by the draft's confidence alone."


@runtime_checkable
class Tapped(Protocol):
    """A Runner whose rows can carry hidden states."""

    def tap(self, layers: int) -> None:
        """Let rows carry the hidden states of the last layers from now on; of 0 layers, none."""
        ...

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """The input embeddings of tokens [tokens, hidden]."""
        ...


def tap(runner: object, layers: int) -> Tapped:
    """Have a runner's rows carry hidden states, or say that it cannot."""
    if not isinstance(runner, Tapped):
        raise PredictorError(f"The hidden states of {type(runner).__name__} cannot be reached, so no predictor can be used with it.")
    runner.tap(layers)
    return runner


def features(rows: Sequence[TensorRow], tokens: Sequence[int], runner: Tapped) -> Tensor:
    """What the network reads: the hidden states at each row, and the embedding of the token it led to [rows, width]."""
    states = [row.states[row.index] for row in rows if row.states is not None]
    if len(states) != len(rows):
        raise ValueError("a row carries no hidden states; tap the runner before it is made")
    return torch.cat((torch.stack(states), runner.embedded(tokens)), dim=-1)


class Forecast:
    """A `core.runner.Forecaster` for a target whose rows carry hidden states."""

    def __init__(self, predictor: Predictor, runner: object) -> None:
        self._runner = tap(runner, predictor.about.layers)
        sample = self._runner.embedded((0,))
        if sample.shape[-1] != predictor.about.hidden:
            raise PredictorError(
                f"The predictor reads hidden states of {predictor.about.hidden} numbers, this target's have {sample.shape[-1]}. "
                "Train one for this pair with `specbranch train-predictor`."
            )
        self.longest = predictor.about.longest
        self._layers, self._network = predictor.about.layers, predictor.network.to(sample.device)
        self._told: set[str] = set()
        self.attend(False)

    def attend(self, wanted: bool) -> None:
        """Have the rows of the next forward carry hidden states, or spare them that."""
        self._runner.tap(self._layers if wanted else 0)

    def reaches(self, length: int) -> bool:
        """Whether drafts of so many tokens are foretold; if not, that is said once."""
        if length > self.longest:
            told = (
                f"The predictor foretells drafts of up to {self.longest} tokens; num_speculative_tokens is {length}. Lower it, or train one"
            )
            self._say(f"{told} with --longest {length}.")
        return length <= self.longest

    @torch.inference_mode()
    def signal(self, row: Row, token: int) -> Signal | None:
        """What becomes of a draft behind a token that came of this row; nothing if that cannot be told."""
        if row.states is None:
            return None  # made before anybody asked
        seen = torch.cat((row.states[row.index], self._runner.embedded((token,))[0]))
        found = Signal.of(self._network.steps(seen[None])[0].tolist())
        if found.sound:
            return found
        self._say("The target's hidden states hold numbers that are not finite, so H-RAD says nothing there.")
        return None

    def _say(self, words: str) -> None:
        """Say something, once."""
        if words not in self._told:
            log.warning("%s %s", words, ON)
            self._told.add(words)
