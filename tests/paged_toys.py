"""A toy whose cache is a bounded pool of pages, with a prefix cache: what a scheduler has to reckon with, without a
model.

Owns the memory behind the pages; who holds which, and what is known, is `core.pages`, as for the native runner.
Invariant: a state is read from the page it lies in, so that a page with two meanings changes the output.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any

from specbranch.core.pages import Copy, PageTable, Pool, PrefilledPrompt, check_shared, chunks
from specbranch.core.runner import Feed
from specbranch.core.slots import TAIL
from specbranch.errors import CacheFull
from specbranch.lab.toys.toys import START, Logits, State, ToyLaw, ToyRunner


class PagedStates(MutableSequence[State]):
    """The states of one sequence, in pages; only its end can be added to or cut."""

    def __init__(self, pool: Pool, memory: list[State]) -> None:
        self.table, self._memory, self._length = PageTable(pool), memory, 0
        self.read = PrefilledPrompt(self.table)

    def reach(self, length: int) -> None:
        """Reserve room for some states, those behind the present end unshared, or raise CacheFull."""
        self.table.reserve(self._length, length, self._copy)

    def recall(self, text: Sequence[int], chunk: int) -> int:
        """Take what is known of the beginning of a text; returns how many states there are then."""
        self._length = self.read.recall(text, self._length, chunk)
        return self._length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, slot: Any) -> Any:
        return self._memory[self._flat(range(self._length)[slot])]

    def __setitem__(self, slot: Any, state: Any) -> None:
        # what moves within a tail lies behind all that others share of the page, as in the native runner
        self._memory[self._flat(slot)] = state

    def __delitem__(self, kv_slots: Any) -> None:
        assert isinstance(kv_slots, slice) and kv_slots.stop is None
        self._length = min(self._length, kv_slots.start)
        self.table.shrink(self._length)

    def insert(self, index: int, value: State) -> None:
        """Add a state at the end."""
        assert index == self._length
        self.reach(index + 1)
        self._length += 1
        self._memory[self._flat(index)] = value

    def _flat(self, slot: int) -> int:
        size = self.table.pool.size
        return self.table.pages[slot // size] * size + slot % size

    def _copy(self, copies: list[Copy]) -> None:
        size = self.table.pool.size
        for source, target in copies:
            self._memory[target * size : (target + 1) * size] = self._memory[source * size : (source + 1) * size]


class PagedToyRunner(ToyRunner):
    """A toy with `pages` pages of `page` KV slots each, which prefills in chunks of `prefill_chunk` tokens."""

    _states: dict[int, PagedStates]  # type: ignore[assignment] # what the toy does with its states is the same

    def __init__(
        self,
        law: ToyLaw,
        pages: int = 1024,
        page: int = 8,
        prefill_chunk: int = 8,
        context_length: int = 4096,
        tail: int = TAIL,
    ) -> None:
        super().__init__(law, context_length, tail)
        self.pool, self.prefill_chunk, self.page = Pool(pages, page), prefill_chunk, page
        self._memory = [START] * (pages * page)

    @property
    def kv_slots(self) -> int:
        """How many KV slots the cache has, for all sequences together."""
        return self.pool.pages * self.pool.size

    @property
    def kv_slots_free(self) -> int:
        """How many of them can be had, those left out that copies of shared pages will take."""
        due = self.pool.copies_due(states.table for states in self._states.values())
        return max(self.pool.free - due, 0) * self.pool.size

    def demand(self, seq: int, count: int) -> None:
        """Make sure that this many more nodes can be fed, or raise CacheFull."""
        super().demand(seq, count)
        self._states[seq].reach(len(self._states[seq]) + count)

    def check(self) -> None:
        """Raise if the pool and the open sequences do not agree, or a page has two meanings."""
        self.pool.check([states.table for states in self._states.values()])
        check_shared((states.table, self.slots(seq).prefix) for seq, states in self._states.items())
        for states in self._states.values():
            states.read.check()

    def _open(self, seq: int) -> None:
        super()._open(seq)
        self._states[seq] = PagedStates(self.pool, self._memory)

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        states, slots = self._states[seq], self.slots(seq)
        start = len(slots.prefix)
        self._reach({seq: len(tokens)})
        super()._extend(seq, tokens)
        if self.prefix_cache:
            for prefill_chunk in chunks(range(start, len(slots.prefix)), self.prefill_chunk):
                states.read.note(slots.prefix, *prefill_chunk, self.prefill_chunk)

    def _recall(self, seq: int, tokens: Sequence[int]) -> None:
        slots = self.slots(seq)
        before = len(slots.prefix)
        slots.extend(tokens[before : self._states[seq].recall(tokens, self.prefill_chunk)])

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        self._reach({item.seq: len(item.tokens) for item in work})
        return super()._score(work)

    def _rewind(self, seq: int, length: int) -> None:
        self._states[seq].read.cut(length, self.prefill_chunk)
        super()._rewind(seq, length)

    def _close(self, seq: int) -> None:
        del self._states[seq][0:]
        super()._close(seq)

    def _reach(self, counts: dict[int, int]) -> None:
        """Have pages for all that is to be read, or change nothing."""
        try:
            for seq, count in counts.items():
                self._states[seq].reach(len(self._states[seq]) + count)
        except CacheFull:
            for seq in counts:
                self._states[seq].table.shrink(len(self._states[seq]))
            raise
