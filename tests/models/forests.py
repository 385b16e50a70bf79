"""Random forests, and rounds over them that two implementations make side by side; every table is compared."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from specbranch.config import SamplingParams
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.slots import ROOT
from specbranch.core.trees import CLASSES, LOOKS, STANDINGS, Chances, Growth, Node, Tree
from specbranch.models.gpu.forest_growing import ForestGrowth, grow_plainly, launch_grow, new_growth
from specbranch.models.gpu.forest_layout import (
    DECODING,
    PLACE_FIELDS,
    REPORT_FIELDS,
    Forest,
    new_forest,
    weights_of,
)
from specbranch.models.gpu.granting import Granting, launch_send, new_granting, send_plainly
from specbranch.models.gpu.layout import BEFORE, CONFIDENCE, Bucket, largest_size, views
from specbranch.models.gpu.looking import launch_look, look_plainly
from specbranch.models.gpu.settling import launch_settle, settle_plainly
from specbranch.models.gpu.tree_layout import ENTRIES, NODE_FIELDS

CONTEXT, PAGES, SPARE, WORDS = 1024, 5, 7777, 12
ROWS = PLACE_FIELDS.index("rows")


@dataclass
class Side:
    """One implementation with its tables; `launches`: it uses the kernels."""

    forest: Forest
    granting: Granting
    packed: Tensor
    launches: bool
    growth: ForestGrowth | None = None

    def send(self, bucket: Bucket) -> None:
        (launch_send if self.launches else send_plainly)(self.forest, self.granting, self.packed, bucket, SPARE)

    def look(self, chances: Chances, longest: int, shortest: int) -> None:
        weights = weights_of(chances, self.packed.device)
        (launch_look if self.launches else look_plainly)(self.forest, weights, longest, shortest)

    def grow(self, bucket: Bucket, results: Tensor, last: bool) -> None:
        assert self.growth is not None
        work = launch_grow if self.launches else grow_plainly
        work(self.forest, self.growth, results.to(self.packed.device), self.packed, bucket, SPARE, last)

    def settle(self, bucket: Bucket, picks: Tensor, results: Tensor) -> None:
        device = self.packed.device
        work = launch_settle if self.launches else settle_plainly
        work(self.forest, self.packed, bucket, picks.to(device), results.to(device))


def side(sessions: int, nodes: int, device: str, launches: bool) -> Side:
    packed = torch.zeros(largest_size(PAGES), dtype=torch.int32, device=device)
    return Side(new_forest(sessions, CONTEXT, nodes, PAGES, device), new_granting(sessions, device), packed, launches)


def some_tree(rng: random.Random, most: int, length: int, root_scored: bool) -> tuple[Tree, list[int]]:
    """A tree in which some nodes are computed, each behind its parent, and the draft's KV slots of these."""
    nodes: list[Node] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(rng.randrange(most + 1)):
        parent = rng.choice([ROOT, *range(len(nodes)), len(nodes) - 1, len(nodes) - 1])
        token = rng.randrange(WORDS)
        depth = nodes[parent].depth + 1 if parent != ROOT else 1
        if (parent, token) in taken or depth > 32:
            continue
        taken.add((parent, token))
        above = nodes[parent] if parent != ROOT else None
        chance = rng.choice([1.0, 0.5, 0.25, rng.random()])
        scored = root_scored and (above is None or above.scored) and rng.random() < 0.6
        reach = chance * (above.reach if above else 1.0) * rng.choice([1.0, 1.0, 0.9])  # not always up to date
        nodes.append(Node(token, parent, chance, reach, depth, rng.randrange(3), 0.5, rng.randrange(3), scored))
    slots, at = [], rng.randrange(3)
    for node in nodes:
        slots.append(at if node.scored else -1)
        at += node.scored + (rng.random() < 0.2)
    return Tree(tuple(nodes), root_scored), slots


def some_request(rng: random.Random) -> Request:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8]), max_tokens=500, stop_token_ids=tuple(rng.sample(range(WORDS), 1))
    )
    if rng.random() < 0.7:
        params = replace(params, stop_token_ids=(WORDS + 5,))
    return Request(params, rng.choice([0, 7, rng.getrandbits(63), -3]), 1, rng.randrange(3))


def some_chances(rng: random.Random) -> Chances:
    first, other, looked, shifts = (
        tuple(rng.random() * scale for _ in range(count))
        for count, scale in [(CLASSES, 1.0), (CLASSES, 0.5), (LOOKS * STANDINGS, 0.9), (LOOKS * STANDINGS, 3.0)]
    )
    return Chances(first, other, looked, shifts)


