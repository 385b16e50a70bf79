"""One pool of cache pages for all sequences of a model: who holds which page, and the memory behind it.

Owns block tables, the counting of who shares a page, and the bound. Invariants: a page is free or has as many users as
tables name it; place `i` of a sequence lies in page `i // PAGE` of its table; nobody writes to a page that has another
user.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specbranch.errors import PoolFull
from specbranch.models.files.architecture import Architecture

PAGE = 256  # places

Copy = tuple[int, int]  # from page, to page


class Pool:
    """The pages of one model, and how many tables name each."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))  # the last one given back is taken first: what is resident stays so
        self._users = np.zeros(pages, dtype=np.int64)

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return free pages, or raise PoolFull and take none."""
        if count > len(self._free):
            raise PoolFull(
                f"Need {count} more cache pages of {PAGE} tokens, {len(self._free)} free (of {self.pages}). "
                "Send fewer requests at once, lower max_tokens or context_length, or raise cache_tokens."
            )
        taken = [self._free.pop() for _ in range(count)]
        self._users[taken] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Count one more user of some pages."""
        self._users[list(pages)] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Count one user less; pages without any are free."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether a page has several users."""
        return bool(self._users[page] > 1)

    def settle(self, tables: Sequence[Table]) -> None:
        """Count anew by what these tables, and no others, name: after something was interrupted."""
        self._users[:] = 0
        for table in tables:
            self._users[table.pages] += 1
        self._free = np.flatnonzero(self._users == 0)[::-1].tolist()

    def check(self, tables: Sequence[Table]) -> None:
        """Raise unless these tables, and no others, hold the pages that are not free."""
        named = np.zeros(self.pages, dtype=np.int64)
        for table in tables:
            if len(set(table.pages)) != len(table.pages):
                raise AssertionError(f"a table names a page twice: {table.pages}")
            named[table.pages] += 1
        if not np.array_equal(named, self._users):
            raise AssertionError(
                f"pages {np.flatnonzero(named != self._users).tolist()} have other users than the tables say"
            )
        if sorted(self._free) != np.flatnonzero(named == 0).tolist():
            raise AssertionError(f"{len(self._free)} pages count as free, {(named == 0).sum()} are")


class Table:
    """The pages of one sequence, in the order of its places."""

    def __init__(self, pool: Pool, pages: Sequence[int] = ()) -> None:
        self.pool = pool
        self.pages = list(pages)

    def reach(self, places: int) -> None:
        """Have room for so many places, or raise PoolFull and change nothing."""
        missing = -(-places // PAGE) - len(self.pages)
        if missing > 0:
            self.pages += self.pool.take(missing)

    def shrink(self, places: int) -> None:
        """Give back the pages that hold nothing but what lies beyond so many places."""
        kept = -(-places // PAGE)
        gone = self.pages[kept:]
        # before it is free: a page lost by an interrupt is found again, one both free and named would be written twice
        del self.pages[kept:]
        self.pool.drop(gone)

    def own(self, start: int, stop: int) -> list[Copy]:
        """Make the places from `start` to `stop` one's own to write to; returns which pages have to be copied."""
        shared = [at for at in range(start // PAGE, -(-stop // PAGE)) if self.pool.is_shared(self.pages[at])]
        if not shared:
            return []
        fresh = self.pool.take(len(shared))
        copies = [(self.pages[at], new) for at, new in zip(shared, fresh, strict=True)]
        for at, new in zip(shared, fresh, strict=True):
            self.pool.drop([self.pages[at]])
            self.pages[at] = new
        return copies

    def fork(self, places: int) -> Table:
        """Return a table that shares the pages of the first places."""
        pages = self.pages[: -(-places // PAGE)]
        self.pool.share(pages)
        return Table(self.pool, pages)

    def flat(self, places: np.ndarray) -> np.ndarray:
        """Where places lie in the pool, counted through all its pages."""
        found: np.ndarray = np.asarray(self.pages, dtype=np.int64)[places // PAGE] * PAGE + places % PAGE
        return found


class Memory:
    """Keys and values of all pages [pages, layers, 2, kv_heads, PAGE, head_dim]; a page is one piece, all layers in
    it."""

    def __init__(self, arch: Architecture, pages: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (pages, arch.layers, 2, arch.kv_heads, PAGE, arch.head_dim)
        # On a CPU nothing is resident before it is written. Elsewhere what a mask hides is still multiplied by 0, and
        # must not be NaN.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.data = make(shape, device=device, dtype=dtype)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of one layer, each [pages, kv_heads, PAGE, head_dim]."""
        both = self.data[:, index]
        return both[:, 0], both[:, 1]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy places, counted through all pages, to others, in every layer at once; the two may overlap."""
        self.data[targets // PAGE, :, :, :, targets % PAGE] = self.data[sources // PAGE, :, :, :, sources % PAGE]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy whole pages."""
        for source, target in copies:
            self.data[target].copy_(self.data[source])


def put(side: Tensor, places: Tensor, new: Tensor) -> None:
    """Write rows [rows, kv_heads, head_dim] to the keys or the values of one layer; `places` [2, rows]: pages, and
    places within them."""
    _in_words(side)[places[0], :, places[1]] = _in_words(new)


def gathered(side: Tensor, pages: Tensor, end: int) -> Tensor:
    """Copy the first `end` places of some pages, one behind the other, from the keys or the values of one layer.

    Returns [kv_heads, end, head_dim].
    """
    found = _in_words(side).transpose(0, 1)[:, pages]  # [kv_heads, pages, PAGE, words]
    return found.reshape(found.shape[0], -1, found.shape[-1]).view(side.dtype)[:, :end]


def _in_words(x: Tensor) -> Tensor:
    """View the last dimension in words of 16 bytes, if it can be: what is indexed is moved number by number, however
    small those are."""
    return x.view(torch.complex128) if x.shape[-1] * x.element_size() % 16 == 0 else x


def page_bytes(arch: Architecture, dtype: torch.dtype) -> int:
    """How much memory a page takes."""
    return 2 * arch.layers * arch.kv_heads * PAGE * arch.head_dim * dtype.itemsize
