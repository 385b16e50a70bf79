"""The values between methods and models: what a method orders, and what the executor reports.

Owns only values; nothing here computes with a model. Invariant: an order states the true sequence and never says
"undo".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

from specbranch.config import HeadKind
from specbranch.core.arms import ArmRound
from specbranch.core.forecast import Signal
from specbranch.core.forest import ForestWish
from specbranch.core.grammar import Guide, State
from specbranch.core.sending import SendingLater
from specbranch.core.trees import Growth, Tree

Measure = Literal["top", "entropy"]
Until = Literal["length", "target"]
# What the next round does first, given the tokens that a verdict adds. It verifies these tokens; "draft": the draft
# works first; None: unknown.
Following = tuple[int, ...] | Literal["draft"] | None
Follows = Callable[[tuple[int, ...]], Following]


@dataclass(frozen=True, slots=True)
class Sparse:
    """A proposal distribution by its few non-zero entries, most probable first; they sum to 1."""

    ids: tuple[int, ...]
    probs: tuple[float, ...]

    def prob(self, token: int) -> float:
        """Return the probability of `token`, 0 where it has none."""
        return self.probs[self.ids.index(token)] if token in self.ids else 0.0

    def without(self, token: int) -> Sparse:
        """Return the distribution of the next draw once `token` was tried: without its mass, renormalised."""
        rest = [(i, p) for i, p in zip(self.ids, self.probs, strict=True) if i != token]
        total = sum(p for _, p in rest)
        return Sparse(tuple(i for i, _ in rest), tuple(p / total for _, p in rest))


@dataclass(frozen=True, slots=True)
class Context:
    """A sequence as an order states it: keep the first `base` tokens of what the worker holds, then `tail`.

    `history` is the session's own token list. Only its first `base` tokens are used, for a worker that has lost them.
    """

    base: int
    tail: tuple[int, ...]
    history: Sequence[int] = field(default=(), repr=False, compare=False)

    def __len__(self) -> int:
        return self.base + len(self.tail)

    def whole(self) -> Context:
        """Return the same sequence for a worker that holds nothing of it."""
        return Context(0, (*self.history[: self.base], *self.tail))

    def plus(self, tokens: Sequence[int], held: int) -> Context:
        """Return this sequence followed by `tokens`, for a worker that holds its first `held` tokens."""
        before, held = self.history[held : self.base], min(held, len(self))
        return Context(held, (*before, *self.tail[max(held - self.base, 0) :], *tokens))


@dataclass(frozen=True, slots=True)
class Plan:
    """How to draft: from each fork, `width` heads, each extended to `length` tokens, the head included.

    A fork is `(after, width)`: it presumes that `after` of the pending tokens are accepted. No fork: one chain behind
    all of them. `narrow` lets the worker shrink a fork where the draft is sure, by the paper's rule: k = max(1,
    ⌊width·(1 − confidence)⌋).
    """

    length: int
    forks: tuple[tuple[int, int], ...] = ()
    stop_below: float = 0.0  # end a lane before the first token less confident than this …
    keep_unsure: bool = False  # … or after it
    measure: Measure = "top"
    narrow: bool = False
    heads: HeadKind = "top"
    until: Until = "length"


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft by `plan` behind the sequence `on`, whose last `pending` tokens are not committed yet.

    `number` counts the session's draft orders, and keys their random draws. A position drafted again after a rollback
    gets a fresh variate. So a plan may depend on what became of the tokens that were rolled back.
    """

    on: Context
    plan: Plan
    pending: int = 0
    number: int = 0
    state: State | None = field(default=None, repr=False, compare=False)  # the grammar's, before the pending tokens

    @property
    def until_target(self) -> bool:
        """True if it ends when the target is done."""
        return self.plan.until == "target"

    @property
    def announces(self) -> bool:
        """True if its first head is sampled: the target judges that head with its own row."""
        return self.plan.length > 0 and self.plan.heads == "sampled"


class Receiver(Protocol):
    """A target that may start to verify a tree on the device that extended it, before the order comes."""

    def prepare(self) -> Any:
        """Prepare; returns what goes to the device together with the tree."""
        ...

    def take(self, tree: Any, nodes: int) -> None:
        """Start to verify the likeliest choice of rows from a tree of `nodes` nodes."""
        ...


