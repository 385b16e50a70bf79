"""The protocol between the workers and the models: a Runner reads nodes and answers questions about them.

Owns no behaviour. Invariants: rows of logits stay where they were made; only token ids, confidences and a few
probabilities come out. What is answered about a node depends on the tokens up to it and on its sequence's request
alone, whatever else is read or asked with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from specbranch.config import HeadKind
from specbranch.core.orders import Context, Measure, Receiver, Sparse, TokenLogprobs, Verify
from specbranch.core.request import Request
from specbranch.core.sending import SendingLater
from specbranch.core.slots import Slots
from specbranch.core.trees import Growth, Tree

ENTROPY_WEIGHT = 0.2  # AdaEDL's γ in the bound 1 − sqrt(γ·H)
NO_TOKEN = -2  # what a target says whose scores are not finite; -1 is what a record says that has ended
MOST_ENTRIES = 64  # of a proposal law: any q is exact, and few entries are cheap to send

Allowed = frozenset[int]  # the tokens that may be said at a position


class NoNumber(RuntimeError):
    """A model's scores are NaN or infinite."""


class Feed(NamedTuple):
    """New nodes for one sequence, each with its parent (see Slots.grow)."""

    seq: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """What does the draft propose after a node (ROOT: after the prefix)?"""

    seq: int
    node: int
    width: int = 1
    heads: HeadKind = "sampled"  # ratio: is the first proposal drawn from q, or are all the top ones? (match: the same)
    measure: Measure = "top"
    attempt: int = 0  # tells apart the orders that drafted this position
    allowed: Allowed | None = None  # nothing: any token


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates for one position, best first, with the draft's confidence there and, if the first was drawn, its law.

    `odds` tells how likely each candidate is beside the best one, by the draft's own scores; nothing: it was not said.
    """

    tokens: tuple[int, ...]
    confidence: float
    q: Sparse | None = None
    odds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """A token drawn for the position after the order's token `node` that is judged without having been fed."""

    node: int
    token: int
    q: Sparse


@dataclass(frozen=True, slots=True)
class Trial:
    """Which of an order's tokens does the target take, and what does it say next? By the rule of the sequence's
    request."""

    seq: int
    order: Verify
    root: int  # the node that the order's tokens hang on
    nodes: tuple[int, ...]  # where they lie
    head: Head | None = None
    logprobs: int | None = None  # how many of the most likely tokens are told with each taken one; nothing: none is
    wants_forecast: bool = False  # whether what the model's probe says of the verdict is told too
    # after the root, then after each of the nodes; nothing: any token anywhere
    allowed: tuple[Allowed | None, ...] | None = None

    def node(self, index: int) -> int:
        """The node of the order's token `index`, −1 for the root."""
        return self.nodes[index] if index >= 0 else self.root

    def nodes_on(self, path: Sequence[int]) -> list[int]:
        """The nodes from the prefix to the end of a path of the order's tokens."""
        return [*range(self.root + 1), *(self.nodes[index] for index in path)]


@dataclass(frozen=True, slots=True)
class Judged:
    """Indices of the taken tokens, then the target's own next one, NO_TOKEN where a row on the way is not finite.

    `said` is what a probe made of the row behind the last taken, `kept` whether what was taken joined the prefix
    already.
    """

    path: tuple[int, ...]
    token: int
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each taken token, then one for `token`
    said: tuple[float, ...] | None = None
    kept: bool = False


def _at_once() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a verification finds: calling it waits for the model, `ready` tells whether there is anything to wait
    for."""

    found: Callable[[], list[Judged]]
    ready: Callable[[], bool] = _at_once

    def __call__(self) -> list[Judged]:
        """Wait, and tell."""
        return self.found()


Done = Callable[[], bool]  # whether the target is


@dataclass(frozen=True, slots=True)
class Growing:
    """A tree to be grown behind a sequence: `uncomputed` of its text is read first, `held` tells where what was read of
    the tree lies."""

    seq: int
    uncomputed: tuple[int, ...]
    tree: Tree
    held: Mapping[int, int]  # numbers in the tree to nodes of the tail
    growth: Growth
    receiver: Receiver | None = None  # is given the tree where it has grown


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lanes of one sequence to be drafted on, a token a step each: what each reads first, and what it hangs on."""

    feed: Feed
    steps: int  # at most
    measure: Measure = "top"


Hear = Callable[[list[Proposal]], bool]  # told what every lane is to read next; returns whether to go on


