"""A target that starts to verify a tree on the device: the step is the one that is ordered then, and no text
changes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from counting_runner import CountingRunner
from specbranch.config import SamplingParams
from specbranch.core.costs import MeasuredCosts
from specbranch.core.pages import Pool
from specbranch.core.rehearsal import rehearse
from specbranch.core.request import Request
from specbranch.core.runner import Growing
from specbranch.core.sending import Sending
from specbranch.core.slots import ROOT
from specbranch.core.trees import Node, Tree
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.models.cache.kv_memory import Table
from specbranch.models.gpu.growing import _noise
from specbranch.models.gpu.layout import SMALLEST_BUCKET, Bucket, packed_size, views
from specbranch.models.gpu.receiving import DeviceReceiver, Expected
from specbranch.models.gpu.tree_layout import DEEPEST, NO_MOVES
from specbranch.models.gpu.tree_layout import TREE_AT as TREE_AT
from specbranch.models.gpu.trees import DeviceTree
from test_device_trees import some_growth
from test_streams_models import decode, decoders, executor
from tiers import each_value, tiered

__all__ = ["decoders"]
pytestmark = pytest.mark.usefixtures("one_thread")
SPARE = 100 * 256
PARAMS = [SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(temperature=0.9, max_tokens=40)]


def counts(works: Serial) -> tuple[int, int]:
    target = works.target.runner
    assert isinstance(target, CountingRunner)
    return target.received, target.received_right


@each_value
@pytest.mark.parametrize("method", tiered(("tree", "specbranch", "auto"), "auto".__ne__))
@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "hot"])
def test_texts_are_those_of_plain_decoding_and_what_was_launched_is_what_is_ordered(
    params: SamplingParams, kind: type[Serial], method: str, decoders: tuple[Any, Any]
) -> None:
    works = executor(decoders, kind)[0]
    for number in range(2):
        expected = decode(executor(decoders, Serial)[0], "autoregressive", params, number).tokens
        assert decode(works, method, params, number).tokens == expected
        works.target.runner.check()  # type: ignore[attr-defined]
    launched, right = counts(works)
    assert launched > 10 and right == launched


@pytest.mark.slow
@pytest.mark.parametrize(
    "shaping", tiered(({"top_p": 0.8}, {"logprobs": 1}, {"presence_penalty": 0.5}), {"logprobs": 1}.__eq__)
)
def test_nothing_is_launched_where_more_than_a_graph_is_wanted(
    shaping: dict[str, Any], decoders: tuple[Any, Any]
) -> None:
    params, works = SamplingParams(temperature=0.8, max_tokens=30, **shaping), executor(decoders, Serial)[0]
    expected = decode(executor(decoders, Serial)[0], "autoregressive", params, 1).tokens
    assert decode(works, "specbranch", params, 1).tokens == expected and counts(works) == (0, 0)


@pytest.mark.slow
def test_a_step_that_was_launched_for_other_tokens_is_left_alone(
    decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is foretold is always wrong here: one node less than is sent, or one more."""
    works, rng = executor(decoders, Serial)[0], random.Random(1)
    sheet = DeviceReceiver.sheet

    def wrong(self: DeviceReceiver, text: Expected, table: Table, moves: np.ndarray) -> np.ndarray | None:
        price = rng.choice([0.0, 100.0])
        text.sending = Sending((price,) * len(text.sending.prices), text.sending.deepest)
        return sheet(self, text, table, moves)

    monkeypatch.setattr(DeviceReceiver, "sheet", wrong)
    for number in range(2):
        expected = decode(executor(decoders, Serial)[0], "autoregressive", PARAMS[1], number).tokens
        assert decode(works, "specbranch", PARAMS[1], number).tokens == expected
    launched, right = counts(works)
    assert launched > 10 and right < launched / 2


