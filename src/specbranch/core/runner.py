"""The protocol between workers and models: a Runner computes nodes and answers questions about them.

Owns no behaviour. Invariants: logits stay where they were computed; only token ids, confidences and a few probabilities
come out. The answer about a node depends on the tokens up to it and on its sequence's request. It does not depend on
what else is in the same forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from specbranch.config import HeadKind
from specbranch.core.grammar import Guide
from specbranch.core.orders import Context, Measure, Receiver, Sparse, TokenLogprobs, Verify
from specbranch.core.request import Request
from specbranch.core.sending import SendingLater
from specbranch.core.slots import Slots
from specbranch.core.trees import Growth, Tree
from specbranch.errors import SpecBranchError

ENTROPY_WEIGHT = 0.2  # AdaEDL's γ in the bound 1 − sqrt(γ·H)
NO_TOKEN = -2  # the token of a target whose scores are not finite; -1 is that of a record that has ended
MOST_ENTRIES = 64  # entries of a proposal distribution: any q is exact, and few entries are cheap to send


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
    allowed: Guide | None = None  # None: any token


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates for one position, best first, with the draft's confidence there; `q` if the first was sampled.

    `odds`: each candidate's probability over that of the best one; empty: unknown. There is no candidate if none is
    allowed.
    """

    tokens: tuple[int, ...]
    confidence: float
    q: Sparse | None = None
    odds: tuple[float, ...] = ()

    @property
    def said(self) -> tuple[float, ...]:
        """The draft's probability of each candidate; if only the first is known, the others share the rest."""
        if not self.tokens:
            return ()
        others = len(self.tokens) - 1
        odds = self.odds or (1.0, *[(1.0 / max(self.confidence, 1e-9) - 1.0) / max(others, 1)] * others)
        return tuple([self.confidence * one for one in odds])


@dataclass(frozen=True, slots=True)
class Head:
    """A sampled token behind the order's token `node`; the target judges it without computing it."""

    node: int
    token: int
    q: Sparse


@dataclass(frozen=True, slots=True)
class Trial:
    """Asks which of an order's tokens the target accepts, and its next one, by the rule of the sequence's request."""

    seq: int
    order: Verify
    root: int  # the node behind which the order's tokens are
    nodes: tuple[int, ...]  # the nodes of the order's tokens
    head: Head | None = None
    logprobs: int | None = None  # log-probabilities of so many likeliest tokens with each emitted one; None: of none
    wants_forecast: bool = False  # the answer has the output of the model's probe, too
    # after the root, then after each of the nodes; None: any token anywhere
    allowed: tuple[Guide | None, ...] | None = None

    def node(self, index: int) -> int:
        """The node of the order's token `index`, −1 for the root."""
        return self.nodes[index] if index >= 0 else self.root

    def nodes_on(self, path: Sequence[int]) -> list[int]:
        """The nodes from the prefix to the end of a path of the order's tokens."""
        return [*range(self.root + 1), *(self.nodes[index] for index in path)]


@dataclass(frozen=True, slots=True)
class Judged:
    """Indices of the accepted tokens, then the bonus token; NO_TOKEN if a row on the path is not finite.

    `said`: the probe's output for the row behind the last accepted token. `kept`: the runner has moved the accepted
    tokens to the prefix already.
    """

    path: tuple[int, ...]
    token: int
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each accepted token, then one for `token`
    said: tuple[float, ...] | None = None
    kept: bool = False


def _at_once() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The result of a verify: calling it waits for the model; `ready` is True if it would not have to wait."""

    found: Callable[[], list[Judged]]
    ready: Callable[[], bool] = _at_once

    def __call__(self) -> list[Judged]:
        """Wait for the model, and return its verdicts."""
        return self.found()


Done = Callable[[], bool]  # True once the target is done


@dataclass(frozen=True, slots=True)
class Growing:
    """A tree to be extended behind a sequence, of which the `uncomputed` tokens come first."""

    seq: int
    uncomputed: tuple[int, ...]
    tree: Tree
    held: Mapping[int, int]  # computed nodes: number in the tree to node of the tail
    growth: Growth
    receiver: Receiver | None = None  # gets the tree on the device


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lanes of one sequence to be drafted on, one token a step each; `feed` has their first tokens and parents."""

    feed: Feed
    steps: int  # at most
    measure: Measure = "top"


