"""Steps that start before they are ordered, all in one part: without it a runner waits for each order.

Owns what was started early and not asked for yet: the verify step of a tree that has just grown, the step that most
likely follows a verdict, and a text that a draft has computed ahead of its next tree. Does not own their launch
(`launching.py`), nor the comparison with the order that comes (`begun.py`). Invariant: a step that was started early
and is not asked for has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specbranch.core.orders import Context
from specbranch.core.pages import PAGE
from specbranch.core.request import Spot
from specbranch.core.runner import NO_TOKEN, Done, Feed, Growing, Judged, Trial
from specbranch.core.sending import SendingLater
from specbranch.errors import CacheFull
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu import asking
from specbranch.models.gpu.begun import Followed, Received
from specbranch.models.gpu.chains import ChainSheets, chain_choosing, chain_rows
from specbranch.models.gpu.growing import TextRead
from specbranch.models.gpu.launching import StepHost, StepLauncher, wide
from specbranch.models.gpu.layout import GROUP_ROWS
from specbranch.models.gpu.receiving import DeviceReceiver, Expected, Launch, TreeReceiver
from specbranch.models.gpu.stream_clock import DeviceMoment
from specbranch.models.gpu.tree_layout import ENTRIES
from specbranch.models.gpu.trees import DeviceTree
from specbranch.models.gpu.warm_up import limits_of, received_buckets
from specbranch.models.runners.sequences import Sequences


class EarlyHost(StepHost, Protocol):
    """The runner, as far as early starts need it."""

    @property
    def state_layers(self) -> int:
        """How many layers' hidden states the next forward returns."""
        ...

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail; the first `commit` of them join the prefix."""
        ...

    def hold(self, work: Sequence[Feed], block: Tensor, states: Tensor | None) -> None:
        """Keep the rows of a forward, as later calls may need them."""
        ...


class EarlyStarts:
    """Starts steps of a runner early, and hands them to the orders that ask for them."""

    def __init__(self, launcher: StepLauncher, sequences: Sequences, context_length: int, host: EarlyHost) -> None:
        graphs = launcher.graphs
        self._launcher, self._sequences, self._host, self._context_length = launcher, sequences, host, context_length
        self._chains = ChainSheets(launcher.spare, graphs.step.least, context_length)
        self._receiver = DeviceReceiver(launcher.spare, graphs.input, graphs.step.least, graphs.captures)
        self.step: Received | Followed | None = None  # in flight, not asked for yet
        self._text: TextRead | None = None
        self._text_launch = 0  # the number of the launch that computed the text
        self.begun: DeviceMoment | None = None  # when the last verify or tree started, maybe before it was ordered
        self.grown_at: DeviceMoment | None = None  # when the last tree was complete

    def new_draft(self) -> None:
        """Forget when the last draft started and was complete."""
        self.grown_at = self.begun = None

    def forget_step(self) -> None:
        """Forget the step in flight: another one is about to run, or pages or tokens change."""
        self.step = None

    def forget(self) -> None:
        """Forget all that was started early."""
        self.step = self._text = None

    def close(self, seq: int) -> None:
        """Forget what was started for a sequence: another one may get its number."""
        self._chains.forget()
        if self.step is not None and self.step.seq == seq:
            self.step = None

    def taken(self, work: Sequence[Feed], rows: Sequence[Rows]) -> Reading | None:
        """Return the results of the step in flight if it computes this work; either way it is in flight no longer."""
        step = self.step
        self._host.drop_ahead()
        if step is None or self._launcher.moves or not step.reads(work, rows):
            return None
        self.begun = step.begun
        return step.results

    def make_ready(self, seq: int, done: Done) -> None:
        """Pack steps for texts that `read_ahead` may get: those that end in the tail, and a few tokens behind it."""
        sequence = self._sequences[seq]
        first = len(sequence.slots.prefix)
        starts = range(first, first + sequence.slots.depth + 1)
        self._chains.write(seq, self._host.request(seq), sequence.table, starts, done, (1, 4))

    @torch.inference_mode()
    def read_ahead(self, feed: Feed) -> bool:
        """Compute the rest of a text, and sample what follows it; False if that is not possible in a graph."""
        launcher = self._launcher
        self._host.flush()
        self._host.drop_ahead()
        seq, count = feed.seq, len(feed.tokens)
        spot = Spot(self._host.request(seq), len(self._sequences[seq].slots.prefix) + count, list)
        if not count or count > GROUP_ROWS or not asking.is_chosen_in_graph(spot):
            return False
        with launcher.stream.here(), self._sequences.appending([feed]) as (rows,):
            moves = launcher.moves_for(count)
            step = self._chains.take(seq, rows.table, rows.start, feed.tokens, moves)
            if step is None:
                step = launcher.packed([rows], asking.choosing_of(count, [(count - 1, spot)]), moves)
            ran = launcher.run_packed(*step, moves, ENTRIES, timed=True)
            self._host.hold([feed], wide(ran.logits), None)
        assert ran.results is not None
        self._text = TextRead(seq, spot.position, ran.results, count - 1, launcher.started)
        self._text_launch = launcher.launches
        return True

    def text_before(self, growing: Growing) -> TextRead | None:
        """Return the text that a tree is to grow behind, if that was computed ahead and no step ran since."""
        text = self._text
        if text is None or self._text_launch != self._launcher.launches:
            return None
        return text if text.ends(growing, len(self._sequences[growing.seq].slots)) else None

    def took(self, text: TextRead) -> None:
        """Note that the last tree grew behind a text that was computed ahead: it started with that text."""
        self.begun = text.begun

    def receiver(self, seq: int, on: Context, sending: SendingLater) -> TreeReceiver:
        """Return the receiver of a tree that grows behind a text, of which all but the last token is committed."""
        return TreeReceiver(partial(self._expect, seq, on, sending))

    def _expect(self, seq: int, on: Context, sending: SendingLater) -> tuple[np.ndarray, Launch] | None:
        """Reserve memory for the verification of a tree.

        Returns the array to copy with the tree, and the function that starts the verification. None: the worker has to
        ask for it.
        """
        launcher = self._launcher
        self._host.flush()
        text = self._expected(seq, on, sending)
        if text is None:
            return None
        with launcher.stream.here():
            try:
                table = self._sequences.reserve(seq, text.prefix, text.kv_slots)
            except CacheFull:  # the worker's order will wait for memory, as any other
                return None
            moves = launcher.tree_moves()
        sheet = self._receiver.sheet(text, table, moves)
        return None if sheet is None else (sheet, partial(self._begin, seq, text, moves))

    def _expected(self, seq: int, on: Context, sending: SendingLater) -> Expected | None:
        """Return what a tree will be verified behind; None if a graph alone cannot verify it there."""
        slots, request = self._sequences[seq].slots, self._host.request(seq)
        follows = len(slots.prefix) == len(on) - 1 and not slots.tokens and len(on.tail) > 0
        if not follows or self._host.state_layers or not asking.is_chosen_in_graph(Spot(request, len(on), list)):
            return None
        text = Expected(request, len(on) - 1, on.tail[-1], sending())
        rows = len(text.sending.prices)
        return None if rows >= GROUP_ROWS or slots.room <= rows else text

    def _begin(self, seq: int, text: Expected, moves: np.ndarray, tree: DeviceTree, nodes: int) -> None:
        """Start to verify a tree that has just grown; the current stream is that of the draft."""
        launcher, transfer = self._launcher, self._launcher.transfer
        if tree.state.device != launcher.device:
            return
        table, bucket = self._sequences[seq].table, self._receiver.bucket(text, nodes)
        around = launcher.stream.callers()
        self._host.drop_ahead()
        transfer.mark(around).wait(launcher.stream.cuda)
        with launcher.stream.here():
            begun = launcher.stream.moment()
            launcher.graphs.late += self._receiver.send(tree, text, table, moves, bucket)
            transfer.mark(launcher.stream.cuda).wait(around)  # before another tree is written there
            ran = launcher.run_brought(bucket, 1)
            assert ran.results is not None
            results = transfer.later(ran.results)
        read = transfer.later(self._receiver.read, around)
        self.step = Received(seq, table, text.prefix, read, results, begun)

    def write_chains(self, seq: int, part: Rows, root: int, done: Done) -> None:
        """Pack the steps that may follow a verdict, first those after full acceptance and full rejection."""
        first, last = part.start + root + 1, part.start + max(map(int.bit_count, part.seen))
        request = self._host.request(seq)
        self._chains.write(seq, request, part.table, (last, *range(first, last)), done, (GROUP_ROWS, 1))

    @torch.inference_mode()
    def follow(self, trial: Trial, table: Table, found: Judged) -> Judged:
        """Start the step that most likely follows a verdict, if its KV slots lie on the last page of the sequence."""
        launcher, order, seq = self._launcher, trial.order, trial.seq
        if order.follows is None or launcher.moves or self._sequences.pending or found.token == NO_TOKEN:
            return found
        chain = order.follows(order.taken(found.path, found.token))
        start = len(self._sequences[seq].slots.prefix) + trial.root + 1 + len(found.path)
        room = min(-start % PAGE, self._context_length - start, GROUP_ROWS)
        if not isinstance(chain, tuple) or room < 1 + len(chain):
            return found
        if not order.is_chain:  # accepted nodes have to move to their KV slots
            kept = trial.nodes_on(found.path)
            self._host.keep(seq, kept, len(kept))
            found = Judged(found.path, found.token, kept=True)
        self._launch_chain(seq, table, start, (found.token, *chain))
        return found

    def _launch_chain(self, seq: int, table: Table, start: int, tokens: tuple[int, ...]) -> None:
        """Start the step that verifies a chain behind a committed text."""
        launcher = self._launcher
        with launcher.stream.here():
            moves = launcher.moves_for(len(tokens))
            step = self._chains.take(seq, table, start, tokens, moves)
            if step is None:
                rows = chain_rows(table, tokens, start)
                step = launcher.packed([rows], chain_choosing(self._host.request(seq), rows), moves)
            results = launcher.read_later(launcher.run_packed(*step, moves, 1, timed=True), len(tokens))
        pages = table.pages[: start // PAGE + 1]
        self.step = Followed(seq, chain_rows(table, tokens, start), pages, results, launcher.started)

    def warm_up_receiver(self, tree: DeviceTree) -> None:
        """Get ready for trees that grow here on the same device, which this model verifies where they have grown."""
        self._for_each_bucket(partial(self._receiver.capture, tree))

    def launch_receiver(self, tree: DeviceTree) -> None:
        """Launch the kernels that `warm_up_receiver` captures."""
        self._for_each_bucket(partial(self._receiver.launch, tree))

    def _for_each_bucket(self, do: Callable[..., None]) -> None:
        for bucket in received_buckets(limits_of(self._launcher.graphs)):
            do(bucket)
