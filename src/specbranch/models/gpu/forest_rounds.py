"""Rounds of the forest on a GPU: the device goes from verify to verify by itself, the host launches one round ahead.

A round is: the rows are chosen and written (`granting.py`), the target computes them, each session commits what was
accepted (`settling.py`), lookup (`looking.py`) and some draft steps (`forest_growing.py`) extend its tree. Owns the
tables, which session has which row of them, and the round in flight. Does not own the steps of both models
(`launching.py`), or what a round is planned to do (`core/forest_plan.py`). Invariant: what is launched and not read has
no effect: what it wrote lies behind what a model's sequence holds, and all later work of the device comes after it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from specbranch.core.forest import ForestEnd, ForestOrders, ForestPlan, ForestReport, ForestStep, NgramSizes
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.slots import TAIL
from specbranch.core.trees import NO_TREE
from specbranch.errors import CacheFull, SpecBranchError
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu.forest_growing import ForestGrowth, grow
from specbranch.models.gpu.forest_layout import (
    DECODING,
    DRAFT_PAGES,
    FAILED,
    LIMITED,
    REPORT_FIELDS,
    SENT_ROWS,
    STOPPED,
    TARGET_PAGES,
    VACANT,
    Forest,
    Written,
    as_pairs,
    fitting_ending_ids,
    new_forest,
    read_tree,
)
from specbranch.models.gpu.forest_plan_tables import CAPACITIES, TABLE_ROWS, PlanTables
from specbranch.models.gpu.granting import send
from specbranch.models.gpu.launching import StepLauncher
from specbranch.models.gpu.layout import (
    MOVED_COUNT,
    Bucket,
    brought_moves,
    padded_bucket,
    views,
)
from specbranch.models.gpu.looking import look
from specbranch.models.gpu.settling import settle
from specbranch.models.gpu.step import Ran
from specbranch.models.gpu.tree_layout import DEEPEST, ENTRIES
from specbranch.models.gpu.trees import wait_for
from specbranch.models.runners.sequences import Sequences

FOREST_NODES = 128  # nodes of a tree, at most
AHEAD = DEEPEST + 1  # tokens that a session may get in the round in flight
Steps = Generator[None, None, None]  # launches further draft steps, each only if the device wants it
ENDS: dict[int, ForestEnd] = {STOPPED: "stop", LIMITED: "length", FAILED: "not finite"}


class ForestModel(Protocol):
    """A runner of either model, as far as rounds of the forest need it."""

    launcher: StepLauncher
    sequences: Sequences

    @property
    def context_length(self) -> int:
        """How many tokens one sequence may hold."""
        ...

    def request(self, seq: int) -> Request:
        """Return the request of a sequence."""
        ...

    def reserve(self, seq: int, start: int, stop: int) -> Table:
        """Make KV slots writable, or raise CacheFull; returns the page table."""
        ...

    def forget_rows(self, seq: int) -> None:
        """Forget the logits of a sequence."""
        ...

    def flush(self) -> None:
        """Compute all prefill that was put off."""
        ...

    def drop_steps(self) -> None:
        """Forget steps that were started ahead, except those of the forest."""
        ...


@dataclass(slots=True)
class Planted:
    """A session that has a row of the tables."""

    row: int
    length: int  # tokens that the host knows of
    last: int  # the last of them
    looks: bool  # lookup works for it
    drafts: bool = False  # the draft works for it
    draft_length: int = 0  # tokens that the draft holds for sure
    leaves: bool = False  # it takes no part in the rounds that are launched now
    has_tree: bool = False  # the device may have a tree of it
    pages: list[list[int]] = field(default_factory=lambda: [[], []])  # of both models, as the device has them


@dataclass(slots=True)
class ForestFlight:
    """A round that was launched and is not read yet."""

    row_of: dict[int, int]  # by session
    rows: int  # of its verify, at most
    reports: Reading
    trees: Reading | None  # None: no session has a tree
    grown: list[int]  # rows of its draft steps
    before: list[int]  # and of those of the round before that ended after that round was read
    growing: Steps | None = None  # None: all its draft steps are launched


class ForestDecoder:
    """Makes rounds of the forest with a target, and with a draft on the same device or without one."""

    def __init__(self, target: ForestModel, draft: ForestModel | None) -> None:
        self._target, self._draft = target, draft
        graphs, self._device = target.launcher.graphs, target.launcher.device
        pages = -(-(target.context_length + TAIL) // PAGE)
        with target.launcher.stream.in_turn():
            self._forest = new_forest(TABLE_ROWS, target.context_length + TAIL, FOREST_NODES, pages, self._device)
            self._tables = PlanTables(self._device)
        self._least = graphs.step.least
        self._planted: dict[int, Planted] = {}
        self._flight: ForestFlight | None = None
        self._unread = False  # the round before the one in flight was not read
        self._rows = 0  # of the last verify
        self._grown: list[int] = []  # rows of the draft steps behind it
        self._asked = False  # these end before the round is read, because the host asks before each of them
        self._changes: dict[int, list[Written]] = {}  # of rows, for the next round
        self._heads: dict[int, Forest] = {}

    @torch.inference_mode()
    def warm_up(self, looks: NgramSizes) -> None:
        """Launch all kernels once, on no session; `looks`: of lookup.

        They write to the inputs of both models on one stream, so both have to be idle before and after.
        """
        self._synchronize()
        target = self._target.launcher
        models = [target] if self._draft is None else [target, self._draft.launcher]
        weights, nothing = self._tables.weights, self._tables.no_results
        for count in CAPACITIES:
            forest, buckets = self._first(count), {Bucket(count, count)}
            if count == 1:
                buckets |= {padded_bucket(rows, True, self._least, 0) for rows in (1, SENT_ROWS)}
            for bucket in buckets:
                send(forest, self._tables.granting(count), target.graphs.input, bucket, target.spare)
                settle(forest, target.graphs.input, bucket, target.graphs.step.picks, nothing)
                for last in (False, True) if len(models) > 1 else ():
                    growth = self._tables.growth_of(count)
                    grow(forest, growth, nothing, models[1].graphs.input, bucket, models[1].spare, last)
            look(forest, weights, *looks)
        self._synchronize()

    def _synchronize(self) -> None:
        device = self._target.launcher.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def is_with(self, draft: object | None) -> bool:
        """True if it was made for this draft."""
        return self._draft is draft

    def forget(self, seq: int) -> None:
        """Take a session out: it is closed, or rolled back."""
        planted = self._planted.pop(seq, None)
        if planted is None:
            return
        self._changes[planted.row] = [self._forest.scalar_change(planted.row, "state", VACANT)]
        if self._flight is not None:
            self._flight.row_of.pop(seq, None)
            if not self._flight.row_of:
                self._stop_growing()

    def finish_growing(self) -> None:
        """Launch the draft steps that the round in flight still wants: the draft is about to do something else."""
        if self._flight is not None and self._flight.growing is not None:
            for _ in self._flight.growing:
                pass

    def _stop_growing(self) -> None:
        """Launch no more draft steps of the round in flight; what the target does next comes after the launched
        ones."""
        if self._flight is None or self._flight.growing is None or self._draft is None:
            return
        self._flight.growing.close()
        target, draft = self._target.launcher, self._draft.launcher
        draft.transfer.mark(draft.stream.cuda).wait(target.stream.cuda)

    def leave(self) -> None:
        """Take all sessions out, and bring the draft's sequences in line; they hold what is known to be in place."""
        self._stop_growing()
        for seq, planted in list(self._planted.items()):
            self._leave(seq, planted)
        self._flight, self._unread = None, False

    def _leave(self, seq: int, planted: Planted) -> None:
        self.forget(seq)
        sequence = self._target.sequences.get(seq)
        if sequence is not None:
            sequence.table.shrink(len(sequence.slots))
        self._free_draft(seq, planted)

    def decode(self, orders: ForestOrders) -> ForestStep | None:
        """See `GrowsForests.decode_forest`."""
        texts, failed = orders.texts, dict[int, SpecBranchError]()
        self.finish_growing()
        flight, self._flight = self._flight, None
        if self._unread:  # a round was never read: the device knows tokens that the host does not
            self.leave()
            flight = None
        self._leave_others(texts)
        now = {} if flight is None else {seq: row for seq, row in flight.row_of.items() if seq in self._planted}
        if not self._fits(texts) or not self._enter(orders, failed):
            self.leave()
            return None
        ahead = bool(now)
        if flight is None or not now:
            flight = self._launch(orders, list(self._planted))
            if flight is None:
                return ForestStep(dict, 0, False, frozenset(), failed)
            now = dict(flight.row_of)
            for _ in flight.growing or ():
                pass
        present = flight
        self._unread = True
        going_on = [seq for seq in self._planted if seq in orders.going_on or seq not in now]
        self._flight = following = self._launch(orders, going_on)
        launched = frozenset(following.row_of if following else ())

        def reports() -> dict[int, ForestReport]:
            return self._read(present, now, texts)

        steps = present.before if present.growing is None else [*present.before, *present.grown]
        return ForestStep(reports, present.rows, ahead, launched, failed, steps)

    def _fits(self, texts: Mapping[int, Sequence[int]]) -> bool:
        """True if the tables and a step take all these sessions."""
        longest = max([len(text) for text in texts.values()], default=0) + 2 * AHEAD + max(SENT_ROWS, TAIL)
        return 0 < len(texts) <= min(TABLE_ROWS, self._target.launcher.most_rows(longest))

    def _leave_others(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Take out sessions that do not take part any longer, or have another text than the device knows."""
        capacity = _capacity(min(len(texts), TABLE_ROWS))
        for seq, planted in list(self._planted.items()):
            text = texts.get(seq)
            known = text is not None and len(text) == planted.length and text[-1] == planted.last
            # a few sessions have low rows, so that kernels for few of them serve
            if not known or planted.leaves or planted.row >= capacity:
                self._leave(seq, planted)

    def _enter(self, orders: ForestOrders, failed: dict[int, SpecBranchError]) -> bool:
        """Give rows to sessions that have none; False: this is not possible for one of them."""
        entering = [seq for seq in orders.texts if seq not in self._planted]
        taken = {planted.row for planted in self._planted.values()} if entering else set()
        free = (row for row in range(TABLE_ROWS) if row not in taken)
        for seq in entering:
            text = orders.texts[seq]
            sequence = self._target.sequences.get(seq)
            if sequence is None or sequence.slots.tokens or len(sequence.slots.prefix) != len(text) - 1:
                return False
            planted = Planted(next(free), len(text), text[-1], looks=seq in orders.looking)
            try:
                self._reserve(seq, planted)
            except CacheFull as error:
                failed[seq] = error
                continue
            more = {"looks": int(planted.looks)}
            request, pages = self._target.request(seq), (planted.pages[0], planted.pages[1])
            admission = self._forest.admission(planted.row, request, text, orders.limits[seq], pages, more)
            self._changes[planted.row] = admission
            self._planted[seq] = planted
        return True

    def _reserve(self, seq: int, planted: Planted) -> None:
        """Reserve the pages of a round behind the one in flight, or raise CacheFull."""
        length = planted.length
        table = self._target.reserve(seq, length - 1, self._end(length + AHEAD + SENT_ROWS))
        planted.pages[TARGET_PAGES] = list(table.pages)

    def _reserve_draft(self, seq: int, planted: Planted) -> bool:
        """Do the same for the draft; returns False if there is no memory."""
        assert self._draft is not None
        start = min(planted.draft_length, planted.length - 1)
        try:
            table = self._draft.reserve(seq, start, self._end(planted.length + AHEAD + TAIL))
        except CacheFull:
            return False
        planted.pages[DRAFT_PAGES] = list(table.pages)
        return True

    def _end(self, kv_slots: int) -> int:
        """Return where a sequence's KV slots end: page tables have no more room, and no row needs more."""
        return min(kv_slots, self._target.context_length + TAIL)

    def _keep_up(self, seq: int, planted: Planted, orders: ForestOrders) -> None:
        """Note what has changed for a session since its last round; raises CacheFull if it finds no memory."""
        before, row = planted.pages[:], planted.row
        changes = self._changes.setdefault(row, [])
        self._reserve(seq, planted)
        wanted = seq in orders.drafting and self._draft is not None
        if wanted and not planted.drafts:
            self._begin_drafting(seq, planted, changes)
        elif planted.drafts and (not wanted or not self._reserve_draft(seq, planted)):
            self._end_drafting(seq, planted, changes)
        for table, pages in enumerate(planted.pages):
            first = _first_difference(before[table], pages) if pages != before[table] else len(pages)
            if first < len(pages):
                changes.append(self._forest.page_change(row, table, pages, first))
        looks = seq in orders.looking
        if looks != planted.looks:
            changes.append(self._forest.scalar_change(row, "looks", int(looks)))
            planted.looks = looks
        planted.has_tree = planted.has_tree or planted.looks or planted.drafts

    def _begin_drafting(self, seq: int, planted: Planted, changes: list[Written]) -> None:
        """Let the draft work for a session from now on, if it finds memory."""
        assert self._draft is not None
        slots = self._draft.sequences[seq].slots
        if slots.tokens:
            self._draft.sequences.rewind(seq, len(slots.prefix))
        planted.draft_length = min(len(slots.prefix), planted.length - 1)
        if self._reserve_draft(seq, planted):
            planted.drafts = True
            for name, number in (("drafts", 1), ("draft_length", planted.draft_length)):
                changes.append(self._forest.scalar_change(planted.row, name, number))

    def _end_drafting(self, seq: int, planted: Planted, changes: list[Written]) -> None:
        """Let the draft work for a session no longer; its tree goes, as the draft forgets the nodes."""
        self._free_draft(seq, planted)
        planted.drafts, planted.draft_length, planted.pages[DRAFT_PAGES] = False, 0, []
        for name in ("drafts", "draft_length", "draft_moves", "nodes", "root_scored", "tail"):
            changes.append(self._forest.scalar_change(planted.row, name, 0))

    def _free_draft(self, seq: int, planted: Planted) -> None:
        """Bring the draft's sequence in line with what the draft holds for sure."""
        sequence = self._target.sequences.get(seq)
        drafted = self._draft.sequences.get(seq) if self._draft is not None else None
        if self._draft is None or drafted is None or sequence is None or not planted.drafts:
            return
        text, held = list(sequence.slots.prefix), drafted.slots.prefix
        if len(text) == planted.length - 1:  # otherwise moves were not made, and the target holds less
            text.append(planted.last)
        held.extend(text[len(held) : planted.draft_length])
        self._draft.forget_rows(seq)
        drafted.table.shrink(len(drafted.slots))

    def _launch(self, orders: ForestOrders, sessions: Sequence[int]) -> ForestFlight | None:
        """Launch a round of some sessions; the others leave once the round before is read."""
        staying: list[int] = []
        for seq in sessions:
            try:
                self._keep_up(seq, self._planted[seq], orders)
                staying.append(seq)
            except CacheFull:  # it comes again once there is memory
                pass
        for seq in self._planted.keys() - set(staying):
            planted = self._planted[seq]
            planted.leaves = True
            self._changes[planted.row] = [self._forest.scalar_change(planted.row, "state", VACANT)]
        if not staying:
            return None
        row_of = {seq: self._planted[seq].row for seq in staying}
        forest = self._first(_capacity(max(row_of.values()) + 1))
        # A step makes four moves a row, so it is not much smaller than the one before, whose nodes may have to move.
        rows = max(orders.plan.rows, len(staying), self._rows // 4)
        rows = min(rows, self._target.launcher.most_rows(self._longest(staying)))
        bucket = padded_bucket(rows, forest.count == 1 and rows <= SENT_ROWS, self._least, 0)
        self._rows = bucket.rows
        growth = self._bring(orders.plan, rows, bucket, forest)
        has_trees = any(self._planted[seq].has_tree for seq in staying)
        reports, trees = self._verify(forest, bucket, orders.plan, growth, has_trees)
        drafting = [seq for seq in staying if self._planted[seq].drafts]
        before, self._grown, growing = [] if self._asked else self._grown, [], None
        if drafting and growth is not None:
            growing = self._grow(forest, growth, orders.plan, drafting)
        self._asked = growing is not None
        return ForestFlight(row_of, bucket.rows, reports, trees, self._grown, before, growing)

    def _first(self, count: int) -> Forest:
        if count not in self._heads:
            self._heads[count] = self._forest.first(count)
        return self._heads[count]

    def _bring(self, plan: ForestPlan, rows: int, bucket: Bucket, forest: Forest) -> ForestGrowth | None:
        """Copy the changes of rows and the plan to the device."""
        launcher = self._target.launcher
        changes = [change for row in self._changes.values() for change in row if len(change[1])]
        with launcher.stream.here():
            launcher.up({})  # pending moves come first
            if changes:
                self._forest.scatter(launcher.transfer.up({"changes": as_pairs(changes)})["changes"])
            self._changes.clear()
            return self._tables.bring(plan, rows, bucket, forest.count, launcher)

    @torch.inference_mode()
    def _verify(
        self, forest: Forest, bucket: Bucket, plan: ForestPlan, growth: ForestGrowth | None, has_trees: bool
    ) -> tuple[Reading, Reading | None]:
        """Launch the target's part of a round; returns its reports, and the trees that are verified."""
        launcher = self._target.launcher
        graphs, transfer = launcher.graphs, launcher.transfer
        with launcher.stream.here():
            send(forest, self._tables.granting(forest.count), graphs.input, bucket, launcher.spare)
            ran = self._run(self._target, bucket, 1)
            assert ran.results is not None
            trees = transfer.later(forest.trees) if has_trees else None
            settle(forest, graphs.input, bucket, graphs.step.picks, ran.results)
            reports = transfer.later(forest.reports)
            if plan.looks is not None and growth is not None:
                look(forest, growth.weights, *plan.looks)
        return reports, trees

    def _grow(self, forest: Forest, growth: ForestGrowth, plan: ForestPlan, drafting: Sequence[int]) -> Steps | None:
        """Launch the draft's part of a round; returns what launches the steps before which the device is asked."""
        assert self._draft is not None
        launcher, rows = self._draft.launcher, len(drafting) * growth.growth.lanes
        if not plan.steps + plan.more or rows > launcher.most_rows(self._longest(drafting)):
            return None
        self._draft.drop_steps()
        self._draft.flush()
        steps = self._draft_steps(forest, growth, plan, rows)
        if plan.more:
            next(steps)  # up to the first question
            return steps
        for _ in steps:
            pass
        return None

    def _longest(self, sessions: Iterable[int]) -> int:
        """Return the KV slots of the longest of some sequences in the next round."""
        return max(self._planted[seq].length for seq in sessions) + AHEAD + max(SENT_ROWS, TAIL)

    def _draft_steps(self, forest: Forest, growth: ForestGrowth, plan: ForestPlan, rows: int) -> Steps:
        """Launch draft steps; yields before the first step of those that are launched only if the device wants them."""
        assert self._draft is not None
        target, launcher = self._target.launcher, self._draft.launcher
        bucket = padded_bucket(rows, forest.count == 1, launcher.graphs.step.least, 0)
        results, most, grown = self._tables.no_results, plan.steps + plan.more, self._grown
        totals = self._tables.fresh_totals(most)
        target.transfer.mark(target.stream.cuda).wait(launcher.stream.cuda)
        with launcher.stream.here():
            launcher.up({})
        for step in range(most + 1):
            last = step == most
            noting = growth if last else replace(growth, total=totals[step])
            with torch.inference_mode(), launcher.stream.here():
                grow(forest, noting, results, launcher.graphs.input, bucket, launcher.spare, last)
            if last:
                break
            asked = step - plan.lead  # what the device has found for this step decides
            if asked == plan.steps:
                yield
            if asked >= plan.steps and not wait_for(totals[asked].numpy(), 0, self._device):
                break
            with torch.inference_mode(), launcher.stream.here():
                ran = self._run(self._draft, bucket, ENTRIES)
            assert ran.results is not None
            results = ran.results
            grown.append(rows)
        launcher.transfer.mark(launcher.stream.cuda).wait(target.stream.cuda)

    def _run(self, model: ForestModel, bucket: Bucket, count: int) -> Ran:
        """Run a step that the device has written, with the moves that it has noted there."""
        launcher = model.launcher
        graphs = launcher.graphs
        if not graphs.step.moves:  # then torch computes the step, in host memory
            counts = views(graphs.input, bucket).counts
            assert counts is not None
            if moved := int(counts[MOVED_COUNT]):
                launcher.memory.move(*brought_moves(graphs.input, bucket, moved))
        return launcher.run_brought(bucket, count)

    def _read(
        self, flight: ForestFlight, now: Mapping[int, int], texts: Mapping[int, Sequence[int]]
    ) -> dict[int, ForestReport]:
        """Wait for a round, and bring the target's sequences in line with it."""
        reports = flight.reports()
        self._unread = False
        trees = flight.trees() if flight.trees is not None else None
        head, found = len(REPORT_FIELDS), dict[int, ForestReport]()
        for seq, row in now.items():
            count, state, placed, draft_length, nodes, root_scored = reports[row, :head].tolist()
            planted, sequence = self._planted.get(seq), self._target.sequences.get(seq)
            tokens: list[int] = reports[row, head : head + count].tolist()
            ended = ENDS.get(state)
            if sequence is None or (not count and state == DECODING):
                continue
            if tokens:
                # Moves of accepted nodes are made by the round behind this one, if the session takes part there.
                moved = planted is not None and self._flight is not None and seq in self._flight.row_of
                held = [texts[seq][-1], *tokens[:-1]]
                sequence.slots.prefix.extend(held if moved and ended is None else held[:placed])
                self._target.forget_rows(seq)
            tree = NO_TREE if trees is None else read_tree(trees[row, :nodes], bool(root_scored))
            found[seq] = ForestReport(tuple(tokens), tree, ended)
            if planted is not None:
                planted.length += count
                planted.last = tokens[-1] if tokens else planted.last
                planted.draft_length = max(planted.draft_length, draft_length)
                if planted.leaves:
                    self._leave(seq, planted)
        return found


def _capacity(sessions: int) -> int:
    """Return the number of rows for so many sessions."""
    return next(one for one in CAPACITIES if one >= sessions)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return where two lists begin to differ, or where the shorter one ends."""
    alike = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(alike) if a != b), min(len(one), len(other)))


def joins(request: Request, in_graph: bool) -> bool:
    """True if the device can decode a request by itself; `in_graph`: the graph of a step chooses its tokens."""
    plain = request.params.logprobs is None and not request.params.min_tokens and not request.wants_forecast
    return in_graph and plain and not request.is_constrained and fitting_ending_ids(request) is not None