Hear = Callable[[list[Proposal]], bool]  # gets the next proposal of every lane; returns True to go on


class Runner(Protocol):
    """One model and its KV cache for several sequences; it knows nothing of speculation."""

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
        """How many tokens one prefill chunk has.

        A prompt is cut at multiples of this from its beginning, whatever was computed before. So its bits depend on
        nothing else.
        """
        ...

    @property
    def most_prefill(self) -> int | None:
        """How many prompt tokens one forward computes at most, all sequences together; None: as many as are asked."""
        ...

    @property
    def page(self) -> int:
        """How many KV slots a page has."""
        ...

    @property
    def kv_slots(self) -> int | None:
        """How many KV slots there are for all sequences together; None: they are not counted."""
        ...

    @property
    def kv_slots_free(self) -> int:
        """How many KV slots are free.

        Pages that only the prefix cache holds count; pages due for copy-on-write do not.
        """
        ...

    def open(self, seq: int, request: Request) -> None:
        """Make room for a new, empty sequence."""
        ...

    def slots(self, seq: int) -> Slots:
        """Return the sequence's KV slots, read-only: only this Runner changes them."""
        ...

    def demand(self, seq: int, count: int) -> None:
        """Reserve memory for `count` more nodes, or raise CacheFull."""
        ...

    def recall(self, seq: int, tokens: Sequence[int]) -> int:
        """Take the beginning of a prompt from the prefix cache, if that is more than the sequence holds.

        Returns how many tokens the sequence holds then. `tokens`: the part of the prompt that will be prefilled, from
        its beginning. The sequence may hold only a beginning of it, and no tail. Cached pages have the bits that
        prefill would give.
        """
        ...

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Prefill: append tokens to the committed prefix, in chunks, without logits. The tail must be empty.

        Memory is reserved at once, or CacheFull is raised. The forward may be put off until the next one (`feed`,
        `propose`, `verify`), or until `flush`. So chunks of several sequences, and decode rows of others, share a
        forward. If that forward fails, the sequences of its chunks are rolled back to before them.
        """
        ...

    def flush(self) -> None:
        """Compute all prefill that was put off."""
        ...

    def feed(self, work: Sequence[Feed]) -> None:
        """Compute new nodes of several sequences in one forward."""
        ...

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Compute new nodes, and answer questions about these or earlier ones."""
        ...

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Compute new nodes, and judge; where a device works by itself this returns before the verdicts are there."""
        ...

    def knows(self, seq: int, node: int) -> bool:
        """True if questions about a node can be answered without computing it again."""
        ...

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second` after a node, noise and shaping included; 0 is
        a tie."""
        ...

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail and drop the rest; the first `commit` kept ones, a path, join the prefix (see
        Slots.keep)."""
        ...

    def rewind(self, seq: int, length: int) -> None:
        """Drop the tail, and the prefix beyond its first `length` tokens."""
        ...

    def close(self, seq: int) -> None:
        """Drop the sequence and free its KV slots."""
        ...


@runtime_checkable
class ReadsFeatures(Protocol):
    """A draft's Runner whose rows read hidden states of its target: the feature of the position before them.

    Where the target has not computed that position, a row reads the draft's own state of its parent instead.
    """

    def reads(self, seq: int, length: int) -> bool:
        """True if the target has computed all tokens before the last of these `length`."""
        ...

    def refresh(self, seq: int) -> None:
        """Drop rows that were made from fed-back states where the target has computed the features since."""
        ...

    def target_reads(self, seq: int, tokens: Sequence[int]) -> AbstractContextManager[None]:
        """Within this context the target holds a text under this number, for a text that no session has."""
        ...


@runtime_checkable
class GrowsTrees(Protocol):
    """A Runner that chooses the next nodes of a tree itself, so that a whole tree is one call."""

    def grow(self, growing: Growing, done: Done) -> Tree | None:
        """Extend a tree until nothing pays or `done`, and commit the uncomputed tokens; None: extend it step by step
        instead."""
        ...

    def make_ready(self, seq: int, done: Done) -> None:
        """Prepare to compute tokens ahead of the next order, until there is other work."""
        ...

    def read_ahead(self, feed: Feed) -> bool:
        """Compute committed tokens ahead of the next Grow order, without waiting.

        False: that order has to compute them.
        """
        ...

    @property
    def begun(self) -> Callable[[], float] | None:
        """When the last Grow started, if that was before it was ordered."""
        ...

    @property
    def grown_at(self) -> Callable[[], float] | None:
        """When the last drafted tree was complete on the device; None if the last draft was no tree."""
        ...


@runtime_checkable
class ReceivesTrees(Protocol):
    """A Runner that may start to verify a tree before it is ordered to, if its own device extended the tree."""

    def receiver(self, seq: int, on: Context, sending: SendingLater) -> Receiver | None:
        """Return who receives a tree behind this sequence; None: the verify has to be ordered."""
        ...

    @property
    def begun(self) -> Callable[[], float] | None:
        """When the last verify started, which may be before it was ordered; None: when it was ordered."""
        ...


@dataclass(frozen=True, slots=True)
class VerifyWork:
    """New nodes of sequences that do not decode plainly, and the trials on them, for a plain decode step of others."""

    work: Sequence[Feed]
    trials: Sequence[Trial]

    @property
    def rows(self) -> int:
        """How many rows the step gets."""
        return sum([len(feed.tokens) for feed in self.work])


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A plain decode step of several sequences that a device computes, while the next one waits behind it."""

    sampled: Callable[[], dict[int, int]]  # waits for the device; the sampled token by sequence
    rows: int  # of this step, those of verify orders included
    ahead: bool  # it was launched before it was asked for
    launched: frozenset[int]  # sequences that have a row in the next step
    failed: Mapping[int, SpecBranchError]  # sequences that found no memory
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # of requests that want them, once sampled
    verdicts: Verdicts | None = None  # on the trials whose rows are in the next step; None: it has none