def admit(rng: random.Random, sides: list[Side], row: int) -> None:
    """Give a row to a new session on both sides."""
    length, request = rng.choice([1, 2, rng.randrange(1, 900)]), some_request(rng)
    tokens = [rng.randrange(WORDS) for _ in range(length)]
    limit = min(length + rng.randrange(1, 60), CONTEXT - 100)
    pages = [[rng.randrange(1, 500) for _ in range(PAGES)] for _ in range(2)]
    for one in sides:
        one.forest.admit(row, request, tokens, limit, (pages[0], pages[1]))


def plant(rng: random.Random, sides: list[Side], row: int, most: int) -> None:
    """Give a session a tree, behind which the draft has computed its text or has not."""
    length = sides[0].forest.scalars(row)["length"]
    computed = rng.random() < 0.7
    tree, slots = some_tree(rng, most, length, computed and rng.random() < 0.9)
    draft_length = length if computed else rng.randrange(length)
    for one in sides:
        one.forest.plant(row, tree, slots)
        one.forest.set(row, draft_length=draft_length, draft_moves=0)


def some_picks(rng: random.Random, plain: Side, bucket: Bucket) -> tuple[Tensor, Tensor]:
    """What a step might sample: often what a row's first child says, now and then nothing finite."""
    step = views(plain.packed, bucket)
    assert step.choosing is not None
    said, parent = step.choosing[-1].tolist(), step.choosing[-2].tolist()
    picks = [rng.randrange(WORDS) for _ in range(bucket.rows)]
    for row in range(bucket.rows - 1, 0, -1):
        if parent[row] != row and rng.random() < 0.8:
            picks[parent[row]] = said[row]
    for session in range(plain.forest.count):  # and what a node says that was not sent
        first, rows = plain.forest.places[0, session, :2].tolist()
        tree, _ = plain.forest.tree(session)
        row_of = {
            ROOT: 0,
            **{n: int(plain.forest.trees[session, n, -1]) for n, node in enumerate(tree.nodes) if node.sent},
        }
        for node in tree.nodes:
            if rows and not node.sent and node.parent in row_of and rng.random() < 0.3:
                picks[first + row_of[node.parent]] = node.token
    results = torch.rand(bucket.rows, BEFORE + 2)
    if rng.random() < 0.2:
        results[rng.randrange(bucket.rows), CONFIDENCE] = float("nan")
    return torch.tensor(picks, dtype=torch.int32), results


def assert_same_forest(plain: Side, other: Side) -> None:
    """Compare all tables, as far as they have a meaning."""
    a, b = (replace_device(one.forest) for one in (plain, other))
    assert torch.equal(a.sessions, b.sessions), (a.sessions, b.sessions)
    for row in range(a.count):
        scalars = a.scalars(row)
        assert torch.equal(a.history[row, : scalars["length"]], b.history[row, : scalars["length"]])
        assert_same_nodes(a.trees[row, : scalars["nodes"]], b.trees[row, : scalars["nodes"]])
        for model, name in enumerate(("target_moves", "draft_moves")):
            count = scalars[name]
            assert torch.equal(a.moves[row, model, :, :count], b.moves[row, model, :, :count])
        said = len(REPORT_FIELDS) + int(a.reports[row, 0])
        assert torch.equal(a.reports[row, :said], b.reports[row, :said])
    rows = a.places[..., ROWS]
    assert torch.equal(rows, b.places[..., ROWS])
    assert torch.equal(a.places[rows > 0], b.places[rows > 0])


def assert_same_nodes(a: Tensor, b: Tensor) -> None:
    """Compare two tables of nodes. A device's exponential may differ in the last digit of what a draft says, and what
    is known of the children of a computed node has no meaning any more."""
    said, known, scored = (NODE_FIELDS.index(name) for name in ("said", "known", "scored"))
    assert torch.allclose(a[:, said], b[:, said], rtol=1e-12, atol=0.0)
    a, b = a.clone(), b.clone()
    for table in (a, b):
        table[:, said] = 0.0
        table[table[:, scored] > 0.0, known] = 0.0
    assert torch.equal(a, b), (a, b)


def some_proposals(rng: random.Random, rows: int) -> Tensor:
    """What a draft step might propose: distinct tokens, by falling score; sometimes fewer than it could."""
    results = torch.zeros(rows, BEFORE + 2 * ENTRIES)
    for row in range(rows):
        scores = sorted((rng.random() * 6 for _ in range(ENTRIES)), reverse=True)
        few = rng.choice([ENTRIES, ENTRIES, 1])
        scores[few:] = [float("-inf")] * (ENTRIES - few)
        results[row, CONFIDENCE] = rng.random()
        results[row, BEFORE:] = torch.tensor([*rng.sample(range(WORDS), ENTRIES), *scores])
    return results


