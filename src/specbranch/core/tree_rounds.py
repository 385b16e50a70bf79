"""Rounds over a draft tree: the draft extends it, the target verifies the nodes with the highest expected gain.

Owns the order of drafting and verifying; which nodes and how many is the `Planner`'s choice. Invariant: the session
receives only what the verdict says, and the tree that is kept is the subtree below the verdict's last token. Learning
and counting is deferred until the models work again, so a plan does not know the round just before it yet.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from specbranch.core.arms import Arm, ArmRound, shape_of
from specbranch.core.forest import ForestRound
from specbranch.core.forest_plan import FEW_SESSIONS
from specbranch.core.goodput import Way
from specbranch.core.learning import LookedUp
from specbranch.core.market import LaneGrant, RowGrant
from specbranch.core.orders import Deferred, Orders, Reports
from specbranch.core.planner import Planner
from specbranch.core.rounds import MethodRounds, prefill, verdict_of
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, Growth, Tree, below, chosen, marked
from specbranch.core.way_choice import WayChoice

FOREST_ROUNDS = 6  # rounds of the forest that the loop makes in a batch before a session's method hears of them

# Yields Orders and Offers, is sent Reports and Grants, returns the tree kept and what the round was.
TreeRound = Generator[Any, Any, tuple[Tree, ArmRound]]


def decode_tree(session: Session, planner: Planner) -> MethodRounds:
    """Decode a request by draft trees; both models work at once where that pays."""
    # Prefill of the draft waits for its first order if none is likely: in a batch, or where drafting does not pay.
    ways = WayChoice(planner)
    drafts_first = session.batch_size == 1 and not session.in_forest and ways.drafts_first(len(session.tokens))
    with_draft = planner.experience.has_draft and drafts_first
    yield from prefill(session, with_draft, goes_on=ways.joins_plainly(session))
    deferred = Deferred()
    try:
        yield from _decode(session, planner, ways, deferred)
    finally:
        deferred.run()  # the tasks of the last round


def _decode(session: Session, planner: Planner, ways: WayChoice, deferred: Deferred) -> MethodRounds:
    """Decode behind the first token, a plain or a planned round at a time."""
    tree = NO_TREE
    while not session.finished:
        batch_size, since = session.batch_size, session.clock.rounds
        last_end, emitted = session.now, session.stats.emitted
        way = ways.choose(session, tree)
        if session.in_forest and way == "planned" and batch_size > FEW_SESSIONS:
            tree = yield from _forest_rounds_in_batch(session, planner, ways, tree, deferred)
            continue
        if session.in_forest and (way == "planned" or batch_size == 1):
            tree, planned = yield from _forest_round(session, planner, tree, deferred)
            _end_round(session, planner, ways, planned, deferred, "planned", batch_size, since, last_end, emitted)
            continue
        goes_on = way == "plain"
        if session.launched and batch_size == 1:  # its next token is being computed; a plan comes behind it
            way = "plain"
        if way == "plain" and tree is not NO_TREE:
            deferred.add(session.stats.abandon_tree, tree)  # a plain round keeps no tree
            tree = NO_TREE
        if way == "plain" and batch_size > 1:
            yield from _plain_rounds_in_batch(session, ways, planner, deferred)
            continue
        if way == "plain":
            tree, planned = yield from _plain_round(session, planner, ways.looked_up, deferred, goes_on)
        else:
            tree, planned = yield from _planned_round(session, planner, tree, deferred)
        _end_round(session, planner, ways, planned, deferred, way, batch_size, since, last_end, emitted)
    deferred.add(session.stats.abandon_tree, tree)


def _end_round(
    session: Session,
    planner: Planner,
    ways: WayChoice,
    planned: ArmRound,
    deferred: Deferred,
    way: Way,
    batch_size: int,
    since: int,
    last_end: float,
    emitted: int,
) -> None:
    """Count a round; the last four: how many shared it, behind which round of the loop, when and where it began."""
    tokens, seconds = session.stats.emitted - emitted, session.now - last_end
    deferred.add(_count_arm, session, planner, planned, tokens, seconds)
    ways.record_round(batch_size, way, tokens, seconds, since=since)


def _forest_round(session: Session, planner: Planner, tree: Tree, deferred: Deferred) -> TreeRound:
    """Leave a round to the device, which grows the tree and chooses what to verify; `tree`: what is left there."""
    session.stats.begin(tree.root_scored)
    planner.follow_lookup(session.tokens)
    orders = Orders(verify=session.verify_plainly(), deferred=deferred, forest=planner.forest_wish())
    reports = yield orders
    deferred.run()
    if reports.tree is None:  # it was ordered as plain decoding
        deferred.add(session.stats.abandon_tree, tree)
        planned = ArmRound(NO_TREE, [], session.batch_size, len(session.tokens), session.batch_size)
        return _absorb(session, planner, NO_TREE, [], orders, reports, deferred), planned
    verified = [n for n, node in enumerate(reports.tree.nodes) if node.sent]
    planned = ArmRound(reports.tree, verified, len(verified) + 1, len(session.tokens), session.batch_size)
    return _absorb(session, planner, reports.tree, verified, orders, reports, deferred), planned


def _forest_rounds_in_batch(
    session: Session, planner: Planner, ways: WayChoice, tree: Tree, deferred: Deferred
) -> Generator[Any, Any, Tree]:
    """Leave some rounds to the device: in a large batch every microsecond of a session counts.

    The loop commits them, and reports the last one, which teaches acceptance. The sessions of a batch report in
    different rounds. If the request ends meanwhile, this generator is closed, and what it has seen still counts.
    """
    batch_size, since, last_end, emitted = session.batch_size, session.clock.rounds, session.now, session.stats.emitted
    rounds = ways.forest_rounds(FOREST_ROUNDS - (since + session.number) % FOREST_ROUNDS)
    planner.follow_lookup(session.tokens)
    wish = planner.forest_wish()
    try:
        orders = Orders(verify=session.verify_plainly(), deferred=deferred, forest=wish, plain_rounds=rounds)
        reports = yield orders
        deferred.run()
        began, ended, before = session.stats.emitted, session.now, session.take_rounds()
        last_seconds = ended - last_end - sum([made.seconds for made in before])
        plain = began - emitted - sum([made.taken for made in before])  # rounds that the loop made plainly
        deferred.add(_count_rounds, session, planner, before, plain, last_seconds * plain / (plain + 1))
        tree = reports.tree or NO_TREE
        verified = [n for n, node in enumerate(tree.nodes) if node.sent]
        planned = ArmRound(tree, verified, len(verified) + 1, len(session.tokens), batch_size)
        tree = _absorb(session, planner, tree, verified, orders, reports, deferred)
        deferred.add(_count_arm, session, planner, planned, session.stats.emitted - began, last_seconds / (plain + 1))
        in_forest = reports.tree is not None  # otherwise the last round was plain, too
        earlier, made = emitted + plain + (not in_forest), len(before) + in_forest
        _end_rounds(ways, batch_size, session, earlier, last_end, made, since)
        return tree
    except GeneratorExit:
        left = session.take_rounds()
        plain = session.stats.emitted - emitted - sum([made.taken for made in left])
        last_seconds = session.now - last_end - sum([made.seconds for made in left])
        _count_rounds(session, planner, left, plain, last_seconds)
        _end_rounds(ways, batch_size, session, emitted + plain, last_end, len(left), since)
        raise


def _end_rounds(
    ways: WayChoice, batch_size: int, session: Session, emitted: int, last_end: float, rounds: int, since: int
) -> None:
    """Count rounds of the forest; `emitted`: what the session had before them, with what it got in plain rounds."""
    if tokens := session.stats.emitted - emitted:
        ways.record_round(batch_size, "planned", tokens, session.now - last_end, rounds, since)


def _count_rounds(
    session: Session, planner: Planner, rounds: Sequence[ForestRound], plain: int, plain_seconds: float
) -> None:
    """Count rounds that the loop has committed; some of them were plain decoding."""
    if plain:
        for arms in (session.stats.arms, planner.experience.arms):
            arms.add("plain", Arm(plain, plain, plain_seconds))
    for made in rounds:
        name, counted = shape_of(made.tree, made.verified), Arm(1, made.taken, made.seconds)
        for arms in (session.stats.arms, planner.experience.arms):
            arms.add(name, counted)
        planner.learning.pass_round(made.tree, made.path, made.taken)


def _planned_round(session: Session, planner: Planner, tree: Tree, deferred: Deferred) -> TreeRound:
    """Draft while the target waits if that pays, then verify, and draft on during the verify if that pays."""
    session.stats.begin(tree.root_scored)
    tree = planner.with_lookup(session.permitted_tree(tree))
    offer = planner.lane_offer(tree, session.unsent) if session.room > 1 else None
    may_draft: LaneGrant = (yield offer) if offer else LaneGrant(False)
    before = _if_room(session, planner.plan_draft_before_verify(tree, session.unsent, may_draft))
    steps: tuple[int, ...] = ()
    if before:
        orders = Orders(draft=session.grow(tree, before, planner.sending(session.room)))
        reports = yield orders
        tree = session.permitted_tree(_take_tree(session, planner, tree, orders, reports))
        steps = _steps(reports)
    candidates = planner.candidates(tree, session.room)
    rows: RowGrant = yield planner.row_offer(tree, candidates)
    to_verify = sorted(candidates[: rows.count])  # in the tree's order
    tree = marked(tree, to_verify)
    during = _plan_during(session, planner, tree, to_verify, rows, drafted=before is not None)
    planned = ArmRound(tree, to_verify, rows.rows, len(session.tokens), session.batch_size, during is not None, steps)
    orders = _verify_orders(session, planner, planned, during, deferred)
    deferred.add(planner.learning.expect, planned)
    reports = yield orders
    deferred.run()
    tree = _take_tree(session, planner, tree, orders, reports)
    planned.during = _steps(reports)
    return _absorb(session, planner, tree, to_verify, orders, reports, deferred), planned


def _plan_during(
    session: Session, planner: Planner, tree: Tree, to_verify: list[int], rows: RowGrant, drafted: bool
) -> Growth | None:
    """Plan what the draft does during the verify; None: nothing.

    If only looked-up tokens are verified, the device can launch the next verify by itself. Drafting now would prevent
    that, and gains less. A tree that the draft has extended in this round is not such a path.
    """
    if not drafted and planner.launches_lookup(tree, to_verify):
        return None
    return _if_room(session, planner.plan_draft_during_verify(tree, rows))


def _verify_orders(
    session: Session, planner: Planner, planned: ArmRound, during: Growth | None, deferred: Deferred
) -> Orders:
    """Order nodes to be verified, and the tree to be extended meanwhile; otherwise say what can be launched ahead."""
    tree = planned.tree
    follows = None if during else planner.launch_ahead(tree, session.unsent)
    verify = session.verify_tree(chosen(tree, planned.verified), follows=follows)
    draft = session.grow(tree, during) if during else None
    return Orders(draft=draft, verify=verify, deferred=deferred, planned=planned)


def _plain_round(
    session: Session, planner: Planner, looked_up: LookedUp | None, deferred: Deferred, goes_on: bool
) -> TreeRound:
    """Decode one token of the target, without a plan; `goes_on`: a device may launch one more behind it."""
    verify = session.verify_plainly(goes_on)
    planned = ArmRound(NO_TREE, [], session.batch_size, len(session.tokens), session.batch_size)
    orders = Orders(verify=verify, deferred=deferred, planned=planned)
    deferred.add(planner.learning.expect, planned)
    reports = yield orders
    deferred.run()
    deferred.add(planner.learning.record_plain, looked_up, verdict_of(reports).token)
    return _absorb(session, planner, NO_TREE, [], orders, reports, deferred), planned


def _plain_rounds_in_batch(session: Session, ways: WayChoice, planner: Planner, deferred: Deferred) -> MethodRounds:
    """Decode some tokens as plain decoding does: in a large batch every microsecond of a session counts.

    The loop may make several rounds before it reports. If the request ends meanwhile, this generator is closed, and
    what it has seen still counts.
    """
    batch_size, last_end, stats, since = session.batch_size, session.now, session.stats, session.clock.rounds
    emitted = stats.emitted
    if session.in_forest:
        planner.follow_lookup(session.tokens)
    rounds = min(ways.plain_rounds(session), session.room)
    try:
        orders = Orders(verify=session.verify_plainly(), deferred=deferred, plain_rounds=rounds)
        reports = yield orders
        deferred.run()
        if reports.tree is not None:  # a round of the forest was in flight
            verified = [n for n, node in enumerate(reports.tree.nodes) if node.sent]
            left = _absorb(session, planner, reports.tree, verified, orders, reports, deferred)
            deferred.add(stats.abandon_tree, left)
        else:
            session.commit((), verdict_of(reports))
            stats.end_round()
            stats.judge_plain()
            session.take_waited()
    finally:
        if made := stats.emitted - emitted:  # rounds, each with one token
            seconds = session.now - last_end
            for arms in (stats.arms, planner.experience.arms):
                arms.add("plain", Arm(made, made, seconds))
            ways.record_round(batch_size, "plain", made, seconds, made, since)


def _if_room(session: Session, growth: Growth | None) -> Growth | None:
    """Return the plan, or None if only one token may still be generated: the target adds that one itself."""
    return growth if session.room > 1 else None


def _steps(reports: Reports) -> tuple[int, ...]:
    """Return the rows of each draft step; none if the draft did not work, or was lost."""
    return reports.tree.steps if reports.tree is not None else ()


def _take_tree(session: Session, planner: Planner, tree: Tree, orders: Orders, reports: Reports) -> Tree:
    """Return the tree as the draft has extended it, or the old one if the draft was lost.

    Times of a round with a verdict are recorded once the verdict is committed.
    """
    session.stats.take(reports)
    if orders.verify is None:
        planner.record_forwards(orders, reports, 0, session.take_waited())
    return tree if reports.tree is None else reports.tree


def _absorb(
    session: Session,
    planner: Planner,
    tree: Tree,
    verified: list[int],
    orders: Orders,
    reports: Reports,
    deferred: Deferred,
) -> Tree:
    """Commit a verdict; returns the subtree below the bonus token."""
    verdict = verdict_of(reports)
    path = [verified[node] for node in verdict.path]
    bonus = tree.child(path[-1] if path else ROOT, verdict.token)  # None: the tree does not have it
    taken = session.commit([tree.nodes[n].token for n in verified], verdict, bonus is not None)
    ended_on_path = taken <= len(path)  # the request ended before the bonus token
    last_token = tree.nodes[path[taken - 1]].token if ended_on_path else verdict.token
    session.stats.end_round()
    if session.prediction is not None:
        predicted = session.prediction.sent_in_tree(tree, verified)
        session.stats.count_predicted(len(predicted), len(set(predicted).intersection(path[:taken])))
    planner.learning.accept(tree, path[: taken - 1], verified)  # what lies beyond the end of the request does not count
    if len(tree):
        deferred.add(session.stats.judge_tree, tree, verified, path, bonus, taken)
        deferred.add(planner.learning.record_verdict, tree, path[: taken - 1], last_token)
    else:
        deferred.add(session.stats.judge_plain)
        if orders.forest is not None:  # the text has gone on
            deferred.add(planner.learning.record_verdict, tree, [], last_token)
    planner.record_forwards(orders, reports, taken, session.take_waited())
    return below(tree, bonus) if bonus is not None and not ended_on_path else NO_TREE


def _count_arm(session: Session, planner: Planner, planned: ArmRound, tokens: int, seconds: float) -> None:
    session.stats.arms.add(planned.name, planner.learning.count_arm(planned, tokens, seconds))
