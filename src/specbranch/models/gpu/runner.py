"""The native Runner on a GPU: the GPU samples and judges, so only results cross to the host.

Owns what each step computes beside its logits; `launching.py` owns the launch. A CUDA graph samples by temperature and
noise itself. Other sampling parameters, the ratio rule and log-probabilities are computed behind the graph. If the next
step is known, the GPU starts it before the worker asks (`begun.py`). Invariant: a step that was started ahead and is
not asked for has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specbranch.core.orders import Context, Receiver
from specbranch.core.pages import PAGE
from specbranch.core.request import Spot
from specbranch.core.runner import NO_TOKEN, Ask, Done, Feed, Growing, Hear, Judged, Lanes, Proposal, Trial, Verdicts
from specbranch.core.sending import SendingLater
from specbranch.core.slots import ROOT, TAIL
from specbranch.core.trees import Tree
from specbranch.errors import CacheFull
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu import asking
from specbranch.models.gpu.begun import Followed, Received
from specbranch.models.gpu.chains import ChainSheets, chain_choosing, chain_rows
from specbranch.models.gpu.growing import NO_MOVES, TextRead, TreeGrower
from specbranch.models.gpu.lanes import LaneSteps
from specbranch.models.gpu.launching import StepLauncher, wide
from specbranch.models.gpu.layout import CONFIDENCE, GROUP_ROWS, Bucket
from specbranch.models.gpu.receiving import DeviceReceiver, Expected, Launch, TreeReceiver
from specbranch.models.gpu.stream_clock import DeviceMoment
from specbranch.models.gpu.tree_layout import ENTRIES, TREE_MOVES
from specbranch.models.gpu.trees import DeviceTree
from specbranch.models.gpu.warm_up import limits_of, received_buckets
from specbranch.models.sampling import sample, verdict
from specbranch.models.sampling.logit_rows import TensorRow
from specbranch.models.sampling.sampler import proposed


class GpuRunner(StepLauncher):
    """A Runner whose steps sample and judge on the GPU."""

    def __init__(self, decoder: Decoder, context_length: int, tail: int = TAIL, pages: int | None = None) -> None:
        super().__init__(decoder, context_length, tail, pages)
        spare, step = self.pool.pages * PAGE, self._graphs.step
        with self._in_turn():
            self._grower = TreeGrower(self._graphs, self._most_pages, spare, self.transfer)
        self._chains = ChainSheets(spare, step.least, context_length)
        self._receiver = DeviceReceiver(spare, self._graphs.input, step.least, self._graphs.captures)
        self.begun: DeviceMoment | None = None
        self.grown_at: DeviceMoment | None = None

    @torch.inference_mode()
    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Compute new nodes, and return proposals after them, or after nodes computed before."""
        work = [feed for feed in work if feed.tokens]
        self.flush()
        self._drop_ahead()
        self.grown_at = self.begun = None
        with self._here(), self._appending(work) as rows:
            spots = [self.spot(ask.seq, ask.node, ask) for ask in asks]
            row_of = asking.rows_in(work, self._first_nodes(work))
            row_numbers = [row for ask in asks if (row := row_of(ask.seq, ask.node)) is not None]
            here = len(row_numbers) == len(asks) > 0 and self._is_one_step(rows)
            count = asking.entries_of(asks, spots) if here else None
            if count is not None:
                choosing = asking.choosing_of(
                    sum(len(part.tokens) for part in rows), zip(row_numbers, spots, strict=True)
                )
                ran, results = self._chosen(rows, choosing, count)
                self._hold(work, wide(ran.logits), None)
            else:
                sent = self._launch(
                    work, rows, self.sampler.proposing(spots, asks, self.decoder.columns) if asks else {}
                )
        if count is not None:
            return asking.answers(asks, spots, results()[row_numbers])
        if not asks:
            return []
        with self._here():
            found = self.transfer.later(
                self.sampler.candidates([self._rows[ask.seq][ask.node] for ask in asks], spots, asks, sent)
            )
        return proposed(spots, asks, found())

    @torch.inference_mode()
    def grow(self, growing: Growing, done: Done) -> Tree | None:
        """Grow a tree on the device, which chooses the nodes of each step; the host only learns how many they are.

        Returns None if the caller has to grow it step by step.
        """
        self.flush()
        self._drop_ahead()
        self.grown_at = self.begun = None
        sequence, read = self._sequences[growing.seq], self._read
        read = read if read is not None and read.ends(growing, len(sequence.slots)) else None
        room = self._grower.room(growing, sequence.slots, self._requests[growing.seq], read)
        kv_slots = len(sequence.slots) + len(growing.uncomputed) + room
        if not room:
            return None
        try:
            with self._here():
                try:
                    self._reserve(sequence, len(sequence.slots), kv_slots)
                except CacheFull:  # step by step a tree may grow in the free pages
                    return None
                bucket = self._grower.bucket()
                self._plant(growing, room, bucket, read)
                if growing.receiver is not None:
                    self._grower.bring_sheet(growing.receiver.prepare())
                steps, count = self._grower.steps(bucket, done, self._grow_on)
                self.grown_at = None if self._clock is None else self._clock.note()
                if growing.receiver is not None:
                    growing.receiver.take(self._grower.tree, count)
                if read is not None:
                    self.begun = read.begun
                return self._grower.grown(growing, sequence.slots, steps, count, read)
        finally:
            sequence.table.shrink(len(sequence.slots))

    def make_ready(self, seq: int, done: Done) -> None:
        """Pack steps for texts that `read_ahead` may get: those that end in the tail, and a few tokens behind it."""
        sequence = self._sequences[seq]
        first = len(sequence.slots.prefix)
        starts = range(first, first + sequence.slots.depth + 1)
        self._chains.write(seq, self._requests[seq], sequence.table, starts, done, (1, 4))

    @torch.inference_mode()
    def read_ahead(self, feed: Feed) -> bool:
        """Compute the rest of a text, and sample what follows it; False if that is not possible in a graph."""
        self.flush()
        self._drop_ahead()
        seq, count = feed.seq, len(feed.tokens)
        spot = Spot(self._requests[seq], len(self.slots(seq).prefix) + count, list)
        if not count or count > GROUP_ROWS or not asking.is_chosen_in_graph(spot):
            return False
        with self._here(), self._appending([feed]) as (rows,):
            moves = self._moves_for(count)
            step = self._chains.take(seq, rows.table, rows.start, feed.tokens, moves)
            if step is None:
                step = self._packed([rows], asking.choosing_of(count, [(count - 1, spot)]), moves)
            ran = self._run_packed(*step, moves, ENTRIES, timed=True)
            self._hold([feed], wide(ran.logits), None)
        assert ran.results is not None
        self._read = TextRead(seq, spot.position, ran.results, count - 1, self._started)
        return True

    def _plant(self, growing: Growing, room: int, bucket: Bucket, read: TextRead | None) -> None:
        """Copy a tree to the device, which chooses its first step.

        Tokens of the text that are not computed yet are computed for that, and committed.
        """
        seq, count, moves = growing.seq, len(growing.uncomputed), NO_MOVES
        sequence, request = self._sequences[seq], self._requests[seq]
        if not count and self._moves:  # otherwise the text's step makes them
            moves = self._waiting_moves()
            if read is not None or not self._grower.carries(moves):
                moves = NO_MOVES
                self._up({})
        self._grower.plant(growing, sequence.slots, request, sequence.table, room, moves, read)
        if not count:
            self._grower.choose(bucket, read)
            return
        spot = Spot(request, len(sequence.slots.prefix) + count, list)
        with self._appending([Feed(seq, growing.uncomputed, tuple(range(ROOT, count - 1)))]) as rows:
            self._start(rows, asking.choosing_of(count, [(count - 1, spot)]), ENTRIES, grows=True)
        # Commit in place. Unlike `keep` this frees no page, as the tree's steps are about to write there.
        self._rows[seq].clear()
        sequence.slots.keep(range(count), count)

    def _grow_on(self, bucket: Bucket) -> None:
        """Run the step that the device chose for the tree; the device then chooses the next one."""
        self._read = None
        with self._moving():
            self._graphs.run_brought(bucket, 0, ENTRIES, True)

    @torch.inference_mode()
    def run_ahead(self, lanes: Lanes, hear: Hear) -> int:
        """Draft in lanes: each step starts with the device's own tokens, before the host has read the last step."""
        self.flush()
        self._drop_ahead()
        seq, width, self.grown_at, self.begun = lanes.feed.seq, len(lanes.feed.tokens), None, None
        sequence, request = self._sequences[seq], self._requests[seq]
        spots = [Spot(request, sequence.slots.position(parent) + 2, list) for parent in lanes.feed.parents]
        count = asking.entries_of([Ask(seq, ROOT, measure=lanes.measure)], spots[:1])
        if count is None or width > GROUP_ROWS or sequence.slots.room < width * lanes.steps:
            return 0
        try:
            with self._here():
                try:
                    self._reserve(sequence, len(sequence.slots), len(sequence.slots) + width * lanes.steps)
                except CacheFull:  # step by step they may be drafted in the free pages
                    return 0
                return self._lane_steps(LaneSteps(sequence.table, sequence.slots, lanes, spots), count, hear)
        finally:
            sequence.table.shrink(len(sequence.slots))

    def _lane_steps(self, steps: LaneSteps, count: int, hear: Hear) -> int:
        """Run steps until `hear` returns False; one more may be in flight then, which has no effect."""
        results = self._chosen(*steps.step(0), count)[1]
        for number in range(steps.lanes.steps):
            ahead = self._chosen(*steps.step(number + 1), count)[1] if number + 1 < steps.lanes.steps else None
            numbers = results()
            goes_on = hear(asking.answers(steps.asks, steps.spots, numbers))
            steps.heard(number, numbers[:, 0].astype(int).tolist())
            if not goes_on or ahead is None:
                return number + 1
            results = ahead
        return 0

    @torch.inference_mode()
    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Start to compute and judge new nodes; a call of the verdicts waits for the device."""
        self.begun = None
        work = [feed for feed in work if feed.tokens]
        with self._here(), self._returning_states(self._wanted(work)), self._appending(work) as rows:
            spots = [spot for trial in trials for spot in self._spots_of(trial)]
            row_numbers = self._chosen_rows(work, rows, trials, spots)
            if row_numbers is None:
                return self._verify_shaped(work, rows, trials, spots)
            results = self._results(work, rows, trials, spots, row_numbers)

        def judged() -> list[Judged]:
            follows = len(trials) == 1 and trials[0].order.follows is not None and rows[0].start == rows[0].prefix
            if follows:
                self._write_chains(trials[0].seq, rows[0], row_numbers[0][0], results.ready)
            found = _judged(row_numbers, results())
            return [self._follow(trials[0], rows[0].table, found[0])] if follows else found

        return Verdicts(judged, results.ready)

    def receiver(self, seq: int, on: Context, sending: SendingLater) -> Receiver | None:
        """Return the receiver of a tree that grows behind a text, of which all but the last token is committed."""
        return TreeReceiver(partial(self._expect, seq, on, sending))

    def _expect(self, seq: int, on: Context, sending: SendingLater) -> tuple[np.ndarray, Launch] | None:
        """Reserve memory for the verification of a tree.

        Returns the array to copy with the tree, and the function that starts the verification. None: the worker has to
        ask for it.
        """
        sequence, request, moves = self._sequences[seq], self._requests[seq], NO_MOVES
        self.flush()
        follows = len(sequence.slots.prefix) == len(on) - 1 and not sequence.slots.tokens and len(on.tail) > 0
        if not follows or self._state_layers or not asking.is_chosen_in_graph(Spot(request, len(on), list)):
            return None
        text = Expected(request, len(on) - 1, on.tail[-1], sending())
        if len(text.sending.prices) >= GROUP_ROWS or sequence.slots.room <= len(text.sending.prices):
            return None
        with self._here():
            try:
                self._reserve(sequence, text.prefix, text.kv_slots)
            except CacheFull:  # the worker's order will wait for memory, as any other
                return None
            if self._moves:
                moves = self._waiting_moves()
                if not self._graphs.step.moves or moves.shape[1] > TREE_MOVES:
                    moves = NO_MOVES
                    self._up({})
        sheet = self._receiver.sheet(text, sequence.table, moves)
        return None if sheet is None else (sheet, partial(self._begin, seq, text, moves))

    def _begin(self, seq: int, text: Expected, moves: np.ndarray, tree: DeviceTree, nodes: int) -> None:
        """Start to verify a tree that has just grown; the current stream is that of the draft."""
        if tree.state.device != self.device:
            return
        sequence, bucket, transfer = self._sequences[seq], self._receiver.bucket(text, nodes), self.transfer
        around = None if self._stream is None else torch.cuda.current_stream(self.device)
        self._drop_ahead()
        transfer.mark(around).wait(self._stream)
        with self._here():
            begun = self._moment()
            self._graphs.late += self._receiver.send(tree, text, sequence.table, moves, bucket)
            transfer.mark(self._stream).wait(around)  # before another tree is written there
            with self._moving():
                ran = self._graphs.run_brought(bucket, 0, 1)
            assert ran.results is not None
            results = transfer.later(ran.results)
        self._ahead = Received(
            seq, sequence.table, text.prefix, transfer.later(self._receiver.read, around), results, begun
        )

    def _spots_of(self, trial: Trial) -> list[Spot]:
        """Return the spots of the tokens after a trial's root and after each of its nodes."""
        slots, request, root = self.slots(trial.seq), self._requests[trial.seq], trial.root
        positions = [len(slots.prefix) if root == ROOT else slots.position(root) + 1]
        for parent in trial.order.parents or range(ROOT, len(trial.nodes) - 1):
            positions.append(positions[parent + 1] + 1)
        allowed = trial.allowed or [None] * len(positions)
        nodes = (root, *trial.nodes)
        return [
            Spot(request, at, partial(slots.sequence, node), 0, one)
            for at, node, one in zip(positions, nodes, allowed, strict=True)
        ]

    def _chosen_rows(
        self, work: Sequence[Feed], rows: list[Rows], trials: Sequence[Trial], spots: Sequence[Spot]
    ) -> list[list[int]] | None:
        """Return the rows of each trial in the step; None if a graph alone cannot judge all of them."""
        wants_more = any(trial.logprobs is not None or trial.wants_forecast for trial in trials)
        # sequences without a trial are judged later, from rows that are kept
        others = {feed.seq for feed in work} != {trial.seq for trial in trials}
        if not trials or self._state_layers or wants_more or others:
            return None
        if not self._is_one_step(rows) or not asking.are_chosen_in_graph(spots):
            return None
        return asking.trial_rows(trials, asking.rows_in(work, self._first_nodes(work)))

    def _results(
        self,
        work: Sequence[Feed],
        rows: list[Rows],
        trials: Sequence[Trial],
        spots: Sequence[Spot],
        row_numbers: list[list[int]],
    ) -> Reading:
        """Start the step, unless it was started ahead; returns its results in flight."""
        ahead = self._ahead
        self._drop_ahead()
        if ahead is not None and not self._moves and ahead.reads(work, rows):
            self.begun = ahead.begun
            return ahead.results
        choosing = asking.choosing_of(
            sum(len(part.tokens) for part in rows), zip(chain(*row_numbers), spots, strict=True)
        )
        asking.lead(choosing, trials, row_numbers)
        results = self._read_later(self._start_with_prefill(rows, choosing), len(choosing.said))
        self.begun = self._started
        return results

    def _write_chains(self, seq: int, part: Rows, root: int, done: Done) -> None:
        """Pack the steps that may follow a verdict, first those after full acceptance and full rejection."""
        first, last = part.start + root + 1, part.start + max(map(int.bit_count, part.seen))
        self._chains.write(seq, self._requests[seq], part.table, (last, *range(first, last)), done, (GROUP_ROWS, 1))

    @torch.inference_mode()
    def _follow(self, trial: Trial, table: Table, found: Judged) -> Judged:
        """Start the step that most likely follows a verdict, if its KV slots lie on the last page of the sequence."""
        order, seq = trial.order, trial.seq
        if order.follows is None or self._moves or self._pending or found.token == NO_TOKEN:
            return found
        chain = order.follows(order.taken(found.path, found.token))
        start = len(self.slots(seq).prefix) + trial.root + 1 + len(found.path)
        room = min(-start % PAGE, self._context_length - start, GROUP_ROWS)
        if not isinstance(chain, tuple) or room < 1 + len(chain):
            return found
        if not order.is_chain:  # accepted nodes have to move to their KV slots
            kept = trial.nodes_on(found.path)
            self.keep(seq, kept, len(kept))
            found = Judged(found.path, found.token, kept=True)
        tokens = (found.token, *chain)
        with self._here():
            moves = self._moves_for(len(tokens))
            step = self._chains.take(seq, table, start, tokens, moves)
            if step is None:
                rows = chain_rows(table, tokens, start)
                step = self._packed([rows], chain_choosing(self._requests[seq], rows), moves)
            results = self._read_later(self._run_packed(*step, moves, 1, timed=True), len(tokens))
        pages = table.pages[: start // PAGE + 1]
        self._ahead = Followed(seq, chain_rows(table, tokens, start), pages, results, self._started)
        return found

    def _verify_shaped(
        self, work: Sequence[Feed], rows: list[Rows], trials: Sequence[Trial], spots: Sequence[Spot]
    ) -> Verdicts:
        """Judge trials behind the graph, with all sampling parameters and rules."""
        self._drop_ahead()
        self.flush()
        arrays = {**self.sampler.picking(spots), **verdict.judging(trials, spots)} if trials else {}
        if trials:
            arrays["choice"] = np.stack(asking.choosing_of(len(spots), enumerate(spots)))
        sent = self._launch(work, rows, arrays)
        if not trials:
            return Verdicts(list, self.transfer.passed())
        top = max((trial.logprobs for trial in trials if trial.logprobs is not None), default=None)
        of_trials = [
            self._rows[trial.seq][trial.node(index)] for trial in trials for index in range(ROOT, len(trial.nodes))
        ]
        logits = self.sampler.logits(of_trials)
        tokens, reached = verdict.decided(
            self._picked(sample.unscaled(logits, sent), sent["choice"]), sample.shape(logits, sent), sent
        )
        said = self._probed(of_trials, tokens) if any(trial.wants_forecast for trial in trials) else None
        results = self.transfer.later(verdict.results(logits, tokens, reached, top, said))
        probed = [said is not None and row.states is not None for row in of_trials]
        return Verdicts(
            lambda: verdict.judged(trials, results(), top, 0 if said is None else said.shape[1], probed), results.ready
        )

    def _probed(self, rows: Sequence[TensorRow], tokens: Tensor) -> Tensor | None:
        """Return the probe's output for rows and their tokens; None if no row has hidden states.

        The output of a row without hidden states has no meaning.
        """
        states = [None if row.states is None else row.states[row.index] for row in rows]
        like = next((state for state in states if state is not None), None)
        if self._probe is None or like is None:
            return None
        seen = torch.stack([torch.zeros_like(like) if state is None else state for state in states])
        return self._probe[1](torch.cat((seen, self.decoder.embedding[tokens]), dim=-1))

    def warm_up_receiver(self, draft: object) -> None:
        """Get ready for trees of a draft on the same device, which this model verifies where they have grown."""
        if isinstance(draft, GpuRunner) and draft.device == self.device:
            with self._in_turn():
                for bucket in received_buckets(limits_of(self._graphs)):
                    self._receiver.capture(draft._grower.tree, bucket)

    def _launch_receiver(self, draft: object | None) -> None:
        if isinstance(draft, GpuRunner) and draft.device == self.device:
            for bucket in received_buckets(limits_of(self._graphs)):
                self._receiver.launch(draft._grower.tree, bucket)

    def _warm_up_kernels(self) -> None:
        """Compile the kernel that chooses a tree's first step: it runs outside graphs."""
        self._grower.warm_up()

    def _close(self, seq: int) -> None:
        self._chains.forget()
        self._plain.forget(seq)  # the rows of other sequences stay valid
        if self._ahead is not None and self._ahead.seq == seq:
            self._ahead = None
        super()._close(seq)


def _judged(rows: Sequence[Sequence[int]], results: np.ndarray) -> list[Judged]:
    """Make verdicts of results; `rows`: those of each trial, its root's first."""
    numbers, found = results[:, : CONFIDENCE + 1].tolist(), []
    for root, *nodes in rows:
        path = tuple([index for index, row in enumerate(nodes) if numbers[row][1]])
        way = [numbers[root], *(numbers[nodes[index]] for index in path)]
        # the confidence of a row is NaN if its logits are not all finite
        token = NO_TOKEN if math.isnan(sum(row[CONFIDENCE] for row in way)) else int(way[-1][0])
        found.append(Judged(path, token))
    return found
