"""Toy models whose distribution at each position depends on *every* earlier token, so that an off-by-one in a cache
changes the output.

Owns a Runner in plain Python, and the sampling from its rows. Invariant: a node's state is made from its parent's
*cached* state and its token, as in a transformer. A wrong cache gives a wrong distribution, while `ToyLaw.logits_of`
recomputes the truth from the tokens.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from struct import Struct

from specbranch.core import noise
from specbranch.core.grammar import allowed_by
from specbranch.core.orders import Sparse, TokenLogprobs
from specbranch.core.request import Spot
from specbranch.core.rows import RowRunner
from specbranch.core.runner import ENTROPY_WEIGHT, MOST_ENTRIES, Ask, Feed, Proposal
from specbranch.core.slots import TAIL, Slots

State = int
_FOUR = Struct("<4H")
_SPREAD = math.sqrt(3.0)
START: State = 0
Logits = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ToyLaw:
    """Logits as a function of the whole prefix. `drift` mixes in a private part: 0 is the common law, 1 another one."""

    vocabulary: int = 12
    seed: int = 0
    sharpness: float = 3.0
    drift: float = 0.0

    def step(self, state: State, token: int) -> State:
        """Return the state after one more token."""
        return _read(state, token)

    def logits(self, state: State) -> Logits:
        """Return the logits after a state."""
        return _logits(self, state)

    def logits_of(self, tokens: Sequence[int]) -> Logits:
        """Return the logits after these tokens, without any cache."""
        state = START
        for token in tokens:
            state = self.step(state, token)
        return self.logits(state)


@lru_cache(maxsize=1 << 18)
def _read(state: State, token: int) -> State:
    read = state.to_bytes(8, "little") + token.to_bytes(4, "little")
    return int.from_bytes(blake2b(read, digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 16)
def _logits(law: ToyLaw, state: State) -> Logits:
    common = _normals(state, law.seed, law.vocabulary)
    if law.drift == 0.0:
        return tuple(law.sharpness * c for c in common)
    private = _normals(state, law.seed + 1, law.vocabulary)
    own = math.sqrt(law.drift)
    shared = math.sqrt(1.0 - law.drift)
    return tuple(law.sharpness * (shared * c + own * p) for c, p in zip(common, private, strict=True))


def _normals(state: State, seed: int, count: int) -> list[float]:
    """Return roughly normal numbers from a hash: the sum of four 16-bit uniforms, centred and scaled."""
    hashed = blake2b(state.to_bytes(8, "little") + bytes([seed % 256]), digest_size=8)
    out: list[float] = []
    for block in range(count):
        one = hashed.copy()
        one.update(bytes([block % 256]))
        out.append((sum(_FOUR.unpack(one.digest())) / 65536.0 - 2.0) * _SPREAD)
    return out


class ToyRunner(RowRunner[Logits]):
    """A Runner over a toy law, with a real cache of states behind the same Slots as the torch runners."""

    def __init__(
        self, law: ToyLaw, context_length: int = 4096, tail: int = TAIL, sampler: ToySampler | None = None
    ) -> None:
        super().__init__(sampler or ToySampler())
        self.law = law
        self.vocabulary = law.vocabulary
        self.context_length = context_length
        self._tail = tail
        self._slots: dict[int, Slots] = {}
        self._states: dict[int, MutableSequence[State]] = {}  # by KV slot

    def _open(self, seq: int) -> None:
        """Start an empty sequence."""
        self._slots[seq] = Slots(self.context_length + self._tail, self._tail)
        self._states[seq] = []

    def slots(self, seq: int) -> Slots:
        """The KV slots of the sequence."""
        return self._slots[seq]

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Process committed tokens."""
        states = self._states[seq]
        for slot, token in zip(self._slots[seq].extend(tokens), tokens, strict=True):
            before = states[slot - 1] if slot else START
            del states[slot:]
            states.append(self.law.step(before, token))

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        """Process new nodes."""
        return [self._feed(item) for item in work]

    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail."""
        slots, states = self._slots[seq], self._states[seq]
        for source, slot in slots.keep(nodes, commit):
            states[slot] = states[source]
        del states[len(slots) :]

    def _rewind(self, seq: int, length: int) -> None:
        """Keep only the first tokens."""
        self._slots[seq].truncate(length)
        del self._states[seq][length:]

    def _close(self, seq: int) -> None:
        """Drop a sequence."""
        del self._slots[seq], self._states[seq]

    def _feed(self, item: Feed) -> list[Logits]:
        slots, states = self._slots[item.seq], self._states[item.seq]
        rows: list[Logits] = []
        for node, token, parent in zip(slots.grow(item.tokens, item.parents), item.tokens, item.parents, strict=True):
            above = slots.slot_of(parent)  # ROOT is the slot before the tail
            states.append(self.law.step(states[above] if above >= 0 else START, token))
            assert len(states) == slots.slot_of(node) + 1
            rows.append(self.law.logits(states[-1]))
        return rows


class ListLaw:
    """A Law over a plain list of probabilities."""

    def __init__(self, probs: Sequence[float]) -> None:
        self.probs = list(probs)

    def prob(self, token: int) -> float:
        """Return p(token)."""
        return self.probs[token]

    def draw(self, u: float) -> int:
        """Draw by inversion."""
        return _invert(self.probs, u)

    def residual(self, q: Sparse) -> ListLaw:
        """Return norm((p − q)+)."""
        rest = self.probs.copy()
        for token, prob in zip(q.ids, q.probs, strict=True):
            rest[token] = max(rest[token] - prob, 0.0)
        total = sum(rest)
        return ListLaw([r / total for r in rest]) if total > 0 else self


class ToySampler:
    """A Sampler over lists of logits: temperature and both rules; no filters."""

    def pick(self, rows: Sequence[Logits], spots: Sequence[Spot]) -> list[int]:
        """Return argmax(log p + noise)."""
        return [_best(_scores(row, spot)) for row, spot in zip(rows, spots, strict=True)]

    def propose(self, rows: Sequence[Logits], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Return candidates for each row."""
        return [self._propose(row, spot, ask) for row, spot, ask in zip(rows, spots, asks, strict=True)]

    def law(self, row: Logits, spot: Spot) -> ListLaw:
        """Return the tempered distribution."""
        return ListLaw(shaped(_allowed(row, spot), spot.request.params.temperature))

    def margin(self, row: Logits, spot: Spot, first: int, second: int) -> float:
        """Return the difference of two scores, in logits."""
        scores = _scores(row, spot)
        return (scores[first] - scores[second]) * (spot.request.params.temperature or 1.0)

    def logprobs(self, row: Logits, token: int, top: int) -> TokenLogprobs:
        """Return log-probabilities at temperature 1."""
        logs = [math.log(p) for p in shaped(row, 1.0)]
        ranked = sorted(range(len(logs)), key=lambda t: (-logs[t], t))[:top]
        return TokenLogprobs(logs[token], tuple((t, logs[t]) for t in ranked))

    def _propose(self, row: Logits, spot: Spot, ask: Ask) -> Proposal:
        if max(_allowed(row, spot)) == -math.inf:
            return Proposal((), 0.0)
        if spot.request.by_ratio:
            return self._propose_by_ratio(row, spot, ask)
        scores = _scores(row, spot)
        ranked = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
        confidence = max(shaped(scores, 1.0))
        if ask.measure == "entropy":
            confidence = _entropy_bound(shaped(_allowed(row, spot), spot.request.params.temperature or 1.0))
        best = [t for t in ranked[: ask.width] if scores[t] > -math.inf]
        return Proposal(tuple(best), confidence, odds=tuple(math.exp(scores[t] - scores[best[0]]) for t in best))

    def _propose_by_ratio(self, row: Logits, spot: Spot, ask: Ask) -> Proposal:
        probs = shaped(_allowed(row, spot), spot.request.params.temperature)
        ranked = [t for t in sorted(range(len(probs)), key=lambda t: (-probs[t], t)) if probs[t] > 0.0][:MOST_ENTRIES]
        total = sum(probs[t] for t in ranked)
        q = Sparse(tuple(ranked), tuple(probs[t] / total for t in ranked))
        confidence = q.probs[0] if ask.measure == "top" else _entropy_bound(q.probs)
        if ask.heads == "top":
            odds = tuple(prob / q.probs[0] for prob in q.probs[: ask.width])
            return Proposal(q.ids[: ask.width], confidence, odds=odds)
        request = spot.request
        drawn = noise.uniform(request.seed, request.sample, spot.position, "draft", spot.attempt)
        first = q.ids[_invert(q.probs, drawn)]
        others = tuple(t for t in q.ids if t != first)
        return Proposal((first, *others[: ask.width - 1]), confidence, q)


def shaped(logits: Sequence[float], temperature: float) -> list[float]:
    """Return softmax(logits / temperature)."""
    most = max(logits)
    weights = [math.exp((x - most) / temperature) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


def _scores(row: Logits, spot: Spot) -> Sequence[float]:
    request, row = spot.request, _allowed(row, spot)
    if request.greedy:
        return row
    gumbel = noise.gumbel_row(request.seed, request.sample, spot.position, len(row))
    return [x / request.params.temperature + g for x, g in zip(row, gumbel, strict=True)]


def _allowed(row: Logits, spot: Spot) -> Logits:
    if (allowed := allowed_by(spot.allowed)) is None:
        return row
    return tuple(x if token in allowed else -math.inf for token, x in enumerate(row))


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda t: (scores[t], -t))


def _entropy_bound(probs: Sequence[float]) -> float:
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    return max(0.0, 1.0 - math.sqrt(ENTROPY_WEIGHT * entropy))


def _invert(probs: Sequence[float], u: float) -> int:
    total, last = 0.0, 0
    for index, prob in enumerate(probs):
        if prob > 0:
            total, last = total + prob, index
            if u < total:
                return index
    return last
