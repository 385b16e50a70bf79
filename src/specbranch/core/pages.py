"""Pages of a KV cache: which sequence holds which, and the prefix cache.

Owns page tables, reference counts, the bound, and the prefix cache. Prefill makes a page *known* by a digest of all
tokens up to its last, and of their cut into chunks. It stays known when nobody holds it any more (it is *idle* then),
until its memory is needed: the least recently held goes first. Knows no memory and no model. Invariants: a page is
free, idle, or has as many users as tables name it; KV slot `i` of a sequence is in page `i // size` of its table;
nobody writes to a page with another user, nor to known KV slots; a digest is that of one page, and a page is known by
one digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from math import lcm
from typing import NamedTuple, Self, overload

from specbranch.errors import PoolFull

PAGE = 256  # KV slots
BROKEN = 16  # idle pages kept that are not full: they serve the same prompt sent again, which is soon or never

Copy = tuple[int, int]  # from page, to page


def chunks(kv_slots: range, prefill_chunk: int) -> Iterator[tuple[int, int]]:
    """Cut a range of KV slots at absolute multiples of the chunk size, so that a prompt is always cut alike."""
    start = kv_slots.start
    while start < kv_slots.stop:
        stop = min((start // prefill_chunk + 1) * prefill_chunk, kv_slots.stop)
        yield start, stop
        start = stop


class Content(NamedTuple):
    """What is known of a page: the digest of all tokens up to its last, and how many of its KV slots are filled."""

    digest: bytes
    kv_slots: int


class Pool:
    """The pages of one model, and how many tables name each."""

    def __init__(self, pages: int, size: int = PAGE) -> None:
        self.pages, self.size = pages, size
        self._free = list(range(pages - 1, -1, -1))  # the last freed page is taken first: it is most likely resident
        self._users = [0] * pages
        self._known: dict[bytes, int] = {}
        self._contents: dict[int, Content] = {}  # every page in `_known` is here, too
        self._idle: dict[int, None] = {}  # known pages without users, longest idle first

    @property
    def free(self) -> int:
        """How many pages can be taken: those that nobody holds, known or not."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """How many pages nobody holds whose content is known."""
        return len(self._idle)

    def take(self, count: int) -> list[int]:
        """Return pages that nobody holds, or raise PoolFull and take none."""
        if count > self.free:
            raise PoolFull(
                f"Need {count} more cache pages of {self.size} tokens, {self.free} free (of {self.pages}). "
                "Send fewer requests at once, lower max_tokens or context_length, or raise cache_tokens."
            )
        while len(self._free) < count:
            self.forget(next(iter(self._idle)))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Count one more user of some pages."""
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)

    def drop(self, pages: Iterable[int]) -> None:
        """Count one user less; pages without any are free, or idle."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                self._lay_by(page)

    def forget_idle(self) -> None:
        """Free the pages that only the prefix cache holds."""
        for page in list(self._idle):
            self.forget(page)

    def is_shared(self, page: int) -> bool:
        """True if a page has several users."""
        return self._users[page] > 1

    def copies_due(self, tables: Iterable[PageTable]) -> int:
        """Return how many free pages copy-on-write will take.

        Each user of a page that is not full yet will write to it, and only the last of them finds it unshared.
        """
        ends = {table.pages[-1] for table in tables if table.pages}
        return sum(self._users[page] - 1 for page in ends if self.is_shared(page) and not self._is_full(page))

    def _is_full(self, page: int) -> bool:
        known = self._contents.get(page)
        return known is not None and known.kv_slots == self.size

    def learn(self, page: int, content: Content) -> None:
        """Note the content of a page that somebody holds; if another page has the same, that one stays known."""
        if content.digest not in self._known:
            self.forget(page)
            self._contents[page] = content
            self._known[content.digest] = page

    def known(self, digest: bytes) -> int | None:
        """Return the page that is known by a digest."""
        return self._known.get(digest)

    def content(self, page: int) -> Content | None:
        """Return what is known of a page."""
        return self._contents.get(page)

    def forget(self, page: int) -> None:
        """Forget the content of a page that is about to be written."""
        if page in self._contents:
            # an interrupt may come at any line: a page that can be found must never be one that can be written to
            self._known.pop(self._contents[page].digest, None)
            del self._contents[page]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def settle(self, tables: Sequence[PageTable]) -> None:
        """Recount references by these tables, and no others, after an interruption."""
        self._users = self._named(tables)
        self._contents = {page: one for page, one in self._contents.items() if self._known.get(one.digest) == page}
        self._known = {one.digest: page for page, one in self._contents.items()}
        unused = [page for page, users in enumerate(self._users) if users == 0]
        known = dict.fromkeys(page for page in unused if page in self._contents)
        self._idle = {page: None for page in self._idle if page in known} | known
        self._free = [page for page in reversed(unused) if page not in known]

    def check(self, tables: Sequence[PageTable]) -> None:
        """Raise unless these tables, and no others, hold the pages in use, and every digest is that of one page."""
        named = self._named(tables)
        if named != self._users:
            wrong = [page for page in range(self.pages) if named[page] != self._users[page]]
            raise AssertionError(f"pages {wrong} have other users than the tables say")
        unused = {page for page in range(self.pages) if named[page] == 0}
        if len(self._free) != len(set(self._free)) or set(self._free) != unused - self._contents.keys():
            raise AssertionError(f"{len(self._free)} pages count as free, of {len(unused)} that nobody names")
        if self._idle.keys() != unused & self._contents.keys():
            raise AssertionError(f"{len(self._idle)} pages count as idle, of {len(unused)} that nobody names")
        if self._known != {one.digest: page for page, one in self._contents.items()}:
            raise AssertionError("a page is known by other digests than it says")

    def _lay_by(self, page: int) -> None:
        if page not in self._contents:
            self._free.append(page)
            return
        self._idle[page] = None
        if self._contents[page].kv_slots < self.size:
            broken = [one for one in self._idle if self._contents[one].kv_slots < self.size]
            for one in broken[:-BROKEN]:
                self.forget(one)

    def _named(self, tables: Sequence[PageTable]) -> list[int]:
        """Return how many tables name each page."""
        named = [0] * self.pages
        for table in tables:
            if len(set(table.pages)) != len(table.pages):
                raise AssertionError(f"a table names a page twice: {table.pages}")
            for page in table.pages:
                named[page] += 1
        return named


class PageTable:
    """The pages of one sequence, in the order of its KV slots."""

    def __init__(self, pool: Pool, pages: Sequence[int] = ()) -> None:
        self.pool = pool
        self.pages = list(pages)

    def reach(self, kv_slots: int) -> None:
        """Allocate pages for so many KV slots, or raise PoolFull and change nothing."""
        missing = self._count(kv_slots) - len(self.pages)
        if missing > 0:
            self.pages += self.pool.take(missing)

    def shrink(self, kv_slots: int) -> None:
        """Free the pages that are wholly beyond the first `kv_slots` KV slots."""
        kept = self._count(kv_slots)
        gone = self.pages[kept:]
        # before it is freed: a page lost by an interrupt is found again, one both free and named would be written twice
        del self.pages[kept:]
        self.pool.drop(reversed(gone))  # so that the prefix cache evicts the end of a sequence first

    def own(self, start: int, stop: int, copy: Callable[[list[Copy]], None]) -> None:
        """Copy on write: make the KV slots from `start` to `stop` writable.

        Shared pages are copied first, and the known content of these KV slots is forgotten.
        """
        pool, size = self.pool, self.pool.size
        written = range(start // size, self._count(stop)) if start < stop else range(0)
        shared = [at for at in written if pool.is_shared(self.pages[at])]
        if shared:
            fresh = pool.take(len(shared))
            copy([(self.pages[at], new) for at, new in zip(shared, fresh, strict=True)])
            for at, new in zip(shared, fresh, strict=True):
                old, self.pages[at] = self.pages[at], new
                pool.drop([old])
        for at in written:
            known = pool.content(self.pages[at])
            if known is not None and known.kv_slots > max(start - at * size, 0):
                pool.forget(self.pages[at])

    def is_writable(self, kv_slot: int) -> bool:
        """True if a KV slot is allocated, and on a page of this table alone."""
        at = kv_slot // self.pool.size
        return at < len(self.pages) and not self.pool.is_shared(self.pages[at])

    def reserve(self, start: int, stop: int, copy: Callable[[list[Copy]], None]) -> None:
        """Allocate up to `stop`, and make the KV slots from `start` on writable; or raise PoolFull and change
        nothing."""
        held = len(self.pages) * self.pool.size
        self.reach(stop)
        try:
            self.own(min(start, held), min(stop, held), copy)
        except PoolFull:
            self.shrink(held)
            raise

    def fork(self, kv_slots: int) -> Self:
        """Return a table that shares the pages of the first KV slots."""
        pages = self.pages[: self._count(kv_slots)]
        self.pool.share(pages)
        return type(self)(self.pool, pages)

    def exchange(self, pages: Sequence[int]) -> None:
        """Hold these pages instead, which others may hold, too."""
        self.pool.share(pages)
        old, self.pages = self.pages, list(pages)
        self.pool.drop(reversed(old))

    def _count(self, kv_slots: int) -> int:
        return -(-kv_slots // self.pool.size)


class JoinedText(Sequence[int]):
    """Two texts, one behind the other, of which nothing is copied but what is read."""

    def __init__(self, first: Sequence[int], second: Sequence[int]) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        split = len(self._first)
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                return [self[each] for each in range(start, stop, step)]
            return [*self._first[start:stop], *self._second[max(start - split, 0) : max(stop - split, 0)]]
        at = range(len(self))[at]
        return self._first[at] if at < split else self._second[at - split]


class PrefilledPrompt:
    """The part of a sequence that prefill computed, in whole chunks from its beginning.

    It makes pages known to the prefix cache, and finds known ones. A chunk ends at a multiple of the runner's
    `prefill_chunk`, or where the prompt ends; it has the same bits wherever the same text is cut alike. So pages of
    whole chunks serve every prompt that begins with them. Pages of a last, partial chunk only serve a prompt that ends
    there. KV slots written by decode steps, or behind a partial chunk, serve nobody.
    """

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.whole = 0  # KV slots
        self._marks: list[bytes] = []  # digests of the pages that `whole` fills

    def note(self, text: Sequence[int], start: int, stop: int, prefill_chunk: int) -> None:
        """Note that prefill has computed a part of a text, of whole chunks but for its last one."""
        if start != self.whole:
            return
        self.whole = stop - stop % prefill_chunk
        pool = self.table.pool
        for at, digest in enumerate(list(self._digests(text, stop, prefill_chunk)), len(self._marks)):
            if (at + 1) * pool.size <= self.whole:
                self._marks.append(digest)
            pool.learn(self.table.pages[at], Content(digest, min(stop - at * pool.size, pool.size)))

    def recall(self, text: Sequence[int], held: int, prefill_chunk: int) -> int:
        """Take the beginning of a text from the prefix cache, if that is more than the first `held` tokens.

        Returns how many tokens are held then.
        """
        pool, end = self.table.pool, len(text)
        pages, marks = self.table.pages[: len(self._marks)], list(self._marks)
        for digest in self._digests(text, end, prefill_chunk):
            if (page := pool.known(digest)) is None:
                break
            pages.append(page)
            marks.append(digest)
        kv_slots = min(len(pages) * pool.size, end)
        if kv_slots < end:
            kv_slots -= kv_slots % lcm(prefill_chunk, pool.size)
        if kv_slots <= held:
            return held
        self.table.exchange(pages[: -(-kv_slots // pool.size)])
        self.whole = kv_slots - kv_slots % prefill_chunk
        self._marks = marks[: self.whole // pool.size]
        return kv_slots

    def cut(self, length: int, prefill_chunk: int) -> None:
        """Forget all but the first `length` KV slots."""
        self.whole = min(self.whole, length - length % prefill_chunk)
        del self._marks[self.whole // self.table.pool.size :]

    def check(self) -> None:
        """Raise if a page is known by another content than it has."""
        for page, mark in zip(self.table.pages, self._marks, strict=False):
            known = self.table.pool.content(page)
            if known is not None and known.kv_slots == self.table.pool.size and known.digest != mark:
                raise AssertionError(f"page {page} holds another text than it is known for")

    def _digests(self, text: Sequence[int], end: int, prefill_chunk: int) -> Iterator[bytes]:
        """Yield the digests of the pages of a text that ends at `end`, from the first one without a mark."""
        size, whole = self.table.pool.size, end - end % prefill_chunk
        before = self._marks[-1] if self._marks else b""
        for start in range(len(self._marks) * size, end, size):
            stop = min(start + size, end)
            cut = array("q", (prefill_chunk, 0 if stop <= whole else end, *text[start:stop]))
            before = blake2b(before + cut.tobytes(), digest_size=32).digest()
            yield before


def check_shared(texts: Iterable[tuple[PageTable, Sequence[int]]]) -> None:
    """Raise if a shared page is not at the same position of the same text in all its tables."""
    found: dict[int, tuple[int, Sequence[int]]] = {}  # its position in a table, and the text up to its end
    for table, text in texts:
        for at, page in enumerate(table.pages):
            if table.pool.is_shared(page):
                here = text[: (at + 1) * table.pool.size]
                other_at, other = found.setdefault(page, (at, here))
                if at != other_at or any(a != b for a, b in zip(here, other, strict=False)):
                    raise AssertionError(f"page {page} is that of two texts")
