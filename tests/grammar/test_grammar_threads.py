"""Copies of a compiled grammar, parsed in several threads at once while others compile: no state is shared."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from schemas import SCHEMAS
from small_tokenizers import byte_level, save
from specbranch.config import SamplingParams
from specbranch.core.grammar import Constraint, Mask
from specbranch.grammar.compiler import Grammars
from specbranch.text.tokenizer import Tokenizer
from tiers import tiered

pytest.importorskip("llguidance")

END = 2
Masks = list[bytes]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save(byte_level(), folder)
    return Tokenizer.from_folder(folder)


def walked(constraint: Constraint, seed: int, steps: int) -> Masks:
    """The masks on a random walk that also rolls back, as the branches of a tree make it."""
    parser, rng = constraint.parser(), random.Random(seed)
    found, depth = Masks(), 0
    for _ in range(steps):
        bits = parser.mask()
        found.append(bits)
        allowed = list(Mask(bits))
        if not allowed or (depth and rng.random() < 0.3):
            back = rng.randint(1, depth) if depth else 0
            parser.rollback(back)
            depth -= back
        else:
            parser.consume(rng.choice(allowed))
            depth += 1
    return found


@pytest.mark.parametrize("threads", tiered((4, 16), (4).__eq__))
def test_copies_in_several_threads_have_the_masks_that_each_has_alone(tokenizer: Tokenizer, threads: int) -> None:
    params = [SamplingParams(json_schema=SCHEMAS[name]) for name in ("nested", "long keys")] * (threads // 2)
    steps = 40 * threads
    alone = Grammars(tokenizer)
    expected = [
        walked(alone.constraint(one, frozenset((END,))), seed, steps)  # type: ignore[arg-type]
        for seed, one in enumerate(params)
    ]
    shared = Grammars(tokenizer)

    def work(seed: int) -> Masks:
        constraint = shared.constraint(params[seed], frozenset((END,)))
        assert constraint is not None
        shared.compile(SamplingParams(regex=f"[a-z]{{{seed + 1}}}"))  # meanwhile, as other requests do
        return walked(constraint, seed, steps)

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(work, range(threads))) == expected
