"""A Runner for a draft with another vocabulary: outside it speaks the target's ids, inside the draft's own.

Owns both views of a sequence: the target's tokens (`Slots`), and what the draft has read of their text (`Reading`).
Does not own which token stands for which (`text/translation.py`), or the forward, which the draft's own runner does.
Invariants: noise, positions, penalties and masks are those of the target's tokens, as everywhere. Each proposal is from
a law over the target's ids that depends on the draft's logits alone, so both rules apply to it.

A node is computed when something is asked about it, or behind it: its text may be other draft tokens than its parent's
and some more. The law of a node has three parts:
- each draft token counts for the target's first token of its text;
- the draft may have meant a longer token than the one that the text ends with (`_with_longer`);
- the target may have a token for several of the draft's: the draft is asked what follows its choice (`_look_ahead`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specbranch.core.reading import Reading, Translates
from specbranch.core.request import Request, Spot
from specbranch.core.runner import Ask, Feed, Proposal, Trial, Verdicts
from specbranch.core.slots import ROOT, Slots
from specbranch.errors import CacheFull
from specbranch.models.forward.transfer import Transfer
from specbranch.models.runners.torch_runner import TorchRunner
from specbranch.models.sampling.logit_rows import TensorRow, rows_of
from specbranch.models.sampling.noise_rows import shared_noise
from specbranch.models.sampling.sampler import TorchSampler
from specbranch.models.sampling.sheet import is_noisy

FOLLOWERS = 8  # likeliest draft tokens behind another that are tokenised together with it
LONGER = 8  # likeliest longer draft tokens that a text may be the beginning of
MOST_LOOKS = 4  # draft tokens of one target token that are looked for by forwards
MOST_UNREAD = 16  # settled draft tokens that a decode step computes; more are prefilled
NO_PROPOSAL = Proposal((), 0.0)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A state to roll back to: tokens of the target, tokens that the draft has committed, and its reading then."""

    tokens: int
    committed: int
    reading: Reading


@dataclass(slots=True)
class _Sequence:
    """One sequence: the target's tokens, and the draft's reading behind each node."""

    request: Request
    slots: Slots
    root: Reading  # behind the prefix
    marks: list[_Mark]
    readings: list[Reading] = field(default_factory=list)  # behind each node of the tail

    def reading(self, node: int) -> Reading:
        """Return what the draft has read behind a node."""
        return self.root if node == ROOT else self.readings[node]

    def commit(self, count: int) -> None:
        """Note that the draft has committed so many more settled tokens."""
        if count:
            self.root = self.root.behind(count)
            self.readings = [reading.behind(count) for reading in self.readings]


@dataclass(slots=True)
class _Question:
    """One ask while its law is made."""

    ask: Ask
    spot: Spot
    reading: Reading
    law: Tensor  # [the target's ids], sums to 1
    weight: float  # share of the draft's own next tokens in the law; the rest belongs to longer last tokens
    ahead: tuple[int, ...] = ()  # draft tokens whose target token is being looked for
    chance: float = 0.0  # the part of the law that they have


