"""The native Runner on a GPU: the GPU samples and judges, so only results cross to the host.

Owns what each step computes beside its logits; `launching.py` owns the launch. A CUDA graph samples by temperature and
noise itself. Other sampling parameters, the ratio rule and log-probabilities are computed behind the graph. If the next
step is known, the GPU starts it before the worker asks (`early_starts.py`). Invariant: an answer depends only on the
tokens up to its node and on its request, whoever else is in the step, and whenever the step was launched.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specbranch.core.orders import Context, Receiver
from specbranch.core.pages import PAGE, Copy
from specbranch.core.request import Spot
from specbranch.core.runner import (
    NO_TOKEN,
    Ask,
    Done,
    Feed,
    Growing,
    Hear,
    Judged,
    Lanes,
    PlainStep,
    Proposal,
    Trial,
    Verdicts,
)
from specbranch.core.sending import SendingLater
from specbranch.core.slots import ROOT, TAIL
from specbranch.core.trees import Tree
from specbranch.errors import CacheFull
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu import asking
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.early_starts import EarlyStarts
from specbranch.models.gpu.growing import TextRead, TreeGrower
from specbranch.models.gpu.lanes import LaneSteps
from specbranch.models.gpu.launching import StepLauncher, wide
from specbranch.models.gpu.layout import CONFIDENCE, GROUP_ROWS, MOST_STEP_ROWS, Bucket
from specbranch.models.gpu.plain_decode import Texts
from specbranch.models.gpu.stream_clock import DeviceMoment
from specbranch.models.gpu.tree_layout import ENTRIES, NO_MOVES
from specbranch.models.gpu.trees import DeviceTree
from specbranch.models.sampling import sample, verdict
from specbranch.models.sampling.logit_rows import TensorRow
from specbranch.models.sampling.sampler import proposed


class GpuRunner(StepLauncher):
    """A Runner whose steps sample and judge on the GPU."""

    def __init__(self, decoder: Decoder, context_length: int, tail: int = TAIL, pages: int | None = None) -> None:
        super().__init__(decoder, context_length, tail, pages)
        spare = self.pool.pages * PAGE
        with self.in_turn():
            self._grower = TreeGrower(self.graphs, self._most_pages, spare, self.transfer)
        self.early = EarlyStarts(self)

    @property
    def begun(self) -> DeviceMoment | None:
        """When the last verify or tree started, if that may have been before it was ordered."""
        return self.early.begun

    @property
    def grown_at(self) -> DeviceMoment | None:
        """When the last drafted tree was complete on the device; None if the last draft was no tree."""
        return self.early.grown_at

    def make_ready(self, seq: int, done: Done) -> None:
        """Pack steps for texts that `read_ahead` may get."""
        self.early.make_ready(seq, done)

    def read_ahead(self, feed: Feed) -> bool:
        """Compute the rest of a text, and sample what follows it; False if that is not possible in a graph."""
        return self.early.read_ahead(feed)

    def receiver(self, seq: int, on: Context, sending: SendingLater) -> Receiver | None:
        """Return the receiver of a tree that grows behind a text, of which all but the last token is committed."""
        return self.early.receiver(seq, on, sending)

    def decode(self, texts: Texts, going_on: Collection[int]) -> PlainStep | None:
        """Decode one token of each sequence, and launch the next step; see `DecodesBatches`."""
        self.early.forget()
        return super().decode(texts, going_on)

    @torch.inference_mode()
    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Compute new nodes, and return proposals after them, or after nodes computed before."""
        work = [feed for feed in work if feed.tokens]
        self.flush()
        self.drop_ahead()
        self.early.new_draft()
        with self.here(), self.sequences.appending(work) as rows:
            spots = [self.spot(ask.seq, ask.node, ask) for ask in asks]
            row_of = asking.rows_in(work, self.sequences.first_nodes(work))
            row_numbers = [row for ask in asks if (row := row_of(ask.seq, ask.node)) is not None]
            here = len(row_numbers) == len(asks) > 0 and self.is_one_step(rows)
            count = asking.entries_of(asks, spots) if here else None
            if count is not None:
                choosing = asking.choosing_of(
                    sum(len(part.tokens) for part in rows), zip(row_numbers, spots, strict=True)
                )
                ran, results = self.chosen(rows, choosing, count)
                self.hold(work, wide(ran.logits), None)
            else:
                sent = self.launch(
                    work, rows, self.sampler.proposing(spots, asks, self.decoder.columns) if asks else {}
                )
        if count is not None:
            return asking.answers(asks, spots, results()[row_numbers])
        if not asks:
            return []
        with self.here():
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
        self.drop_ahead()
        self.early.new_draft()
        sequence, read = self.sequences[growing.seq], self.early.text_before(growing)
        room = self._grower.room(growing, sequence.slots, self._requests[growing.seq], read)
        kv_slots = len(sequence.slots) + len(growing.uncomputed) + room
        if not room:
            return None
        try:
            with self.here():
                try:
                    self.sequences.reserve(growing.seq, len(sequence.slots), kv_slots)
                except CacheFull:  # step by step a tree may grow in the free pages
                    return None
                bucket = self._grower.bucket()
                self._plant(growing, room, bucket, read)
                if growing.receiver is not None:
                    self._grower.bring_sheet(growing.receiver.prepare())
                steps, count = self._grower.steps(bucket, done, self._grow_on)
                self.early.grown_at = None if self.clock is None else self.clock.note()
                if growing.receiver is not None:
                    growing.receiver.take(self._grower.tree, count)
                if read is not None:
                    self.early.begun = read.begun
                return self._grower.grown(growing, sequence.slots, steps, count, read)
        finally:
            sequence.table.shrink(len(sequence.slots))

    def _plant(self, growing: Growing, room: int, bucket: Bucket, read: TextRead | None) -> None:
        """Copy a tree to the device, which chooses its first step.

        Tokens of the text that are not computed yet are computed for that, and committed.
        """
        seq, count, moves = growing.seq, len(growing.uncomputed), NO_MOVES
        sequence, request = self.sequences[seq], self._requests[seq]
        if not count and read is None:  # otherwise the text's step makes them
            moves = self.tree_moves()
        elif not count:
            self.up({})
        self._grower.plant(growing, sequence.slots, request, sequence.table, room, moves, read)
        if not count:
            self._grower.choose(bucket, read)
            return
        spot = Spot(request, len(sequence.slots.prefix) + count, list)
        with self.sequences.appending([Feed(seq, growing.uncomputed, tuple(range(ROOT, count - 1)))]) as rows:
            self.start(rows, asking.choosing_of(count, [(count - 1, spot)]), ENTRIES, grows=True)
        # Commit in place. Unlike `keep` this frees no page, as the tree's steps are about to write there.
        self._rows[seq].clear()
        sequence.slots.keep(range(count), count)

    def _grow_on(self, bucket: Bucket) -> None:
        """Run the step that the device chose for the tree; the device then chooses the next one."""
        self.run_brought(bucket, ENTRIES, grows=True)

    @torch.inference_mode()
    def run_ahead(self, lanes: Lanes, hear: Hear) -> int:
        """Draft in lanes: each step starts with the device's own tokens, before the host has read the last step."""
        self.flush()
        self.drop_ahead()
        self.early.new_draft()
        seq, width = lanes.feed.seq, len(lanes.feed.tokens)
        sequence, request = self.sequences[seq], self._requests[seq]
        spots = [Spot(request, sequence.slots.position(parent) + 2, list) for parent in lanes.feed.parents]
        count = asking.entries_of([Ask(seq, ROOT, measure=lanes.measure)], spots[:1])
        if count is None or width > GROUP_ROWS or sequence.slots.room < width * lanes.steps:
            return 0
        try:
            with self.here():
                try:
                    self.sequences.reserve(seq, len(sequence.slots), len(sequence.slots) + width * lanes.steps)
                except CacheFull:  # step by step they may be drafted in the free pages
                    return 0
                return self._lane_steps(LaneSteps(sequence.table, sequence.slots, lanes, spots), count, hear)
        finally:
            sequence.table.shrink(len(sequence.slots))

    def _lane_steps(self, steps: LaneSteps, count: int, hear: Hear) -> int:
        """Run steps until `hear` returns False; one more may be in flight then, which has no effect."""
        results = self.chosen(*steps.step(0), count)[1]
        for number in range(steps.lanes.steps):
            ahead = self.chosen(*steps.step(number + 1), count)[1] if number + 1 < steps.lanes.steps else None
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
        self.early.begun = None
        work = [feed for feed in work if feed.tokens]
        with self.here(), self._returning_states(self._wanted(work)), self.sequences.appending(work) as rows:
            spots = [spot for trial in trials for spot in self._spots_of(trial)]
            row_numbers = self._chosen_rows(work, rows, trials, spots)
            if row_numbers is None:
                return self._verify_shaped(work, rows, trials, spots)
            results = self._results(work, rows, trials, spots, row_numbers)

        def judged() -> list[Judged]:
            follows = len(trials) == 1 and trials[0].order.follows is not None and rows[0].start == rows[0].prefix
            if follows:
                self.early.write_chains(trials[0].seq, rows[0], row_numbers[0][0], results.ready)
            found = _judged(row_numbers, results())
            return [self.early.follow(trials[0], rows[0].table, found[0])] if follows else found

        return Verdicts(judged, results.ready)

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
        if not trials or self.state_layers or wants_more or others:
            return None
        if not self.is_one_step(rows) or not asking.are_chosen_in_graph(spots):
            return None
        return asking.trial_rows(trials, asking.rows_in(work, self.sequences.first_nodes(work)))

    def _results(
        self,
        work: Sequence[Feed],
        rows: list[Rows],
        trials: Sequence[Trial],
        spots: Sequence[Spot],
        row_numbers: list[list[int]],
    ) -> Reading:
        """Start the step, unless it was started ahead; returns its results in flight."""
        taken = self.early.taken(work, rows)
        if taken is not None:
            return taken
        choosing = asking.choosing_of(
            sum(len(part.tokens) for part in rows), zip(chain(*row_numbers), spots, strict=True)
        )
        asking.lead(choosing, trials, row_numbers)
        results = self.read_later(self.start_with_prefill(rows, choosing), len(choosing.said))
        self.early.begun = self.started
        return results

    def _verify_shaped(
        self, work: Sequence[Feed], rows: list[Rows], trials: Sequence[Trial], spots: Sequence[Spot]
    ) -> Verdicts:
        """Judge trials behind the graph, with all sampling parameters and rules."""
        self.drop_ahead()
        self.flush()
        arrays = {**self.sampler.picking(spots), **verdict.judging(trials, spots)} if trials else {}
        if trials:
            arrays["choice"] = np.stack(asking.choosing_of(len(spots), enumerate(spots)))
        sent = self.launch(work, rows, arrays)
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

    def _picked(self, logits: Tensor, choice: Tensor) -> Tensor:
        """Return the token of every row by the match rule, over the whole vocabulary [rows]."""
        chooser = self.graphs.chooser
        if chooser is None or self.decoder.columns is not None:
            chooser = Chooser(self.graphs.step.picks, logits.shape[1])
        none = torch.zeros(2, dtype=torch.int32, device=self.device)
        parts = zip(torch.split(logits, MOST_STEP_ROWS), torch.split(choice, MOST_STEP_ROWS, dim=1), strict=True)
        return torch.cat([chooser(some, how, none, 1)[:, 0].long() for some, how in parts])

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
            with self.in_turn():
                self.early.warm_up_receiver(draft.tree)

    def _launch_receiver(self, draft: object | None) -> None:
        if isinstance(draft, GpuRunner) and draft.device == self.device:
            self.early.launch_receiver(draft.tree)

    @property
    def tree(self) -> DeviceTree:
        """The tree that grows on this model's device."""
        return self._grower.tree

    def _warm_up_kernels(self) -> None:
        """Compile the kernel that chooses a tree's first step: it runs outside graphs."""
        self._grower.warm_up()

    def drop_ahead(self) -> None:
        """Forget steps that were started ahead: another one is about to run."""
        self.early.forget_step()
        super().drop_ahead()

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copy pages of the pool, once the pending moves are made; the step in flight does not read the copies."""
        self.early.forget_step()
        super().copy_pages(copies)

    def rewinding(self, seq: int) -> None:
        """Forget steps in flight: a sequence is about to be rolled back."""
        self.early.forget_step()
        super().rewinding(seq)

    def _close(self, seq: int) -> None:
        self.early.close(seq)
        self.plain.forget(seq)  # the rows of other sequences stay valid
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
