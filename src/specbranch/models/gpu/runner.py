"""The native Runner on a GPU: steps are graphs, questions are answered where the logits are.

Owns the order of a step: nodes are added on the host, all that the device needs goes up in one copy, the graph is
started, and one read brings the answers. What a graph does not choose by itself (shaped logits, the ratio rule, laws,
log-probabilities) is worked out behind it. Where plain decoding goes on, the next step is started before anybody asks
for it. Invariants: nothing waits for the device but that read; places that are to move move before anything else is
read or written; all that a runner launches goes on its one stream (`_here`), so that two models work at once and
nothing of one has to wait for the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbranch.core.orders import Context, Receiver
from specbranch.core.pages import PAGE, Copy
from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Done, Feed, Growing, Hear, Judged, Lanes, Proposal, Trial, Verdicts
from specbranch.core.sending import SendingLater
from specbranch.core.slots import ROOT, TAIL
from specbranch.core.trees import Tree
from specbranch.errors import CacheFull
from specbranch.models import sample, verdict
from specbranch.models.batch import Rows, dealt
from specbranch.models.decoder import Decoder
from specbranch.models.gpu import asking
from specbranch.models.gpu.attention import blocks_of
from specbranch.models.gpu.begun import Ahead, Followed, Received
from specbranch.models.gpu.chains import ChainSheets, chain_choosing, chain_rows
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.growing import NO_MOVES, TextRead, TreeGrower
from specbranch.models.gpu.kernel_step import step_of
from specbranch.models.gpu.lanes import LaneSteps
from specbranch.models.gpu.layout import (
    GROUP_ROWS,
    MOST_ROWS,
    Bucket,
    Choosing,
    brought_moves,
    most_moves,
    pack,
    power_of_four,
)
from specbranch.models.gpu.own_stream import OnStream, own_stream
from specbranch.models.gpu.receiving import DeviceReceiver, Expected, Launch, TreeReceiver
from specbranch.models.gpu.step import Graphs, Ran
from specbranch.models.gpu.stream_clock import DeviceMoment, StreamClock
from specbranch.models.gpu.trees import ENTRIES, MOVES, DeviceTree
from specbranch.models.kv import Table
from specbranch.models.model import PIECES, ProbeNetwork
from specbranch.models.native import NativeRunner
from specbranch.models.rows import TensorRow
from specbranch.models.sample import Asked
from specbranch.models.sampling import proposed
from specbranch.models.sheet import Arrays
from specbranch.models.transfer import Reading

PARTIAL_BYTES = 1 << 28  # that partial results of attention may take in a step


class GpuRunner(NativeRunner):
    """A Runner whose steps are captured; on a CPU, as in tests, they are run as they are."""

    def __init__(self, decoder: Decoder, context_length: int, tail: int = TAIL, pages: int | None = None) -> None:
        super().__init__(decoder, context_length, tail, pages)
        self._fused, self.piece = None, PIECES["cuda"]
        self._stream = own_stream(self, self.device) if self.device.type == "cuda" else None
        self._clock = None if self._stream is None else StreamClock(self._stream)
        self.transfer.stream = self._stream
        most = -(-(context_length + tail) // PAGE)
        with self._in_turn():  # weights and pages were made on the caller's stream
            self._graphs = Graphs(step_of(decoder, self.memory), most)
            self._graphs.choose_with(self._chooser())
            self._grower = TreeGrower(self._graphs, most, self.pool.pages * PAGE, self.transfer)
        # still to be made: sequence, places, and the lowest that is written
        self._moves: list[tuple[int, np.ndarray, int]] = []
        self._ahead: Ahead | Received | Followed | None = None
        self._read: TextRead | None = None
        self._chains = ChainSheets(self.pool.pages * PAGE, self._graphs.step.least, context_length)
        self._receiver = DeviceReceiver(
            self.pool.pages * PAGE, self._graphs.input, self._graphs.step.least, self._graphs.captures
        )
        self.begun: DeviceMoment | None = None
        self.grown_at: DeviceMoment | None = None
        self._started = self._moment()  # the last step of which that is noted
        # Steps that were begun for a tree, and those of them that were asked for then; likewise for what follows.
        self.received = self.received_right = self.followed = self.followed_right = 0
        self.texts_read = self.texts_right = 0  # likewise texts behind which trees were to grow

    @property
    def note(self) -> Callable[[], DeviceMoment] | None:
        """How to note the moment at which the device has done all it was given so far; nothing where it does not
        work by itself."""
        return None if self._clock is None else self._clock.note

    def padded(self, rows: int) -> int:
        """With how many rows a step of so many is computed."""
        return max(power_of_four(rows), self._graphs.step.least.rows)

    def limit(self, vocabulary: int) -> None:
        """Never say a token from this id on, as one that is unknown to the other model."""
        super().limit(vocabulary)
        with self._in_turn():
            self._graphs.choose_with(self._chooser())

    def probe(self, layers: int, network: ProbeNetwork | None) -> None:
        """Have verdicts carry what a network makes of hidden states; see `TorchRunner`."""
        with self._in_turn():
            super().probe(layers, network)

    def feed(self, work: Sequence[Feed]) -> None:
        """Read new nodes of several sequences in one forward."""
        with self._here():
            super().feed(work)

    def score(self, work: Sequence[Feed]) -> list[list[TensorRow]]:
        """Read new nodes; returns one row a node, for the caller's stream to read."""
        with self._in_turn():
            return super().score(work)

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second` after a node; 0 is a tie."""
        with self._here():
            return super().margin(seq, node, first, second)

    @torch.inference_mode()
    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Read new nodes, and answer what is asked about them, or about nodes read before."""
        work = [feed for feed in work if feed.tokens]
        self._ahead = self.grown_at = self.begun = None
        with self._here(), self._grown(work) as rows:
            spots = [self.spot(ask.seq, ask.node, ask) for ask in asks]
            row_of = asking.rows_in(work, self._first_nodes(work))
            places = [row for ask in asks if (row := row_of(ask.seq, ask.node)) is not None]
            here = len(places) == len(asks) > 0 and self._is_one_step(rows)
            count = asking.entries_of(asks, spots) if here else None
            if count is not None:
                choosing = asking.choosing_of(sum(len(part.tokens) for part in rows), zip(places, spots, strict=True))
                ran, lines = self._chosen(rows, choosing, count)
                self._hold(work, _wide(ran.logits), None)
            else:
                sent = self._launch(
                    work, rows, self.sampler.proposing(spots, asks, self.decoder.columns) if asks else {}
                )
        if count is not None:
            return asking.answers(asks, spots, lines()[places])
        if not asks:
            return []
        with self._here():
            found = self.transfer.later(
                self.sampler.candidates([self._rows[ask.seq][ask.node] for ask in asks], spots, asks, sent)
            )
        return proposed(spots, asks, found())

    @torch.inference_mode()
    def grow(self, growing: Growing, done: Done) -> Tree | None:
        """Grow a tree by itself: one step after the other, each chosen by the device, of which the host hears no
        more than its width."""
        held, read, self._ahead, self.grown_at, self.begun = self._held[growing.seq], self._read, None, None, None
        read = read if read is not None and read.ends(growing, len(held.slots)) else None
        room = self._grower.room(growing, held.slots, self._requests[growing.seq], read)
        places = len(held.slots) + len(growing.unread) + room
        if not room:
            return None
        try:
            with self._here():
                try:
                    self._reach(held, len(held.slots), places)
                except CacheFull:  # step by step a tree may grow in what there is
                    return None
                bucket = self._grower.bucket(places)
                self._plant(growing, room, bucket, read)
                if growing.receiver is not None:
                    self._grower.bring_sheet(growing.receiver.prepare())
                steps, count = self._grower.steps(bucket, done, self._grow_on)
                self.grown_at = None if self._clock is None else self._clock.note()
                if growing.receiver is not None:
                    growing.receiver.take(self._grower.tree, count)
                if read is not None:
                    self.texts_right += 1
                    self.begun = read.begun
                return self._grower.grown(growing, held.slots, steps, count, read)
        finally:
            held.table.shrink(len(held.slots))

    def make_ready(self, seq: int, done: Done) -> None:
        """Write out the steps of texts that it may have to read ahead: those that end in its tail, and one or a few
        tokens behind that."""
        held = self._held[seq]
        first = len(held.slots.prefix)
        starts = range(first, first + held.slots.depth + 1)
        self._chains.write(seq, self._requests[seq], held.table, starts, done, (1, 4))

    @torch.inference_mode()
    def read_ahead(self, feed: Feed) -> bool:
        """Read what is unread of a text, and have chosen what follows it."""
        seq, count, self._ahead = feed.seq, len(feed.tokens), None
        spot = Spot(self._requests[seq], len(self.slots(seq).prefix) + count, list)
        if not count or count > GROUP_ROWS or not asking.is_chosen_in_graph(spot):
            return False
        with self._here(), self._grown([feed]) as (rows,):
            moves = self._moves_for(count)
            step = self._chains.take(seq, rows.table, rows.start, feed.tokens, moves)
            if step is None:
                step = self._packed([rows], asking.choosing_of(count, [(count - 1, spot)]), moves)
            ran = self._run_packed(*step, moves, ENTRIES, timed=True)
            self._hold([feed], _wide(ran.logits), None)
        assert ran.lines is not None
        self._read = TextRead(seq, spot.position, ran.lines, count - 1, self._started)
        self.texts_read += 1
        return True

    def _plant(self, growing: Growing, room: int, bucket: Bucket, read: TextRead | None) -> None:
        """Bring a tree to the device, and have its first step chosen. What is unread of its text is read for that,
        and committed."""
        seq, count, moves = growing.seq, len(growing.unread), NO_MOVES
        held, request = self._held[seq], self._requests[seq]
        if not count and self._moves:  # else they are made with the text's step
            moves = self._waiting_moves()
            if read is not None or not self._grower.carries(moves):
                moves = NO_MOVES
                self._up({})
        self._grower.plant(growing, held.slots, request, held.table, room, moves, read)
        if not count:
            self._grower.choose(bucket, read)
            return
        spot = Spot(request, len(held.slots.prefix) + count, list)
        with self._grown([Feed(seq, growing.unread, tuple(range(ROOT, count - 1)))]) as rows:
            self._start(rows, asking.choosing_of(count, [(count - 1, spot)]), ENTRIES, bucket)
        # Committed where it lies. No page is given back, as `keep` would: the tree's steps are about to write there.
        self._rows[seq].clear()
        held.slots.keep(range(count), count)

    def _grow_on(self, bucket: Bucket) -> None:
        """Run the step that the device chose for the tree, and have the next one chosen."""
        self._read = None
        with self._moving():
            self._graphs.run_brought(bucket, 0, ENTRIES, True)

    @torch.inference_mode()
    def run_ahead(self, lanes: Lanes, hear: Hear) -> int:
        """Draft on in lanes: a step is started, with what the device chose itself, before the last one is heard of."""
        seq, width, self._ahead, self.grown_at, self.begun = lanes.feed.seq, len(lanes.feed.tokens), None, None, None
        held, request = self._held[seq], self._requests[seq]
        spots = [Spot(request, held.slots.position(parent) + 2, list) for parent in lanes.feed.parents]
        count = asking.entries_of([Ask(seq, ROOT, measure=lanes.measure)], spots[:1])
        if count is None or width > GROUP_ROWS or held.slots.room < width * lanes.steps:
            return 0
        try:
            with self._here():
                try:
                    self._reach(held, len(held.slots), len(held.slots) + width * lanes.steps)
                except CacheFull:  # step by step they may be drafted in what there is
                    return 0
                return self._lane_steps(LaneSteps(held.table, held.slots, lanes, spots), count, hear)
        finally:
            held.table.shrink(len(held.slots))

    def _lane_steps(self, steps: LaneSteps, count: int, hear: Hear) -> int:
        """Take steps until somebody has heard enough; one more may be under way then, which is as if it were not."""
        lines = self._chosen(*steps.step(0), count)[1]
        for number in range(steps.lanes.steps):
            ahead = self._chosen(*steps.step(number + 1), count)[1] if number + 1 < steps.lanes.steps else None
            told = lines()
            goes_on = hear(asking.answers(steps.asks, steps.spots, told))
            steps.heard(number, told[:, 0].astype(int).tolist())
            if not goes_on or ahead is None:
                return number + 1
            lines = ahead
        return 0

    @torch.inference_mode()
    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Read new nodes and start judging; the verdicts wait for the device."""
        self.begun = None
        work = [feed for feed in work if feed.tokens]
        with self._here(), self._tapping(self._wanted(work)), self._grown(work) as rows:
            spots = [spot for trial in trials for spot in self._spots_of(trial)]
            places = self._chosen_rows(work, rows, trials, spots)
            if places is None:
                return self._verify_shaped(work, rows, trials, spots)
            lines, at = self._lines(work, rows, trials, spots, places)
            said = self._go_on(rows, trials, spots, at)

        def judged() -> list[Judged]:
            follows = len(trials) == 1 and trials[0].order.follows is not None and rows[0].start == rows[0].prefix
            if follows:
                self._write_chains(trials[0].seq, rows[0], at[0][0], lines.ready)
            found = _judged(trials, at, lines(), said)
            return [self._follow(trials[0], rows[0].table, found[0])] if follows else found

        return Verdicts(judged, lines.ready)

    def receiver(self, seq: int, on: Context, sending: SendingLater) -> Receiver | None:
        """Who is to be given a tree that grows behind a text, of which all but the last token is committed."""
        return TreeReceiver(partial(self._expect, seq, on, sending))

    def _expect(self, seq: int, on: Context, sending: SendingLater) -> tuple[np.ndarray, Launch] | None:
        """Have memory for what of a tree is verified; returns what is to be brought up with the tree, and how to begin
        with it once it has grown. Nothing: it has to be asked for."""
        held, request, moves = self._held[seq], self._requests[seq], NO_MOVES
        follows = len(held.slots.prefix) == len(on) - 1 and not held.slots.tokens and len(on.tail) > 0
        if not follows or self._tapped or not asking.is_chosen_in_graph(Spot(request, len(on), list)):
            return None
        text = Expected(request, len(on) - 1, on.tail[-1], sending())
        if len(text.sending.prices) >= GROUP_ROWS or held.slots.room <= len(text.sending.prices):
            return None
        with self._here():
            self._reach(held, text.prefix, text.places)
            if self._moves:
                moves = self._waiting_moves()
                if not self._graphs.step.moves or moves.shape[1] > MOVES:
                    moves = NO_MOVES
                    self._up({})
        sheet = self._receiver.sheet(text, held.table, moves)
        return None if sheet is None else (sheet, partial(self._begin, seq, text, moves))

    def _begin(self, seq: int, text: Expected, moves: np.ndarray, tree: DeviceTree, nodes: int) -> None:
        """Begin to verify a tree that has just grown, on the stream that is current."""
        if tree.state.device != self.device:
            return
        held, bucket, transfer = self._held[seq], self._receiver.bucket(text, nodes), self.transfer
        around = None if self._stream is None else torch.cuda.current_stream(self.device)
        transfer.mark(around).wait(self._stream)
        with self._here():
            begun = self._moment()
            self._receiver.send(tree, text, held.table, moves, bucket)
            transfer.mark(self._stream).wait(around)  # before another tree is written there
            with self._moving():
                ran = self._graphs.run_brought(bucket, 0, 1)
            assert ran.lines is not None
            lines = transfer.later(ran.lines)
        self.received += 1
        self._ahead = Received(seq, held.table, text.prefix, transfer.later(self._receiver.read, around), lines, begun)

    def _spots_of(self, trial: Trial) -> list[Spot]:
        """Where the tokens after a trial's root and after each of its nodes will stand."""
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
        """The rows of each trial in the step, if a graph can choose at all of them and nothing else is wanted."""
        wanted = (
            not trials or self._tapped or any(trial.logprobs is not None or trial.wants_forecast for trial in trials)
        )
        # others are judged later, by rows that are held
        wanted = wanted or {feed.seq for feed in work} != {trial.seq for trial in trials}
        if wanted or not self._is_one_step(rows) or not asking.are_chosen_in_graph(spots):
            return None
        return asking.trial_rows(trials, asking.rows_in(work, self._first_nodes(work)))

    def _lines(
        self,
        work: Sequence[Feed],
        rows: list[Rows],
        trials: Sequence[Trial],
        spots: Sequence[Spot],
        places: list[list[int]],
    ) -> tuple[Reading, list[list[int]]]:
        """Start the step, unless it was started before; returns its lines, and which of them are the trials'."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not self._moves and ahead.reads(work, rows):
            if isinstance(ahead, Ahead):
                return ahead.lines, [[ahead.rows[trial.seq]] for trial in trials]
            self.begun = ahead.begun
            if isinstance(ahead, Received):
                self.received_right += 1
            else:
                self.followed_right += 1
            return ahead.lines, places
        choosing = asking.choosing_of(sum(len(part.tokens) for part in rows), zip(chain(*places), spots, strict=True))
        asking.lead(choosing, trials, places)
        lines = self._chosen(rows, choosing, 1, timed=True)[1]
        self.begun = self._started
        return lines, places

    def _go_on(
        self, rows: list[Rows], trials: Sequence[Trial], spots: Sequence[Spot], at: list[list[int]]
    ) -> dict[int, int] | None:
        """Start the step that follows, where all trials go on plainly and it needs no new page; returns where to
        note what is said."""
        if not all(trial.order.goes_on and not trial.nodes for trial in trials) or len(rows) != len(trials):
            return None
        after = [Spot(spot.request, spot.position + 1, spot.history) for spot in spots]
        fits = all(part.start + 1 < min(len(part.table.pages) * PAGE, self._context_length) for part in rows)
        if not fits or not asking.are_chosen_in_graph(after):
            return None
        there = [
            Rows(part.table, [-1 - place], part.start + 1, part.start + 1, [1])
            for part, (place,) in zip(rows, at, strict=True)
        ]
        _, lines = self._chosen(there, asking.choosing_of(len(there), enumerate(after)), 1)
        places = {trial.seq: (part.start, int(part.places()[0])) for trial, part in zip(trials, there, strict=True)}
        self._ahead = Ahead({trial.seq: row for row, trial in enumerate(trials)}, places, lines)
        return self._ahead.tokens

    def _write_chains(self, seq: int, part: Rows, root: int, hurry: Callable[[], bool]) -> None:
        """Write out the steps that may follow on a verdict, those first that follow if all is taken or nothing."""
        first, last = part.start + root + 1, part.start + max(map(int.bit_count, part.seen))
        self._chains.write(seq, self._requests[seq], part.table, (last, *range(first, last)), hurry, (GROUP_ROWS, 1))

    @torch.inference_mode()
    def _follow(self, trial: Trial, table: Table, found: Judged) -> Judged:
        """Start the step that most likely follows on a verdict, at the places behind it, where all of them lie on a
        page that it keeps."""
        order, seq = trial.order, trial.seq
        if order.follows is None or self._moves:
            return found
        chain = order.follows((*(order.tokens[node] for node in found.path), found.token))
        start = len(self.slots(seq).prefix) + trial.root + 1 + len(found.path)
        room = min(-start % PAGE, self._context_length - start, GROUP_ROWS)
        if not isinstance(chain, tuple) or room < 1 + len(chain):
            return found
        if not order.is_chain:  # what was taken has to move to its places
            line = trial.line(found.path)
            self.keep(seq, line, len(line))
            found = Judged(found.path, found.token, kept=True)
        tokens = (found.token, *chain)
        with self._here():
            moves = self._moves_for(len(tokens))
            step = self._chains.take(seq, table, start, tokens, moves)
            if step is None:
                rows = chain_rows(table, tokens, start)
                step = self._packed([rows], chain_choosing(self._requests[seq], rows), moves)
            lines = self._read_later(self._run_packed(*step, moves, 1, timed=True), len(tokens))
        self.followed += 1
        pages = table.pages[: start // PAGE + 1]
        self._ahead = Followed(seq, chain_rows(table, tokens, start), pages, lines, self._started)
        return found

    def _chosen(self, rows: list[Rows], choosing: Choosing, count: int, timed: bool = False) -> tuple[Ran, Reading]:
        """Run rows as one step that chooses, and start to read what it says of each."""
        ran = self._start(rows, choosing, count, timed=timed)
        return ran, self._read_later(ran, len(choosing.said))

    def _read_later(self, ran: Ran, rows: int) -> Reading:
        assert ran.lines is not None
        return self.transfer.later(ran.lines[:rows])

    def _start(
        self, rows: list[Rows], choosing: Choosing, count: int, tree_step: Bucket | None = None, timed: bool = False
    ) -> Ran:
        """Run rows as one step that chooses; `tree_step`: the bucket of the steps of a tree that grows on from it;
        `timed`: note when the device began."""
        moves = self._moves_for(len(choosing.said))
        return self._run_packed(
            *self._packed(rows, choosing, moves, tree_step), moves, count, tree_step is not None, timed
        )

    def _packed(
        self, rows: list[Rows], choosing: Choosing, moves: np.ndarray | None, tree_step: Bucket | None = None
    ) -> tuple[np.ndarray, Bucket]:
        """Write a step out."""
        least = self._graphs.step.least
        if tree_step is not None:  # the graph writes the tree's first step, with as many pages as its own
            least = least._replace(pages=max(tree_step.pages, least.pages))
        return pack(rows, self.pool.pages * PAGE, choosing, moves, least)

    def _run_packed(
        self,
        packed: np.ndarray,
        bucket: Bucket,
        moves: np.ndarray | None,
        count: int,
        grows: bool = False,
        timed: bool = False,
    ) -> Ran:
        """Run a step that is written out, with the moves that it makes."""
        self._read = None
        if timed:
            self._started = self._moment()
        with self._moving():
            self.transfer.into(self._graphs.input, packed)
            if moves is not None and not self._graphs.step.moves:
                self.memory.move(*brought_moves(self._graphs.input, bucket, moves.shape[1]))
            return self._graphs.run_brought(bucket, 0, count, grows)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """What is launched in here makes the moves that wait; where it fails, what was to move is forgotten."""
        try:
            yield
            self._moves = []
        except BaseException:
            self._forget_moves()
            raise

    def _waiting_moves(self) -> np.ndarray:
        return np.concatenate([places for _, places, _ in self._moves], axis=1)

    def _moves_for(self, rows: int) -> np.ndarray | None:
        """The moves that go with a step of so many rows; where it has no room for them, they are made before it."""
        if not self._moves:
            return None
        moves = self._waiting_moves()
        # a place may be left by one keep and filled by the next
        in_order = self._graphs.step.moves or len(self._moves) == 1
        if in_order and moves.shape[1] <= most_moves(rows):
            return moves
        self._up({})
        return None

    def _verify_shaped(
        self, work: Sequence[Feed], rows: list[Rows], trials: Sequence[Trial], spots: Sequence[Spot]
    ) -> Verdicts:
        """Judge behind the graph what it does not choose by itself."""
        self._ahead = None
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
        lines = self.transfer.later(verdict.lines(logits, tokens, reached, top, said))
        told = [said is not None and row.states is not None for row in of_trials]
        return Verdicts(
            lambda: verdict.judged(trials, lines(), top, 0 if said is None else said.shape[1], told), lines.ready
        )

    def _picked(self, logits: Tensor, choice: Tensor) -> Tensor:
        """The token of every row by the match rule, over the whole vocabulary [rows]."""
        chooser = self._graphs.chooser
        if chooser is None or self.decoder.columns is not None:
            chooser = Chooser(self._graphs.step.picks, logits.shape[1])
        none = torch.zeros(2, dtype=torch.int32, device=self.device)
        parts = zip(torch.split(logits, MOST_ROWS), torch.split(choice, MOST_ROWS, dim=1), strict=True)
        return torch.cat([chooser(some, how, none, 1)[:, 0].long() for some, how in parts])

    def _probed(self, rows: Sequence[TensorRow], tokens: Tensor) -> Tensor | None:
        """What the probe makes of rows and the tokens they led to; anything of a row that was made before anybody
        asked."""
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
        if not rows:
            return self._up(arrays)
        (block, states), sent = self._run(rows, arrays)
        self._hold(work, block, states)
        return sent

    def _hold(self, work: Sequence[Feed], block: Tensor, states: Tensor | None) -> None:
        """Keep the rows of a forward: they may be asked about later."""
        made = iter(range(block.shape[0]))
        for feed, start in zip(work, self._first_nodes(work), strict=True):
            held = (
                (start + at, TensorRow(block, next(made), self.decoder.columns, states))
                for at in range(len(feed.tokens))
            )
            self._rows[feed.seq].update(held)

    def _first_nodes(self, work: Sequence[Feed]) -> list[int]:
        """The nodes that the first tokens of some work became, once they were added."""
        return [len(self.slots(feed.seq).tokens) - len(feed.tokens) for feed in work]

    def _run(self, work: list[Rows], arrays: Arrays) -> tuple[tuple[Tensor, Tensor | None], Asked]:
        """Run all rows, beyond what a step takes in several; the last copy up carries the arrays too."""
        self._ahead = self._read = None
        blocks: list[Tensor] = []
        states: list[Tensor] = []
        steps = list(dealt(work, self._most_rows(work)))
        for number, step in enumerate(steps, 1):
            packed, bucket = pack(step, self.pool.pages * PAGE, least=self._graphs.step.least)
            sent = self._up({"step": packed, **(arrays if number == len(steps) else {})})
            self._graphs.bring(sent["step"])
            ran = self._graphs.run_brought(bucket, self._tapped)
            rows = sum(len(part.tokens) for part in step)
            blocks.append(_wide(ran.logits[:rows]))
            states += [] if ran.states is None else [ran.states[:rows].clone()]
        return (torch.cat(blocks) if len(blocks) > 1 else blocks[0], torch.cat(states) if states else None), sent

    def _most_rows(self, work: Sequence[Rows]) -> int:
        """How many rows a step takes: behind long texts fewer, as each row has a partial result for every block."""
        arch, pages = self.architecture, max(-(-(part.start + len(part.tokens)) // PAGE) for part in work)
        blocks = blocks_of(2 * pages)  # a bucket may have twice as many pages
        row = arch.heads * (arch.head_dim * self.dtype.itemsize + 8) * (1 + blocks)
        return min(self._graphs.step.most_rows, max(PARTIAL_BYTES // row // GROUP_ROWS, 1) * GROUP_ROWS)

    def _is_one_step(self, rows: list[Rows]) -> bool:
        count = sum([len(part.tokens) for part in rows])
        return 0 < count <= GROUP_ROWS or GROUP_ROWS < count <= self._most_rows(rows)

    def _chooser(self) -> Chooser:
        columns = self.decoder.columns
        return Chooser(self._graphs.step.picks, self.sampler.width(columns), columns)

    def _move(self, seq: int, moves: np.ndarray, first: int) -> None:
        self._moves.append((seq, moves, first))

    @torch.inference_mode()
    def _up(self, arrays: Arrays) -> Asked:
        """Send arrays up, and with them the moves that wait, which are made at once. Where that fails, what was to
        move is forgotten."""
        if not arrays and not self._moves:
            return {}
        waiting = {f"moves {number}": moves for number, (_, moves, _) in enumerate(self._moves)}
        with self._moving():
            sent = self.transfer.up({**waiting, **arrays})
            for name in waiting:
                self.memory.move(*sent[name])
        return sent

    def _forget_moves(self) -> None:
        """Forget what was to move, and the places it was to move to: its worker will have them read again."""
        for seq, _, first in self._moves:
            if seq in self._held:
                self.rewind(seq, min(first, len(self.slots(seq).prefix)))
        self._moves = []

    def _rewind(self, seq: int, length: int) -> None:
        self._ahead = None
        super()._rewind(seq, length)

    def _close(self, seq: int) -> None:
        self._chains.forget()
        if isinstance(self._ahead, Ahead):
            self._ahead.rows.pop(seq, None)  # the others' rows stay good
        elif self._ahead is not None and self._ahead.seq == seq:
            self._ahead = None
        super()._close(seq)

    def _copy(self, copies: Sequence[Copy]) -> None:
        self._ahead = None
        with self._here():
            self._up({})
            super()._copy(copies)

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        self._ahead = None  # a page it wrote to may have been given back, and may be written to now
        with self._here():
            self._up({})
            super()._extend(seq, tokens)

    def _moment(self) -> DeviceMoment:
        """Note when the device comes to this; where it is no device, the present moment."""
        if self._clock is not None:
            return self._clock.note()
        moment = time.perf_counter()
        return lambda: moment

    def _here(self) -> AbstractContextManager[Any]:
        """Have kernels launched on the runner's own stream."""
        return nullcontext() if self._stream is None else OnStream(self._stream)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """The same, behind what the caller has launched and before what it launches next: for tensors that pass
        between the two."""
        around = None if self._stream is None else torch.cuda.current_stream(self.device)
        if self._stream is not None and around is not None:
            self._stream.wait_stream(around)
        try:
            with self._here():
                yield
        finally:
            if self._stream is not None and around is not None:
                around.wait_stream(self._stream)


def _judged(
    trials: Sequence[Trial], at: Sequence[Sequence[int]], lines: np.ndarray, said: dict[int, int] | None
) -> list[Judged]:
    """Make verdicts of lines; notes what each sequence says, where a step was started that presumes it."""
    told, found = lines[:, :2].tolist(), []
    for trial, (root, *nodes) in zip(trials, at, strict=True):
        path = tuple([index for index, row in enumerate(nodes) if told[row][1]])
        token = int(told[nodes[path[-1]] if path else root][0])
        found.append(Judged(path, token))
        if said is not None:
            said[trial.seq] = token
    return found


def _wide(logits: Tensor) -> Tensor:
    """Copy logits out of the graph's own memory, in float32 or better."""
    return logits.float() if logits.dtype.itemsize < 4 else logits.clone()
