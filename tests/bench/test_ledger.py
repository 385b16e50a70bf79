"""A book charges what a play would have been charged, under any profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specbranch.bench.ledger import BookingPlayer
from specbranch.bench.play import Draft, Player
from specbranch.bench.record import Record, Task
from specbranch.bench.replay import Memory
from specbranch.bench.tuning import SPACES
from specbranch.config import SpeculativeConfig
from specbranch.sim.profile import CostProfile
from specbranch.sim.shipped import load_profile
from specbranch.sim.toys import ToyRunner, ToySampler
from toybench import PROFILE, Case, Ending, law, plainly

CASES = [Case((seed, 3, 1), temperature, seed, Ending("length", 40)) for seed, temperature in ((1, 0.0), (2, 0.9))]
TURNS = CostProfile(target=((1, 10.0), (8, 12.0)), draft=((1, 3.0), (8, 5.0)), host=0.2, overlap=False)
FAR = CostProfile(
    target=((1, 10.0), (8, 12.0)),
    draft=((1, 3.0), (8, 5.0)),
    slow_down=0.4,
    draft_slow_down=0.2,
    context=4,
    target_per_context=((1, 0.05),),
    draft_per_context=((1, 0.02),),
)


@pytest.fixture
def draft(tmp_path: Path) -> Iterator[Draft]:
    memory = Memory(tmp_path / "memory.sqlite")
    yield Draft("toy", memory, ToyRunner(law(0.3)), ToySampler())
    memory.close()


def record_of(case: Case) -> Record:
    answer = plainly(case, law())
    return Record(Task(case.prompt, case.params, case.seed, ()), answer.tokens, ())


@pytest.mark.parametrize("method", SPACES)
def test_a_book_charges_what_a_play_is_charged(method: str, draft: Draft) -> None:
    profiles = [PROFILE, TURNS, FAR, load_profile("c10"), load_profile("h200-1b-8b")]
    seen = set()
    for case in CASES:
        for length in (2, 7):
            config = SpeculativeConfig(method=method, num_speculative_tokens=length, max_branches=3, stop_below=0.5)
            book = BookingPlayer(record_of(case), draft).book(config)
            for profile in profiles:
                stats = Player(record_of(case), draft).play(config, profile)
                assert book.seconds(profile) == pytest.approx(stats.decode_seconds, rel=1e-6)
                assert book.decoded == stats.emitted - 1
            seen.add(book.seconds(PROFILE))
    assert len(seen) > 1 or method == "autoregressive"


def test_a_draft_that_goes_on_until_the_target_is_done_has_no_book(draft: Draft) -> None:
    with pytest.raises(ValueError, match="depends on the profile"):
        BookingPlayer(record_of(CASES[0]), draft).book(SpeculativeConfig(method="specbranch", until_target=True))
