"""Rounds over a tree: the draft grows it, the target verifies the part that promises most, both at once where that
pays.

Owns the order of growing and verifying; what to grow and to send is the `Planner`'s choice. Invariant: the session
receives only what the verdict says; what is left of the tree afterwards hangs below exactly that. What is learned and
counted of a round is put off until the models work again, so a plan knows nothing yet of the round just before it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from specbranch.core.market import LaneGrant, RowGrant
from specbranch.core.orders import Meanwhile, Orders, Reports
from specbranch.core.planner import Planner
from specbranch.core.rounds import MethodRounds, prefill
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, Growth, Tree, below, chosen, marked

TreeRound = Generator[Any, Any, Tree]  # orders and offers for reports and grants, as of a method; the tree that is left


def growing(session: Session, planner: Planner) -> MethodRounds:
    """Decode a request: grow while that pays, verify the best of the tree, and grow on meanwhile where both models
    can work at once."""
    # In a batch, or where plain decoding is faster, a draft may never be asked: it reads the prompt when it first is.
    alone = session.batch_size == 1 and not planner.plainly(1)
    yield from prefill(session, planner.experience.has_draft and alone)
    meanwhile = Meanwhile()
    try:
        yield from _decoding(session, planner, meanwhile)
    finally:
        meanwhile()  # what was put off in the last round


def _decoding(session: Session, planner: Planner, meanwhile: Meanwhile) -> MethodRounds:
    tree = NO_TREE
    while not session.finished:
        batch_size, begun, emitted = session.batch_size, session.now, session.stats.emitted
        plainly = planner.plainly(batch_size)
        if plainly:
            meanwhile.add(session.stats.abandon_tree, tree)
            yield from _plain_round(session, planner, meanwhile)
            tree = NO_TREE
        else:
            tree = yield from _planned_round(session, planner, tree, meanwhile)
        planner.passed(batch_size, plainly, session.stats.emitted - emitted, session.now - begun)
    meanwhile.add(session.stats.abandon_tree, tree)


def _planned_round(session: Session, planner: Planner, tree: Tree, meanwhile: Meanwhile) -> TreeRound:
    planner.begin(len(session.tokens), session.batch_size)
    session.stats.begin(tree.read)
    tree = planner.looked_up(tree)
    offered = planner.lane_offer(tree, session.unsent) if session.room > 1 else None
    may: LaneGrant = (yield offered) if offered else LaneGrant(False)
    if growth := _within(session, planner.while_waiting(tree, session.unsent, may)):
        orders = Orders(draft=session.grow(tree, growth, planner.sending(session.room)))
        reports = yield orders
        tree = _grown(session, planner, tree, orders, reports)
    candidates = planner.candidates(tree, session.room)
    grant: RowGrant = yield planner.row_offer(tree, candidates)
    sent = sorted(candidates[: grant.count])
    tree = marked(tree, sent)
    # What is begun with a verdict is begun sooner than a draft beside the target can help.
    begins = growth is None and planner.looks_up(tree, sent)
    growth = None if begins else _within(session, planner.while_verifying(tree, grant))
    follows = None if growth else planner.follows(tree, session.unsent)
    verify = session.verify_tree(chosen(tree, sent), follows=follows)
    orders = Orders(session.grow(tree, growth) if growth else None, verify, meanwhile)
    meanwhile.add(_count_kind, session, tree, sent, growth)
    reports = yield orders
    meanwhile()
    return _absorb(session, planner, sent, _grown(session, planner, tree, orders, reports), orders, reports, meanwhile)


def _plain_round(session: Session, planner: Planner, meanwhile: Meanwhile) -> TreeRound:
    """A round without a plan: the target's next token."""
    orders = Orders(verify=session.verify_plainly(), meanwhile=meanwhile)
    meanwhile.add(_count_kind, session, NO_TREE, [], None)
    reports = yield orders
    meanwhile()
    return _absorb(session, planner, [], NO_TREE, orders, reports, meanwhile)


def _within(session: Session, growth: Growth | None) -> Growth | None:
    """The growth as planned; none where one token is left to say, which the target says by itself."""
    return growth if session.room > 1 else None


def _grown(session: Session, planner: Planner, tree: Tree, orders: Orders, reports: Reports) -> Tree:
    """Take in what was drafted; the old tree if the draft was lost."""
    session.stats.take(reports)
    if orders.verify is None:
        planner.note(orders, reports, 0, session.rest())
    return tree if reports.tree is None else reports.tree


def _absorb(
    session: Session,
    planner: Planner,
    sent: list[int],
    tree: Tree,
    orders: Orders,
    reports: Reports,
    meanwhile: Meanwhile,
) -> Tree:
    """Commit a verdict; returns what is left of the tree: what hangs below the target's own token."""
    verdict = reports.verdict
    if verdict is None:
        raise ValueError("the executor reported no verdict for a verify order")
    path = [sent[node] for node in verdict.path]
    hit = tree.child(path[-1] if path else ROOT, verdict.token)
    taken = session.commit([tree.nodes[n].token for n in sent], verdict, hit is not None)
    ended = taken <= len(path)
    session.stats.end_round()
    meanwhile.add(session.stats.judge_tree, tree, sent, path, hit, taken)
    meanwhile.add(
        planner.observe, tree, path[: taken - 1], tree.nodes[path[taken - 1]].token if ended else verdict.token
    )
    planner.note(orders, reports, taken, session.rest())
    return below(tree, hit) if hit is not None and not ended else NO_TREE


def _count_kind(session: Session, tree: Tree, sent: list[int], growth: Growth | None) -> None:
    session.stats.chose(_kind(tree, sent, growth))


def _kind(tree: Tree, sent: list[int], growth: Growth | None) -> str:
    """What a round amounts to, as a word for statistics."""
    if growth is not None:
        return "hedged"
    if not sent:
        return "plain"
    main_path = tree.main_path(sent)
    if all(tree.nodes[n].look for n in main_path):
        return "lookup"
    return "chain" if len(main_path) == len(sent) else "tree"
