"""Every message comes back exactly as it was sent; what is none of ours is refused with a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.config import Rule, SamplingParams
from specbranch.core.draft_evaluation import ClassCounts, DraftEvaluation
from specbranch.core.orders import Branch, Context, Draft, Effort, Grow, Measure, Plan, Sparse, Until
from specbranch.core.request import Request
from specbranch.core.trees import Chances, Growth, Node, Tree
from specbranch.exec.messages import (
    Broken,
    Evaluated,
    HeadsDrawn,
    Hello,
    Leave,
    Open,
    Ready,
    Recipe,
    RoundDrafted,
    StaleHolding,
    TargetDone,
    Tokens,
    WireMessage,
    Work,
)
from specbranch.exec.wire import BadMessage, from_bytes, to_bytes

MESSAGES = get_args(WireMessage)

numbers = st.floats()  # infinities and NaN among them
ints = st.integers()
rows = st.lists(numbers, max_size=4).map(tuple)
ids = st.lists(ints, max_size=4).map(tuple)
texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)  # a path may hold what is no UTF-8
plain = st.recursive(
    st.none() | st.booleans() | ints | numbers | texts,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(texts, below, max_size=3),
)


def several(one: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(one, max_size=most).map(tuple)


def full(kind: Callable[..., Any], **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a class with every field drawn: those that are not given, by their hint."""
    usual = {int: ints, float: numbers, bool: st.booleans(), str: texts, tuple[int, ...]: ids, tuple[float, ...]: rows}
    hints = {name: hint for name, hint in get_type_hints(kind).items() if hint in usual}
    return st.builds(kind, **({name: usual[hint] for name, hint in hints.items()} | parts))


def choice(of: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(of))


params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2) | st.just(1),
    top_k=st.none() | st.integers(1, 99),
    top_p=st.floats(0.1, 1.0),
    logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-9, 9), max_size=3),
    seed=st.none() | ints,
    stop=several(st.text(min_size=1, max_size=3)),
    stop_token_ids=several(st.integers(0, 9)),
    logprobs=st.none() | st.integers(0, 9),
)
requests = full(Request, params=params, rule=choice(Rule))
sparse = full(Sparse)
laws = st.none() | several(st.none() | sparse)
branches = full(Branch, q=laws)
contexts = full(Context, history=st.just(()))
plans = full(
    Plan,
    forks=several(st.tuples(ints, ints)),
    measure=choice(Measure),
    heads=st.sampled_from(["top", "sampled"]),
    until=choice(Until),
)
nodes = full(Node)
trees = full(Tree, nodes=several(nodes))
orders = full(Draft, on=contexts, plan=plans) | full(
    Grow, on=contexts, tree=trees, growth=full(Growth, chances=full(Chances))
)
made = several(branches) | trees
counts = full(ClassCounts)
PARTS: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    Hello: {
        "path": several(texts),
        "recipe": full(Recipe, given=st.dictionaries(texts, plain, max_size=3), modules=several(texts)),
    },
    Open: {"request": requests},
    Work: {"orders": st.dictionaries(ints, orders, max_size=2)},
    HeadsDrawn: {"heads": st.dictionaries(ints, branches, max_size=2)},
    Tokens: {"tokens": st.dictionaries(ints, texts, max_size=3)},
    Evaluated: {"evaluation": full(DraftEvaluation, first=counts, other=counts)},
    RoundDrafted: {"made": st.dictionaries(ints, made, max_size=2), "effort": full(Effort)},
}


def messages_of(kind: type) -> st.SearchStrategy[Any]:
    return full(kind, **PARTS.get(kind, {}))


any_message = st.one_of([messages_of(kind) for kind in MESSAGES])


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_message_comes_back_exactly_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    back = from_bytes(to_bytes(message))
    assert type(back) is kind
    assert repr(back) == repr(message)  # a repr tells NaN, 0.0 from -0.0, 1 from 1.0, a list from a tuple


def test_every_field_of_every_message_is_drawn() -> None:
    for kind in MESSAGES:
        drawn = {
            name
            for name, hint in get_type_hints(kind).items()
            if hint in (int, float, bool, str, tuple[int, ...], tuple[float, ...])
        }
        assert get_type_hints(kind).keys() == drawn | PARTS.get(kind, {}).keys(), kind


def test_a_history_stays_with_its_session() -> None:
    sent = Draft(Context(3, (4,), history=[1, 2, 3, 4]), Plan(2))
    back = from_bytes(to_bytes(Work(1, {7: sent})))
    assert back == Work(1, {7: sent})
    assert isinstance(back, Work) and back.orders[7].on.history == ()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1 + 0.2, 1e308])
