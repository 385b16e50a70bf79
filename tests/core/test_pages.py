"""The prefix cache by itself: what a page is known for, who finds it, and who has to go first."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specbranch.core.pages import BROKEN, Content, PageTable, Pool, PrefilledPrompt, check_shared, chunks
from specbranch.errors import CacheFull

SIZE = 4


def read(pool: Pool, text: list[int], chunk: int = SIZE) -> PrefilledPrompt:
    """Prefill a prompt as a runner does, except for what is cached of it."""
    prompt = PrefilledPrompt(PageTable(pool))
    held = prompt.recall(text, 0, chunk)
    prompt.table.reach(len(text))
    prompt.table.own(held, len(text), lambda copies: None)
    for start, stop in chunks(range(held, len(text)), chunk):
        prompt.note(text, start, stop, chunk)
    return prompt


def known(pool: Pool, text: list[int], chunk: int = SIZE) -> int:
    """How much of a text is known."""
    prompt = PrefilledPrompt(PageTable(pool))
    kv_slots = prompt.recall(text, 0, chunk)
    prompt.table.shrink(0)
    return kv_slots


def gone(*prompts: PrefilledPrompt) -> None:
    for prompt in prompts:
        prompt.table.shrink(0)


def test_whole_chunks_serve_every_text_that_begins_with_them_and_the_last_one_its_own_end() -> None:
    pool = Pool(20, SIZE)
    gone(read(pool, list(range(10))))
    assert known(pool, list(range(10))) == 10
    assert known(pool, list(range(30))) == known(pool, list(range(9))) == known(pool, list(range(8))) == 8
    assert known(pool, [*range(7), 99, 8, 9]) == 4
    assert known(pool, [99, *range(1, 10)]) == 0
    assert known(pool, list(range(10)), chunk=2) == 0  # what was cut elsewhere may have other bits


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6, 8, 16])
def test_a_cached_prefix_ends_where_a_chunk_and_a_page_end(chunk: int) -> None:
    pool = Pool(40, SIZE)
    gone(read(pool, list(range(50)), chunk))
    for length in range(1, 70):
        found = known(pool, list(range(length)), chunk)
        assert found == 50 if length == 50 else (found % chunk == 0 and found % SIZE == 0 and found <= min(length, 50))
    assert known(pool, list(range(64)), chunk) > 50 - 2 * max(chunk, SIZE) * (chunk if chunk in (3, 5) else 1)


def test_the_pages_of_an_incomplete_chunk_serve_no_longer_prompt() -> None:
    pool = Pool(40, SIZE)
    gone(read(pool, list(range(30)), chunk=16))  # 16 and 14: pages 4 to 7 are of the broken chunk
    assert known(pool, list(range(40)), chunk=16) == 16
    assert known(pool, list(range(28)), chunk=16) == 16
    assert known(pool, list(range(30)), chunk=16) == 30


@pytest.mark.parametrize("chunk", [1, 3, SIZE, 2 * SIZE, 5])
@pytest.mark.parametrize("ends", [(19,), (8, 19), (1, 2, 19), (16, 19)])
def test_chunks_that_are_noted_at_once_are_known_like_chunks_noted_one_by_one(
    ends: tuple[int, ...], chunk: int
) -> None:
    text, pools = list(range(19)), [Pool(12, SIZE) for _ in range(2)]
    for pool, at_once in zip(pools, (True, False), strict=True):
        prompt = PrefilledPrompt(PageTable(pool))
        prompt.table.reach(len(text))
        for start, stop in pairwise((0, *ends)):
            parts = [(start, stop)] if at_once else chunks(range(start, stop), chunk)
            for part in parts:
                prompt.note(text, *part, chunk)
        prompt.check()
        gone(prompt)
    for asked in (text, text[:8], text[:12], text[:18], [*text, 7]):
        found = [known(pool, asked, chunk) for pool in pools]
        assert found[0] == found[1]
    assert (known(pools[0], text, chunk) == 19) == all(end % chunk == 0 for end in ends[:-1])


def test_what_is_prefilled_from_the_middle_of_a_chunk_on_is_not_cached() -> None:
    pool, text = Pool(40, SIZE), list(range(40))
    prompt = PrefilledPrompt(PageTable(pool))
    prompt.table.reach(40)
    prompt.note(text, 0, 8, 8)
    prompt.note(text, 8, 11, 8)  # ends here …
    prompt.note(text, 11, 16, 8)  # … and goes on
    prompt.note(text, 16, 24, 8)
    assert known(pool, text, 8) == 8
    prompt.cut(10, 8)
    prompt.note(text, 10, 16, 8)
    assert known(pool, text, 8) == 8
    prompt.cut(8, 8)
    prompt.note(text, 8, 16, 8)
    assert known(pool, text, 8) == 16
    prompt.check()


def test_the_end_of_the_text_that_was_held_longest_ago_goes_first() -> None:
    pool = Pool(8, SIZE)
    gone(read(pool, [1] * 12), read(pool, [2] * 12))
    assert (pool.free, pool.idle) == (8, 6)
    assert known(pool, [1] * 12) == 12  # held again just now
    other = PageTable(pool)
    other.reach(4 * SIZE)  # two that are free, and two more
    assert (known(pool, [2] * 12), known(pool, [1] * 12)) == (4, 12)
    other.reach(6 * SIZE)
    assert (known(pool, [2] * 12), known(pool, [1] * 12)) == (0, 8)
    pool.check([other])


def test_of_many_short_prompts_the_last_ones_stay_known_and_few_pages_are_touched() -> None:
    """What was never written takes no memory on a CPU: requests one after the other go on with the same pages."""
    pool, touched = Pool(500, SIZE), set[int]()
    for number in range(200):
        prompt = read(pool, [number, number + 1])
        touched |= set(prompt.table.pages)
        gone(prompt)
        pool.check([])
    assert len(touched) == BROKEN + 1 and pool.idle == BROKEN
    assert [known(pool, [number, number + 1]) for number in (199, 184, 183, 0)] == [2, 2, 0, 0]


def test_what_is_held_is_never_given_away() -> None:
    pool = Pool(4, SIZE)
    first = read(pool, [1] * 12)
    second = read(pool, [1] * 12)
    assert second.table.pages == first.table.pages and pool.free == 1
    gone(first)
    with pytest.raises(CacheFull, match=r"Need 2 more cache pages of 4 tokens, 1 free \(of 4\)"):
        PageTable(pool).reach(2 * SIZE)
    gone(second)
    PageTable(pool).reach(4 * SIZE)
    assert pool.idle == 0


def test_a_page_that_is_known_is_copied_or_forgotten_before_it_is_written_to() -> None:
    pool, copies = Pool(12, SIZE), list[tuple[int, int]]()
    first, second = read(pool, list(range(10))), read(pool, list(range(10)))
    last = first.table.pages[2]
    assert second.table.pages[2] == last
    second.table.own(10, 11, copies.extend)
    assert copies == [(last, second.table.pages[2])] and pool.content(last) is not None
    first.table.own(10, 11, copies.extend)  # behind what is known, and its only user
    assert first.table.pages[2] == last and len(copies) == 1 and known(pool, list(range(10))) == 10
    first.table.own(9, 10, copies.extend)
    assert known(pool, list(range(10))) == 8 and pool.content(last) is None
    pool.check([first.table, second.table])


def test_two_that_read_the_same_at_once_leave_one_page_known() -> None:
    pool, text = Pool(12, SIZE), list(range(8))
    both = [PrefilledPrompt(PageTable(pool)) for _ in range(2)]
    for prompt in both:
        prompt.table.reach(8)
    for start, stop in chunks(range(8), SIZE):
        for prompt in both:
            prompt.note(text, start, stop, SIZE)
    pool.check([prompt.table for prompt in both])
    assert known(pool, text) == 8
    gone(*both)
    assert (pool.free, pool.idle) == (12, 2)


def test_one_who_reads_the_same_behind_another_catches_up() -> None:
    """As samples of one prompt do that are read chunk by chunk, in turns."""
    pool, text = Pool(12, SIZE), list(range(16))
    first, second = read(pool, text[:2], 2), read(pool, text[:2], 2)
    for start in range(2, 16, 2):
        first.table.own(start, start + 2, lambda copies: None) if start % SIZE else first.table.reach(start + 2)
        first.note(text, start, start + 2, 2)
        held = second.recall(text[: start + 2], start, 2)
        assert held == start + 2 and second.table.pages == first.table.pages
    assert second.whole == first.whole == 16
    pool.check([first.table, second.table])


def test_settling_keeps_what_is_known_and_loses_no_page() -> None:
    pool = Pool(12, SIZE)
    held = read(pool, [1] * 12)
    gone(read(pool, [2] * 12), read(pool, [3] * 6))
    pool._users[held.table.pages[0]] += 3
    pool._free.clear()
    pool._known.popitem()  # half forgotten
    pool.settle([held.table])
    pool.check([held.table])
    assert [known(pool, [n] * 12) for n in (1, 2)] == [12, 12] and known(pool, [3] * 6) == 4
    other = PageTable(pool)
    other.reach(pool.free * SIZE)
    assert known(pool, [1] * 12) == 12 and known(pool, [2] * 12) == 0


def test_a_check_finds_a_page_with_two_meanings() -> None:
    pool = Pool(12, SIZE)
    one, other = read(pool, [1] * 8), read(pool, [2] * 8)
    tables = [one.table, other.table]
    pool._known[b"another"] = one.table.pages[0]
    with pytest.raises(AssertionError, match="other digests"):
        pool.check(tables)
    pool.settle(tables)
    pool._contents[other.table.pages[0]] = Content(b"x", SIZE)
    with pytest.raises(AssertionError, match="another text"):
        other.check()
    three = one.table.fork(8)
    check_shared([(one.table, [1] * 8), (three, [1] * 8)])
    with pytest.raises(AssertionError, match="two texts"):
        check_shared([(one.table, [1] * 8), (three, [1] * 7 + [2])])


def test_a_check_finds_a_page_that_is_idle_and_free() -> None:
    pool = Pool(4, SIZE)
    gone(read(pool, [1] * 4))
    pool._free.append(next(iter(pool._idle)))
    with pytest.raises(AssertionError, match="count as free"):
        pool.check([])
    pool._free.pop()
    pool._idle.clear()
    with pytest.raises(AssertionError, match="count as idle"):
        pool.check([])
