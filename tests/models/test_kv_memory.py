"""The pool of KV pages against a list of lists: whatever is done to it, every slot holds what was last put there."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbranch.core.pages import PAGE, Copy, Pool
from specbranch.errors import CacheFull
from specbranch.models.cache.kv_memory import Table


class Model:
    """Sequences as plain lists, and the same in pages of a made-up memory."""

    def __init__(self, pages: int) -> None:
        self.pool = Pool(pages)
        self.memory = np.zeros(pages * PAGE, dtype=np.int64)
        self.lists: list[list[int]] = []
        self.tables: list[Table] = []
        self.forks = self.full = self.copies = 0

    def write(self, at: int, start: int, values: list[int]) -> None:
        """Put values in KV slots of a sequence, as a runner does: pages first, shared ones copied, then the values."""
        table, held = self.tables[at], self.lists[at]
        try:
            written = len(table.pages) * PAGE
            table.reach(start + len(values))
            table.own(min(start, written), min(start + len(values), written), self.copy)
        except CacheFull:
            table.shrink(len(held))
            self.full += 1
            return
        held[start:] = values
        self.memory[table.flat(np.arange(start, start + len(values)))] = values
        table.shrink(len(held))

    def copy(self, copies: list[Copy]) -> None:
        for source, target in copies:
            self.memory[target * PAGE : (target + 1) * PAGE] = self.memory[source * PAGE : (source + 1) * PAGE]
        self.copies += len(copies)

    def check(self) -> None:
        self.pool.check(self.tables)
        for held, table in zip(self.lists, self.tables, strict=True):
            assert self.memory[table.flat(np.arange(len(held)))].tolist() == held
            assert len(table.pages) == -(-len(held) // PAGE)


def exercise(model: Model, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        what = rng.choice(("open", "grow", "grow", "grow", "rewrite", "fork", "drop", "close"))
        if what == "open" or not model.lists:
            model.lists.append([])
            model.tables.append(Table(model.pool))
            continue
        at = rng.randrange(len(model.lists))
        held, table = model.lists[at], model.tables[at]
        if what == "grow":
            model.write(at, len(held), [rng.randrange(1 << 40) for _ in range(rng.choice((1, 7, 100, 300)))])
        elif what == "rewrite" and held:
            start = rng.randrange(len(held))
            model.write(at, start, [rng.randrange(1 << 40) for _ in range(rng.choice((1, 50)))])
        elif what == "fork":
            length = rng.randint(0, len(held))
            model.lists.append(held[:length])
            model.tables.append(table.fork(length))
            model.forks += 1
        elif what == "drop":
            length = rng.randint(0, len(held))
            del held[length:]
            table.shrink(length)
        elif what == "close":
            table.shrink(0)
            del model.lists[at], model.tables[at]
        model.check()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_every_kv_slot_holds_what_was_last_put_there(seed: int) -> None:
    exercise(Model(24), random.Random(seed), 60)


def test_the_exercise_shares_copies_and_overflows() -> None:
    model = Model(12)
    exercise(model, random.Random(1), 400)
    assert model.forks > 20 and model.copies > 5 and model.full > 5


def test_no_page_is_lost_over_many_requests() -> None:
    pool, rng = Pool(64), random.Random(0)
    live: list[Table] = []
    for _ in range(10_000):
        table = live[rng.randrange(len(live))].fork(rng.randrange(600)) if live and rng.random() < 0.3 else Table(pool)
        live.append(table)
        try:
            table.reach(rng.randrange(1, 1500))
        except CacheFull:
            table.shrink(0)
            live.pop()
        while len(live) > 8:
            live.pop(rng.randrange(len(live))).shrink(0)
        pool.check(live)
    for table in live:
        table.shrink(0)
    assert pool.free == 64


def test_a_full_pool_says_so_and_takes_nothing() -> None:
    pool = Pool(3)
    first, second = Table(pool), Table(pool)
    first.reach(2 * PAGE)
    with pytest.raises(CacheFull, match=r"Need 2 more cache pages of 256 tokens, 1 free \(of 3\)"):
        second.reach(PAGE + 1)
    assert second.pages == [] and pool.free == 1
    second.reach(PAGE)


def test_a_check_finds_a_page_that_was_forgotten_and_one_that_was_given_away() -> None:
    pool = Pool(4)
    table = Table(pool)
    table.reach(2 * PAGE)
    with pytest.raises(AssertionError, match="other users"):
        pool.check([])
    table.pages.append(table.pages[0])
    with pytest.raises(AssertionError, match="twice"):
        pool.check([table])
