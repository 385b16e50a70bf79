"""Constraints on an answer: which tokens may follow, in every state that a draft tree can reach.

Owns the states of one answer, their masks, and what a tree or a chain loses that the grammar forbids. Does not own the
parsing: a `Parser` does (`grammar/`). A state is a value: `advance` forks it, and each state is computed once, whether
the draft, the planner or the target asks. One parser serves all states of an answer: it rolls back to their common
ancestor. Orders carry states, so a mask is computed when it is needed, which may be while a device computes the logits.
Invariants: a state depends on the answer's tokens alone; a token may follow if and only if the state's mask has its
bit; end tokens may follow only if the grammar accepts the answer so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree, chosen
from specbranch.errors import BadParameter

DEAD_END = (
    "No token of this model's vocabulary can continue the answer as its grammar wants. Loosen the grammar: a pattern, "
    "or a text that is required, has characters that the tokenizer cannot write."
)
TOO_COMPLEX = (
    "{what} is too complex to be followed ({reason}). Make it simpler: fewer alternatives, or smaller bounds of "
    "repetitions."
)


Found = TypeVar("Found")


class Mask:
    """A set of token ids as packed bits: token t is bit t % 8 of byte t // 8."""

    __slots__ = ("bits",)

    def __init__(self, bits: bytes) -> None:
        self.bits = bits

    @classmethod
    def of(cls, tokens: Collection[int]) -> Mask:
        """Make the mask of some tokens."""
        bits = bytearray(max(tokens, default=-1) // 8 + 1)
        for token in tokens:
            bits[token // 8] |= 1 << token % 8
        return cls(bytes(bits))

    def __contains__(self, token: int) -> bool:
        at = token // 8
        return at < len(self.bits) and bool(self.bits[at] >> token % 8 & 1)

    def __iter__(self) -> Iterator[int]:
        for at, byte in enumerate(self.bits):
            if byte:
                yield from (8 * at + bit for bit in range(8) if byte >> bit & 1)

    def __len__(self) -> int:
        return int.from_bytes(self.bits, "little").bit_count()

    @property
    def only(self) -> int | None:
        """The token, if there is only one."""
        number = int.from_bytes(self.bits, "little")
        return number.bit_length() - 1 if number.bit_count() == 1 else None


Allowed = frozenset[int] | Mask  # the tokens that are allowed at a position


class Parser(Protocol):
    """A parser of one answer: it consumes tokens, and can roll back."""

    def consume(self, token: int) -> None:
        """Go on behind a token that the mask has."""
        ...

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        ...

    def mask(self) -> bytes:
        """Return the packed bits of the tokens that may follow; end tokens do not count."""
        ...

    def allows(self, token: int) -> bool:
        """True if the mask has a token that is no end token; much cheaper than the mask."""
        ...

    def forced(self) -> int | None:
        """Return the only token that the mask has, found without the mask; None: there are several, or it is not known.
        End tokens do not count."""
        ...

    def accepts(self) -> bool:
        """True if the answer may end here."""
        ...

    def failure(self) -> str:
        """Return why the parser has given up here, as the grammar is too complex; empty if it has not."""
        ...


NOT_ASKED = -1


class State:
    """The grammar after some tokens of an answer."""

    __slots__ = (
        "_allowed", "_answer", "_children", "_forced", "_known", "_over", "depth", "ended", "parent", "token",
    )  # fmt: skip

    def __init__(self, answer: Parsing, parent: State | None, token: int, ended: bool = False) -> None:
        self.parent, self.token, self.ended = parent, token, ended
        self.depth: int = 0 if parent is None else parent.depth + 1
        self._answer = answer
        self._children: dict[int, State | None] = {}
        self._known = ended  # an end token was chosen: nothing is asked behind it
        self._allowed: Mask | None = None
        self._over = ended
        self._forced: int | None = NOT_ASKED

    @property
    def allowed(self) -> Mask | None:
        """The tokens that may follow; None behind an end token, where nothing counts any more."""
        self._look()
        return self._allowed

    def check(self) -> None:
        """Raise if nothing may follow, and the answer may not end here either."""
        if self.allowed is not None and _is_empty(self.allowed.bits):
            self._answer.check()
            reason = self._answer.failure(self)
            raise BadParameter(TOO_COMPLEX.format(what="The answer's grammar", reason=reason) if reason else DEAD_END)

    @property
    def is_over(self) -> bool:
        """True if nothing may follow but an end token."""
        if not self._known and self._answer.accepts(self):  # otherwise something else has to follow
            self._look()
        return self._over

    @property
    def forced(self) -> int | None:
        """The one token that may follow, as far as that is known without a mask; None if there are several, or if the
        answer is over."""
        if self._known:
            token = None if self._allowed is None else self._allowed.only
            return None if token in self._answer.ends else token
        if self._forced == NOT_ASKED:
            self._forced = self._answer.forced(self)
        return self._forced

    def advance(self, token: int) -> State | None:
        """Return the state behind one more token; None: it is forbidden. It needs no mask."""
        if token not in self._children:
            self._children[token] = self._next(token)
        return self._children[token]

    def _look(self) -> None:
        """Compute what may follow, once. Where the parser gives up on that, no token may that was asked for before."""
        if not self._known:
            self._allowed, self._over = self._answer.look(self)
            self._known = True
            may = self._allowed or ()
            self._children = {token: child for token, child in self._children.items() if token in may}

    def _next(self, token: int) -> State | None:
        if self._known:
            may = self._allowed is not None and token in self._allowed
        else:
            may = token == self._forced or self._answer.allows(self, token)
        return State(self._answer, self, token, token in self._answer.ends) if may else None

    def walk(self, tokens: Sequence[int]) -> State | None:
        """Return the state behind some more tokens; None: one of them is forbidden."""
        here: State | None = self
        for token in tokens:
            here = None if here is None else here.advance(token)
        return here

    def permitted(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens may follow; none does behind an end token."""
        here: State | None = self
        for count, token in enumerate(tokens):
            here = here.advance(token) if here is not None else None
            if here is None:
                return count
        return len(tokens)

    def forced_chain(self, most: int) -> tuple[int, ...]:
        """Return the tokens that have to follow, at most so many."""
        found: list[int] = []
        here: State | None = self
        while here is not None and len(found) < most and (token := here.forced) is not None:
            found.append(token)
            here = here.advance(token)
        return tuple(found)

    def commit(self) -> State:
        """Make this state the first of its answer: all states that are not behind it are dropped."""
        self._answer.settle(self)
        if self.parent is not None:
            self.parent._children.clear()
            self.parent = None
        return self


@dataclass(frozen=True, slots=True)
class Constraint:
    """The grammar of a request: how to make a parser, and the tokens that end an answer. It has no state."""

    parser: Callable[[], Parser]
    ends: frozenset[int]

    def start(self) -> State:
        """Return the state before the first token of an answer, on a parser of its own."""
        return Parsing(self.parser(), self.ends).start


class Parsing:
    """The parser of one answer, and the state at which it is."""

    def __init__(self, parser: Parser, ends: frozenset[int]) -> None:
        self.ends = ends
        self._parser = parser
        self._error: Exception | None = None  # of the parser: it knows nothing any more
        self.start = self._at = State(self, None, ROOT)

    def look(self, state: State) -> tuple[Mask | None, bool]:
        """Return what may follow in a state, and True if that is nothing but an end token.

        End tokens may follow if the grammar accepts. The mask of a dead end is empty; there the answer fails, if the
        target goes there.
        """
        nothing: tuple[Mask | None, bool] = Mask(b""), False
        return self._asked(state, self._look, nothing)

    def forced(self, state: State) -> int | None:
        """Return the one token that may follow in a state, if that is known without its mask."""
        return self._asked(state, self._forced, None)

    def allows(self, state: State, token: int) -> bool:
        """True if a token may follow in a state."""
        if token in self.ends:
            return self.accepts(state)
        return self._asked(state, lambda: self._parser.allows(token), False)

    def accepts(self, state: State) -> bool:
        """True if the answer may end in a state."""
        return self._asked(state, self._parser.accepts, False)

    def check(self) -> None:
        """Raise what the parser has raised."""
        if self._error is not None:
            raise self._error

    def _asked(self, state: State, question: Callable[[], Found], nothing: Found) -> Found:
        """Ask the parser in a state; returns `nothing` once it has raised.

        Whoever asks may serve other requests, too. This one fails where the target goes to such a state.
        """
        if self._error is None:
            try:
                self.move(state)
                return question()
            except Exception as error:
                self._error = error
        return nothing

    def _forced(self) -> int | None:
        token = self._parser.forced()
        several = token in self.ends or (self.ends and self._parser.accepts())
        return None if several else token

    def _look(self) -> tuple[Mask | None, bool]:
        bits = bytearray(self._parser.mask())
        bits.extend(bytes(max(max(self.ends, default=0) // 8 + 1 - len(bits), 0)))
        for token in self.ends:
            bits[token // 8] &= ~(1 << token % 8) & 255
        if not self._parser.accepts():
            return Mask(bytes(bits)), False
        over = _is_empty(bits)
        for token in self.ends:
            bits[token // 8] |= 1 << token % 8
        # without an end token the answer ends here all the same
        return Mask(bytes(bits)) if self.ends or not over else None, over

    def failure(self, state: State) -> str:
        """Return why the parser has given up in a state; empty if it has not."""
        self.move(state)
        return self._parser.failure()

    def move(self, to: State) -> None:
        """Bring the parser from one state to another, by their common ancestor."""
        here, there, back = self._at, to, 0
        path: list[State] = []
        while here is not there:
            if there.depth >= here.depth:
                path.append(there)
                assert there.parent is not None, "a state of the past"
                there = there.parent
            else:
                back += 1
                assert here.parent is not None, "a state of the past"
                here = here.parent
        if back:
            self._parser.rollback(back)
            self._at = here
        for state in reversed(path):
            self._parser.consume(state.token)
            self._at = state

    def settle(self, state: State) -> None:
        """Move to a state that will have no parent: the answer goes on from there."""
        self.move(state)
        self.start = state


def _is_empty(bits: bytes | bytearray) -> bool:
    return bits.count(0) == len(bits)


Guide = Allowed | State  # the tokens that are allowed at a position, or the state that computes them when asked


def allowed_by(guide: Guide | None) -> Allowed | None:
    """Return the tokens that are allowed at a position; None: any."""
    return guide.allowed if isinstance(guide, State) else guide


def guides_in_tree(state: State, tokens: Sequence[int], parents: Sequence[int] | None) -> tuple[State | None, ...]:
    """Return the states behind the root, then behind each node of a tree; `parents` as in `Verify`.

    None: behind a node that is forbidden itself, as the target never reaches it, and behind an end token.
    """
    states: list[State | None] = [state]
    for node, token in enumerate(tokens):
        above = states[(node - 1 if parents is None else parents[node]) + 1]
        states.append(None if above is None else above.advance(token))
    return tuple([None if one is None or one.ended else one for one in states])


def pruned(state: State, tree: Tree) -> Tree:
    """Return a draft tree without the nodes that a grammar forbids."""
    states: dict[int, State] = {ROOT: state}
    for n, node in enumerate(tree.nodes):
        above = states.get(node.parent)
        if above is not None and (here := above.advance(node.token)) is not None:
            states[n] = here
    if len(states) > len(tree):
        return tree
    return chosen(tree, sorted(states.keys() - {ROOT}))


Find = Callable[[int, tuple[int, ...]], tuple[int, tuple[int, ...]]]  # see `Ngrams.find`


class GuidedLookup:
    """Lookup under a grammar: the tokens that have to follow, else what lookup finds, as far as the grammar allows."""

    def __init__(self, state: Callable[[], State], find: Find | None, words: int) -> None:
        """`find`: lookup; None: there is none. `words`: forced tokens count as a match of so many."""
        self._state, self._find, self._words = state, find, words

    def find(self, length: int, behind: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
        """Return the length of the match, and the tokens that may follow the text and `behind`; see `Ngrams.find`."""
        here = self._state().walk(behind)
        if here is None or length < 1:
            return 0, ()
        if forced := here.forced_chain(length):
            return self._words, forced
        words, tokens = self._find(length, behind) if self._find else (0, ())
        tokens = tokens[: here.permitted(tokens)]
        return (words, tokens) if tokens else (0, ())
