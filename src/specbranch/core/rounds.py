"""Methods over chains, round by round. A method is a generator: it yields orders, receives reports, commits verdicts.

Owns the order of drafting and verifying; never calls a model. `tree_rounds` is the same for trees. Invariant: whatever
is drafted, the session receives only what the verdict says.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from specbranch.config import SpeculativeConfig
from specbranch.core.grammar import GuidedLookup, State
from specbranch.core.lookup import LONGEST_MATCH, Lookup, Ngrams
from specbranch.core.market import Offer
from specbranch.core.orders import NOTHING, Branch, Orders, Plan, Reports, Verdict
from specbranch.core.policy import Policy
from specbranch.core.prediction import ngrams_of
from specbranch.core.session import Session

MethodRounds = Generator[Orders | Offer, Any, None]  # receives Reports for Orders, a Grant for an Offer
InFlight = Branch | None  # a chain that is drafted and not verified yet; None: the next one has to be drafted
Decode = Callable[[Session, SpeculativeConfig, Policy], MethodRounds]
PREFILL = Plan(0)
GIVEN_AT_ONCE = 32  # tokens of a given text in one forward
FORCED_AT_ONCE = 15  # tokens that a grammar forces, in one forward


def autoregressive(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """Plain decoding, one token a forward: the reference for every other method."""
    while not session.finished:
        reports = yield Orders(verify=session.verify_plainly(to_the_end=True), plain_rounds=session.room)
        absorb(session, policy, NOTHING, reports)


def speculative(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """Serial speculative decoding: draft a chain, then verify it; AdaEDL with the entropy policy."""
    while not session.finished:
        pending = _forced(session)
        if not pending.tokens:
            reports = yield Orders(draft=session.draft(policy.chain()))
            pending = _chain(session, policy, reports)
        reports = yield Orders(verify=session.verify(pending))
        absorb(session, policy, pending, reports)


def lookup(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """Prompt lookup: verify what followed the same words earlier in the text; no draft model takes part."""
    first, expected = session.request.prompt_length, session.prediction
    ngrams = ngrams_of(session.tokens, first, expected, config.ngram_max, config.ngram_min)
    looked_up = guided(session, ngrams) or ngrams

    def found(behind: tuple[int, ...] = ()) -> tuple[int, ...]:
        return looked_up.find(min(policy.chain().length, session.room - len(behind) - 1), behind)[1]

    while not session.finished:
        tokens = session.forced(FORCED_AT_ONCE) or found()
        pending = Branch(0, tokens, (1.0,) * len(tokens))
        session.stats.drafted += len(tokens)
        sent = expected.sent_in_chain(tokens) if expected else 0
        before = len(session.tokens)
        reports = yield Orders(verify=session.verify(pending, found))
        absorb(session, policy, pending, reports)
        accepted = min(len(verdict_of(reports).path), len(session.tokens) - before)
        session.stats.count_predicted(sent, min(sent, accepted))


def pearl(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """PEARL: while the target verifies the pending chain, the draft continues it.

    After a rollback nothing is pending.
    """
    pending: InFlight = None
    while not session.finished:
        session.stats.begin(pending is not None)
        chain = pending or _forced(session)
        reports = yield Orders(session.draft(policy.fork(chain), chain), session.verify(chain))
        pending = absorb(session, policy, chain, reports)
    _abandon(session, pending)


def specbranch(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """SpecBranch as published: a serial draft stage, then branch stages until no branch is hit.

    In a branch stage the draft hedges at the unsure token while the target verifies.
    """
    pending: InFlight = None
    while not session.finished:
        session.stats.begin(pending is not None)
        if pending is None:
            pending = _forced(session)
            if not pending.tokens:
                pending = yield from _draft_stage(session, policy)
        reports = yield Orders(session.draft(policy.fork(pending), pending), session.verify(pending))
        pending = absorb(session, policy, pending, reports)
    _abandon(session, pending)


def guided(session: Session, ngrams: Ngrams | None) -> Lookup | None:
    """Return the lookup of a session: what its grammar forces comes first, and nothing that it forbids."""
    if session.state is None:
        return ngrams

    def state() -> State:
        assert session.state is not None
        return session.state

    return GuidedLookup(state, ngrams.find if ngrams else None, LONGEST_MATCH)


def given(session: Session, tokens: Sequence[int], then: Callable[[], MethodRounds]) -> MethodRounds:
    """Have the target score a given text, for its log-probabilities; `then` decodes the rest of the request."""
    for at in range(0, len(tokens), GIVEN_AT_ONCE):
        if session.finished:
            return
        part = tokens[at : at + GIVEN_AT_ONCE]
        reports = yield Orders(verify=session.verify_given(part))
        session.commit(part, verdict_of(reports))
    if not session.finished:
        yield from then()


def whole(
    session: Session, config: SpeculativeConfig, policy: Policy, decode: Decode, with_draft: bool
) -> MethodRounds:
    """Decode a request from its prompt to its end."""
    verdict = yield from prefill(session, with_draft, goes_on=decode is autoregressive)
    policy.observe(NOTHING, verdict)
    yield from decode(session, config, policy)


def prefill(session: Session, with_draft: bool, goes_on: bool = False) -> Generator[Orders, Reports, Verdict]:
    """Prefill in both models; the target adds the first token. Nothing of this counts as decoding.

    `goes_on`: plain decoding follows.
    """
    draft = session.draft(PREFILL) if with_draft else None
    reports = yield Orders(draft, session.verify_plainly() if goes_on else session.verify())
    session.stats.take(reports)
    verdict = verdict_of(reports)
    session.commit((), verdict)
    return verdict


def absorb(session: Session, policy: Policy, pending: Branch, reports: Reports) -> InFlight:
    """Commit a verdict and count the branches; returns the trimmed rest of the branch that was hit, or None."""
    verdict, kept, stats = verdict_of(reports), reports.kept, session.stats
    taken = session.commit(pending.tokens, verdict, kept is not None)
    ended = taken <= len(verdict.path)
    stats.take(reports)
    stats.judge(pending, verdict, taken)
    stats.settle(reports.branches, kept, len(verdict.path), ended)
    policy.observe(pending, verdict)
    if kept is None or ended:
        return None
    behind = kept.cut(1)
    return _counted(session, behind, session.permitted(policy.inherit(behind)))


def _abandon(session: Session, pending: InFlight) -> None:
    """Count the chain in flight when the request ended."""
    session.stats.unused += len(pending.tokens) if pending else 0


def _draft_stage(session: Session, policy: Policy) -> Generator[Orders, Reports, Branch]:
    """Draft a chain while the target waits, unless the policy wants none."""
    plan = policy.chain()
    if plan.length == 0:
        return NOTHING
    reports = yield Orders(draft=session.draft(plan))
    return _chain(session, policy, reports)


def _chain(session: Session, policy: Policy, reports: Reports) -> Branch:
    """Return the next pending chain from a draft stage's report."""
    session.stats.take(reports)
    if not reports.branches:
        return NOTHING
    drafted = reports.branches[0]
    return _counted(session, drafted, session.permitted(policy.trim(drafted)))


def _forced(session: Session) -> Branch:
    """Return the tokens that a grammar forces, as a chain that needs no draft; NOTHING if there are none."""
    tokens = session.forced(FORCED_AT_ONCE)
    session.stats.drafted += len(tokens)
    return Branch(0, tokens, (1.0,) * len(tokens)) if tokens else NOTHING


def _counted(session: Session, drafted: Branch, kept: Branch) -> Branch:
    """Count the tokens that the policy cut off."""
    session.stats.dropped += len(drafted.tokens) - len(kept.tokens)
    return kept


def verdict_of(reports: Reports) -> Verdict:
    """Return the verdict of a verify order, which every executor reports."""
    if reports.verdict is None:
        raise ValueError("the executor reported no verdict for a verify order")
    return reports.verdict
