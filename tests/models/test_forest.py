"""The forest: a session of it commits, sends and looks up what `core` does, and the kernels do as their twins."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from forests import (
    CONTEXT,
    PAGES,
    SPARE,
    WORDS,
    Side,
    admit,
    assert_same_step,
    plant,
    side,
    some_chances,
    some_growth,
    some_picks,
    some_proposals,
    some_request,
    some_tree,
)
from specbranch.core.noise import keys
from specbranch.core.orders import Verdict
from specbranch.core.sending import Sending, sent
from specbranch.core.session import Session
from specbranch.core.slots import ROOT, Slots
from specbranch.core.trees import NO_TREE, GrowingTree, Node, below, chosen
from specbranch.core.verify import accept_match
from specbranch.models.gpu.forest_growing import new_growth
from specbranch.models.gpu.forest_layout import (
    DECODING,
    LIMITED,
    REPORT_FIELDS,
    SENT_ROWS,
    STOPPED,
    TARGET_PAGES,
    node_table,
    read_tree,
    weights_of,
)
from specbranch.models.gpu.granting import _verify_rows, send_plainly
from specbranch.models.gpu.layout import Bucket, pack, views
from specbranch.models.gpu.looking import look_plainly
from specbranch.models.gpu.settling import settle_plainly
from specbranch.models.gpu.tree_layout import NODE_FIELDS
from specbranch.models.gpu.trees import _candidates

pytestmark = pytest.mark.usefixtures("one_thread")
NO_PRICE = [0.0] * 64
ALONE = Bucket(64, 4)
STATES = {None: DECODING, "stop": STOPPED, "length": LIMITED}


def test_a_tree_read_from_its_table_has_the_same_nodes_of_the_same_types() -> None:
    rng = random.Random(4)
    for most in (1, 5, 60):
        tree, kv_slots = some_tree(rng, most, 20, root_scored=True)
        nodes = [node._replace(sent=rng.random() < 0.5) for node in tree.nodes]
        found = read_tree(node_table(nodes, kv_slots), True)
        assert found == replace(tree, nodes=tuple(nodes), steps=())
        assert [list(map(type, node)) for node in found.nodes] == [list(map(type, node)) for node in nodes]
        assert all(type(node) is Node for node in found.nodes)
    assert read_tree(np.empty((0, len(NODE_FIELDS))), False) is NO_TREE


def test_a_tree_whose_child_comes_before_its_parent_is_refused() -> None:
    nodes = [Node(1, 1, 0.5, 0.5, 2), Node(2, ROOT, 0.5, 0.5, 1)]
    with pytest.raises(AssertionError):
        read_tree(node_table(nodes, [0, 1]), True)


def one_session(rng: random.Random, nodes: int = 32) -> tuple[Side, Session]:
    """A forest of one session with a tree, and the same session of `core`."""
    alone, request = side(1, nodes, "cpu", False), some_request(rng)
    tokens = [rng.randrange(WORDS) for _ in range(rng.randrange(1, 600))]
    session = Session(0, tokens, request, len(tokens) + rng.randrange(1, 12))
    pages = [rng.randrange(1, 500) for _ in range(PAGES)]
    alone.forest.admit(0, request, tokens, session.limit, (pages, pages[::-1]))
    plant(rng, [alone], 0, nodes)
    alone.granting.price(1.0, NO_PRICE)
    return alone, session


@pytest.mark.parametrize("seed", range(30))
def test_a_settled_session_has_the_tokens_and_the_tree_that_core_gives_it(seed: int) -> None:
    rng = random.Random(seed)
    alone, session = one_session(rng)
    forest, length = alone.forest, len(session.tokens)
    alone.send(ALONE)
    grown, _ = forest.tree(0)
    numbers = [n for n, node in enumerate(grown.nodes) if node.sent]
    order = session.verify_tree(chosen(grown, numbers))
    picks, results = some_picks(rng, alone, ALONE)
    results[:] = 0.5
    path, token = accept_match(order, picks.tolist())
    session.commit(order.tokens, Verdict(path, token))
    alone.settle(ALONE, picks, results)
    scalars = forest.scalars(0)
    assert forest.text(0) == session.tokens
    assert scalars["state"] == STATES[session.finished]
    count = len(session.tokens) - length
    said = forest.reports[0, : len(REPORT_FIELDS) + count].tolist()
    assert [*said[:2], *said[len(REPORT_FIELDS) :]] == [count, scalars["state"], *session.tokens[length:]]
    assert said[4:6] == [len(grown), grown.root_scored]
    if session.finished:
        return
    here = numbers[path[-1]] if path else -1
    hit = grown.child(here, token)
    kept, _ = forest.tree(0)
    assert kept == (GrowingTree(below(grown, hit)).tree() if hit is not None else type(grown)())
    slots = Slots(CONTEXT)
    slots.extend(session.tokens[: length - 1])
    slots.grow([session.tokens[length - 1], *order.tokens], [-1, *(parent + 1 for parent in order.parents or ())])
    moves = np.array(slots.keep([0, *(node + 1 for node in path)], len(path) + 1), dtype=np.int64).reshape(-1, 2).T
    assert forest.moves[0, TARGET_PAGES, :, : scalars["target_moves"]].tolist() == moves.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_a_lone_session_sends_what_core_sends_in_the_step_that_is_packed_for_it(seed: int) -> None:
    rng = random.Random(seed)
    alone, _ = one_session(rng)
    forest = alone.forest
    seconds = np.cumsum([rng.random() * 0.1 for _ in range(64)]).tolist()
    alone.granting.price(2.0, seconds)
    scalars, (tree, _) = forest.scalars(0), forest.tree(0)
    grown = GrowingTree(tree).tree()
    prices = tuple(2.0 * (seconds[rows] - seconds[0]) for rows in range(1, SENT_ROWS))
    expected = sent(grown, Sending(prices, min(scalars["limit"] - scalars["length"] - 1, 32)))
    alone.send(ALONE)
    now, _ = forest.tree(0)
    assert [n for n, node in enumerate(now.nodes) if node.sent] == expected
    assert int(alone.granting.total[0]) == 1 + len(expected)
    rows, choosing = _verify_rows(forest, 0, grown, expected)
    packed, bucket = pack([rows], SPARE, choosing, None, ALONE)
    assert bucket == ALONE
    expected_side = side(1, 32, "cpu", False)
    expected_side.packed[: len(packed)] = torch.from_numpy(packed)
    assert_same_step(expected_side, alone, ALONE)


def test_every_decoding_session_has_a_row_and_the_noise_of_its_position() -> None:
    rng = random.Random(0)
    plain = side(8, 32, "cpu", False)
    for row in (0, 3, 4, 7):
        admit(rng, [plain], row)
    plain.granting.price(1.0, [10.0 * rows for rows in range(64)])
    plain.send(Bucket(16, 16))
    step = views(plain.packed, Bucket(16, 16))
    assert step.choosing is not None
    assert int(plain.granting.total[0]) == 4
    for at, row in enumerate((0, 3, 4, 7)):
        scalars = plain.forest.scalars(row)
        assert step.positions[at] == scalars["length"] - 1
        assert step.tokens[at] == plain.forest.text(row)[-1]
        seed = (scalars["seed_low"] & 0xFFFFFFFF) | (scalars["seed_high"] & 0xFFFFFFFF) << 32
        noise = keys(seed, scalars["sample"], scalars["length"]) if scalars["noisy"] else (0, 0)
        assert tuple(number & 0xFFFFFFFF for number in step.choosing[1:3, at].tolist()) == noise


def test_the_likeliest_nodes_of_all_sessions_get_the_rows_that_are_left() -> None:
    rng = random.Random(2)
    plain = side(4, 32, "cpu", False)
    for row in range(4):
        admit(rng, [plain], row)
        plain.forest.set(row, limit=CONTEXT - 100)
        plant(rng, [plain], row, 32)
    plain.granting.price(1.0, [0.0] * 12)
    plain.send(Bucket(16, 16))
    trees = [plain.forest.tree(row)[0] for row in range(4)]
    best = sorted((node.reach for tree in trees for node in tree.nodes), reverse=True)[:8]
    assert sorted((node.reach for tree in trees for node in tree.nodes if node.sent), reverse=True) == best


def test_a_session_that_has_no_row_in_flight_is_left_alone() -> None:
    rng = random.Random(1)
    alone, session = one_session(rng)
    before = alone.forest.sessions.clone()
    settle_plainly(alone.forest, alone.packed, ALONE, torch.zeros(64, dtype=torch.int32), torch.ones(64, 6))
    assert torch.equal(alone.forest.sessions, before)
    assert alone.forest.text(0) == session.tokens
    assert alone.forest.reports[0, 0] == 0


def test_lookup_ends_where_the_table_of_nodes_is_full() -> None:
    rng = random.Random(3)
    alone = side(1, 8, "cpu", False)
    alone.forest.admit(0, some_request(rng), [1, 2, 3, 1, 2, 3, 1, 2], 500, ([1] * PAGES, [2] * PAGES))
    look_plainly(alone.forest, weights_of(some_chances(rng)), 4, 1)
    tree, _ = alone.forest.tree(0)
    assert [node.token for node in tree.nodes] == [3, 1, 2, 3, 1, 2, 3, 1]
    alone.granting.price(1.0, NO_PRICE)
    send_plainly(alone.forest, alone.granting, alone.packed, ALONE, SPARE)


@pytest.mark.parametrize("seed", range(20))
def test_a_lone_tree_grows_as_core_grows_it(seed: int) -> None:
    rng = random.Random(seed)
    alone, session = one_session(rng, 128)
    forest, growth = alone.forest, some_growth(rng, 16)
    forest.plant(0, NO_TREE, [])
    forest.set(0, draft_length=max(len(session.tokens) - 3, 0))
    alone.growth = new_growth(growth, 1)
    within = replace(growth, deepest=min(growth.deepest, session.room - 1))
    growing, now = GrowingTree(NO_TREE), [ROOT]
    alone.grow(ALONE, torch.zeros(64, 20), last=False)
    results, kv_slots = some_proposals(rng, 64), dict[int, int]()
    for step in range(6):
        rows = int(alone.growth.total[0])
        assert rows == len(now) or step == 0
        alone.grow(ALONE, results, last=step == 5)
        if step:
            growing.feed(now)
        for at, n in enumerate(now):
            growing.add_candidates(n, growth, *_candidates(results[at if step else rows - 1].tolist(), growth.children))
        tree, slots = forest.tree(0)
        assert (tree.nodes, tree.root_scored) == (tuple(growing.nodes), True)
        best = growing.open_nodes(within)[: (128 - len(tree)) // growth.children]
        now = sorted(n for n, _ in best[: growth.pace(0.0, [gain for _, gain in best])])
        if step < 5:
            kv_slots |= {n: len(kv_slots) + at for at, n in enumerate(now)}
        assert [kv_slots.get(n, -1) for n in range(len(tree))] == slots
        results = some_proposals(rng, 64)
    assert forest.scalars(0)["draft_length"] == len(session.tokens)


needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or "SPECBRANCH_TRITON_TESTS" not in os.environ,
    reason="they need Triton, a minute or two, and SPECBRANCH_TRITON_TESTS=1",
)


@needs_triton
@pytest.mark.parametrize(("seed", "sessions"), [(0, 1), (1, 2), pytest.param(2, 16, marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter_do_as_their_twins(seed: int, sessions: int) -> None:
    run_kernels(str(seed), str(sessions))


@needs_triton
def test_kernels_compile_for_a_gpu() -> None:
    assert "write" in run_kernels("compile")


def run_kernels(*arguments: str) -> str:
    """Run Triton in a process of its own: its interpreter replaces its functions."""
    child = Path(__file__).with_name("run_forest_kernels.py")
    done = subprocess.run([sys.executable, str(child), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
