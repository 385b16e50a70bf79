"""The predictor at work beside a target: from what the target showed where it chose a token to the chances of the next
draft.

Owns the step from hidden states to features. Invariant: no pass of the target is made for it; what it needs was
computed with the verdict. Whatever is wrong with it, decoding goes on without it, and that is said once.
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
        """Have verdicts carry what a network makes of `features` at the row that led to their token [1, width],
        where that is asked for."""
        ...

    def show(self, work: Sequence[Feed], layers: int) -> Tensor:
        """Read new nodes; returns the hidden states of the last layers at each [nodes, layers·hidden]."""
        ...

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """The input embeddings of tokens [tokens, hidden]."""
        ...


def reached(runner: object) -> Transparent:
    """Return a runner whose hidden states can be reached, or say that they cannot."""
    if not isinstance(runner, Transparent):
        raise PredictorError(
            f"The hidden states of {type(runner).__name__} cannot be reached, so no predictor can be used with it."
        )
    return runner


def features(states: Tensor, tokens: Sequence[int], runner: Transparent) -> Tensor:
    """What the network reads: hidden states, each with the embedding of the token they led to [rows, width]."""
    return torch.cat((states, runner.embedded(tokens)), dim=-1)


class TargetForecaster:
    """A `core.forecast.Forecaster` for a target whose hidden states can be reached: its probe from now on."""

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
        self._told: set[str] = set()
        self._runner.probe(about.layers, self._steps)

    def reaches(self, length: int) -> bool:
        """Whether drafts of so many tokens are foretold; if not, that is said once."""
        if length > self.longest:
            told = (
                f"The predictor foretells drafts of up to {self.longest} tokens; num_speculative_tokens is "
                f"{length}. Lower it, or train one"
            )
            self._say(f"{told} with --longest {length}.")
        return length <= self.longest

    def signal(self, said: tuple[float, ...] | None, position: int) -> Signal | None:
        """What becomes of a draft, by what the network said at the verdict before it; nothing if that cannot be
        told."""
        if said is None:
            return None
        found = Signal.of(said)
        if found.sound:
            return found
        self._say("The target's hidden states hold numbers that are not finite, so H-RAD says nothing there.")
        return None

    def along(self, states: Tensor, tokens: Sequence[int]) -> list[Signal | None]:
        """What becomes of a draft behind each of some tokens, by the hidden states that led to them."""
        said = self._steps(features(states, tokens, self._runner)).tolist()
        return [self.signal(tuple(line), at) for at, line in enumerate(said)]

    @torch.inference_mode()
    def _steps(self, seen: Tensor) -> Tensor:
        return self._network.steps(seen)

    def _say(self, words: str) -> None:
        """Say something, once."""
        if words not in self._told:
            log.warning("%s %s", words, ON)
            self._told.add(words)