@dataclass(frozen=True, slots=True)
class Grow:
    """Extend `tree` behind the sequence `on`, all of which is committed.

    The worker computes again what it no longer holds of the tree.
    """

    on: Context
    tree: Tree
    growth: Growth
    number: int = 0
    # how the rows of the next verify are chosen, if that is known, and who may start with them
    sending: SendingLater | None = field(default=None, compare=False)
    receiver: Receiver | None = field(default=None, repr=False, compare=False)
    state: State | None = field(default=None, repr=False, compare=False)  # the grammar's, behind `on`
    announces: ClassVar[bool] = False

    @property
    def until_target(self) -> bool:
        """True if it ends when the target is done."""
        return self.growth.free_time > 0.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill the committed sequence `on` by about `most` tokens: whole chunks of the prompt, then steps.

    It asks for no tokens; the worker answers with its new length (`Reached`). `last`: the token behind `on`, if the
    next round decodes it. A device that launches the next step ahead may include it.
    """

    on: Context
    most: int
    last: int | None = None
    announces: ClassVar[bool] = False
    until_target: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Reached:
    """The number of tokens of a sequence that a worker holds after a Prefill order."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Aside:
    """Rows of a verify forward that are never accepted; the verdict has the target's tokens after those in `guessed`.

    `parents[i]` is the index of token i's parent among them, -1 for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    guessed: tuple[int, ...]

    def depth(self, node: int) -> int:
        """Return how many of its tokens lead to a node, the node included."""
        return 0 if node < 0 else 1 + self.depth(self.parents[node])


@dataclass(frozen=True, slots=True)
class Verify:
    """Verify `tokens` behind the sequence `on`.

    `parents[i]` is the index of node i's parent, -1 for the root; None: a chain. `q[i]` is the distribution that node i
    was sampled from; None: the proposal was deterministic. `aside` are rows of the same forward. `allowed`: the tokens
    allowed after the root, then after each of `tokens`; None: any.

    Three hints let a model launch the next step ahead. `goes_on`: unless the request ends, the next order is one token
    behind the verdict. `ends`: there is no next order, whatever the verdict; so the next step goes on without it.
    `follows`: a function from the tokens that the verdict adds to what comes next.
    """

    on: Context
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    q: tuple[Sparse | None, ...] | None = None
    goes_on: bool = False
    aside: Aside | None = None
    allowed: tuple[Guide | None, ...] | None = None
    follows: Follows | None = field(default=None, repr=False, compare=False)
    ends: bool = False

    @property
    def is_plain(self) -> bool:
        """True if it asks for the next token alone, and nothing is launched behind it but one more.

        So is a masked one, if plain decoding goes on: the next mask comes while the next step runs.
        """
        alone = not self.tokens and self.aside is None and self.follows is None
        return alone and (self.allowed is None or self.goes_on or self.ends)

    @property
    def is_chain(self) -> bool:
        """True if every token has the one before it as its parent."""
        return self.parents is None or self.parents == tuple(range(-1, len(self.tokens) - 1))

    def taken(self, path: Sequence[int], token: int) -> tuple[int, ...]:
        """Return the tokens that a verdict adds: those of its path, then the bonus token."""
        return (*(self.tokens[node] for node in path), token)

    def parent(self, node: int) -> int:
        """Return the index of the node's parent, -1 for the root."""
        return node - 1 if self.parents is None else self.parents[node]


@dataclass(frozen=True, slots=True)
class Branch:
    """A drafted continuation that presumes `after` accepted pending tokens; `tokens[0]` is its head.

    If `confidence` is one longer than `tokens`, its last entry is that of the token at which the draft stopped.
    """

    after: int
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    q: tuple[Sparse | None, ...] | None = None

    def cut(self, start: int, stop: int | None = None) -> Branch:
        """Return the tokens from `start` up to `stop`, as a branch that presumes the ones before them."""
        q = None if self.q is None else self.q[start:stop]
        return Branch(self.after + start, self.tokens[start:stop], self.confidence[start:stop], q)


NOTHING = Branch(0, (), ())  # a pending chain with no token in it


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of an emitted token and of the most likely ones, before sampling parameters apply."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Indices of the accepted nodes (a chain: 0..n-1), then the bonus token: the target's own next one."""

    path: tuple[int, ...]
    token: int
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each accepted node, then one for `token`
    signal: Signal | None = None  # H-RAD's prediction, computed where the target's features are
    guessed: tuple[int, ...] = ()  # the target's tokens after the nodes in the order's `aside.guessed`


