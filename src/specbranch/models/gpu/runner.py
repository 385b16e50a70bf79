"""The native Runner on a GPU: steps are graphs, questions are answered where the logits are.

Owns the order of a step: nodes are added on the host, all that the device needs goes up in one copy, the graph and the sampling are
started, and one read brings the answers. Invariants: nothing waits for the device but that read; places that are to move move before
anything else is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from specbranch.core.request import Spot
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
        self._moves: list[np.ndarray] = []  # of places, still to be made

    @torch.inference_mode()
    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Read new nodes, and answer what is asked about them, or about nodes read before."""
        with self._grown(work) as rows:
            spots = [self.spot(ask.seq, ask.node, ask) for ask in asks]
            asked = self._launch(work, rows, self.sampler.proposing(spots, asks, self.decoder.columns) if asks else {})
        if not asks:
            return []
        found = self.sampler.candidates([self._rows[ask.seq][ask.node] for ask in asks], spots, asks, asked)
        return proposed(spots, asks, self.transfer.down(found))

    @torch.inference_mode()
    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Read new nodes and start judging; the verdicts wait for the device."""
        with self._tapping(self._wanted(work)), self._grown(work) as rows:
            spots = [self._spot_of(trial, index) for trial in trials for index in range(ROOT, len(trial.nodes))]
            arrays = {**self.sampler.picking(spots), **verdict.judging(trials, spots)} if trials else {}
            asked = self._launch(work, rows, arrays)
        if not trials:
            return list
        top = max((trial.logprobs for trial in trials if trial.logprobs is not None), default=None)
        lines, width = self._judging(trials, spots, asked, top)
        return lambda: verdict.judged(trials, self.transfer.down(lines), top, width)

    def _judging(self, trials: Sequence[Trial], spots: Sequence[Spot], asked: Asked, top: int | None) -> tuple[Tensor, int]:
        """Start the judging; returns what is to be read of each row, and how many numbers of that are a probe's."""
        rows = [self._rows[trial.seq][trial.node(index)] for trial in trials for index in range(ROOT, len(trial.nodes))]
        logits, scores = self.sampler.scores(rows, spots, asked)
        tokens, reached = verdict.decided(scores, asked)
        said = self._probed(rows, tokens) if any(trial.foretold for trial in trials) else None
        return verdict.lines(logits, tokens, reached, top, said), 0 if said is None else said.shape[1]

    def _probed(self, rows: Sequence[TensorRow], tokens: Tensor) -> Tensor | None:
        """What the probe makes of rows and the tokens they led to; nothing where one was made before anybody asked."""
        states = [row.states[row.index] for row in rows if row.states is not None]
        if self._probe is None or len(states) < len(rows):
            return None
        return self._probe[1](torch.cat((torch.stack(states), self.decoder.embedding[tokens]), dim=-1))

    def _forward(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        return self._run(work, {})[0]

    @contextmanager
    def _grown(self, work: Sequence[Feed]) -> Iterator[list[Rows]]:
        """Add nodes, and take them back should what follows fail."""
        sizes = {feed.seq: len(self.slots(feed.seq).tokens) for feed in work}
        try:
            yield [self._grow(feed) for feed in work if feed.tokens]
        except BaseException:
            self._take_back(sizes)
            raise

    def _launch(self, work: Sequence[Feed], rows: list[Rows], arrays: Arrays) -> Asked:
        """Send everything up, start the forward, and hold its rows; returns the arrays as they are on the device."""
        work = [feed for feed in work if feed.tokens]
        if not rows:
            return self.transfer.up(arrays)
        (block, states), asked = self._run(rows, arrays)
        made = iter(range(block.shape[0]))
        for feed in work:
            count = len(feed.tokens)
            start = len(self.slots(feed.seq).tokens) - count
            self._rows[feed.seq].update((start + at, TensorRow(block, next(made), self.decoder.columns, states)) for at in range(count))
        return asked

    def _run(self, work: list[Rows], arrays: Arrays) -> tuple[tuple[Tensor, Tensor | None], Asked]:
        """Run all rows, beyond what a step takes in several; the first copy up carries the arrays too."""
        blocks: list[Tensor] = []
        states: list[Tensor] = []
        asked: Asked = {}
        for number, step in enumerate(dealt(work, MOST_ROWS)):
            packed, bucket = pack(step, self.pool.pages * PAGE)
            sent = self.transfer.up({"step": packed, **self._pending(), **({} if number else arrays)})
            self._move_now(sent)
            logits, seen = self._graphs.run_tapped(sent["step"], bucket, self._tapped)
            rows = sum(len(part.tokens) for part in step)
            blocks.append(_wide(logits[:rows]))
            states += [] if seen is None else [seen[:rows].clone()]
            asked = asked or sent
        return (torch.cat(blocks) if len(blocks) > 1 else blocks[0], torch.cat(states) if states else None), asked

    def _move(self, moves: np.ndarray) -> None:
        self._moves.append(moves)

    def _pending(self) -> Arrays:
        """The moves that are still to be made, as arrays."""
        moves = {f"moves {number}": moves for number, moves in enumerate(self._moves)}
        self._moves = []
        return moves

    def _move_now(self, sent: Asked) -> None:
        for name, moves in sent.items():
            if name.startswith("moves "):
                self.memory.move(*moves)

    def _copy(self, copies: Sequence[Copy]) -> None:
        self._move_now(self.transfer.up(self._pending()))
        super()._copy(copies)

    def _store(self, rows: Rows) -> None:
        self._move_now(self.transfer.up(self._pending()))
        super()._store(rows)


def _wide(logits: Tensor) -> Tensor:
    """Copy logits out of the graph's own memory, in float32 or better."""
    return logits.float() if logits.dtype.itemsize < 4 else logits.clone()
