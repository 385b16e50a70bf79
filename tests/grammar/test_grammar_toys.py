"""Under a grammar every method on every executor gives, token for token, what plain decoding with the masks gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest

from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.grammar import Constraint, State, allowed_by, pruned
from specbranch.core.loop import Executor, Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Verify
from specbranch.core.runner import Ask, Feed
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.core.trees import Node, Tree
from specbranch.errors import BadParameter
from specbranch.exec.grower import _GrowingOrder
from tiers import covering
from toy_grammar import ToyGrammar, ToyParser, constrained, plainly
from toybench import (
    PROFILE,
    VOCABULARY,
    Case,
    Ending,
    Timeless,
    answer,
    config_of,
    law,
    next_number,
    process,
    run_out,
    serial,
    streams,
    virtual_clock,
    wandering,
)

TEMPERATURES = (0.0, 0.8)
KINDS = ("serial", "process", "streams", "clock")
NAMES = (*METHODS, "confidence", "wandering")
PLANNED = ("tree", "specbranch", "auto", "wandering")
ENDINGS = (
    Ending("end token", max_tokens=40, eos_ids=(1,)),
    Ending("two end tokens", max_tokens=40, eos_ids=(1, 3)),
    Ending("end token ignored", max_tokens=40, eos_ids=(1,), ignore_eos=True),
    Ending("short", max_tokens=7, eos_ids=(1,)),
    Ending("stop id", max_tokens=40, eos_ids=(1,), stop_token_ids=(2,)),
)
CELLS = [(t, m, k) for t in TEMPERATURES for m in NAMES for k in KINDS]
QUICK = {CELLS[number] for number in covering(CELLS)}


def case(seed: int, temperature: float) -> Case:
    prompt = tuple((seed * 7 + i * i) % VOCABULARY for i in range(3 + seed % 4 * 9))
    return Case(prompt, temperature, seed, ENDINGS[seed % len(ENDINGS)])


def grammar_of(seed: int) -> ToyGrammar:
    return ToyGrammar(seed, VOCABULARY, force=(0.0, 0.3, 0.7)[seed % 3])


@pytest.fixture(scope="module")
def executor_of() -> Iterator[Callable[[str, float], Executor]]:
    with ExitStack() as stack:

        @cache
        def child(drift: float) -> Executor:
            made = process(drift, VOCABULARY, 0.0005, 0.00005)
            stack.callback(made.close)
            return made

        made = {"serial": serial, "process": child, "streams": streams, "clock": virtual_clock}
        yield lambda kind, drift: made[kind](drift)


def decode(executor: Executor, sessions: list[Session], name: str, config: SpeculativeConfig) -> None:
    """Decode several sessions at once, to their ends."""
    experience = Timeless(PROFILE) if name in PLANNED else Experience()
    loop = Loop(executor, None, experience.learned)
    for session in sessions:
        started = (
            wandering(session) if name == "wandering" else METHODS[config.method].start(session, config, experience)
        )
        loop.join(session, started)
    run_out(loop)
    for session in sessions:
        if session.error is not None:
            raise session.error
        session.stats.check()


def config_for(name: str) -> SpeculativeConfig:
    return config_of("auto" if name == "wandering" else name, "match")


@pytest.mark.parametrize(
    ("temperature", "name", "kind"),
    [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS],
)
def test_answers_are_those_of_plain_decoding_with_masks(
    temperature: float, name: str, kind: str, executor_of: Callable[[str, float], Executor]
) -> None:
    finished = set[str | None]()
    for seed in range(15):
        executor, request, grammar = executor_of(kind, (0.05, 0.3)[seed % 2]), case(seed, temperature), grammar_of(seed)
        session = constrained(request, grammar, next_number())
        decode(executor, [session], name, config_for(name))
        assert answer(session) == plainly(request, law(0.0), grammar), (seed, request, grammar)
        finished.add(session.finished)
    assert finished == {"stop", "length"}


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_and_without_grammars_gives_the_same(name: str) -> None:
    executor = serial(0.2)
    cases = [case(seed, TEMPERATURES[seed % 2]) for seed in range(6)]
    free = [request.session(next_number()) for request in cases[:2]]
    bound = [constrained(request, grammar_of(seed), next_number()) for seed, request in enumerate(cases)]
    decode(executor, [*bound, *free], name, config_for(name))
    for seed, (request, session) in enumerate(zip(cases, bound, strict=True)):
        assert answer(session) == plainly(request, law(0.0), grammar_of(seed))


def sent_by(name: str, kind: str, executor_of: Callable[[str, float], Executor]) -> list[tuple[Session, Verify]]:
    """Return the verify orders of some answers."""
    executor, found = executor_of(kind, 0.3), list[tuple[Session, Verify]]()
    run = executor.run

    def noted(orders):
        sent = [(by_number[number], order.verify) for number, order in orders.items() if order.verify]
        for session, verify in sent:
            check_allowed(session, verify)
        found.extend(sent)
        return run(orders)

    by_number: dict[int, Session] = {}
    executor.run = noted
    try:
        for seed in range(14):
            session = constrained(case(seed, 0.8), grammar_of(seed), next_number())
            by_number[session.number] = session
            decode(executor, [session], name, config_for(name))
    finally:
        executor.run = run
    return found


def check_allowed(session: Session, verify: Verify) -> None:
    """Check every row's mask against the grammar itself, and that no node is forbidden."""
    grammar = session.request.constraint.parser().grammar
    said, ends = session.output, session.request.ending_ids
    assert verify.allowed is not None and len(verify.allowed) == len(verify.tokens) + 1
    paths: list[list[int] | None] = [said]
    for node, token in enumerate(verify.tokens):
        above = paths[verify.parent(node) + 1]
        assert above is not None and token in (allowed_by(verify.allowed[verify.parent(node) + 1]) or ())
        paths.append(None if token in ends else [*above, token])
    for path, allowed in zip(paths, map(allowed_by, verify.allowed), strict=True):
        if path is not None and allowed is not None:
            accepts = grammar.accepts(path)
            assert set(allowed) == (grammar.allowed(path) - ends) | (ends if accepts else set())


