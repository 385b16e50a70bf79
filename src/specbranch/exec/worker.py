"""A worker's hold on its sequences: what the model has read, and how to bring that in line with an order.

Owns `align`, the one operation behind branch choice, rollback, retry and recovery. Invariants: after `align` the tail
holds exactly the path the order states, the committed part of it in the prefix, and every fed node can still be asked
about, also where the order was carried out before, in part or whole. Whether a token is read as part of the prompt or
as a step hangs on its position and the prompt's length alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from math import lcm

from specbranch.core.orders import NO_PREFILL, Context, Prefill, PrefillCount
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Done, Feed, GrowsTrees, Proposal, Runner, RunsAhead
from specbranch.core.slots import ROOT, Slots
from specbranch.core.trees import Tree
from specbranch.errors import CacheFull, PoolFull

AT_ONCE = 16  # unread tokens an order's own forward reads besides what it asks for; more are read before it
STRIDE = 32  # tokens of a text that are read again in one step: as deep as a tail is exact on every device


class Stale(Exception):
    """The worker holds less of a sequence than the order presumes; send it whole."""


@dataclass(slots=True)
class Holding:
    """One sequence as a worker holds it."""

    request: Request
    out_of_reach: bool = False  # the text holds what this model cannot read
    prompt: PrefillCount = NO_PREFILL  # since it was last told


class Worker:
    """A Runner and the sequences it holds."""

    lets_grow = True  # whether a model may take several steps by itself; not where every step has to be seen

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.grows_trees = runner if isinstance(runner, GrowsTrees) else None  # told apart once: that takes long
        self.runs_ahead = runner if isinstance(runner, RunsAhead) else None
        self.rows_fed = 0
        self.enough: Done = never  # asked before each step: whether all that is drafted ends here
        self._held: dict[int, Holding] = {}

    def open(self, session: int, request: Request) -> None:
        """Make room for a session."""
        self.runner.open(session, request)
        self._held[session] = Holding(request)

    def leave(self, session: int) -> None:
        """Free what a session holds; harmless if it holds nothing."""
        if self._held.pop(session, None):
            self.runner.close(session)

    def prefill_counts(self) -> dict[int, PrefillCount]:
        """Return what was read of the sessions' prompts since this was last asked."""
        found = {session: held.prompt for session, held in self._held.items() if held.prompt is not NO_PREFILL}
        for session in found:
            self._held[session].prompt = NO_PREFILL
        return found

    def stale(self, session: int, on: Context) -> bool:
        """Whether less is held than `on` presumes, so that it has to be told whole; a text out of reach is not
        missed."""
        return len(self.slots(session).prefix) < on.base and not self._held[session].out_of_reach

    def align(self, session: int, on: Context, pending: int = 0) -> tuple[int, list[int]]:
        """Bring the cache in line with `on`, whose last `pending` tokens are uncommitted.

        Returns the node the path ends at so far (ROOT: the prefix) and the tokens still to be fed after it.
        """
        uncomputed, path = self._uncomputed(session, on, pending, asked=pending + 1)
        committed = len(uncomputed) - pending
        self.runner.keep(session, path, min(len(path), committed))
        rest = uncomputed[len(path) :]
        return len(self.slots(session).tokens) - 1, self._catch_up(session, rest, committed - len(path))

    def settle(self, session: int, on: Context, tree: Tree) -> tuple[list[int], dict[int, int]]:
        """Bring the cache in line with `on`, all of it committed, and keep what it holds of a tree behind it.

        Returns the tokens still to be fed, and where the nodes of the tree lie that were read.
        """
        uncomputed, path = self._uncomputed(session, on, 0, asked=0 if tree.read else 1)
        rest = uncomputed[len(path) :]
        held = {} if rest else _held_nodes(self.slots(session), path[-1] if path else ROOT, tree)
        kept = sorted(held.values())
        self.runner.keep(session, [*path, *kept], len(path))
        return self._catch_up(session, rest, len(rest)), {n: kept.index(node) for n, node in held.items()}

    def read(self, session: int, order: Prefill) -> int:
        """Read on in a sequence, by whole chunks of its prompt, then by steps; returns how many tokens of it are held.

        Bits are those of reading it at once: both cut a prompt at the same places.
        """
        on = order.on.whole() if self.stale(session, order.on) else order.on
        uncomputed, path = self._uncomputed(session, on, 0, asked=0)
        self.runner.keep(session, path, len(path))
        rest = uncomputed[len(path) :]
        if (prompt := self._prompt(session) - len(self.slots(session).prefix)) > 0:
            self._prefill(session, rest[:prompt], order.most)
        else:
            self._catch_up(session, rest[: order.most], len(rest[: order.most]), at_once=0)
        return len(self.slots(session).prefix)

    def _uncomputed(self, session: int, on: Context, pending: int, asked: int) -> tuple[list[int], list[int]]:
        """Go back to where `on` and the prefix part; returns the tokens beyond, and the nodes of the tail that carry
        the first of them.

        `asked`: after how many of the last tokens something will be asked.
        """
        slots = self.slots(session)
        held, settled = len(slots.prefix), len(on) - pending
        if held < on.base:
            raise Stale(f"session {session}: {held} tokens held, {on.base} presumed")
        uncomputed = on.tail[held - on.base :]
        alike = on.base + _alike(slots.prefix[on.base :], on.tail)
        if min(alike, settled) < held or (asked and settled == held and not self.runner.knows(session, ROOT)):
            uncomputed = self._go_back(session, on, min(alike, settled - 1))
        answered = len(uncomputed) - asked  # of those before, nothing is asked
        nodes = takewhile(
            lambda at: at[0] < answered or self.runner.knows(session, at[1]), enumerate(slots.find(uncomputed))
        )
        return list(uncomputed), [node for _, node in nodes]

    def _go_back(self, session: int, on: Context, length: int) -> tuple[int, ...]:
        """Forget all but the first tokens, of a prompt that is not whole all of it; returns what is to be read of
        `on`."""
        before = tuple(self.slots(session).prefix[: on.base])
        length = length if length >= self._prompt(session) else 0
        self.runner.rewind(session, length)
        return (*before, *on.tail)[length:]

    def commit_path(self, session: int, nodes: Sequence[int]) -> None:
        """Make a path of nodes from the root part of the prefix, and forget all others."""
        self.runner.keep(session, nodes, len(nodes))

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Feed nodes of several sequences in one forward, and ask about some of those that were fed."""
        work = [item for item in work if item.tokens]
        self._count(work)
        return self.runner.propose(work, asks)

    def make_room(self, session: int, count: int) -> bool:
        """Take memory for so many more nodes of a session; returns whether there was any."""
        try:
            self.runner.demand(session, count)
        except CacheFull:
            return False
        return True

    @contextmanager
    def releasing(self, session: int) -> Iterator[None]:
        """Carry out an order; one that the pool refuses releases the pages of the prompt that it took. Shared pages
        would make others copy theirs, for which there is no memory either."""
        before = len(self.slots(session).prefix)
        try:
            yield
        except PoolFull:
            if before < self._prompt(session) and len(self.slots(session).prefix) > before:
                # whole pages, as recalling may have exchanged the last one; whole chunks, so that bits stay the same
                self.runner.rewind(session, before - before % lcm(self.runner.prefill_chunk, self.runner.page))
            raise

    def slots(self, session: int) -> Slots:
        """The KV slots of a session's sequence."""
        return self.runner.slots(session)

    def request(self, session: int) -> Request:
        """The request a session was opened with."""
        return self._held[session].request

    def _count(self, work: Sequence[Feed]) -> None:
        """Note that nodes are about to be fed, in one forward."""
        self.rows_fed += sum(len(item.tokens) for item in work)

    def _catch_up(self, session: int, rest: list[int], committed: int, at_once: int = AT_ONCE) -> list[int]:
        """Read the prompt but for its last token, then by steps all but a few of the committed tokens; returns those
        left to feed."""
        if (prompt := self._prompt(session) - len(self.slots(session).prefix)) > 0:
            self._prefill(session, rest[:prompt])
            rest, committed = rest[prompt:], committed - prompt
        while committed > at_once:
            most = max(self.slots(session).room, 1)  # without room the cache says so
            count = min(committed - min(at_once, 1), STRIDE, most)
            work = [Feed(session, tuple(rest[:count]), chain_after(ROOT, 0, count))]
            self._count(work)
            self.runner.feed(work)
            self.commit_path(session, range(count))
            rest, committed = rest[count:], committed - count
        return rest

    def _prefill(self, session: int, uncomputed: Sequence[int], most: int | None = None) -> None:
        """Read on in a prompt, of which all that is unread is given: to its end, or about `most` tokens of it in whole
        chunks, but for what the cache knows of it. All prefill starts here."""
        held, before, prefill_chunk = self._held[session], self.slots(session).prefix[:], self.runner.prefill_chunk
        known = self.runner.recall(session, (*before, *uncomputed)) - len(before)
        end = len(uncomputed)
        if most is not None:
            at = len(before) + known
            end = min((at // prefill_chunk + max(most // prefill_chunk, 1)) * prefill_chunk - len(before), end)
        if known < end:
            self._extend(session, uncomputed[known:end])
        held.prompt = held.prompt.plus(PrefillCount(read=max(end - known, 0), cached=known))

    def _extend(self, session: int, tokens: Sequence[int]) -> None:
        """Read a part of the prompt, about which nothing is asked."""
        self.runner.extend(session, tokens)
        self.rows_fed += len(tokens)

    def _prompt(self, session: int) -> int:
        """How many tokens are read as a prompt: its last one is a step, as the target's first word hangs on its row."""
        return self._held[session].request.prompt_length - 1


def never() -> bool:
    """It does not come to that."""
    return False


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _held_nodes(slots: Slots, root: int, tree: Tree) -> dict[int, int]:
    """Where those nodes of a tree lie in the tail that are known to be read, if the tree hangs below `root`."""
    at = {(parent, token): node for node, (parent, token) in enumerate(zip(slots.parents, slots.tokens, strict=True))}
    held: dict[int, int] = {}
    for n, node in enumerate(tree.nodes):
        above = root if node.parent == ROOT else held.get(node.parent)
        if node.fed and above is not None and (above, node.token) in at:
            held[n] = at[above, node.token]
    return held


def chain_after(node: int, tail: int, count: int) -> tuple[int, ...]:
    """Parents of `count` tokens that follow `node` one after the other, in a tail that holds `tail` nodes."""
    return tuple(node if i == 0 else tail + i - 1 for i in range(count))
