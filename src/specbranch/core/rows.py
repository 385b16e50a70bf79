"""The common part of all Runners that keep a row of logits for each node and sample on the host.

Owns the rows of live nodes, and their position (`Spot`). A model provides `_score` and the bookkeeping of its cache; a
Sampler turns rows into tokens. Invariants: a row belongs to its node's own tokens as long as the node lives; a node
without a row cannot be asked about, and is never answered from another's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from specbranch.core import noise
from specbranch.core.noise import Purpose
from specbranch.core.orders import TokenLogprobs
from specbranch.core.request import Request, Spot
from specbranch.core.runner import NO_TOKEN, Ask, Feed, Judged, Law, NoNumber, Proposal, Trial, Verdicts
from specbranch.core.slots import ROOT, Slots
from specbranch.core.verify import Outcome, accept_match, accept_ratio

Row = TypeVar("Row")
Row_contra = TypeVar("Row_contra", contravariant=True)


class Sampler(Protocol[Row_contra]):
    """Turns rows into tokens: temperature, filters, penalties and noise, the same for target and draft."""

    def pick(self, rows: Sequence[Row_contra], spots: Sequence[Spot]) -> list[int]:
        """Return the model's token at each row: argmax(log p + noise), ties to the lowest id.

        NO_TOKEN if the greatest score is not finite.
        """
        ...

    def propose(self, rows: Sequence[Row_contra], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Return candidates for each row."""
        ...

    def law(self, row: Row_contra, spot: Spot) -> Law:
        """Return the distribution at a row, sampling parameters applied, or raise NoNumber."""
        ...

    def margin(self, row: Row_contra, spot: Spot, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second`, noise and shaping included."""
        ...

    def logprobs(self, row: Row_contra, token: int, top: int) -> TokenLogprobs:
        """Return the log-probability of `token` and of the `top` most likely, before sampling parameters apply."""
        ...


class RowRunner(Generic[Row]):
    """A Runner over a model that scores nodes; a subclass says how to open, prefill, keep and score."""

    prefix_cache = True  # prompts share computed pages, if the model can
    prefill_chunk = 256  # tokens of a prefill chunk
    most_prefill: int | None = None  # prompt tokens of one forward; None: no limit
    page = 1  # KV slots of a page

    def __init__(self, sampler: Sampler[Row]) -> None:
        self.sampler = sampler
        self._requests: dict[int, Request] = {}
        self._rows: dict[int, dict[int, Row]] = {}  # by sequence and node; ROOT: after the prefix

    def open(self, seq: int, request: Request) -> None:
        """Make room for a new, empty sequence."""
        self._open(seq)
        self._requests[seq], self._rows[seq] = request, {}

    @property
    def kv_slots(self) -> int | None:
        """How many KV slots there are for all sequences together; None: they are not counted."""
        return None

    @property
    def kv_slots_free(self) -> int:
        """How many KV slots are free."""
        return 0

    def slots(self, seq: int) -> Slots:
        """Return the sequence's KV slots, read-only."""
        raise NotImplementedError

    def demand(self, seq: int, count: int) -> None:
        """Reserve memory for `count` more nodes, or raise CacheFull."""
        self.slots(seq).demand(count)

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Prefill: append tokens to the committed prefix, without logits."""
        if tokens:
            self._rows[seq].clear()
            self._extend(seq, tokens)

    def flush(self) -> None:
        """Compute all prefill that was put off: none, unless a subclass puts it off."""

    def recall(self, seq: int, tokens: Sequence[int]) -> int:
        """Take the beginning of a prompt from the prefix cache, if that is more than is held; returns how many tokens
        are held."""
        if self.prefix_cache:
            self._rows[seq].clear()
            self._recall(seq, tokens)
        return len(self.slots(seq).prefix)

    def feed(self, work: Sequence[Feed]) -> None:
        """Compute new nodes of several sequences in one forward."""
        self.score(work)

    def score(self, work: Sequence[Feed]) -> list[list[Row]]:
        """Compute new nodes; returns one row a node, valid until its node is dropped."""
        work = [item for item in work if item.tokens]
        if not work:
            return []
        starts = [len(self.slots(item.seq).tokens) for item in work]
        made = self._score(work)
        for item, start, rows in zip(work, starts, made, strict=True):
            self._rows[item.seq].update(enumerate(rows, start))
        return made

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Compute new nodes, and answer questions about these or earlier ones."""
        self.score(work)
        rows, spots = (
            [self._rows[ask.seq][ask.node] for ask in asks],
            [self.spot(ask.seq, ask.node, ask) for ask in asks],
        )
        return self.sampler.propose(rows, spots, asks)

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Compute new nodes, and judge them when the verdicts are called for."""
        self.score(work)
        return Verdicts(lambda: [self._judged(trial) for trial in trials])

    def knows(self, seq: int, node: int) -> bool:
        """True if a node still has its row."""
        return node in self._rows[seq]

    def row(self, seq: int, node: int) -> Row:
        """Return the row of a node that still has one."""
        return self._rows[seq][node]

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second` after a node; 0 is a tie."""
        return self.sampler.margin(self._rows[seq][node], self.spot(seq, node), first, second)

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail with their rows; the first `commit` of them join the prefix."""
        rows, path = self._rows[seq], [ROOT, *nodes]  # the row after k kept nodes of a path is that of path[k]
        left = {at - commit - 1: rows[node] for at, node in enumerate(path) if at >= commit and node in rows}
        # An interrupt may come now. Nodes without rows are computed again; rows of other nodes would be trusted.
        rows.clear()
        self._keep(seq, nodes, commit)
        rows.update(left)

    def rewind(self, seq: int, length: int) -> None:
        """Drop the tail, and the prefix beyond its first `length` tokens."""
        self._rows[seq].clear()
        self._rewind(seq, length)

    def close(self, seq: int) -> None:
        """Drop the sequence and free its KV slots."""
        self._close(seq)
        del self._requests[seq], self._rows[seq]

    def spot(self, seq: int, node: int, ask: Ask | None = None) -> Spot:
        """Return the position of the token after a node, with all else that sampling needs."""
        slots = self.slots(seq)
        position = len(slots.prefix) if node == ROOT else slots.position(node) + 1
        attempt, allowed = (ask.attempt, ask.allowed) if ask else (0, None)
        return Spot(self._requests[seq], position, lambda: slots.sequence(node), attempt, allowed)

    def _judged(self, trial: Trial) -> Judged:
        path, token = self._outcome(trial)
        if token == NO_TOKEN:
            return Judged(path, token)
        last = trial.node(path[-1] if path else ROOT)
        return Judged(
            path,
            token,
            self._logprobs(trial, path, token),
            self._said(trial.seq, last, token) if trial.wants_forecast else None,
        )

    def _outcome(self, trial: Trial) -> Outcome:
        if not self._requests[trial.seq].by_ratio:
            nodes = range(ROOT, len(trial.nodes))
            rows, spots = (
                [self._rows[trial.seq][trial.node(n)] for n in nodes],
                [self._spot_of(trial, n) for n in nodes],
            )
            return accept_match(trial.order, self.sampler.pick(rows, spots))

        def law(index: int) -> Law:
            return self.sampler.law(self._rows[trial.seq][trial.node(index)], self._spot_of(trial, index))

        try:
            return accept_ratio(trial.order, law, self._uniform(trial), trial.head)
        except NoNumber:
            return (), NO_TOKEN

    def _uniform(self, trial: Trial) -> noise.Uniform:
        request, start = self._requests[trial.seq], len(trial.order.on)

        def uniform(depth: int, purpose: Purpose, attempt: int) -> float:
            return noise.uniform(request.seed, request.sample, start + depth, purpose, attempt)

        return uniform

    def _spot_of(self, trial: Trial, index: int) -> Spot:
        spot = self.spot(trial.seq, trial.node(index))
        return (
            spot
            if trial.allowed is None
            else Spot(spot.request, spot.position, spot.history, 0, trial.allowed[index + 1])
        )

    def _logprobs(self, trial: Trial, path: tuple[int, ...], token: int) -> tuple[TokenLogprobs, ...] | None:
        if trial.logprobs is None:
            return None
        rows = [self._rows[trial.seq][trial.node(n)] for n in (ROOT, *path)]
        tokens = [*(trial.order.tokens[n] for n in path), token]
        return tuple(self.sampler.logprobs(row, said, trial.logprobs) for row, said in zip(rows, tokens, strict=True))

    def _said(self, seq: int, node: int, token: int) -> tuple[float, ...] | None:
        """Return the probe's output for the row after a node and its token; None: there is no probe."""
        return None

    def _open(self, seq: int) -> None:
        raise NotImplementedError

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        raise NotImplementedError

    def _recall(self, seq: int, tokens: Sequence[int]) -> None:
        """Take nothing: a runner without a prefix cache."""

    def _score(self, work: Sequence[Feed]) -> list[list[Row]]:
        raise NotImplementedError

    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        raise NotImplementedError

    def _rewind(self, seq: int, length: int) -> None:
        raise NotImplementedError

    def _close(self, seq: int) -> None:
        raise NotImplementedError
