"""A prompt that is cut anywhere, alone or beside others, fills the KV cache alike; here on a CPU, in plain torch.

On a GPU the same comparison is exact (`tests/gpu/test_prefill_ways_on_gpu.py`).
"""

from __future__ import annotations

import pytest
import torch

from prefill_ways import (
    CHUNKS,
    CONTEXT,
    DECODING,
    PAGES,
    SMALL_SHAPES,
    Read,
    compare,
    random_decoder,
    read_alone,
    read_among_others,
    read_others_alone,
)
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.runners.native import NativeRunner
from tiers import each_value, tiered

KINDS = {"plain": NativeRunner, "graphs": GpuRunner}
TOLERANCE = 1e-8  # in float64, of numbers about 1


def make(kind: str, shape: str) -> NativeRunner:
    runner = KINDS[kind](random_decoder(SMALL_SHAPES[shape], "cpu", torch.float64), CONTEXT, pages=PAGES)
    runner.prefix_cache = False
    return runner


@each_value
@pytest.mark.parametrize("chunk", tiered(CHUNKS, (17, 256).__contains__))
@pytest.mark.parametrize("shape", tiered(SMALL_SHAPES, ("llama", "qwen3").__contains__))
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_read_in_any_way_fills_the_cache_alike(kind: str, shape: str, chunk: int) -> None:
    runner = make(kind, shape)
    exact = runner.prefill_chunk == 1
    expected, others = read_alone(runner, CHUNKS[-1]), read_others_alone(runner)
    compare(read_alone(runner, chunk), expected, exact, TOLERANCE)
    among = read_among_others(runner, chunk)
    assert set(among.keys_and_values) == {0, 1, 2, 3}
    assert len(among.rows.keys() & others.rows.keys()) == len(among.rows) >= len(DECODING)
    compare(among, expected, exact, TOLERANCE)
    compare(among, others, exact, TOLERANCE)
    runner.check()
    assert runner.pool.free == runner.pool.pages


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [17, 256])
def test_where_every_cut_is_allowed_a_prompt_has_the_same_bits_in_any_way(chunk: int) -> None:
    """As on a GPU by our kernels; here each token is a chunk of its own."""
    runner = make("graphs", "llama")
    runner.prefill_chunk = 1
    expected, others = read_alone(runner, CHUNKS[-1]), read_others_alone(runner)
    for found in (read_alone(runner, chunk), among := read_among_others(runner, chunk)):
        compare(found, expected, exact=True)
    compare(among, others, exact=True)


def test_a_wrong_position_would_be_noticed() -> None:
    runner = make("graphs", "llama")
    expected = read_alone(runner, 256)
    for wrong in ("keys_and_values", "logits"):
        found = read_alone(runner, 256)
        if wrong == "logits":
            found.logits = expected.logits + 10 * TOLERANCE
        else:
            found.keys_and_values[0] = expected.keys_and_values[0].roll(1, 0)
        with pytest.raises(AssertionError, match="cache of 0" if wrong == "keys_and_values" else "logits"):
            compare(found, expected, exact=False, tolerance=TOLERANCE)
    place = (4, 2, "verdict")
    with pytest.raises(AssertionError, match=r"row \(4, 2, 'verdict'\)"):
        compare(Read(rows={place: 7}), Read(rows={place: 8}), exact=False)