@dataclass(frozen=True, slots=True)
class PrefillCount:
    """How many tokens of a prompt a model prefilled, and how many it took from the prefix cache.

    The prompt's last token is neither: it goes with the first decode step.
    """

    read: int = 0
    cached: int = 0

    def plus(self, other: PrefillCount) -> PrefillCount:
        """Return the sum of two counts."""
        return PrefillCount(self.read + other.read, self.cached + other.cached)


NO_PREFILL = PrefillCount()


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of work on the executor's clock, in seconds."""

    start: float
    end: float
    tokens: int = 0  # rows that the model computed
    prompts: Mapping[int, PrefillCount] = field(default_factory=dict)  # what was prefilled, by session
    link: float = 0.0  # seconds of it that orders and answers were on their way to another process and back

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def work_seconds(self) -> float:
        """How long it took without the way."""
        return max(self.seconds - self.link, 0.0)  # the difference of two times is rounded


@dataclass(frozen=True, slots=True)
class Effort:
    """What a worker in another process took for its work: a duration, because the clocks of two machines do not
    compare."""

    seconds: float
    tokens: int = 0
    prompts: Mapping[int, PrefillCount] = field(default_factory=dict)

    def placed(self, start: float, link: float) -> Span:
        """Return it as a span on the executor's clock: ordered at `start`, `link` seconds on the way."""
        return Span(start, start + link + self.seconds, self.tokens, self.prompts, link)


DraftOrder = Draft | Grow | Prefill
Drafted = tuple[Branch, ...] | Tree | Reached  # the answer to each of them


class Deferred:
    """Tasks that nobody waits for. They run while the models work, or at the latest once their reports are there."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], object]] = []
        self._error: Exception | None = None

    def add(self, task: Callable[..., object], *given: Any) -> None:
        """Defer a call."""
        self._tasks.append(partial(task, *given))

    def run(self) -> None:
        """Run all tasks in their order; raises what a task raised in `attempt`."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        while self._tasks:
            self._tasks.pop(0)()

    def attempt(self) -> None:
        """Run all tasks, and keep an exception for `run`: the sessions of the same round are not concerned."""
        try:
            self.run()
        except Exception as error:  # whatever a method raises
            self._error = error


@dataclass(frozen=True, slots=True)
class Orders:
    """One session's orders for one round; any may be absent.

    `prefill` is for the target, and comes without `verify`. An executor that waits for a device may run the `deferred`
    tasks first. `planned` is the round of a method that plans, for statistics and traces. `plain_rounds`: how many
    rounds, of plain decoding or of the forest, this one included, the loop may make before it reports the last of them.
    `forest`: beside the next token the device may draft and verify as it sees fit; the report has the tree that was
    verified.
    """

    draft: DraftOrder | None = None
    verify: Verify | None = None
    deferred: Deferred | None = field(default=None, repr=False, compare=False)
    prefill: Prefill | None = None
    planned: ArmRound | None = field(default=None, repr=False, compare=False)
    plain_rounds: int = field(default=1, compare=False)
    forest: ForestWish | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Reports:
    """What came back for one session. A lost or absent draft reports no branches."""

    branches: tuple[Branch, ...] = ()
    verdict: Verdict | None = None
    drafting: Span | None = None
    verifying: Span | None = None
    draft_lost: bool = False
    error: Exception | None = None  # this session cannot go on; the others can
    tree: Tree | None = None  # the answer to a Grow order
    reached: int | None = None  # tokens that the target holds after a Prefill order
    draft_reached: int | None = None  # the same for the draft

    @property
    def kept(self) -> Branch | None:
        """The branch that presumed exactly this outcome, or None."""
        if self.verdict is None:
            return None
        outcome = (len(self.verdict.path), self.verdict.token)
        return next((b for b in self.branches if b.tokens and (b.after, b.tokens[0]) == outcome), None)


def as_drafted(what: Drafted) -> dict[str, Any]:
    """Return the draft's answer as fields of a report."""
    if isinstance(what, Reached):
        return {"draft_reached": what.tokens}
    return {"tree": what} if isinstance(what, Tree) else {"branches": what}
