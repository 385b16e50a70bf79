"""A worker: a model's KV cache of its sequences, and how to bring it in line with an order.

Owns `align`, the one operation behind branch choice, rollback, retry and recovery. Invariants: after `align` the tail
holds exactly the path that the order states, with its committed part in the prefix. Every computed node can still be
asked about, also if the order was carried out before, in part or whole. Whether prefill or a decode step computes a
token depends on its position and the prompt's length alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from math import lcm

from specbranch.core.orders import NO_PREFILL, Context, Prefill, PrefillCount
from specbranch.core.pages import JoinedText
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Done, Feed, GrowsTrees, Proposal, ReadsFeatures, Runner, RunsAhead
from specbranch.core.slots import ROOT, Slots
from specbranch.core.trees import Tree
from specbranch.errors import CacheFull, PoolFull

UNCOMPUTED_AT_ONCE = 16  # uncomputed tokens that an order's own forward may include; more are computed before it
STRIDE = 32  # committed tokens that one decode step recomputes: up to this depth a tail is exact on every device


class Stale(Exception):
    """The worker holds less of a sequence than the order presumes; send it whole."""


@dataclass(slots=True)
class Holding:
    """One sequence that a worker holds."""

    request: Request
    out_of_reach: bool = False  # the model cannot compute this sequence: it is too long, or has unknown token ids
    prompt: PrefillCount = NO_PREFILL  # since the last call of `prefill_counts`


class Worker:
    """A Runner and the sequences it holds."""

    lets_grow = True  # the model may take several draft steps by itself; False if every step has to be seen

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.grows_trees = runner if isinstance(runner, GrowsTrees) else None  # once: isinstance of a protocol is slow
        self.runs_ahead = runner if isinstance(runner, RunsAhead) else None
        self.reads_features = runner if isinstance(runner, ReadsFeatures) else None
        self.rows_fed = 0
        self.enough: Done = never  # checked before each draft step: True ends all drafting
        self._held: dict[int, Holding] = {}

    def open(self, session: int, request: Request) -> None:
        """Open an empty sequence for a session."""
        self.runner.open(session, request)
        self._held[session] = Holding(request)

    def free(self, session: int) -> None:
        """Free a session's KV cache; harmless if there is none."""
        if self._held.pop(session, None):
            self.runner.close(session)

    @property
    def requests(self) -> dict[int, Request]:
        """The requests of all open sequences, by session."""
        return {session: held.request for session, held in self._held.items()}

    def prefill_counts(self, sessions: Collection[int] | None = None) -> dict[int, PrefillCount]:
        """Return what was prefilled of the prompts of all or some sessions since the last call."""
        held_by = self._held if sessions is None else {one: self._held[one] for one in sessions if one in self._held}
        found = {session: held.prompt for session, held in held_by.items() if held.prompt is not NO_PREFILL}
        for session in found:
            self._held[session].prompt = NO_PREFILL
        return found

    def stale(self, session: int, on: Context) -> bool:
        """True if the worker holds less than `on` presumes, so that the order has to be sent whole.

        A sequence that the model cannot compute is not needed.
        """
        if self.reads_features is not None:
            self.reads_features.refresh(session)  # it may hold less then
        return len(self.slots(session).prefix) < on.base and not self._held[session].out_of_reach

    def align(self, session: int, on: Context, pending: int = 0) -> tuple[int, list[int]]:
        """Bring the KV cache in line with `on`, whose last `pending` tokens are uncommitted.

        Returns the node at which the path ends so far (ROOT: the prefix), and the tokens still to be computed behind
        it.
        """
        uncomputed, path = self._uncomputed(session, on, pending, asked=pending + 1)
        committed = len(uncomputed) - pending
        self.runner.keep(session, path, min(len(path), committed))
        rest = uncomputed[len(path) :]
        return len(self.slots(session).tokens) - 1, self._catch_up(session, rest, committed - len(path))

    def settle(self, session: int, on: Context, tree: Tree) -> tuple[list[int], dict[int, int]]:
        """Bring the KV cache in line with `on`, all of it committed, and keep the nodes it holds of a tree behind it.

        Returns the tokens still to be computed, and the tail nodes of those tree nodes that are computed.
        """
        uncomputed, path = self._uncomputed(session, on, 0, asked=0 if tree.root_scored else 1)
        rest = uncomputed[len(path) :]
        held = {} if rest else _held_nodes(self.slots(session), path[-1] if path else ROOT, tree)
        kept = sorted(held.values())
        self.runner.keep(session, [*path, *kept], len(path))
        return self._catch_up(session, rest, len(rest)), {n: kept.index(node) for n, node in held.items()}

    def continue_prefill(self, session: int, order: Prefill) -> int:
        """Prefill a sequence further, by whole chunks of its prompt, then by steps; returns how many tokens are held.

        The bits are those of prefill at once: both cut a prompt at the same positions.
        """
        on = order.on.whole() if self.stale(session, order.on) else order.on
        held = len(self.slots(session).prefix)
        if len(on) < held <= self._prompt(session):  # a round that failed has carried out a longer order already
            return held
        uncomputed, path = self._uncomputed(session, on, 0, asked=0)
        self.runner.keep(session, path, len(path))
        rest = uncomputed[len(path) :]
        if (prompt := self._prompt(session) - len(self.slots(session).prefix)) > 0:
            self._prefill(session, rest[:prompt], order.most)
        else:
            self._catch_up(session, rest[: order.most], len(rest[: order.most]), at_once=0)
        return len(self.slots(session).prefix)

    def _uncomputed(self, session: int, on: Context, pending: int, asked: int) -> tuple[list[int], list[int]]:
        """Roll back to where `on` and the prefix differ.

        Returns the tokens of `on` beyond the prefix, and the tail nodes that carry the first of them. `asked`: after
        how many of the last tokens something will be asked.
        """
        if self.reads_features is not None:
            self.reads_features.refresh(session)
        slots = self.slots(session)
        held, settled = len(slots.prefix), len(on) - pending
        if held < on.base:
            raise Stale(f"session {session}: {held} tokens held, {on.base} presumed")
        uncomputed = on.tail[held - on.base :]
        alike = on.base + _alike(slots.prefix[on.base :], on.tail)
        if min(alike, settled) < held or (asked and settled == held and not self.runner.knows(session, ROOT)):
            uncomputed = self._go_back(session, on, min(alike, settled - 1))
        answered = len(uncomputed) - asked  # nothing is asked about the tokens before this
        nodes = takewhile(
            lambda at: at[0] < answered or self.runner.knows(session, at[1]), enumerate(slots.find(uncomputed))
        )
        return list(uncomputed), [node for _, node in nodes]

    def _go_back(self, session: int, on: Context, length: int) -> tuple[int, ...]:
        """Drop all but the first `length` tokens, or all if that is inside the prompt; returns the tokens of `on`
        beyond."""
        before = tuple(self.slots(session).prefix[: on.base])
        length = length if length >= self._prompt(session) else 0
        self.runner.rewind(session, length)
        return (*before, *on.tail)[length:]

    def commit_path(self, session: int, nodes: Sequence[int]) -> None:
        """Commit a path of nodes from the root to the prefix, and drop all others."""
        self.runner.keep(session, nodes, len(nodes))

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Compute nodes of several sequences in one forward, and ask about some computed ones."""
        work = [item for item in work if item.tokens]
        self._count(work)
        return self.runner.propose(work, asks)

    def make_room(self, session: int, count: int) -> bool:
        """Reserve memory for `count` more nodes of a session; returns False if there is none."""
        try:
            self.runner.demand(session, count)
        except CacheFull:
            return False
        return True

    @contextmanager
    def releasing(self, session: int) -> Iterator[None]:
        """Carry out an order; if the pool is full, free the pages of the prompt that this order took.

        Otherwise shared pages would make other sessions copy theirs, and there is no memory for that either.
        """
        before = len(self.slots(session).prefix)
        try:
            yield
        except PoolFull:
            if before < self._prompt(session) and len(self.slots(session).prefix) > before:
                # Whole pages: the prefix cache may have replaced the last one. Whole chunks: bits stay the same.
                self.runner.rewind(session, before - before % lcm(self.runner.prefill_chunk, self.runner.page))
            raise

    def slots(self, session: int) -> Slots:
        """Return the KV slots of a session's sequence."""
        return self.runner.slots(session)

    def request(self, session: int) -> Request:
        """Return the request that a session was opened with."""
        return self._held[session].request

    def _count(self, work: Sequence[Feed]) -> None:
        """Count the rows of a forward that is about to run."""
        self.rows_fed += sum(len(item.tokens) for item in work)

    def _catch_up(self, session: int, rest: list[int], committed: int, at_once: int = UNCOMPUTED_AT_ONCE) -> list[int]:
        """Prefill the prompt but for its last token, then compute all but a few committed tokens in steps.

        Returns the tokens that are left for the order's own forward.
        """
        if (prompt := self._prompt(session) - len(self.slots(session).prefix)) > 0:
            self._prefill(session, rest[:prompt])
            rest, committed = rest[prompt:], committed - prompt
        while committed > at_once:
            most = max(self.slots(session).room, 1)  # without room the cache raises
            count = min(committed - min(at_once, 1), STRIDE, most)
            work = [Feed(session, tuple(rest[:count]), chain_after(ROOT, 0, count))]
            self._count(work)
            self.runner.feed(work)
            self.commit_path(session, range(count))
            rest, committed = rest[count:], committed - count
        return rest

    def _prefill(self, session: int, uncomputed: Sequence[int], most: int | None = None) -> None:
        """Prefill a prompt to its end, or by about `most` tokens in whole chunks; all prefill starts here.

        `uncomputed`: the rest of the prompt. The prefix cache provides what it has of it.
        """
        held, prefix, prefill_chunk = self._held[session], self.slots(session).prefix, self.runner.prefill_chunk
        before, end = len(prefix), len(uncomputed)
        known = self.runner.recall(session, JoinedText(prefix, uncomputed)) - before
        if most is not None:
            at = before + known
            end = min((at // prefill_chunk + max(most // prefill_chunk, 1)) * prefill_chunk - before, end)
        if known < end:
            self._extend(session, uncomputed[known:end])
        held.prompt = held.prompt.plus(PrefillCount(read=max(end - known, 0), cached=known))

    def _extend(self, session: int, tokens: Sequence[int]) -> None:
        """Prefill a part of the prompt, without logits."""
        self.runner.extend(session, tokens)
        self.rows_fed += len(tokens)

    def _prompt(self, session: int) -> int:
        """Return how many tokens prefill computes: the prompt's last token is a decode step, because its row gives the
        first token."""
        return self._held[session].request.prompt_length - 1


def never() -> bool:
    """Return False: no end condition."""
    return False


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two sequences."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _held_nodes(slots: Slots, root: int, tree: Tree) -> dict[int, int]:
    """Return the tail nodes of those tree nodes that are computed, if the tree is below `root`."""
    at = {(parent, token): node for node, (parent, token) in enumerate(zip(slots.parents, slots.tokens, strict=True))}
    held: dict[int, int] = {}
    for n, node in enumerate(tree.nodes):
        above = root if node.parent == ROOT else held.get(node.parent)
        if node.scored and above is not None and (above, node.token) in at:
            held[n] = at[above, node.token]
    return held


def chain_after(node: int, tail: int, count: int) -> tuple[int, ...]:
    """Return the parents of `count` tokens that follow `node` as a chain, in a tail of `tail` nodes."""
    return tuple(node if i == 0 else tail + i - 1 for i in range(count))