def test_a_float_comes_back_the_same(value: float) -> None:
    back = from_bytes(to_bytes(RoundDrafted(1, {}, Effort(value))))
    assert isinstance(back, RoundDrafted) and repr(back.effort.seconds) == repr(value)


@given(message=any_message, cut=st.integers(1, 10**6))
def test_a_message_cut_short_is_refused(message: Any, cut: int) -> None:
    whole = to_bytes(message)
    with pytest.raises(BadMessage, match="is no message of ours"):
        from_bytes(whole[: -(cut % len(whole)) or -1])


@given(message=any_message, index=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_damaged_message_is_refused_or_is_another_message(message: Any, index: int, byte: int) -> None:
    damaged = bytearray(to_bytes(message))
    damaged[index % len(damaged)] = byte
    refused_or_ours(bytes(damaged))


named = st.tuples(st.sampled_from([kind.__name__ for kind in MESSAGES]), plain)


@given(foreign=st.binary() | (plain | named).map(lambda value: json.dumps(value).encode()))
def test_nothing_but_messages_is_made_of_foreign_bytes(foreign: bytes) -> None:
    refused_or_ours(foreign)


def refused_or_ours(data: bytes) -> None:
    try:
        assert type(from_bytes(data)) in MESSAGES
    except BadMessage as refused:
        assert str(refused)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"\x80\x04K\x01.", "is no message of ours"),  # a pickle
        (b"[" * 100_000, "is no message of ours"),
        (b'["Popen",["true"]]', "'Popen' where one of Hello, Open"),
        (b'["SamplingParams",[]]', "'SamplingParams' where one of Hello, Open"),
        (b'[["Work"],[]]', "where one of Hello, Open"),
        (b'{"Work":[]}', "where a list of 2 was expected"),
        (b'["Leave",[1,2]]', "where a list of 1 was expected"),
        (b'["Leave",[true]]', "it holds True where int was expected"),
        (b'["Leave",[1.0]]', "it holds 1.0 where int was expected"),
        (b'["Broken",[null]]', "it holds None where str was expected"),
        (
            b'["RoundDrafted",[1,[[2,["list",[]]]],[1.0,0]]]',
            "'list' where one of tuple, Tree, Reached was expected",
        ),
        (b'["RoundDrafted",[1,[[2,["tuple",[[0,[],[0.5],null]]]]],[1.0,0]]]', "where packed floats was expected"),
        (b'["RoundDrafted",[1,[[2,["tuple",[[0,[],"AAAA",null]]]]],[1.0,0]]]', "is no message of ours"),
        (
            b'["RoundDrafted",[1,[[2,["tuple",[[0,[1,true],"",null]]]]],[1.0,0]]]',
            "where a list of int was expected",
        ),
        (
            b'["RoundDrafted",[1,[[2,["Tree",[[[1],[],"","",[],[],"",[],[],[]],true,[]]]]],[1.0,0]]]',
            "is no message of ours",
        ),
        (b'["RoundDrafted",[1,[[2]],[1.0,0]]]', "where a list of 2 was expected"),
        (
            b'["Work",[1,[[2,["Draft",[[0,[]],[1,[],0.0,false,"bottom",false,"top","length"],0,0]]]]]]',
            r"'bottom' where one of \('top', 'entropy'\)",
        ),
    ],
)
def test_what_is_no_message_is_refused_with_a_sentence(said: bytes, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        from_bytes(said)


def test_a_request_out_of_range_is_refused() -> None:
    sent = to_bytes(Open(1, Request(SamplingParams(temperature=0.125), 3, 4)))
    with pytest.raises(BadMessage, match=r"temperature is -0\.125; expected a number ≥ 0"):
        from_bytes(sent.replace(b"0.125", b"-0.125"))


@pytest.mark.parametrize("unsent", [Hello((), Recipe("a:b", {"c": object()})), Work(1, {2: "draft"}), "hello"])  # type: ignore[dict-item]
def test_what_cannot_be_sent_says_so(unsent: Any) -> None:
    with pytest.raises(BadMessage, match=f"This {type(unsent).__name__} cannot be sent: "):
        to_bytes(unsent)


def test_the_simplest_messages_look_simple() -> None:
    assert to_bytes(Ready()) == b'["Ready",[]]'
    assert to_bytes(TargetDone(3)) == b'["TargetDone",[3]]'
    assert from_bytes(b'["StaleHolding",[3,[7]]]') == StaleHolding(3, (7,))
    assert from_bytes(b'["Leave",[3]]') == Leave(3)
    assert from_bytes(b'["Broken",["why"]]') == Broken("why")