class Runner(Protocol):
    """One model and its cache for several sequences; it knows nothing of speculation."""

    @property
    def vocabulary(self) -> int:
        """How many token ids the model scores."""
        ...

    @property
    def context_length(self) -> int:
        """How many tokens one sequence may hold."""
        ...

    @property
    def prefill_chunk(self) -> int:
        """How many tokens of a prompt are read at once: it is cut at multiples of this, counted from its beginning,
        whoever reads it and whatever was read before, so that its bits depend on nothing else."""
        ...

    @property
    def page(self) -> int:
        """How many KV slots are taken at once."""
        ...

    @property
    def kv_slots(self) -> int | None:
        """How many KV slots there are for all sequences together; nothing: they are not counted."""
        ...

    @property
    def kv_slots_free(self) -> int:
        """How many of them can be had; those that only keep what was read of a prompt are among them, those that copies
        of shared pages will take are not."""
        ...

    def open(self, seq: int, request: Request) -> None:
        """Make room for a new, empty sequence."""
        ...

    def slots(self, seq: int) -> Slots:
        """The sequence's KV slots, to be read; only this Runner changes them."""
        ...

    def demand(self, seq: int, count: int) -> None:
        """Make sure that so many more nodes can be fed, or raise CacheFull."""
        ...

    def recall(self, seq: int, tokens: Sequence[int]) -> int:
        """Take what is known of the beginning of a prompt from those that read it, if that is more than the sequence
        holds; returns how many tokens it holds then.

        `tokens`: the prompt as far as it is to be read, from its beginning. The sequence holds nothing but a beginning
        of it, and no tail. What is taken has the bits that reading it would give.
        """
        ...

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Append tokens to the committed prefix, in chunks; nothing can be asked about them. The tail must be empty."""
        ...

    def feed(self, work: Sequence[Feed]) -> None:
        """Read new nodes of several sequences in one forward."""
        ...

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Read new nodes, and answer what is asked about them, or about nodes read before."""
        ...

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Read new nodes, and judge; returns at once where a device works by itself, and the verdicts when they are
        called for."""
        ...

    def knows(self, seq: int, node: int) -> bool:
        """Whether questions about a node that was read can still be answered without reading it again."""
        ...

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second` after a node, noise and shaping included; 0 is
        a tie."""
        ...

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail, the first `commit` of them, a path, as prefix; drop the rest (see
        Slots.keep)."""
        ...

    def rewind(self, seq: int, length: int) -> None:
        """Forget the tail, and the prefix beyond its first `length` tokens."""
        ...

    def close(self, seq: int) -> None:
        """Forget the sequence and free its KV slots."""
        ...


@runtime_checkable
class GrowsTrees(Protocol):
    """A Runner that can choose by itself what of a tree to read next, so that a tree takes one question instead of
    one a step."""

    def grow(self, growing: Growing, done: Done) -> Tree | None:
        """Grow a tree until nothing pays or it is done; the text is committed then. Nothing: this one has to be
        asked for step by step."""
        ...

    def make_ready(self, seq: int, done: Done) -> None:
        """Write down what can be known of texts that it may have to read ahead, until something else is to be done."""
        ...

    def read_ahead(self, feed: Feed) -> bool:
        """Read what is unread of a text behind which a tree is to grow next; nobody waits for that. False: it has to
        be read when that grows."""
        ...

    @property
    def begun(self) -> Callable[[], float] | None:
        """When the last tree began to grow, if that was before it was asked for."""
        ...

    @property
    def grown_at(self) -> Callable[[], float] | None:
        """When the last thing that was drafted was there, if that was a tree, and before anybody had read it."""
        ...


@runtime_checkable
class ReceivesTrees(Protocol):
    """A Runner that may begin to verify a tree before it is asked to, if that has grown beside it on its device."""

    def receiver(self, seq: int, on: Context, sending: SendingLater) -> Receiver | None:
        """Who is to be given a tree behind this text; nothing: it has to be asked for."""
        ...

    @property
    def begun(self) -> Callable[[], float] | None:
        """When the last verification began, which may be before it was asked for; nothing: when it was."""
        ...


@runtime_checkable
class PadsForwards(Protocol):
    """A Runner whose forwards are computed with more rows than they have, so that some of these cost nothing."""

    def padded(self, rows: int) -> int:
        """With how many rows a forward of so many is computed."""
        ...


@runtime_checkable
class RunsAhead(Protocol):
    """A Runner that can have lanes read what they chose themselves before anybody has heard of it."""

    def run_ahead(self, lanes: Lanes, hear: Hear) -> int:
        """Draft on until there were as many steps as asked for, or who hears of them wants no more; returns how many
        there were. None: these have to be asked for step by step."""
        ...


class Law(Protocol):
    """The target's shaped distribution at one node, where a runner judges by `core.verify.accept_ratio`."""

    def prob(self, token: int) -> float:
        """Return p(token)."""
        ...

    def draw(self, u: float) -> int:
        """Draw by inversion with one uniform variate."""
        ...

    def residual(self, q: Sparse) -> Law:
        """Return norm((p − q)+); where nothing remains, p itself (only rounding leads there)."""
        ...