@pytest.mark.parametrize("kind", ["serial", "process"])
@pytest.mark.parametrize("name", ["speculative", "pearl", "confidence", "specbranch", "lookup", "lookahead"])
def test_no_forbidden_token_is_sent_and_every_node_has_its_own_mask(
    name: str, kind: str, executor_of: Callable[[str, float], Executor]
) -> None:
    sent = sent_by(name, kind, executor_of)
    assert sum(len(verify.tokens) for _, verify in sent) > 20


@pytest.mark.parametrize("name", ["speculative", "confidence", "pearl", "lookup", "specbranch", "lookahead"])
def test_forced_tokens_are_verified_as_a_chain_without_a_draft(name: str) -> None:
    """A grammar that forces all but a few tokens needs few forwards, whatever the draft thinks."""
    request = Case((1, 2, 3), 0.8, 3, Ending("long", max_tokens=60))
    grammar = ToyGrammar(5, VOCABULARY, force=0.95, end=0.0, over=0.0)
    session = constrained(request, grammar, next_number())
    decode(serial(0.8), [session], name, config_for(name))
    assert answer(session) == plainly(request, law(0.0), grammar)
    assert session.stats.target_forwards <= 30


@pytest.mark.parametrize("name", ["tree", "specbranch"])
def test_forced_tokens_in_a_draft_tree_take_no_step_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed with the node before them, so the draft is asked where it has a choice."""
    ask, chained, asked = _GrowingOrder.ask, 0, list[bool]()

    def noted(order: _GrowingOrder, number: int, node: int) -> Ask:
        found = ask(order, number, node)
        depth = order.growing.nodes[number].depth if number != ROOT else order.growth.deepest
        if depth + 1 < order.growth.deepest:  # behind the root there is no node before them
            asked.append(isinstance(found.allowed, State) and found.allowed.forced is not None)
        return found

    def fed(order: _GrowingOrder, numbers: list[int]) -> Feed:
        nonlocal chained
        chained += sum([order.growing.nodes[n].parent in numbers for n in numbers])
        return feed(order, numbers)

    feed = _GrowingOrder.feed
    monkeypatch.setattr(_GrowingOrder, "ask", noted)
    monkeypatch.setattr(_GrowingOrder, "feed", fed)
    for seed in range(10):
        request, grammar = case(seed, 0.8), ToyGrammar(seed, VOCABULARY, force=0.5, end=0.0, over=0.0)
        session = constrained(request, grammar, next_number())
        decode(serial(0.2), [session], name, config_for(name))
        assert answer(session) == plainly(request, law(0.0), grammar)
    assert chained > 20 and len(asked) > 20 and not any(asked)


def test_a_good_draft_is_accepted_as_it_has_the_masks_too() -> None:
    """Draft and target share law, noise and masks: nothing that was drafted is rejected."""
    for seed in range(6):
        session = constrained(case(seed, 0.8), grammar_of(seed), next_number())
        decode(serial(0.0), [session], "speculative", config_for("speculative"))
        assert session.stats.rejected == 0


def test_states_are_computed_once_and_parse_on_one_parser() -> None:
    grammar = ToyGrammar(3, VOCABULARY, force=0.2, over=0.0)
    parser = ToyParser(grammar)
    state = Constraint(lambda: parser, frozenset((1,))).start()
    seen = list(walk(state, [], 4))
    assert len(seen) > 50
    asked = parser.masks
    for here, path in seen:
        accepts = grammar.accepts(path)
        assert set(here.allowed or ()) == (grammar.allowed(path) - {1}) | ({1} if accepts else set())
    assert parser.masks == asked == len(seen), "a mask was computed again"
    assert parser.rolled_back > 0


def walk(state: State, path: list[int], depth: int) -> Iterator[tuple[State, list[int]]]:
    yield state, path
    for token in state.allowed or ():
        if depth and token != 1:
            after = state.advance(token)
            assert after is not None and after is state.advance(token)
            yield from walk(after, [*path, token], depth - 1)


def test_commit_drops_the_past_and_keeps_what_is_behind() -> None:
    grammar = ToyGrammar(4, VOCABULARY, force=0.0, over=0.0)
    parser = ToyParser(grammar)
    state, path = Constraint(lambda: parser, frozenset()).start(), list[int]()
    for _ in range(30):
        for token in list(state.allowed or ()):
            after = state.advance(token)
            assert after is not None and after.allowed is not None
        token = min(state.allowed or ())
        after = state.advance(token)
        assert after is not None
        state, path = after.commit(), [*path, token]
        assert state.parent is None and set(state.allowed or ()) == grammar.allowed(path)


@pytest.mark.parametrize("name", ["autoregressive", "speculative", "pearl", "specbranch"])
def test_an_answer_that_is_preempted_goes_on_where_it_was(name: str) -> None:
    request, grammar, executor = case(3, 0.8), ToyGrammar(2, VOCABULARY, end=0.0, over=0.0), serial(0.2)
    request = replace(request, ending=Ending("long", max_tokens=40))
    loop, session, config = Loop(executor), constrained(request, grammar, next_number()), config_for(name)
    loop.join(session, METHODS[config.method].start(session, config, Timeless(PROFILE)))
    for _ in range(4):
        loop.step()
        loop.preempt(session)
        loop.resume(session)
    run_out(loop)
    assert answer(session) == plainly(request, law(0.0), grammar)


def test_a_request_has_no_state_so_that_several_sessions_may_have_it() -> None:
    request, grammar = case(5, 0.8), grammar_of(5)
    first = constrained(request, grammar, next_number())
    decode(serial(0.2), [first], "speculative", config_for("speculative"))
    again = Session(next_number(), request.prompt, first.request, 1000)
    decode(serial(0.2), [again], "pearl", config_for("pearl"))
    assert answer(again) == answer(first) == plainly(request, law(0.0), grammar)


def test_a_forbidden_node_takes_its_children_along() -> None:
    grammar = ToyGrammar(9, VOCABULARY, force=0.0, over=0.0)
    state = Constraint(lambda: ToyParser(grammar), frozenset()).start()
    good = min(grammar.allowed([]))
    bad = min(set(range(VOCABULARY)) - grammar.allowed([]))
    nodes = (Node(bad, ROOT, 0.5, 0.5, 1), Node(good, ROOT, 0.5, 0.5, 1), Node(0, 0, 0.5, 0.2, 2))
    child = min(grammar.allowed([good]))
    tree = Tree((*nodes, Node(child, 1, 0.5, 0.25, 2)), root_scored=True)
    left = pruned(state, tree)
    assert [(node.token, node.parent) for node in left.nodes] == [(good, ROOT), (child, 0)] and left.root_scored
    assert pruned(state, left) is left


def test_a_grammar_that_is_over_ends_the_answer_without_an_end_token() -> None:
    request = Case((1, 2), 0.0, 0, Ending("long", max_tokens=50, eos_ids=(1,)))
    for name in NAMES:
        grammar = replace(ToyGrammar(11, VOCABULARY), over=0.3, end=0.0)
        session = constrained(request, grammar, next_number())
        decode(serial(0.1), [session], name, config_for(name))
        assert session.finished == "stop" and session.output[-1] != 1
        assert answer(session) == plainly(request, law(0.0), grammar)


@pytest.mark.parametrize("name", NAMES)
def test_a_dead_end_ends_the_answer_with_its_sentence_and_nothing_else(name: str) -> None:
    """Where no token may follow, the greatest of no scores is token 0: it is no token of the answer, even if it would
    end one."""
    reached = 0
    for seed in range(24):
        request = Case((1, 2), 0.0, 0, Ending("long", max_tokens=50, eos_ids=(seed % 2,)))
        grammar = ToyGrammar(seed, VOCABULARY, force=0.6, end=0.0, over=0.0, dead=5)
        before = plainly(replace(request, ending=replace(request.ending, max_tokens=5)), law(0.0), grammar)
        if before.finished == "stop":  # the answer has ended before
            continue
        session = constrained(request, grammar, next_number())
        with pytest.raises(BadParameter, match="No token of this model's vocabulary"):
            decode(serial(0.1), [session], name, config_for(name))
        assert tuple(session.output) == before.tokens and session.finished == "error"
        reached += 1
    assert reached > 3
