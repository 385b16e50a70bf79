"""The virtual clock charges what the profile says: worked out by hand here."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import Charge
from specbranch.config import SpeculativeConfig
from specbranch.core.session import Session
from specbranch.core.trace import Event, Trace
from specbranch.errors import BadParameter
from toybench import Case, Ending, answer, decode, law, plainly, serial, virtual_clock

SLOPES = CostProfile(target=((1, 10.0), (8, 17.0)), draft=((1, 2.0), (4, 5.0)), slow_down=0.5, host=0.25)
LONG = Ending("long", max_tokens=40)


def traced(config: SpeculativeConfig, profile: CostProfile, case: Case) -> tuple[Session, list[Event]]:
    """Decode with a perfect draft on a clock of that profile."""
    trace = Trace()
    session = decode(virtual_clock(0.0, profile=profile), case, config, trace=trace)
    return session, trace.events


def test_autoregressive_time_is_a_prefill_and_a_forward_a_token() -> None:
    case = Case((1, 2), 0.0, 0, Ending("three", max_tokens=3))
    session, events = traced(SpeculativeConfig(method="autoregressive"), SLOPES, case)
    assert [(e.start, e.end) for e in events] == [(0.0, 11.0), (11.25, 21.25), (21.5, 31.5)]
    assert (session.stats.ttft, session.stats.finished) == (11.25, 31.75)
    assert session.stats.target_busy == 20.0


def test_serial_drafting_adds_its_steps_to_the_targets_forward() -> None:
    case = Case((1, 2), 0.0, 0, Ending("four", max_tokens=4))
    config = SpeculativeConfig(method="speculative", num_speculative_tokens=2)
    session, events = traced(config, SLOPES, case)
    spans = [(e.who, e.start, e.end) for e in events]
    # Prefill side by side: the draft computes the prompt's two tokens in two steps of 2, the last one for its row. They
    # slow the target's 11 by 0.5 each. Then two draft steps of 2 (the target's token, the first drafted one), and a
    # forward over three rows.
    assert spans == [("draft", 0.0, 4.0), ("target", 0.0, 12.0), ("draft", 12.25, 16.25), ("target", 16.5, 28.5)]
    assert session.stats.finished == 28.75
    assert session.stats.emitted == 4


def test_a_long_prompt_is_charged_to_both_models() -> None:
    case = Case((1,) * 40, 0.0, 0, Ending("one", max_tokens=2))
    flat = CostProfile(target=((1, 1.0), (2, 2.0)), draft=((1, 0.5), (2, 1.0)))
    _, events = traced(SpeculativeConfig(method="speculative"), flat, case)
    assert [(e.who, e.end - e.start, e.rows) for e in events[:2]] == [("draft", 20.0, 40), ("target", 40.0, 40)]


@pytest.mark.parametrize(
    ("step", "slow_down", "tokens"), [(1.0, 0.0, 10), (2.5, 0.0, 4), (3.0, 0.0, 4), (1.0, 0.5, 20), (20.0, 0.0, 1)]
)
def test_until_target_lengths_follow_the_profile(step: float, slow_down: float, tokens: int) -> None:
    """The draft reads the last token, then goes on until it has used up the target's 10 seconds, stretched by each
    overlapped step."""
    profile = CostProfile(target=((1, 10.0),), draft=((1, step),), slow_down=slow_down)
    config = SpeculativeConfig(method="pearl", num_speculative_tokens=30, until_target=True)
    session, events = traced(config, profile, Case((1, 2), 0.7, 0, Ending("long", max_tokens=200)))
    lengths = [e.branches for e in events if e.who == "draft"][1:4]
    assert lengths == [(tokens,)] * 3
    rounds = [e for e in events if e.who == "target"][1:4]
    assert {e.end - e.start for e in rounds} == {10.0 + slow_down * tokens}
    assert answer(session) == plainly(Case((1, 2), 0.7, 0, Ending("long", max_tokens=200)), law())


def test_a_draft_step_after_the_target_is_done_slows_nothing() -> None:
    charge = Charge(CostProfile(target=((1, 4.0),), draft=((1, 3.0),), slow_down=1.0))
    charge.verified(1)
    charge.stepped(1)
    assert (charge.draft, charge.target) == (3.0, 5.0)
    charge.stepped(1)
    assert (charge.draft, charge.target) == (6.0, 6.0)
    assert charge.target_done()
    charge.stepped(1)
    assert (charge.draft, charge.target) == (9.0, 6.0)


def test_drafting_alone_is_not_slowed_and_slows_nothing() -> None:
    charge = Charge(SLOPES)
    charge.verified(0)
    charge.stepped(1)
    assert (charge.draft, charge.target) == (2.0, 0.0)


def test_overlap_pays_on_the_clock_where_the_draft_is_dear() -> None:
    profile = CostProfile(target=((1, 5.0), (8, 5.6)), draft=((1, 1.2),), slow_down=0.3)
    times = {"speculative": 0.0, "pearl": 0.0}
    for seed in range(5):
        for method in times:
            config, case = SpeculativeConfig(method=method, num_speculative_tokens=4), Case((seed, 2), 0.7, seed, LONG)
            times[method] += traced(config, profile, case)[0].stats.decode_seconds
    assert times["pearl"] < times["speculative"]


def test_the_clock_changes_no_decision() -> None:
    config = SpeculativeConfig(method="specbranch", policy="confidence", num_speculative_tokens=4, max_branches=12)
    for seed in range(5):
        case = Case((seed, 1), 0.7, seed, LONG)
        on_clock, reference = decode(virtual_clock(0.3), case, config), decode(serial(0.3), case, config)
        assert answer(on_clock) == answer(reference)
        assert on_clock.stats.tested_at == reference.stats.tested_at
        assert on_clock.stats.losing == reference.stats.losing


def test_without_overlap_a_round_costs_the_draft_and_then_the_target() -> None:
    profile = CostProfile(target=((1, 10.0),), draft=((1, 2.0),), slow_down=5.0, draft_slow_down=5.0, overlap=False)
    config = SpeculativeConfig(method="pearl", num_speculative_tokens=3)
    session, events = traced(config, profile, Case((1, 2), 0.0, 0, LONG))
    draft, target = (next(e for e in events if e.round == 1 and e.who == who) for who in ("draft", "target"))
    assert (draft.end - draft.start, target.start - draft.end, target.end - target.start) == (6.0, 0.0, 10.0)
    assert session.stats.draft_busy + session.stats.target_busy == pytest.approx(session.stats.decode_seconds)


def test_without_overlap_a_draft_until_the_target_is_done_goes_on_to_its_length_as_the_serial_executor_has_it() -> None:
    config = SpeculativeConfig(method="pearl", num_speculative_tokens=4, until_target=True)
    for overlap, lengths in ((True, (1,)), (False, (4,))):
        profile = CostProfile(target=((1, 1.0),), draft=((1, 2.0),), overlap=overlap)
        _, events = traced(config, profile, Case((1, 2), 0.0, 0, LONG))
        assert next(e for e in events if e.round == 1 and e.who == "draft").branches == lengths


def test_a_draft_step_beside_the_target_may_be_slower_itself() -> None:
    charge = Charge(CostProfile(target=((1, 4.0),), draft=((1, 3.0),), draft_slow_down=2.0))
    charge.verified(1)
    charge.stepped(1)
    charge.stepped(1)
    assert (charge.draft, charge.target, charge.seconds) == (8.0, 4.0, 8.0)


def test_what_a_draft_takes_once_comes_before_its_first_step() -> None:
    charge = Charge(CostProfile(target=((1, 10.0),), draft=((1, 2.0),), draft_setup=3.0))
    charge.verified(1)
    assert charge.draft == 0.0, "nothing was drafted"
    charge.stepped(1)
    charge.stepped(1)
    assert charge.draft == 3.0 + 2 * 2.0


@pytest.mark.parametrize(
    ("method", "waits"),
    [  # before a round of the target alone behind one of it, then behind a draft; and before a draft
        ("autoregressive", {"target target": 0.25}),
        ("speculative", {"draft target": 1.25, "target draft": 1.25}),
        ("tree", {"draft target": 0.25, "target draft": 1.25}),  # the target verifies a tree on the draft's device
        ("lookup", {"target target": 0.75}),
    ],
)
def test_a_round_that_the_host_asks_for_takes_longer(method: str, waits: dict[str, float]) -> None:
    case, config = Case((1, 2), 0.0, 0, LONG), SpeculativeConfig(method=method)
    free = CostProfile(target=((1, 10.0),), draft=((1, 2.0),), host=0.25)
    session, events = traced(config, replace(free, asking=1.0, hearing=0.5), case)
    late = events[-7:-1]  # by then plain decoding goes on by itself, and a draft has been asked
    found = {f"{one.who} {other.who}": round(other.start - one.end, 6) for one, other in pairwise(late)}
    assert found == waits
    assert session.output == traced(config, free, case)[0].output


def test_the_host_hears_of_each_step_of_a_chain_and_not_of_a_trees() -> None:
    quick = CostProfile(target=((1, 10.0),), draft=((1, 2.0),))
    case = Case((1, 2), 0.0, 0, LONG)
    for method, slower in (("speculative", True), ("tree", False)):
        config = SpeculativeConfig(method=method)
        heard, free = (traced(config, profile, case) for profile in (replace(quick, hearing=3.0), quick))
        drafts = [sum(e.end - e.start for e in events[2:] if e.who == "draft") for _, events in (heard, free)]
        assert drafts[0] == pytest.approx(1.5 * drafts[1] if slower else drafts[1])


def test_a_longer_context_is_charged_by_its_slope_and_a_shorter_one_never_below_half() -> None:
    far = CostProfile(
        target=((1, 4.0), (3, 6.0)), draft=((1, 1.0),), context=10, target_per_context=((1, 0.5), (3, 1.5))
    )
    assert [far.target_seconds(2, context) for context in (None, 10, 20, 0)] == [5.0, 5.0, 15.0, 2.5]
    assert far.draft_seconds(1, 1000) == 1.0


def test_the_clock_knows_how_much_text_there_is() -> None:
    profile = CostProfile(
        target=((1, 1.0), (2, 1.0)), draft=((1, 1.0), (2, 1.0)), context=2, target_per_context=((1, 1.0),)
    )
    _, events = traced(
        SpeculativeConfig(method="autoregressive"), profile, Case((1, 2), 0.0, 0, Ending("four", max_tokens=4))
    )
    assert [e.end - e.start for e in events] == [0.5, 1.0, 2.0, 3.0]  # the first is the prefill, behind nothing


@pytest.mark.parametrize(("rows", "seconds"), [(0, 10.0), (1, 10.0), (4.5, 13.5), (8, 17.0), (10, 19.0)])
def test_costs_are_interpolated_and_go_on_along_the_last_slope(rows: int, seconds: float) -> None:
    assert SLOPES.target_seconds(rows) == pytest.approx(seconds)


def test_one_point_is_a_constant() -> None:
    profile = CostProfile(target=((4, 3.0),), draft=((1, 1.0),))
    assert [profile.target_seconds(n) for n in (1, 4, 100)] == [3.0] * 3


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    SLOPES.save(path)
    assert CostProfile.load(path) == SLOPES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[1, 2]", "is incomplete; expected a JSON object with at least 'target' and 'draft'"),
        ('{"target": [[1, 2]]}', "is incomplete"),
        (
            '{"target": [[1, 2]], "draft": [[1, 2]], "slowdown": 1}',
            "Unknown cost profile key 'slowdown'. Did you mean 'slow_down'?",
        ),
        ('{"target": 5, "draft": [[1, 2]]}', "target is 5; expected (rows, seconds > 0) pairs by rising rows"),
        ('{"target": [], "draft": [[1, 2]]}', "target is []; expected"),
        ('{"target": [[1, 2]], "draft": [[2, 1], [1, 2]]}', "by rising rows"),
        ('{"target": [[1, 2]], "draft": [[1, 0]]}', "seconds > 0"),
        ('{"target": [[1, NaN]], "draft": [[1, 1]]}', "seconds > 0"),
        ('{"target": [[1, "x"]], "draft": [[1, 1]]}', "expected (rows, seconds > 0) pairs"),
        ('{"target": [[1, 1]], "draft": [[1, 1]], "host": -1}', "host is -1; expected seconds ≥ 0"),
        ('{"target": [[1, 1]], "draft": [[1, 1]], "overlap": "no"}', "overlap is 'no'; expected true or false"),
        ('{"target": [[1, 1]], "draft": [[1, 1]], "context": -1}', "context is -1; expected a number of tokens"),
        ('{"target": [[1, 1]], "draft": [[1, 1]], "devices": 0}', "devices is 0; expected a whole number ≥ 1"),
        ('{"target": [[1, 1]], "draft": [[1, 1]], "devices": 1.5}', "devices is 1.5; expected a whole number ≥ 1"),
        ('{"target": [[1, 1]], "draft": [[1, 1]], "devices": true}', "devices is True; expected a whole number ≥ 1"),
        (
            '{"target": [[1, 1]], "draft": [[1, 1]], "target_per_context": [[1, -1]]}',
            "target_per_context is [[1, -1]]; expected",
        ),
        ('{"target": [[1, 1]], "draft": [[1, 1]], "provenance": 5}', "provenance is 5; expected an object"),
        ('{"target": [[1, 1]], "draft": [[1, 1]], "slow_down": "much"}', "slow_down is 'much'; expected seconds ≥ 0"),
    ],
)
def test_a_bad_profile_is_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(BadParameter) as caught:
        CostProfile.load(path)
    assert said in str(caught.value)


def test_a_missing_profile_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=r"none\.json cannot be read"):
        CostProfile.load(tmp_path / "none.json")


def test_a_profile_file_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    SLOPES.save(path)
    values: dict[str, Any] = json.loads(path.read_text())
    assert values == {
        "target": [[1.0, 10.0], [8.0, 17.0]],
        "draft": [[1.0, 2.0], [4.0, 5.0]],
        "slow_down": 0.5,
        "host": 0.25,
    }
