"""What a GPU answers about nodes: proposals after them, and verdicts on them.

Owns which rows are sampled inside a CUDA graph and which behind it, and how results become proposals and verdicts. A
graph samples by temperature and noise itself. Other sampling parameters, the ratio rule and log-probabilities are
computed behind the graph. The host makes what they need, such as the masks of a grammar, while the forward runs. Verify
orders may share a plain decode step of other sequences (`Beside`). Does not own the launch (`launching.py`). Invariant:
an answer depends on the tokens up to its node and on its request only, not on whether other rows are sampled inside the
graph or behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specbranch.core.request import Spot
from specbranch.core.runner import NO_TOKEN, Ask, Feed, Judged, Proposal, Trial, Verdicts, VerifyWork
from specbranch.core.slots import ROOT
from specbranch.models.files.head_columns import Columns, finder
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu import asking
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.decode_rows import VerifyRows
from specbranch.models.gpu.early_starts import EarlyStarts
from specbranch.models.gpu.launching import StepHost, StepLauncher, wide
from specbranch.models.gpu.layout import CONFIDENCE, MOST_STEP_ROWS, PARENT_FIELD, Choosing
from specbranch.models.gpu.step import Ran
from specbranch.models.runners.sequences import Sequences
from specbranch.models.runners.torch_runner import ProbeNetwork
from specbranch.models.sampling import sample, verdict
from specbranch.models.sampling.logit_rows import TensorRow, scored
from specbranch.models.sampling.sampler import TorchSampler, proposed
from specbranch.models.sampling.sheet import Arrays, masks_of


class AnswerHost(StepHost, Protocol):
    """The runner, as far as answers need it."""

    @property
    def sampler(self) -> TorchSampler:
        """The sampler for rows behind a graph."""
        ...

    @property
    def probe_network(self) -> ProbeNetwork | None:
        """The network whose output comes with verdicts."""
        ...

    def spot(self, seq: int, node: int, ask: Ask | None = None) -> Spot:
        """Return the position of the token after a node, with all else that sampling needs."""
        ...

    def row(self, seq: int, node: int) -> TensorRow:
        """Return the logits after a node."""
        ...

    def hold(self, work: Sequence[Feed], block: Tensor, states: Tensor | None) -> None:
        """Keep the rows of a forward, as later calls may need them."""
        ...


@dataclass(frozen=True, slots=True)
class Beside:
    """Verify orders whose rows come behind those of a plain decode step."""

    verify: VerifyWork
    spots: list[Spot]
    rows: VerifyRows
    row_numbers: list[list[int]] | None  # of each trial, among `rows`; None: it is judged behind the graph


class Answers:
    """Proposes and judges with a model's steps."""

    def __init__(
        self, decoder: Decoder, launcher: StepLauncher, sequences: Sequences, early: EarlyStarts, host: AnswerHost
    ) -> None:
        self._decoder, self._launcher, self._sequences, self._early = decoder, launcher, sequences, early
        self._host = host

    @torch.inference_mode()
    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Compute new nodes, and return proposals after them, or after nodes computed before."""
        host = self._host
        work = [feed for feed in work if feed.tokens]
        host.flush()
        host.drop_ahead()
        self._early.new_draft()
        with self._launcher.stream.here(), self._sequences.appending(work) as rows:
            spots = [host.spot(ask.seq, ask.node, ask) for ask in asks]
            results = self._sampled(work, rows, asks, spots)
            if results is None:
                self._launch(work, rows, 0)
        if results is not None:
            return asking.answers(asks, spots, results())
        return self._proposed_behind(asks, spots) if asks else []

    def _sampled(
        self, work: Sequence[Feed], rows: list[Rows], asks: Sequence[Ask], spots: Sequence[Spot]
    ) -> Callable[[], np.ndarray] | None:
        """Start a step that samples after all asked nodes; None if a graph alone cannot answer them.

        A call of what is returned waits for the results of the asked rows.
        """
        row_of = asking.rows_in(work, self._sequences.first_nodes(work))
        row_numbers = [row for ask in asks if (row := row_of(ask.seq, ask.node)) is not None]
        here = len(row_numbers) == len(asks) > 0 and self._launcher.is_one_step(rows)
        count = asking.entries_of(asks, spots) if here else None
        if count is None:
            return None
        choosing = asking.choosing_of(sum(len(part.tokens) for part in rows), zip(row_numbers, spots, strict=True))
        ran, results = self._launcher.chosen(rows, choosing, count)
        self._host.hold(work, wide(ran.logits), None)
        return lambda: results()[row_numbers]

    def _proposed_behind(self, asks: Sequence[Ask], spots: Sequence[Spot]) -> list[Proposal]:
        """Return proposals that are computed behind a graph, with all sampling parameters."""
        launcher, sampler = self._launcher, self._host.sampler
        rows = [self._host.row(ask.seq, ask.node) for ask in asks]
        with launcher.stream.here():
            if (count := asking.entries_of(asks, spots, masked=True)) is not None:
                chosen = launcher.transfer.later(self._chosen_under_masks(rows, spots, count))
                return asking.answers(asks, spots, chosen())
            columns = scored(rows)[1]
            sent = launcher.up(sampler.proposing(spots, asks, columns))
            found = launcher.transfer.later(sampler.candidates(rows, spots, asks, sent))
        return proposed(spots, asks, found())

    def _chosen_under_masks(self, rows: Sequence[TensorRow], spots: Sequence[Spot], count: int) -> Tensor:
        """Return the `count` best entries of rows by the match rule, as a graph does, but under their masks."""
        logits, columns = scored(rows)
        width = self._host.sampler.width(columns)
        tokens = None if columns is None else columns.tokens[:width]
        choice = np.stack(asking.choosing_of(len(spots), enumerate(spots)))
        sent = self._launcher.up({**masks_of(spots, width, finder(columns, width), tokens), "choice": choice})
        return self._chosen(sample.edited(logits[:, :width], sent), sent["choice"], columns, count)

    @torch.inference_mode()
    def verify(self, work: Sequence[Feed], trials: Sequence[Trial], layers: int) -> Verdicts:
        """Start to compute and judge new nodes; a call of the verdicts waits for the device.

        `layers`: how many layers' hidden states are kept with the rows.
        """
        self._early.begun = None
        with self._launcher.stream.here(), self._sequences.appending(work) as rows:
            spots = [spot for trial in trials for spot in self._spots_of(trial)]
            row_numbers = None if layers else self._chosen_rows(work, rows, trials, spots)
            if row_numbers is None:
                return self._verify_behind(work, rows, trials, spots, layers)
            results = self._results(work, rows, trials, spots, row_numbers)

        def judged() -> list[Judged]:
            follows = len(trials) == 1 and trials[0].order.follows is not None and rows[0].start == rows[0].prefix
            if follows:
                self._early.write_chains(trials[0].seq, rows[0], row_numbers[0][0], results.ready)
            found = _judged(row_numbers, results())
            return [self._early.follow(trials[0], rows[0].table, found[0])] if follows else found

        return Verdicts(judged, results.ready)

    def beside(self, verify: VerifyWork, rows: list[Rows], layers: int) -> Beside:
        """Prepare verify orders for a plain decode step; `rows`: those of their new nodes. `layers` as for `verify`."""
        work, trials = verify.work, verify.trials
        spots = [spot for trial in trials for spot in self._spots_of(trial)]
        row_numbers = None if layers else self._chosen_rows(work, rows, trials, spots)
        choosing = None if row_numbers is None else _choosing(rows, trials, spots, row_numbers)
        return Beside(verify, spots, VerifyRows(rows, choosing), row_numbers)

    def verdicts_beside(self, beside: Beside, ran: Ran, results: Reading, first: int) -> Verdicts:
        """Judge verify orders whose step was launched; their rows come behind its `first` rows.

        `results`: of all rows of the step, in flight. The next step may begin with the tokens that this one sampled, so
        these stay.
        """
        row_numbers, trials = beside.row_numbers, beside.verify.trials
        if row_numbers is not None:
            return Verdicts(lambda: _judged(row_numbers, results()[first:]), results.ready)
        if end := len(beside.rows):
            states = None if ran.states is None else ran.states[first : first + end].clone()
            self._host.hold(beside.verify.work, wide(ran.logits[first : first + end]), states)
        picks = self._launcher.graphs.step.picks
        kept = picks.clone()
        try:
            return self._judged_behind(trials, beside.spots)
        finally:
            picks.copy_(kept)

    def _launch(self, work: Sequence[Feed], rows: list[Rows], layers: int) -> None:
        """Start the forward, and keep its rows; without rows make the moves that wait for it."""
        if not rows:
            self._launcher.up({})
            return
        block, states = self._launcher.run(rows, layers)
        self._host.hold(work, block, states)

    def _spots_of(self, trial: Trial) -> list[Spot]:
        """Return the spots of the tokens after a trial's root and after each of its nodes."""
        slots, request, root = self._sequences[trial.seq].slots, self._host.request(trial.seq), trial.root
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
        if not trials or wants_more or others:
            return None
        if not self._launcher.is_one_step(rows) or not asking.are_chosen_in_graph(spots):
            return None
        return asking.trial_rows(trials, asking.rows_in(work, self._sequences.first_nodes(work)))

    def _results(
        self,
        work: Sequence[Feed],
        rows: list[Rows],
        trials: Sequence[Trial],
        spots: Sequence[Spot],
        row_numbers: list[list[int]],
    ) -> Reading:
        """Start the step, unless it was started early; returns its results in flight."""
        taken = self._early.taken(work, rows)
        if taken is not None:
            return taken
        launcher = self._launcher
        choosing = _choosing(rows, trials, spots, row_numbers)
        results = launcher.read_later(launcher.start_with_prefill(rows, choosing), len(choosing.said))
        self._early.begun = launcher.started
        return results

    def _verify_behind(
        self, work: Sequence[Feed], rows: list[Rows], trials: Sequence[Trial], spots: Sequence[Spot], layers: int
    ) -> Verdicts:
        """Judge trials behind the graph, with all sampling parameters and rules."""
        self._host.drop_ahead()
        self._host.flush()
        self._launch(work, rows, layers)
        return self._judged_behind(trials, spots) if trials else Verdicts(list, self._launcher.transfer.passed())

    def _judging(self, trials: Sequence[Trial], spots: Sequence[Spot]) -> Arrays:
        """Return the arrays by which trials are judged behind a graph."""
        choice = np.stack(asking.choosing_of(len(spots), enumerate(spots)))
        return {**self._host.sampler.picking(spots), **verdict.judging(trials, spots), "choice": choice}

    def _judged_behind(self, trials: Sequence[Trial], spots: Sequence[Spot]) -> Verdicts:
        """Judge trials whose rows are kept; the forward that computes these may still run."""
        launcher, sampler = self._launcher, self._host.sampler
        sent = launcher.up(self._judging(trials, spots))
        top = max((trial.logprobs for trial in trials if trial.logprobs is not None), default=None)
        of_trials = [
            self._host.row(trial.seq, trial.node(index)) for trial in trials for index in range(ROOT, len(trial.nodes))
        ]
        logits = sampler.logits(of_trials)
        edited = sample.edited(logits, sent)
        tokens, reached = verdict.decided(self.picked(sample.uncut(edited, sent), sent["choice"]), edited, sent)
        said = self._probed(of_trials, tokens) if any(trial.wants_forecast for trial in trials) else None
        results = launcher.transfer.later(verdict.results(logits, tokens, reached, top, said))
        probed = [said is not None and row.states is not None for row in of_trials]
        return Verdicts(
            lambda: verdict.judged(trials, results(), top, 0 if said is None else said.shape[1], probed), results.ready
        )

    def picked(self, logits: Tensor, choice: Tensor) -> Tensor:
        """Return the token of every row by the match rule, over the whole vocabulary [rows]."""
        return self._chosen(logits, choice, None, 1)[:, 0].long()

    def _chosen(self, logits: Tensor, choice: Tensor, columns: Columns | None, count: int) -> Tensor:
        """Return the results of a chooser for every row, valid until its next call.

        `columns`: the tokens of a reduced head's logits.
        """
        chooser = self._launcher.graphs.chooser
        if chooser is None or self._decoder.columns is not columns:
            chooser = Chooser(self._launcher.graphs.step.picks, logits.shape[1], columns)
        none = torch.zeros(2, dtype=torch.int32, device=self._launcher.device)
        if len(logits) <= MOST_STEP_ROWS:
            return chooser(logits, choice, none, count)
        choice = choice.clone()
        rows = torch.arange(len(logits), device=choice.device)
        choice[PARENT_FIELD] = rows % MOST_STEP_ROWS  # each row is a root
        starts = range(0, len(logits), MOST_STEP_ROWS)
        parts = [(logits[at : at + MOST_STEP_ROWS], choice[:, at : at + MOST_STEP_ROWS]) for at in starts]
        return torch.cat([chooser(some, how, none, count).clone() for some, how in parts])

    def _probed(self, rows: Sequence[TensorRow], tokens: Tensor) -> Tensor | None:
        """Return the probe's output for rows and their tokens; None if no row has hidden states.

        The output of a row without hidden states has no meaning.
        """
        states = [None if row.states is None else row.states[row.index] for row in rows]
        like = next((state for state in states if state is not None), None)
        network = self._host.probe_network
        if network is None or like is None:
            return None
        seen = torch.stack([torch.zeros_like(like) if state is None else state for state in states])
        return network(torch.cat((seen, self._decoder.embedding[tokens]), dim=-1))


def _choosing(
    rows: Sequence[Rows], trials: Sequence[Trial], spots: Sequence[Spot], row_numbers: Sequence[Sequence[int]]
) -> Choosing:
    """Return the numbers by which a graph judges trials; `row_numbers`: their rows."""
    count = sum([len(part.tokens) for part in rows])
    choosing = asking.choosing_of(count, zip(chain(*row_numbers), spots, strict=True))
    asking.lead(choosing, trials, row_numbers)
    return choosing


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