NO_MASKS: Mapping[int, Guide] = {}


@runtime_checkable
class DecodesBatches(Protocol):
    """A Runner that decodes a batch plainly, and launches each step before it has read the one before."""

    def decodes(self, seq: int, length: int) -> bool:
        """True if the device samples the token behind `length` tokens by itself; it does so for all later ones, too."""
        ...

    def fits(self, texts: Mapping[int, Sequence[int]], verify: VerifyWork | None = None) -> bool:
        """True if a step takes all these sequences, and the one behind it takes them and `verify`."""
        ...

    def decode(
        self,
        texts: Mapping[int, Sequence[int]],
        going_on: Collection[int],
        verify: VerifyWork | None = None,
        masks: Mapping[int, Guide] = NO_MASKS,
    ) -> PlainStep | None:
        """Decode one token of each sequence; `going_on`: those that decode one more behind it, unless it ends them.

        `masks`: what may follow the texts of sequences with a grammar.

        All tokens of a text but the last are computed. Sequences that have no row in the step that was launched ahead
        get one in the next, and no token now. `verify`: rows of other sequences for the next step. They need none of
        its own rows, so a step without rows of texts is not launched for them. None: this has to be ordered otherwise.
        """
        ...

    def join(self, seq: int, token: int) -> None:
        """Give a sequence a row in the step that the next `decode` launches: it begins to decode with this token,
        behind a prompt whose forward may be put off."""
        ...


@runtime_checkable
class PadsForwards(Protocol):
    """A Runner that pads its forwards, so that some more rows cost nothing."""

    def padded(self, rows: int) -> int:
        """Return the padded rows of a forward."""
        ...


@runtime_checkable
class TimesForwards(Protocol):
    """A Runner that has timed its forwards, for example while they were captured."""

    def forward_seconds(self, rows: int, prompt_tokens: int = 0) -> float | None:
        """Return the seconds of a forward over so many decode rows and prompt tokens, padding included; None:
        unknown."""
        ...


@runtime_checkable
class RunsAhead(Protocol):
    """A Runner whose lanes go on with their own tokens before the host has seen them."""

    def run_ahead(self, lanes: Lanes, hear: Hear) -> int:
        """Draft until `hear` returns False or all steps are done; returns the number of steps.

        0: the lanes have to be drafted step by step.
        """
        ...


class Law(Protocol):
    """The target's distribution at one node, sampling parameters applied; `core.verify.accept_ratio` uses it."""

    def prob(self, token: int) -> float:
        """Return p(token)."""
        ...

    def draw(self, u: float) -> int:
        """Draw by inversion with one uniform variate."""
        ...

    def residual(self, q: Sparse) -> Law:
        """Return norm((p − q)+); where nothing remains, p itself (only rounding leads there)."""
        ...
