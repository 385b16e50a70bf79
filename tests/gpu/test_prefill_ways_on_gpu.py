"""A prompt that is cut anywhere, alone or beside others, has the same bits: keys, values and logits.

A decode row has the same bits with and without chunks beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from prefill_ways import (
    CHUNKS,
    CONTEXT,
    LENGTH,
    PAGES,
    SHAPES,
    Read,
    compare,
    flush,
    held,
    pieces,
    random_decoder,
    read_alone,
    read_among_others,
    read_others_alone,
    tokens_of,
)
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.models.gpu.kernel_step import KernelStep
from specbranch.models.gpu.runner import GpuRunner
from tiny_models import GREEDY

pytestmark = pytest.mark.gpu

IN_FLOAT16 = ("of SmolLM2", "biases", "of 8B", "norms")
PARAMETERS = [(shape, torch.bfloat16) for shape in SHAPES]
PARAMETERS += [(shape, torch.float16) for shape in SHAPES if shape.endswith(IN_FLOAT16)]


@pytest.fixture(scope="module", params=PARAMETERS, ids=lambda one: f"{one[0]}, {one[1]}")
def made(request: pytest.FixtureRequest) -> tuple[GpuRunner, Read, Read]:
    """A model, what it gives for the prompt whole and alone, and for all other sequences, each alone."""
    shape, dtype = request.param
    with torch.inference_mode():
        runner = GpuRunner(random_decoder(SHAPES[shape], "cuda", dtype), CONTEXT, pages=PAGES)
    assert isinstance(runner.graphs.step, KernelStep)
    runner.prefix_cache = False
    return runner, read_alone(runner, CHUNKS[-1]), read_others_alone(runner)


@pytest.fixture
def given(made: tuple[GpuRunner, Read, Read]) -> Iterator[tuple[GpuRunner, Read, Read]]:
    """The same for many tests; what a failed one left open is closed."""
    yield made
    runner = made[0]
    for seq in list(runner.sequences):
        runner.close(seq)
    runner.check()
    assert runner.pool.free == runner.pool.pages


def test_our_kernels_prefill_any_cut(given: tuple[GpuRunner, Read, Read]) -> None:
    assert given[0].prefill_chunk == 1


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prompt_has_the_same_bits_wherever_it_is_cut(chunk: int, given: tuple[GpuRunner, Read, Read]) -> None:
    runner, expected, _ = given
    compare(read_alone(runner, chunk), expected, exact=True)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_and_decode_rows_in_one_forward_have_the_bits_they_have_alone(
    chunk: int, given: tuple[GpuRunner, Read, Read]
) -> None:
    runner, expected, others = given
    among = read_among_others(runner, chunk)
    compare(among, expected, exact=True)
    compare(among, others, exact=True)


def test_a_cached_prefix_has_the_bits_of_any_cut(given: tuple[GpuRunner, Read, Read]) -> None:
    runner, expected, _ = given
    prompt = tokens_of(0, LENGTH)
    runner.prefix_cache = True
    try:
        for seq, chunk in enumerate((17, 64, 1)):
            runner.open(seq, GREEDY)
            for piece in pieces(prompt[:600], chunk):
                runner.extend(seq, piece)
            flush(runner)
            runner.open(9, GREEDY)
            assert runner.recall(9, prompt[:-1]) == 512
            runner.extend(9, prompt[512:-1])
            row = runner.score([Feed(9, (prompt[-1],), (ROOT,))])[0][0].logits.float().cpu()
            assert torch.equal(row, expected.logits) and torch.equal(held(runner, 9), expected.keys_and_values[0])
            runner.close(9)
            runner.close(seq)
            runner.pool.drop(runner.pool.take(runner.pool.pages))  # forgets what is cached
    finally:
        runner.prefix_cache = False
