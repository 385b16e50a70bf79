"""A session appends only what a verdict says, and ends where one-token-at-a-time decoding would have ended."""

from __future__ import annotations

import pytest

from specbranch.config import SamplingParams
from specbranch.core.orders import NOTHING, Branch, Context, Plan, TokenLogprobs, Verdict
from specbranch.core.request import Request
from specbranch.core.session import Session, Watcher
from specbranch.errors import CacheFull

PROMPT = (1, 2, 3)


def session(limit: int = 100, eos_ids: tuple[int, ...] = (), watch: Watcher | None = None, **params: object) -> Session:
    values: dict[str, object] = {"max_tokens": 20} | params
    return Session(7, PROMPT, Request(SamplingParams.from_dict(values), 0, len(PROMPT), eos_ids=eos_ids), limit, watch)


def chain(*tokens: int) -> Branch:
    return Branch(0, tokens, (1.0,) * len(tokens))


def accept(made: Session, pending: Branch, count: int, token: int) -> None:
    made.stats.drafted += len(pending.tokens)
    verdict = Verdict(tuple(range(count)), token)
    made.stats.judge(pending, verdict, made.commit(pending.tokens, verdict))


def test_a_commit_appends_the_accepted_tokens_and_the_targets_own() -> None:
    made = session()
    accept(made, chain(4, 5, 6), 2, 9)
    assert made.tokens == [1, 2, 3, 4, 5, 9]
    assert made.output == [4, 5, 9]
    assert made.origins == ["draft", "draft", "target"]
    assert made.finished is None


def test_a_commit_follows_the_path_through_a_tree() -> None:
    made = session()
    made.commit((4, 5, 6), Verdict((0, 2), 9))
    assert made.output == [4, 6, 9]


def test_the_head_of_a_kept_branch_is_recognised() -> None:
    made = session()
    made.commit((4,), Verdict((0,), 9), foreseen=True)
    assert made.origins == ["draft", "branch"]


@pytest.mark.parametrize("by", ["end token", "stop id", "watcher"])
def test_an_end_inside_an_accepted_block_cuts_the_rest_off(by: str) -> None:
    made = {
        "end token": lambda: session(eos_ids=(5,)),
        "stop id": lambda: session(stop_token_ids=(5,)),
        "watcher": lambda: session(watch=lambda token: token == 5),
    }[by]()
    accept(made, chain(4, 5, 6), 3, 9)
    assert made.output == [4, 5]
    assert made.finished == "stop"
    assert (made.stats.accepted, made.stats.unused, made.stats.emitted) == (2, 1, 2)
    made.stats.check()


def test_an_ignored_end_token_ends_nothing() -> None:
    made = session(eos_ids=(5,), ignore_eos=True)
    accept(made, chain(4, 5, 6), 3, 9)
    assert made.finished is None


def test_a_stop_id_ends_even_where_the_end_token_is_ignored() -> None:
    made = session(eos_ids=(5,), stop_token_ids=(6,), ignore_eos=True)
    accept(made, chain(4, 5, 6), 3, 9)
    assert made.output == [4, 5, 6]
    assert made.finished == "stop"


def test_the_limit_inside_a_block_cuts_the_rest_off() -> None:
    made = session(max_tokens=2)
    accept(made, chain(4, 5, 6), 3, 9)
    assert made.output == [4, 5]
    assert made.finished == "length"
    made.stats.check()


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    made = session(max_tokens=2, eos_ids=(5,))
    accept(made, chain(4, 5), 2, 9)
    assert made.finished == "stop"


def test_the_watcher_sees_every_token_once_and_none_after_the_end() -> None:
    seen: list[int] = []

    def watch(token: int) -> bool:
        seen.append(token)
        return False

    made = session(eos_ids=(5,), watch=watch)
    accept(made, chain(4, 5, 6), 3, 9)
    assert seen == [4, 5]


def test_the_context_limit_counts_the_prompt() -> None:
    made = session(limit=5)
    assert made.room == 2
    accept(made, chain(4), 1, 5)
    assert made.finished == "length"


def test_logprobs_stay_in_step_with_the_output() -> None:
    made = session(eos_ids=(5,))
    logprobs = tuple(TokenLogprobs(-float(i)) for i in range(4))
    made.commit((4, 5, 6), Verdict((0, 1, 2), 9, logprobs))
    assert made.logprobs == list(logprobs[:2])


def test_an_order_states_what_is_new_since_the_workers_last_order() -> None:
    made = session()
    assert made.verify().on == Context(0, (1, 2, 3))
    accept(made, chain(4, 5), 2, 6)
    assert made.verify(chain(7)).on == Context(3, (4, 5, 6))
    assert made.verify().on == Context(6, ())
    draft = made.draft(Plan(2), chain(7, 8))
    assert draft
    assert draft.on == Context(0, (1, 2, 3, 4, 5, 6, 7, 8)), "the draft is told apart from the target"
    assert draft.pending == 2
    again = made.draft(Plan(2), chain(7))
    assert again
    assert again.on == Context(6, (7,)), "what is pending never counts as told"


def test_a_context_can_be_sent_whole() -> None:
    made = session()
    made.verify()
    accept(made, NOTHING, 0, 4)
    assert made.verify().on.whole() == Context(0, (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("max_tokens", "pending", "asked", "ordered"),
    [(20, 0, 5, 5), (4, 0, 5, 3), (4, 2, 5, 1), (4, 3, 5, None), (1, 0, 5, None)],
)
def test_no_order_reaches_beyond_the_limit(max_tokens: int, pending: int, asked: int, ordered: int | None) -> None:
    draft = session(max_tokens=max_tokens).draft(Plan(asked), chain(*range(pending)))
    assert (draft.plan.length if draft else None) == ordered


def test_a_draft_may_be_ordered_to_prefill_only() -> None:
    draft = session(max_tokens=1).draft(Plan(0))
    assert draft
    assert draft.plan.length == 0


def test_a_failed_session_keeps_what_it_emitted() -> None:
    made = session()
    accept(made, chain(4), 1, 5)
    made.fail(CacheFull("no room"))
    assert made.finished == "error"
    assert made.output == [4, 5]
    assert str(made.error) == "no room"
