"""Noted rounds are priced as a replay under that profile would have been, whatever the profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.clock.shipped import load_profile
from specbranch.config import SpeculativeConfig
from specbranch.core.stats import Stats
from specbranch.lab.bench.methods import SPACES, default_setting
from specbranch.lab.replay.decode import RecordDecoder, ReplayedModel
from specbranch.lab.replay.pricing import NotingDecoder, ReplayedMethods, has_fixed_decisions
from specbranch.lab.replay.record import Record, Task
from specbranch.lab.replay.runners import ProposalStore
from specbranch.lab.toys.toys import ToyRunner
from tiers import tiered
from toybench import PROFILE, Case, Ending, law, plainly

CASES = [Case((seed, 3, 1), temperature, seed, Ending("length", 40)) for seed, temperature in ((1, 0.0), (2, 0.9))]
TURNS = CostProfile(target=((1, 10.0), (8, 12.0)), draft=((1, 3.0), (8, 5.0)), host=0.2, overlap=False)
FAR = CostProfile(
    asking=0.7,
    host=0.1,
    draft_setup=0.3,
    hearing=3.5,
    target=((1, 10.0), (8, 12.0)),
    draft=((1, 3.0), (8, 5.0)),
    slow_down=0.4,
    draft_slow_down=0.2,
    context=4,
    target_per_context=((1, 0.05),),
    draft_per_context=((1, 0.02),),
)


@pytest.fixture
def draft(tmp_path: Path) -> Iterator[ReplayedModel]:
    memory = ProposalStore(tmp_path / "memory.sqlite")
    yield ReplayedModel("toy", memory, ToyRunner(law(0.3)))
    memory.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ReplayedModel]:
    memory = ProposalStore(tmp_path / "target.sqlite")
    yield ReplayedModel("toy", memory, ToyRunner(law()))
    memory.close()


def record_of(case: Case) -> Record:
    answer = plainly(case, law())
    return Record(Task(case.prompt, case.params, case.seed, ()), answer.tokens, ())


def setting(method: str, **values: object) -> SpeculativeConfig:
    config = default_setting(method, values).config
    assert config is not None
    return config


NOTED = [method for method in SPACES if has_fixed_decisions(setting(method))]


def test_what_plans_by_itself_and_nothing_else_depends_on_the_profile() -> None:
    assert set(SPACES) - set(NOTED) == {"tree", "specbranch"}


@pytest.mark.parametrize("method", tiered(NOTED, NOTED[::6].__contains__))
def test_rounds_are_priced_as_a_replay_is(method: str, draft: ReplayedModel, target: ReplayedModel) -> None:
    profiles = [PROFILE, TURNS, FAR, load_profile("h200-1b-8b")]
    seen = set()
    for case in CASES:
        for length in (2, 7):
            config = setting(
                method, num_speculative_tokens=length, max_branches=3, stop_below=0.5, lookahead_window=length
            )
            rounds = NotingDecoder(record_of(case), draft, target=target).noted(config)
            for profile in profiles:
                stats = RecordDecoder(record_of(case), draft, target=target).decode(config, profile)
                assert flat_figures(rounds.priced(profile)) == pytest.approx(flat_figures(stats), rel=1e-6)
                assert rounds.priced(profile).decode_seconds == pytest.approx(stats.decode_seconds, rel=1e-6)
            seen.add(rounds.priced(PROFILE).decode_seconds)
    assert len(seen) > 1 or method == "autoregressive"


def flat_figures(stats: Stats) -> dict[str, object]:
    """Return all figures of a replay, with inner tables flattened."""
    flat: dict[str, object] = {}
    for name, value in stats.summary().items():
        parts = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {"": value}
        flat |= {f"{name} {key}": -1.0 if part is None else part for key, part in parts.items()}
    return flat


def test_what_was_decoded_once_is_not_decoded_again(draft: ReplayedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    replays, config = ReplayedMethods(draft), SpeculativeConfig(method="pearl")
    first = replays.rounds(record_of(CASES[0]), config)
    assert replays.rounds(record_of(CASES[1]), config) != first and replays.decoded == [config, config]
    monkeypatch.setattr(NotingDecoder, "noted", None)
    assert replays.rounds(record_of(CASES[0]), config) is first
    replays.close()


def test_what_goes_on_until_the_target_is_done_or_plans_by_itself_is_refused(draft: ReplayedModel) -> None:
    for config in (setting("specbranch:confidence", until_target=True), *map(setting, ("tree", "specbranch", "auto"))):
        assert not has_fixed_decisions(config)
        with pytest.raises(ValueError, match="depends on the profile"):
            NotingDecoder(record_of(CASES[0]), draft).noted(config)