def some_growth(rng: random.Random, lanes: int) -> Growth:
    step = tuple(0.02 + 0.01 * rng.random() * width for width in range(lanes))
    return Growth(
        step, some_chances(rng), worth=0.8, children=rng.choice([2, 4]), rows=rng.choice([4, 16, 64]), lanes=lanes,
        least=0.01, row_price=rng.choice([0.0, 0.02]), deepest=rng.choice([4, 32]), most=rng.choice([10, 120]),
    )  # fmt: skip


def compare_growth(rng: random.Random, plain: Side, other: Side, bucket: Bucket) -> None:
    """Let all trees grow by some draft steps, and compare both sides after each."""
    growth = some_growth(rng, min(16, bucket.rows // plain.forest.count))
    for one in (plain, other):
        one.growth = new_growth(growth, one.forest.count, one.packed.device)
    steps = rng.randrange(1, 5)
    results = some_proposals(rng, bucket.rows)
    for number in range(steps + 1):
        for one in (plain, other):
            one.grow(bucket, results, number == steps)
        assert_same_forest(plain, other)
        if number < steps:
            assert_same_step(plain, other, bucket)
            assert plain.growth is not None and other.growth is not None
            assert int(plain.growth.total[0]) == int(other.growth.total[0])
        results = some_proposals(rng, bucket.rows)


def replace_device(forest: Forest) -> Forest:
    return Forest(*(getattr(forest, field.name).cpu() for field in fields(forest)))


def assert_same_step(plain: Side, other: Side, bucket: Bucket) -> None:
    """Compare two packed steps, as far as they have a meaning."""
    a, b = views(plain.packed, bucket), views(other.packed.cpu(), bucket)
    for name in ("tokens", "positions", "slots", "shared", "own_count", "choosing", "groups", "counts"):
        assert torch.equal(getattr(a, name), getattr(b, name)), (name, getattr(a, name), getattr(b, name))
    for row, count in enumerate(a.own_count.tolist()):
        assert torch.equal(a.own[row, :count], b.own[row, :count]), row
    assert a.counts is not None and a.moves is not None and b.moves is not None
    moved = int(a.counts[0])
    assert torch.equal(a.moves[:, :moved], b.moves[:, :moved])
    for first, rows, begin in a.groups.tolist():
        if rows:
            pages = (int(a.positions[first : first + rows].max()) // PAGE) + 1
            assert torch.equal(a.tables[begin : begin + pages], b.tables[begin : begin + pages])


def compare_rounds(
    seed: int, sessions: int, device: str, nodes: int = 64, rounds: int = 4, looks: bool = True, grows: bool = True
) -> None:
    """Make some rounds of a random forest with the kernels and with their twins, and compare both after each part."""
    rng, capacity = random.Random(seed), 1 << (sessions - 1).bit_length()
    plain, other = side(capacity, nodes, "cpu", False), side(capacity, nodes, device, True)
    sides = [plain, other]
    for row in rng.sample(range(capacity), sessions):
        admit(rng, sides, row)
    bucket = Bucket(256, 256) if capacity > 1 else rng.choice([Bucket(64, 4), Bucket(64, 64)])
    for _ in range(rounds):
        for row in range(capacity):
            if plain.forest.scalars(row)["state"] == DECODING and rng.random() < 0.8:
                plant(rng, sides, row, rng.choice([3, 20, nodes]))
        if looks:
            chances, shortest = some_chances(rng), rng.choice([1, 1, 2])
            longest = shortest + rng.randrange(4)
            for one in sides:
                one.look(chances, longest, shortest)
            assert_same_forest(plain, other)
        if grows:
            compare_growth(rng, plain, other, bucket)
        seconds = np.cumsum([rng.random() * rng.choice([0.0, 0.01, 0.2]) for _ in range(bucket.rows)]).tolist()
        rate, others = rng.random() * 8, rng.randrange(3)
        for one in sides:
            one.granting.price(rate, seconds, others, bucket.rows)
            one.send(bucket)
        assert_same_forest(plain, other)
        assert_same_step(plain, other, bucket)
        assert int(plain.granting.total[0]) == int(other.granting.total[0])
        picks, results = some_picks(rng, plain, bucket)
        for one in sides:
            one.settle(bucket, picks, results)
        assert_same_forest(plain, other)