def grown(rng: random.Random, size: int) -> list[Node]:
    """A tree at its full size; some of it was looked up, so that nodes below are to be weighed anew."""
    nodes: list[Node] = []
    for n in range(size):
        parent = rng.choice([ROOT, *range(max(n - 6, 0), n)])
        above, depth = (nodes[parent].reach, nodes[parent].depth) if parent != ROOT else (1.0, 0)
        if depth == DEEPEST:
            parent, above, depth = ROOT, 1.0, 0
        chance = rng.choice([0.04, 0.4, 0.7, 0.95, 1.0])
        reach = above * chance * rng.choice([1.0, 0.5])
        nodes.append(Node(rng.randrange(1000), parent, chance, reach, depth + 1, said=0.4, look=rng.choice([0, 3])))
    return nodes


def both_steps(seed: int, kernel: Any, device: str) -> tuple[Any, Any, int]:
    """The step that a kernel writes, and the one that the host writes."""
    rng = random.Random(seed)
    request = Request(SamplingParams(temperature=rng.choice([0.0, 0.8])), seed, 9)
    prefix, size = rng.choice([3, 31, 64, 250, 255, 700]), rng.choice([0, 1, 4, 30, 200, 300])
    slope = rng.choice([0.0, 0.02, 0.3])
    sending = Sending(tuple(slope * k for k in range(1, 16)), rng.choice([2, 30]))
    text = Expected(request, prefix, 17, sending)
    table = Table(Pool(0), rng.sample(range(100), -(-text.kv_slots // 256)))
    moves = np.array([[3, 9], [4, 8]]).T if rng.random() < 0.5 else NO_MOVES
    growing = Growing(0, (), Tree(tuple(grown(rng, size)), True), {}, replace(some_growth(rng), deepest=30))
    least = rng.choice([SMALLEST_BUCKET, Bucket(16, 1)])
    found = []
    for where in (device, "cpu"):
        step_input = torch.full((20000,), -7, dtype=torch.int32, device=where)
        receiver = DeviceReceiver(SPARE, step_input, least)
        tree, bucket = DeviceTree(8, torch.device(where), SPARE), receiver.bucket(text, size)
        sheet = receiver.sheet(text, table, moves)
        array = tree.planted(growing, -1, prefix + 1, 0, 50, table.pages, _noise(text.spot), NO_MOVES)
        array[TREE_AT["sheet"] : TREE_AT["sheet"] + len(sheet)] = sheet
        tree.state[: len(array)] = torch.from_numpy(array)
        (kernel if not found else DeviceReceiver.send)(receiver, tree, text, table, moves, bucket)
        read = receiver.read.cpu().tolist()
        packed = step_input[: packed_size(bucket) + len(table.pages)].cpu()
        found.append((read[0][0], bucket, read[1 : 1 + read[0][0]], views(packed, bucket)))
    return found[0], found[1], moves.shape[1]


def assert_same_step(one: Any, other: Any, moved: int) -> None:
    assert one[:3] == other[:3]
    mine, theirs, rows = one[3], other[3], one[0]
    for name in ("tokens", "positions", "slots", "shared", "own_count", "groups", "choosing"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    pages = int(mine.positions.max()) // 256 + 1  # the host leaves out pages that no row reads
    assert torch.equal(mine.tables[:pages], theirs.tables[:pages])
    assert torch.equal(mine.counts[:3], theirs.counts[:3])
    assert torch.equal(mine.moves[:, :moved], theirs.moves[:, :moved])
    for row in range(one[1].rows):
        length = int(mine.own_count[row])
        assert torch.equal(mine.own[row, :length], theirs.own[row, :length]), (row, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_writes_the_step_that_the_host_writes(seed: int) -> None:
    assert_same_step(*both_steps(seed, DeviceReceiver.send, "cuda"))


@pytest.mark.parametrize("kind", [Serial, Streams])
def test_a_rehearsal_has_a_tree_received_so_that_nothing_is_made_ready_later(
    kind: type[Serial], decoders: tuple[Any, Any]
) -> None:
    works = executor(decoders, kind)[0]
    rehearse(works, MeasuredCosts(), 131, has_draft=True, seconds=0.0, set_up=True)
    assert counts(works)[0] > 0
    works.target.runner.check()  # type: ignore[attr-defined]
