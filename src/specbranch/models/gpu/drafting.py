"""Drafts that a GPU goes on with by itself: trees that grow on the device, and lanes whose steps do not wait.

Owns the memory of such a draft while its steps run, and the order of its steps. Does not own the tree's layout and its
copy up (`growing.py`, `trees.py`), the rows of lanes (`lanes.py`) or the launch (`launching.py`). Invariant: a
sequence has only nodes that the host has read; pages behind them are freed at the end.
"""

from __future__ import annotations

from typing import Protocol

import torch

from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Done, Feed, Growing, Hear, Lanes
from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree
from specbranch.errors import CacheFull
from specbranch.models.gpu import asking
from specbranch.models.gpu.early_starts import EarlyStarts
from specbranch.models.gpu.growing import TextRead, TreeGrower
from specbranch.models.gpu.lanes import LaneSteps
from specbranch.models.gpu.launching import StepHost, StepLauncher
from specbranch.models.gpu.layout import GROUP_ROWS, Bucket
from specbranch.models.gpu.tree_layout import ENTRIES, NO_MOVES
from specbranch.models.runners.sequences import Sequences


class DraftHost(StepHost, Protocol):
    """The runner, as far as such drafts need it."""

    def forget_rows(self, seq: int) -> None:
        """Forget the logits of a sequence: its nodes are about to be committed."""
        ...


class DeviceDrafts:
    """Grows trees and drafts in lanes."""

    def __init__(
        self, launcher: StepLauncher, sequences: Sequences, grower: TreeGrower, early: EarlyStarts, host: DraftHost
    ) -> None:
        self._launcher, self._sequences, self._grower, self._early = launcher, sequences, grower, early
        self._host = host

    @torch.inference_mode()
    def grow(self, growing: Growing, done: Done) -> Tree | None:
        """Grow a tree on the device, which chooses the nodes of each step; the host only learns how many they are.

        Returns None if the caller has to grow it step by step.
        """
        self._host.flush()
        self._host.drop_ahead()
        self._early.new_draft()
        sequence, read = self._sequences[growing.seq], self._early.text_before(growing)
        room = self._grower.room(growing, sequence.slots, self._host.request(growing.seq), read)
        kv_slots = len(sequence.slots) + len(growing.uncomputed) + room
        if not room:
            return None
        try:
            with self._launcher.stream.here():
                try:
                    self._sequences.reserve(growing.seq, len(sequence.slots), kv_slots)
                except CacheFull:  # step by step a tree may grow in the free pages
                    return None
                return self._grown(growing, room, read, done)
        finally:
            sequence.table.shrink(len(sequence.slots))

    def _grown(self, growing: Growing, room: int, read: TextRead | None, done: Done) -> Tree:
        """Grow a tree in pages that are reserved; its receiver begins with it before the host has read it."""
        early, grower, clock = self._early, self._grower, self._launcher.stream.clock
        bucket = grower.bucket()
        self._plant(growing, room, bucket, read)
        if growing.receiver is not None:
            grower.bring_sheet(growing.receiver.prepare())
        steps, count = grower.steps(bucket, done, self._grow_on)
        early.grown_at = None if clock is None else clock.note()
        if growing.receiver is not None:
            growing.receiver.take(grower.tree, count)
        if read is not None:
            early.took(read)
        return grower.grown(growing, self._sequences[growing.seq].slots, steps, count, read)

    def _plant(self, growing: Growing, room: int, bucket: Bucket, read: TextRead | None) -> None:
        """Copy a tree to the device, which chooses its first step.

        Tokens of the text that are not computed yet are computed for that, and committed.
        """
        seq, count, moves = growing.seq, len(growing.uncomputed), NO_MOVES
        sequence, request = self._sequences[seq], self._host.request(seq)
        if not count and read is None:  # otherwise the text's step makes them
            moves = self._launcher.tree_moves()
        elif not count:
            self._launcher.up({})
        self._grower.plant(growing, sequence.slots, request, sequence.table, room, moves, read)
        if not count:
            self._grower.choose(bucket, read)
            return
        spot = Spot(request, len(sequence.slots.prefix) + count, list)
        with self._sequences.appending([Feed(seq, growing.uncomputed, tuple(range(ROOT, count - 1)))]) as rows:
            self._launcher.start(rows, asking.choosing_of(count, [(count - 1, spot)]), ENTRIES, grows=True)
        # Commit in place. Unlike `keep` this frees no page, as the tree's steps are about to write there.
        self._host.forget_rows(seq)
        sequence.slots.keep(range(count), count)

    def _grow_on(self, bucket: Bucket) -> None:
        """Run the step that the device chose for the tree; the device then chooses the next one."""
        self._launcher.run_brought(bucket, ENTRIES, grows=True)

    @torch.inference_mode()
    def run_ahead(self, lanes: Lanes, hear: Hear) -> int:
        """Draft in lanes: each step starts with the device's own tokens, before the host has read the last step."""
        self._host.flush()
        self._host.drop_ahead()
        self._early.new_draft()
        seq, width = lanes.feed.seq, len(lanes.feed.tokens)
        sequence, request = self._sequences[seq], self._host.request(seq)
        spots = [Spot(request, sequence.slots.position(parent) + 2, list) for parent in lanes.feed.parents]
        count = asking.entries_of([Ask(seq, ROOT, measure=lanes.measure)], spots[:1])
        if count is None or width > GROUP_ROWS or sequence.slots.room < width * lanes.steps:
            return 0
        try:
            with self._launcher.stream.here():
                try:
                    self._sequences.reserve(seq, len(sequence.slots), len(sequence.slots) + width * lanes.steps)
                except CacheFull:  # step by step they may be drafted in the free pages
                    return 0
                return self._lane_steps(LaneSteps(sequence.table, sequence.slots, lanes, spots), count, hear)
        finally:
            sequence.table.shrink(len(sequence.slots))

    def _lane_steps(self, steps: LaneSteps, count: int, hear: Hear) -> int:
        """Run steps until `hear` returns False; one more may be in flight then, which has no effect."""
        chosen = self._launcher.chosen
        results = chosen(*steps.step(0), count)[1]
        for number in range(steps.lanes.steps):
            ahead = chosen(*steps.step(number + 1), count)[1] if number + 1 < steps.lanes.steps else None
            numbers = results()
            goes_on = hear(asking.answers(steps.asks, steps.spots, numbers))
            steps.heard(number, numbers[:, 0].astype(int).tolist())
            if not goes_on or ahead is None:
                return number + 1
            results = ahead
        return 0
