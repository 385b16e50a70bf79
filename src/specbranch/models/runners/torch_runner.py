"""The base class of all runners on torch: their sampler, their vocabulary limit, and hidden states for a probe.

Owns what torch runners have in common. Subclasses own the forward and the KV cache. Invariant: a forward returns hidden
states only if it was asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specbranch.core.rows import RowRunner
from specbranch.core.runner import Feed, Trial, Verdicts
from specbranch.models.forward.transfer import Transfer
from specbranch.models.sampling.logit_rows import TensorRow
from specbranch.models.sampling.noise_rows import shared_noise
from specbranch.models.sampling.sampler import TorchSampler

# Prefill chunk in tokens, by the kind of device. The decode rows of other sequences in the same round wait for it.
# A GPU computes 256 tokens in little more time than a few. On a CPU time is proportional to tokens, and BLAS is slower
# with fewer of them: at 64 it has four fifths of its speed at 256. The compiled step has its own size, see `native`.
PREFILL_CHUNKS = {"cpu": 64, "cuda": 256}
ProbeNetwork = Callable[[Tensor], Tensor]  # from [rows, layers·hidden + hidden] to a few numbers for each row


class TorchRunner(RowRunner[TensorRow]):
    """A Runner whose rows are tensors."""

    sampler: TorchSampler

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.device = device
        self.transfer = Transfer(device)
        self.prefill_chunk = PREFILL_CHUNKS.get(device.type, PREFILL_CHUNKS["cuda"])
        super().__init__(TorchSampler(vocabulary, shared_noise(), self.transfer))
        self.state_layers = 0  # how many layers' hidden states the next forward returns with its rows
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
        """Never sample a token with this id or a higher one, as the other model does not know it."""
        self.sampler = TorchSampler(vocabulary, shared_noise(), self.transfer)

    def probe(self, layers: int, network: ProbeNetwork | None) -> None:
        """Attach the output of a network to every verdict; None: no longer.

        Its input is the hidden states of the last layers and the input embedding of the verdict's token.
        """
        self.check_layers(layers)
        self._probe = None if network is None else (layers, network)

    def show(self, work: Sequence[Feed], layers: int) -> Tensor:
        """Compute new nodes, and return the hidden states of the last layers [nodes, layers·hidden].

        Those of the last layer are normed.
        """
        self.check_layers(layers)
        with self._returning_states(layers):
            rows = [row for made in self.score(work) for row in made]
        return torch.stack([row.states[row.index] for row in rows if row.states is not None])

    def check_layers(self, layers: int) -> None:
        """Raise a ModelError unless the model can return the hidden states of this many layers."""
        raise NotImplementedError

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Return the input embeddings of tokens [tokens, hidden]."""
        raise NotImplementedError

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Compute new nodes; the returned verdicts judge them when they are called."""
        with self._returning_states(self._wanted(work)):
            return super().verify(work, trials)

    def _wanted(self, work: Sequence[Feed]) -> int:
        """Return how many layers' hidden states a verification needs: 0 unless a request wants forecasts."""
        return self._probe[0] if self._probe and any(self._requests[item.seq].wants_forecast for item in work) else 0

    @contextmanager
    def _returning_states(self, layers: int) -> Iterator[None]:
        """Within this context forwards return the hidden states of the last layers; of 0 layers, none."""
        self.state_layers = layers
        try:
            yield
        finally:
            self.state_layers = 0

    @torch.inference_mode()
    def _said(self, seq: int, node: int, token: int) -> tuple[float, ...] | None:
        """Return the probe's output for a row; None if the row was computed without hidden states."""
        row = self._rows[seq][node]
        if self._probe is None or row.states is None:
            return None
        features = torch.cat((row.states[row.index], self.embedded((token,))[0]))
        return tuple(self._probe[1](features[None])[0].tolist())
