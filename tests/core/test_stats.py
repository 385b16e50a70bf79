"""Every drafted token has one fate, and every metric its definition."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from specbranch.core.arms import Arm, Arms
from specbranch.core.orders import NOTHING, Branch, Reports, Span, Verdict
from specbranch.core.stats import Stats


def chain(count: int, after: int = 0) -> Branch:
    return Branch(after, tuple(range(count)), (1.0,) * count)


def verdict(good: int) -> Verdict:
    return Verdict(tuple(range(good)), 99)


def test_a_verdict_splits_the_pending_chain() -> None:
    stats = Stats(drafted=12)
    stats.judge(chain(4), verdict(4))
    stats.judge(chain(4), verdict(1))
    stats.judge(chain(4), verdict(0))
    stats.judge(NOTHING, verdict(0))
    assert (stats.accepted, stats.rejected, stats.target_forwards) == (5, 7, 4)
    assert (stats.rounds_all_accepted, stats.rounds_rejected_inside) == (1, 1)
    stats.check()


def test_a_round_in_which_the_main_path_was_rejected_counts_once_wherever_it_was() -> None:
    stats = Stats(emitted=13)
    for pending, good, kept in ((4, 4, True), (4, 1, False), (4, 4, False), (0, 0, False)):
        branch = chain(2, after=pending)
        stats.judge(chain(pending), verdict(good))
        stats.settle((branch,), branch if kept else None, good)
    stats.judge(chain(3), verdict(1), taken=1)  # the request ended inside: nothing was rejected
    assert stats.rejections == 3 and stats.summary()["run_between_rejections"] == 4.0


def test_acceptance_by_position_counts_only_tokens_that_were_reached() -> None:
    stats = Stats()
    for good in (3, 1, 0):
        stats.judge(chain(3), verdict(good))
    assert stats.tested_at == [3, 2, 1]
    assert stats.accepted_at == [2, 1, 1]
    assert stats.summary()["acceptance_by_position"] == [2 / 3, 1 / 2, 1.0]


def test_a_kept_branch_counts_its_head_and_the_others_lose() -> None:
    first, second = chain(3, after=2), chain(4, after=2)
    stats = Stats()
    stats.settle((first, second), second, accepted=2)
    assert (stats.accepted, stats.losing, stats.rejected) == (1, 3, 0)
    assert (stats.branch_points, stats.branch_hits, stats.branch_hits_other) == (1, 1, 1)


def test_a_hit_on_the_first_head_is_no_hit_on_another() -> None:
    first, second = chain(3), chain(4)
    stats = Stats()
    stats.settle((first, second), first, accepted=0)
    assert (stats.branch_hits, stats.branch_hits_other, stats.losing) == (1, 0, 4)


def test_branches_that_all_lose_void_the_first_and_count_the_others_apart() -> None:
    stats = Stats(drafted=7)
    stats.settle((chain(3), chain(4)), None, accepted=0)
    assert (stats.rejected, stats.losing, stats.branch_hits, stats.branch_points) == (3, 4, 0, 1)
    stats.check()


def test_two_branch_points_are_counted_as_two() -> None:
    stats = Stats()
    inner, outer = chain(2, after=1), chain(2, after=3)
    stats.settle((outer, inner), inner, accepted=1)
    assert (stats.branch_points, stats.branch_hits, stats.branch_hits_other) == (2, 1, 0)


def test_the_hit_rate_is_over_the_branch_points_that_were_reached() -> None:
    stats = Stats()
    stats.settle((chain(2, after=3),), None, accepted=1)  # the chain broke before
    stats.settle((chain(2, after=3),), None, accepted=3)
    hit = chain(2, after=3)
    stats.settle((hit,), hit, accepted=3)
    assert (stats.branch_points, stats.branch_points_reached) == (3, 2)
    assert stats.summary()["branch_hit_rate"] == 1 / 2


def test_a_lost_draft_counts_once_a_target_forward() -> None:
    stats = Stats()
    stats.take(Reports(draft_lost=True))  # a draft stage
    stats.take(Reports(draft_lost=True))  # beside the verification
    stats.judge(NOTHING, verdict(0))
    stats.take(Reports())
    stats.judge(NOTHING, verdict(0))
    assert stats.rounds_without_draft == 1


def test_no_branches_settle_nothing() -> None:
    stats = Stats()
    stats.settle((), None, accepted=0)
    assert stats == Stats()


def test_a_missing_token_is_noticed() -> None:
    with pytest.raises(AssertionError, match="3 drafted, but 2 accounted for"):
        Stats(drafted=3, accepted=1, unused=1).check()


def test_the_summary_follows_the_definitions() -> None:
    stats = Stats(emitted=11, target_forwards=4, drafted=20, accepted=8, rejected=5, losing=4, dropped=2, unused=1)
    stats.started, stats.first_token, stats.finished = 10.0, 12.0, 17.0
    stats.clock(Reports(drafting=Span(0.0, 1.5), verifying=Span(0.0, 3.0)))
    stats.clock(Reports(verifying=Span(3.0, 4.0)))
    stats.check()
    summary = stats.summary()
    assert summary["ttft_seconds"] == 2.0
    assert summary["tokens_per_second"] == 10 / 5.0, "the first token belongs to the prefill"
    assert summary["end_to_end_tokens_per_second"] == 11 / 7.0
    assert summary["tokens_per_forward"] == 10 / 4
    assert summary["rollback_rate"] == (5 + 2) / (20 - 4), "on the surviving line"
    assert summary["rollback"] == {"rejected": 5, "tree_siblings": 0, "losing_branches": 4, "dropped_by_length": 2}
    assert (summary["draft_idle_seconds"], summary["target_idle_seconds"]) == (3.5, 1.0)


def test_rates_of_nothing_are_nothing() -> None:
    summary = Stats(emitted=1).summary()
    speeds = ("tokens_per_second", "tokens_per_forward", "end_to_end_tokens_per_second")
    for name in (*speeds, "rollback_rate", "branch_hit_rate"):
        assert summary[name] is None


def spans(draft: tuple[float, float] | None, target: tuple[float, float] | None) -> Reports:
    return Reports(drafting=Span(*draft) if draft else None, verifying=Span(*target) if target else None)


def test_time_is_the_drafts_the_targets_both_ones_or_the_hosts() -> None:
    stats = Stats(first_token=10.0, finished=20.0)
    for draft, target in (
        ((10.0, 11.0), None),
        ((11.5, 13.5), (12.0, 15.0)),
        ((15.0, 16.0), (16.0, 19.0)),
        (None, None),
    ):
        stats.clock(spans(draft, target))
    figures = stats.summary()
    assert (stats.draft_busy, stats.target_busy) == (4.0, 6.0)
    assert figures["both_busy_seconds"] == 1.5 and figures["rounds_overlapped"] == 2
    assert figures["host_seconds"] == 1.5
    assert figures["draft_idle_seconds"] == 6.0 and figures["target_idle_seconds"] == 4.0


NOT_SHOWN = {"rounds_all_accepted", "rounds_rejected_inside"}  # by a summary
AT_HAND = {"started", "_lost", "_rejected"}  # a summary's clock begins at 0, and no round is going on


def filled(name: str, number: int) -> Any:
    """A value for a field that no other field has."""
    if name in AT_HAND:
        return getattr(Stats(), name)
    arms = Arms({"plain": Arm(2, 2, 0.5, 2.0, 0.25)})
    by_hand = {"arms": arms, "first_token": 8.0, "finished": 512.0, "both_busy": 4.0}
    return by_hand.get(name, [number, 1, 2] if name.endswith("_at") else number)


def busy() -> Stats:
    """Statistics in which every field has something to tell."""
    names = [one.name for one in fields(Stats)]
    made = Stats(**{name: filled(name, number) for number, name in enumerate(names, 11)})
    usual = Stats()
    assert [name for name in names if getattr(made, name) == getattr(usual, name)] == [
        name for name in names if name in AT_HAND
    ]
    return made


def test_what_a_summary_tells_comes_back() -> None:
    stats, figures = busy(), busy().summary()
    back = Stats.from_summary(figures)
    assert back.summary() == figures
    forgotten = {one.name for one in fields(Stats) if getattr(back, one.name) != getattr(stats, one.name)}
    assert forgotten == NOT_SHOWN, "a field that a summary has is missing in from_summary, or the other way round"


def test_requests_add_up_field_by_field_and_their_first_tokens_are_not_decoded() -> None:
    one, both = busy(), busy()
    both.go_on_with(busy())
    for name in (field.name for field in fields(Stats) if field.name not in AT_HAND | {"emitted", "arms"}):
        value = getattr(one, name)
        assert getattr(both, name) == ([2 * count for count in value] if isinstance(value, list) else 2 * value), name
    assert both.emitted - 1 == 2 * (one.emitted - 1)
    assert both.arms == Arms({"plain": Arm(4, 4, 1.0, 4.0, 0.5)})
    whole = Stats(emitted=1)
    whole.go_on_with(one)
    assert whole == one


def test_a_longer_chain_is_added_position_by_position() -> None:
    short, long = Stats(tested_at=[3], accepted_at=[2]), Stats(tested_at=[1, 1], accepted_at=[1, 0])
    short.go_on_with(long)
    assert (short.tested_at, short.accepted_at) == ([4, 1], [3, 0])


def test_what_earlier_versions_did_not_tell_is_nothing() -> None:
    figures = {"tokens": 5, "ttft_seconds": 1.0, "decode_seconds": 2.0}
    assert Stats.from_summary(figures) == Stats(emitted=5, first_token=1.0, finished=3.0)
    assert Stats.from_summary({**figures, "tested_by_position": [4]}).tested_at == [], (
        "of no use without what was accepted"
    )
