"""The native Runner on a GPU: steps are graphs, questions are answered where the logits are.

Owns the order of a step: nodes are added on the host, all that the device needs goes up in one copy, the graph and the sampling are
started, and one read brings the answers. Invariants: nothing waits for the device but that read; places that are to move move before
anything else is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from specbranch.core.runner import Ask, Feed, Proposal, Trial, Verdicts
from specbranch.core.slots import ROOT, TAIL
from specbranch.models import verdict
from specbranch.models.batch import Rows, dealt
from specbranch.models.decoder import Decoder
from specbranch.models.gpu.kernel_step import step_of
from specbranch.models.gpu.layout import MOST_ROWS, pack
from specbranch.models.gpu.step import Graphs
from specbranch.models.kv import PAGE, Copy
from specbranch.models.native import NativeRunner
from specbranch.models.rows import TensorRow
from specbranch.models.sample import Asked
from specbranch.models.sampling import proposed
from specbranch.models.sheet import Arrays


class GpuRunner(NativeRunner):
    """A Runner whose steps are captured; on a CPU, as in tests, they are run as they are."""

    def __init__(self, decoder: Decoder, context_length: int, tail: int = TAIL, pages: int | None = None) -> None:
        super().__init__(decoder, context_length, tail, pages)
        self._fused = None
        self._graphs = Graphs(step_of(decoder, self.memory), -(-(context_length + tail) // PAGE))
        self._moves: list[tuple[int, np.ndarray, int]] = []  # still to be made: sequence, places, and the lowest that is written

    @torch.inference_mode()
    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Read new nodes, and answer what is asked about them, or about nodes read before."""
        with self._here(), self._grown(work) as rows:
            spots = [self.spot(ask.seq, ask.node, ask) for ask in asks]
            asked = self._launch(work, rows, self.sampler.proposing(spots, asks, self.decoder.columns) if asks else {})
        if not asks:
            return []
        with self._here():
            found = self.sampler.candidates([self._rows[ask.seq][ask.node] for ask in asks], spots, asks, asked)
        return proposed(spots, asks, self.transfer.down(found))

    @torch.inference_mode()
    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Read new nodes and start judging; the verdicts wait for the device."""
        with self._here(), self._tapping(self._wanted(work)), self._grown(work) as rows:
            spots = [self._spot_of(trial, index) for trial in trials for index in range(ROOT, len(trial.nodes))]
            arrays = {**self.sampler.picking(spots), **verdict.judging(trials, spots)} if trials else {}
            asked = self._launch(work, rows, arrays)
        if not trials:
            return list
        top = max((trial.logprobs for trial in trials if trial.logprobs is not None), default=None)
        of_trials = [self._rows[trial.seq][trial.node(index)] for trial in trials for index in range(ROOT, len(trial.nodes))]
        with self._here():
            logits, scores = self.sampler.scores(of_trials, spots, asked)
            tokens, reached = verdict.decided(scores, asked)
            said = self._probed(of_trials, tokens) if any(trial.foretold for trial in trials) else None
            lines = verdict.lines(logits, tokens, reached, top, said)
        told = [said is not None and row.states is not None for row in of_trials]
        return lambda: verdict.judged(trials, self.transfer.down(lines), top, 0 if said is None else said.shape[1], told)

    def _probed(self, rows: Sequence[TensorRow], tokens: Tensor) -> Tensor | None:
        """What the probe makes of rows and the tokens they led to; anything of a row that was made before anybody asked."""
        states = [None if row.states is None else row.states[row.index] for row in rows]
        like = next((state for state in states if state is not None), None)
        if self._probe is None or like is None:
            return None
        seen = torch.stack([torch.zeros_like(like) if state is None else state for state in states])
        return self._probe[1](torch.cat((seen, self.decoder.embedding[tokens]), dim=-1))

    def _forward(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        return self._run(work, {})[0]

    def _launch(self, work: Sequence[Feed], rows: list[Rows], arrays: Arrays) -> Asked:
        """Send everything up, start the forward, and hold its rows; returns the arrays as they are on the device."""
        work = [feed for feed in work if feed.tokens]
        if not rows:
            return self._up(arrays)
        (block, states), asked = self._run(rows, arrays)
        made = iter(range(block.shape[0]))
        for feed in work:
            count = len(feed.tokens)
            start = len(self.slots(feed.seq).tokens) - count
            self._rows[feed.seq].update((start + at, TensorRow(block, next(made), self.decoder.columns, states)) for at in range(count))
        return asked

    def _run(self, work: list[Rows], arrays: Arrays) -> tuple[tuple[Tensor, Tensor | None], Asked]:
        """Run all rows, beyond what a step takes in several; the last copy up carries the arrays too."""
        blocks: list[Tensor] = []
        states: list[Tensor] = []
        steps = list(dealt(work, MOST_ROWS))
        for number, step in enumerate(steps, 1):
            packed, bucket = pack(step, self.pool.pages * PAGE)
            asked = self._up({"step": packed, **(arrays if number == len(steps) else {})})
            logits, seen = self._graphs.run_tapped(asked["step"], bucket, self._tapped)
            rows = sum(len(part.tokens) for part in step)
            blocks.append(_wide(logits[:rows]))
            states += [] if seen is None else [seen[:rows].clone()]
        return (torch.cat(blocks) if len(blocks) > 1 else blocks[0], torch.cat(states) if states else None), asked

    def _move(self, seq: int, moves: np.ndarray, first: int) -> None:
        self._moves.append((seq, moves, first))

    @torch.inference_mode()
    def _up(self, arrays: Arrays) -> Asked:
        """Send arrays up, and with them the moves that wait, which are made at once. Where that fails, what was to move is forgotten."""
        if not arrays and not self._moves:
            return {}
        waiting = {f"moves {number}": moves for number, (_, moves, _) in enumerate(self._moves)}
        try:
            sent = self.transfer.up({**waiting, **arrays})
            for name in waiting:
                self.memory.move(*sent[name])
            self._moves = []
        except BaseException:
            for seq, _, first in self._moves:
                if seq in self._held:
                    self.rewind(seq, min(first, len(self.slots(seq).prefix)))  # its worker will have it read again
            self._moves = []
            raise
        return sent

    def _copy(self, copies: Sequence[Copy]) -> None:
        self._up({})
        super()._copy(copies)

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        self._up({})
        with self._here():
            super()._extend(seq, tokens)

    def _here(self) -> AbstractContextManager[None]:
        """Have kernels launched on the runner's own device, whichever is the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def _wide(logits: Tensor) -> Tensor:
    """Copy logits out of the graph's own memory, in float32 or better."""
    return logits.float() if logits.dtype.itemsize < 4 else logits.clone()