class TranslatingRunner:
    """A Runner that is asked in the target's ids, over the Runner of a draft that has others."""

    def __init__(self, own: TorchRunner, translation: Translates) -> None:
        self.own, self._translation = own, translation
        self.device = own.device
        self._transfer = Transfer(own.device)  # laws are made on the caller's stream, which the draft's may not be
        self.sampler = TorchSampler(translation.vocabulary, shared_noise(), self._transfer)
        first = torch.tensor(translation.first_ids, device=own.device)[: own.vocabulary]
        self._said = (first >= 0).nonzero()[:, 0]  # draft ids that the target can say
        self._first = first[self._said]
        self._start = _Mark(0, 0, translation.start)
        self._longer: dict[int, Tensor] = {}
        self._open: dict[int, _Sequence] = {}

    # --- sizes ---

    @property
    def vocabulary(self) -> int:
        """How many token ids the target has."""
        return self._translation.vocabulary

    @property
    def context_length(self) -> int:
        """How many tokens one sequence may hold; if the draft has more for the same text, less is drafted."""
        return self.own.context_length

    @property
    def prefill_chunk(self) -> int:
        """How many tokens one prefill chunk has."""
        return self.own.prefill_chunk

    @property
    def most_prefill(self) -> int | None:
        """How many prompt tokens one forward computes at most."""
        return self.own.most_prefill

    @property
    def page(self) -> int:
        """How many KV slots a page has."""
        return self.own.page

    @property
    def kv_slots(self) -> int | None:
        """How many KV slots there are for all sequences together."""
        return self.own.kv_slots

    @property
    def kv_slots_free(self) -> int:
        """How many KV slots are free."""
        return self.own.kv_slots_free

    @property
    def prefix_cache(self) -> bool:
        """True if prompts share computed pages."""
        return self.own.prefix_cache

    @prefix_cache.setter
    def prefix_cache(self, shared: bool) -> None:
        self.own.prefix_cache = shared

    def limit(self, vocabulary: int) -> None:
        """Never propose a token with this id or a higher one."""
        self.sampler = TorchSampler(min(vocabulary, self.vocabulary), shared_noise(), self._transfer)

    # --- sequences ---

    def open(self, seq: int, request: Request) -> None:
        """Make room for a new, empty sequence."""
        self.own.open(seq, request)
        own = self.own.slots(seq)
        start = self._start
        self._open[seq] = _Sequence(request, Slots(own.capacity, own.tail_limit), start.reading, [start])

    def slots(self, seq: int) -> Slots:
        """Return the sequence's tokens, in the target's ids."""
        return self._open[seq].slots

    def demand(self, seq: int, count: int) -> None:
        """Reserve memory for `count` more nodes, or raise CacheFull."""
        held = self._open[seq]
        held.slots.demand(count)
        self._read_settled(seq, held)
        self.own.demand(seq, min(count, self.own.slots(seq).room))

    def recall(self, seq: int, tokens: Sequence[int]) -> int:
        """Take the beginning of a prompt from the prefix cache; returns how many tokens the sequence holds then."""
        held, tokens = self._open[seq], tuple(tokens)  # they may be read from the prefix, which changes
        settled, marks = self._read_through(self._start, tokens)
        self._drop_tail(seq)
        known = self.own.recall(seq, settled)
        best = max((mark for mark in marks if mark.committed <= known), key=lambda mark: mark.tokens)
        if best.tokens > len(held.slots.prefix):
            self.own.rewind(seq, best.committed)
            held.slots.truncate(0)
            held.slots.extend(tokens[: best.tokens])
            held.root, held.marks = best.reading, [self._start, best]
        else:
            self._rewind(seq, len(held.slots.prefix))
        return len(held.slots.prefix)

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Prefill: append tokens to the committed prefix, without logits."""
        held = self._open[seq]
        before = _Mark(len(held.slots.prefix), len(self.own.slots(seq).prefix), held.root)
        settled, marks = self._read_through(before, tokens)
        held.slots.demand(len(tokens), held.slots.capacity - len(held.slots))
        self._drop_tail(seq)
        self.own.extend(seq, settled)
        held.slots.extend(tokens)
        held.root = marks[-1].reading
        held.marks.append(marks[-1])

    def flush(self) -> None:
        """Compute all prefill that was put off."""
        self.own.flush()

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail and drop the rest; the first `commit` of them, a path, join the prefix."""
        held = self._open[seq]
        kept = [held.readings[node] for node in nodes]
        held.slots.keep(nodes, commit)
        if commit:
            held.root = kept[commit - 1]
        held.readings = kept[commit:]
        paths = [self._path(seq, reading.ids) for reading in (held.root, *held.readings)]
        settled = min(len(paths[0]), held.root.settled)
        self.own.keep(seq, sorted({node for path in paths for node in path}), settled)
        held.commit(settled)
        if commit:
            held.marks.append(_Mark(len(held.slots.prefix), len(self.own.slots(seq).prefix), held.root))

    def rewind(self, seq: int, length: int) -> None:
        """Drop the tail, and the prefix beyond its first `length` tokens."""
        self._open[seq].slots.truncate(length)
        self._rewind(seq, length)

    def close(self, seq: int) -> None:
        """Drop the sequence and free its KV slots."""
        self.own.close(seq)
        del self._open[seq]

    # --- questions ---

    def feed(self, work: Sequence[Feed]) -> None:
        """Add new nodes; the last of each path are computed."""
        self._compute([(feed.seq, reading) for feed in work for reading in self._added(feed)])

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Add new nodes, and answer questions about these or earlier ones."""
        ends = [(feed.seq, reading) for feed in work for reading in self._added(feed)]
        self._compute([(ask.seq, self._open[ask.seq].reading(ask.node)) for ask in asks] + ends)
        found = {number: question for number, ask in enumerate(asks) if (question := self._question(ask))}
        self._look_ahead(list(found.values()))
        answers = dict(zip(found, self._sampled(list(found.values())), strict=True))
        return [answers.get(number, NO_PROPOSAL) for number in range(len(asks))]

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """A draft with another vocabulary never verifies."""
        raise NotImplementedError("a draft with another vocabulary than its target's does not verify")

    def knows(self, seq: int, node: int) -> bool:
        """True if questions about a node can be answered without computing it again."""
        return self._node(seq, self._open[seq].reading(node)) is not None

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second` after a node; 0 is a tie."""
        question = self._question(Ask(seq, node))
        if question is None:
            raise ValueError(f"node {node} of sequence {seq} is not computed")
        return self.sampler.margin(rows_of(question.law[None].log())[0], question.spot, first, second)

    # --- what the draft has read ---

    def _read_through(self, start: _Mark, tokens: Sequence[int]) -> tuple[list[int], list[_Mark]]:
        """Return the settled draft tokens behind a state once more tokens are read, and the states on the way."""
        settled: list[int] = []
        marks, reading = [start], start.reading
        for number, token in enumerate(tokens, start.tokens + 1):
            reading = self._translation.read(reading, token)
            settled += reading.ids[: reading.settled]
            reading = reading.behind(reading.settled)
            marks.append(_Mark(number, start.committed + len(settled), reading))
        return settled, marks

    def _rewind(self, seq: int, length: int) -> None:
        """Take the draft back to the last state within the first `length` tokens, and read on from there."""
        held = self._open[seq]
        held.readings = []
        there = len(self.own.slots(seq).prefix)
        while held.marks[-1].tokens > length or held.marks[-1].committed > there:
            held.marks.pop()
        mark = held.marks[-1]
        self.own.rewind(seq, mark.committed)
        held.root = mark.reading
        for token in held.slots.prefix[mark.tokens :]:
            held.root = self._translation.read(held.root, token)

    def _read_settled(self, seq: int, held: _Sequence) -> None:
        """Prefill settled tokens if many are not computed, as after a roll-back."""
        if len(self.own.slots(seq).prefix) < held.marks[-1].committed:  # a forward that failed has rolled it back
            self._rewind(seq, len(held.slots.prefix))
        unread = held.root.settled - len(self._path(seq, held.root.ids))
        if unread > MOST_UNREAD:
            self._drop_tail(seq)
            self.own.extend(seq, held.root.ids[: held.root.settled])
            held.commit(held.root.settled)
            held.marks.append(_Mark(len(held.slots.prefix), len(self.own.slots(seq).prefix), held.root))

    def _drop_tail(self, seq: int) -> None:
        """Drop the computed nodes behind the draft's committed tokens."""
        own = self.own.slots(seq)
        if own.tokens:
            self.own.rewind(seq, len(own.prefix))

    def _added(self, feed: Feed) -> list[Reading]:
        """Add nodes; returns the readings behind those without children among them."""
        held = self._open[feed.seq]
        nodes = held.slots.grow(feed.tokens, feed.parents)
        for token, parent in zip(feed.tokens, feed.parents, strict=True):
            held.readings.append(self._translation.read(held.reading(parent), token))
        return [held.readings[node] for node in nodes if node not in feed.parents]

    # --- what the draft has computed ---

    def _path(self, seq: int, ids: Sequence[int]) -> list[int]:
        """Return the draft's nodes that carry the beginning of some ids."""
        own, path, node = self.own.slots(seq), [], ROOT
        at = {edge: child for child, edge in enumerate(zip(own.parents, own.tokens, strict=True))} if own.tokens else {}
        for token in ids:
            if (found := at.get((node, token))) is None:
                break
            node = found
            path.append(node)
        return path

    def _node(self, seq: int, reading: Reading, ahead: tuple[int, ...] = ()) -> int | None:
        """Return the draft's node at the end of a reading, if its logits are there."""
        ids = reading.ids + ahead
        path = self._path(seq, ids)
        if len(path) < len(ids):
            return None
        node = path[-1] if path else ROOT
        return node if self.own.knows(seq, node) else None

    def _compute(self, wanted: Sequence[tuple[int, Reading]]) -> None:
        """Compute what the draft has not read of some texts, in one forward; texts without room are left out."""
        work: dict[int, tuple[list[int], list[int]]] = {}
        for seq, reading in wanted:
            tokens, parents = work.setdefault(seq, ([], []))
            self._add_unread(seq, reading.ids, tokens, parents)
        fitting = []
        for seq, (tokens, parents) in work.items():
            try:
                self.own.demand(seq, len(tokens))
            except CacheFull:
                continue
            fitting += [Feed(seq, tuple(tokens), tuple(parents))] if tokens else []
        self.own.score(fitting)  # not `feed`: the rows are read here, on the caller's stream

    def _add_unread(self, seq: int, ids: Sequence[int], tokens: list[int], parents: list[int]) -> None:
        """Add the uncomputed ids of a path to the new nodes of a sequence, if they all fit."""
        own = self.own.slots(seq)
        path, start = self._path(seq, ids), len(own.tokens)
        node, at = path[-1] if path else ROOT, len(path)
        new = {(parent, token): start + n for n, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        while at < len(ids) and (node, ids[at]) in new:
            node, at = new[node, ids[at]], at + 1
        if len(tokens) + len(ids) - at > own.room or len(own.prefix) + len(ids) > self.own.context_length:
            return  # the draft may need more tokens for a text than the target
        for token in ids[at:]:
            parents.append(node)
            tokens.append(token)
            node = start + len(tokens) - 1

    def _chances(self, seq: int, node: int) -> Tensor:
        """Return the draft's law after one of its nodes [the draft's ids]."""
        return self.own.row(seq, node).logits[: self.own.vocabulary].float().softmax(dim=-1)

    # --- the law over the target's ids ---

    @torch.inference_mode()
    def _question(self, ask: Ask) -> _Question | None:
        """Make the law that an ask is answered from; None: the draft has not computed the node."""
        held = self._open[ask.seq]
        reading = held.reading(ask.node)
        node = self._node(ask.seq, reading)
        if node is None:
            return None
        chances = self._chances(ask.seq, node)
        law = chances.new_zeros(self.vocabulary).index_add_(0, self._first, chances[self._said])
        total = float(law.sum())
        if total <= 0.0:
            return None
        slots = held.slots
        position = len(slots.prefix) if ask.node == ROOT else slots.position(ask.node) + 1
        spot = Spot(held.request, position, lambda: slots.sequence(ask.node), ask.attempt, ask.allowed)
        return self._with_longer(_Question(ask, spot, reading, law / total, 1.0 / total))

    def _with_longer(self, question: _Question) -> _Question:
        """Add that the draft may have meant a longer token than the one that the text ends with."""
        seq, ids = question.ask.seq, question.reading.ids
        if not question.reading.open or len(ids) <= question.reading.settled:
            return question
        before = self._node(seq, Reading(ids[:-1]))
        longer = self._longer_than(ids[-1])
        if before is None or not len(longer):
            return question
        chances = self._chances(seq, before)
        parts, total = chances[longer], float(chances[longer].sum())
        share = float(chances[ids[-1]]) / max(float(chances[ids[-1]]) + total, 1e-30)
        likeliest, numbers = parts.topk(min(LONGER, len(longer)))
        question.law *= share
        question.weight *= share
        for chance, draft_id in zip(likeliest.tolist(), longer[numbers].tolist(), strict=True):
            token = self._translation.first_after(draft_id, ids[-1])
            if token is not None:
                question.law[token] += (1.0 - share) * chance / max(total, 1e-30)
        return question

    def _longer_than(self, draft_id: int) -> Tensor:
        if draft_id not in self._longer:
            found = [one for one in self._translation.longer(draft_id) if one < self.own.vocabulary]
            self._longer[draft_id] = torch.tensor(found, dtype=torch.int64, device=self.device)
        return self._longer[draft_id]

    @torch.inference_mode()
    def _look_ahead(self, questions: list[_Question]) -> None:
        """Ask the draft what follows its choices where the target may have one token for both.

        The rows are needed anyway, if the choice is drafted and the next token is asked for.
        """
        for _ in range(MOST_LOOKS):
            questions = [
                one for one, best in zip(questions, self._best(questions), strict=True) if self._goes_on(one, best)
            ]
            if not questions:
                return
            self._compute([(one.ask.seq, Reading(one.reading.ids + one.ahead)) for one in questions])
            questions = [one for one in questions if self._followed(one)]

    def _best(self, questions: list[_Question]) -> list[int]:
        """Return the token of each law that is likely to be chosen, with noise where the answer has it; −1: none."""
        noisy = [one for one in questions if is_noisy(one.spot) or one.ask.allowed is not None]
        asks = [Ask(one.ask.seq, one.ask.node, heads="top", allowed=one.ask.allowed) for one in noisy]
        found = self.sampler.propose(self._rows(noisy), [one.spot for one in noisy], asks)
        chosen = {id(one): said.tokens[0] if said.tokens else -1 for one, said in zip(noisy, found, strict=True)}
        return [chosen[id(one)] if id(one) in chosen else int(one.law.argmax()) for one in questions]

    def _goes_on(self, question: _Question, best: int) -> bool:
        """Choose the draft tokens to look behind; returns False if the choice is final."""
        if question.ahead:
            whole = self._translation.first_of(question.ahead)
            return whole is not None and whole == (best, True)
        same = self._translation.same(best)
        if same is None:
            return False
        node = self._node(question.ask.seq, question.reading)
        if node is None:
            return False
        question.ahead = (same,)
        question.chance = question.weight * float(self._chances(question.ask.seq, node)[same])
        return True

    def _followed(self, question: _Question) -> bool:
        """Split the chance of the tokens ahead among the target's tokens that they may be the beginning of."""
        node = self._node(question.ask.seq, question.reading, question.ahead)
        first = self._translation.first_of(question.ahead)
        if node is None or first is None:
            return False
        chances, ids = self._chances(question.ask.seq, node).topk(FOLLOWERS)
        best, best_chance = question.ahead, 0.0
        for chance, draft_id in zip(chances.tolist(), ids.tolist(), strict=True):
            found = self._translation.first_of((*question.ahead, draft_id))
            if found is not None and found[0] != first[0]:
                part = min(question.chance * chance, float(question.law[first[0]]))
                question.law[first[0]] -= part
                question.law[found[0]] += part
                if part > best_chance and found[1]:
                    best, best_chance = (*question.ahead, draft_id), part
        question.ahead, question.chance = best, best_chance
        return best_chance > 0.0

    def _sampled(self, questions: list[_Question]) -> list[Proposal]:
        spots, asks = [one.spot for one in questions], [one.ask for one in questions]
        return self.sampler.propose(self._rows(questions), spots, asks)

    def _rows(self, questions: list[_Question]) -> list[TensorRow]:
        return rows_of(torch.stack([one.law for one in questions]).log_()) if questions else []
