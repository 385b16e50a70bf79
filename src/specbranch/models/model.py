"""Runners on torch: rows of logits on a device, turned into tokens there, and hidden states for those who foretell from
them.

Owns what torch runners have in common: their sampler, the probe of hidden states, the limit of what may be said. A
runner adds how it reads. Invariant: hidden states are computed for a forward that was asked for them, and for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specbranch.core.rows import RowRunner
from specbranch.core.runner import Feed, Trial, Verdicts
from specbranch.models.noise import shared_noise
from specbranch.models.rows import TensorRow
from specbranch.models.sampling import TorchSampler
from specbranch.models.transfer import Transfer

# Tokens of a prompt in one forward, by the kind of device: what a round reads of it beside the rows of others, who wait
# for that. A GPU reads 256 in little more time than a few. On a CPU time grows with each, and BLAS is the slower the
# fewer there are: at 64 it has four fifths of its speed at 256. Compiled code has its own size, see `native`.
PREFILL_CHUNKS = {"cpu": 64, "cuda": 256}
ProbeNetwork = Callable[[Tensor], Tensor]  # [rows, layers·hidden + hidden] to a few numbers a row


class TorchRunner(RowRunner[TensorRow]):
    """A Runner whose rows are tensors."""

    sampler: TorchSampler

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.device = device
        self.transfer = Transfer(device)
        self.prefill_chunk = PREFILL_CHUNKS.get(device.type, PREFILL_CHUNKS["cuda"])
        super().__init__(TorchSampler(vocabulary, shared_noise(), self.transfer))
        self._tapped = 0  # layers whose hidden states the rows of the next forward carry
        self._probe: tuple[int, ProbeNetwork] | None = None

    @property
    def vocabulary(self) -> int:
        """How many token ids the model scores."""
        raise NotImplementedError

    @property
    def context_length(self) -> int:
        """How many tokens one sequence may hold."""
        raise NotImplementedError

    def limit(self, vocabulary: int) -> None:
        """Never say a token from this id on, as one that is unknown to the other model."""
        self.sampler = TorchSampler(vocabulary, shared_noise(), self.transfer)

    def probe(self, layers: int, network: ProbeNetwork | None) -> None:
        """Have verdicts carry what a network makes of the last layers' hidden states, and of the input embedding of
        the verdict's token."""
        self.check_layers(layers)
        self._probe = None if network is None else (layers, network)

    def show(self, work: Sequence[Feed], layers: int) -> Tensor:
        """Read new nodes, and return the hidden states of the last layers [nodes, layers·hidden], the last of them
        normed."""
        self.check_layers(layers)
        with self._tapping(layers):
            rows = [row for made in self.score(work) for row in made]
        return torch.stack([row.states[row.index] for row in rows if row.states is not None])

    def check_layers(self, layers: int) -> None:
        """Raise a ModelError unless the hidden states of so many layers can be had."""
        raise NotImplementedError

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """The input embeddings of tokens [tokens, hidden]."""
        raise NotImplementedError

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Read new nodes, and judge when the verdicts are called for."""
        with self._tapping(self._wanted(work)):
            return super().verify(work, trials)

    def _wanted(self, work: Sequence[Feed]) -> int:
        """How many layers' hidden states a verification is asked for."""
        return self._probe[0] if self._probe and any(self._requests[item.seq].wants_forecast for item in work) else 0

    @contextmanager
    def _tapping(self, layers: int) -> Iterator[None]:
        """Have the rows of a forward carry the hidden states of the last layers; of 0 layers, none."""
        self._tapped = layers
        try:
            yield
        finally:
            self._tapped = 0

    @torch.inference_mode()
    def _said(self, seq: int, node: int, token: int) -> tuple[float, ...] | None:
        """What the probe makes of a row; nothing of one that was made before anybody asked."""
        row = self._rows[seq][node]
        if self._probe is None or row.states is None:
            return None
        seen = torch.cat((row.states[row.index], self.embedded((token,))[0]))
        return tuple(self._probe[1](seen[None])[0].tolist())
