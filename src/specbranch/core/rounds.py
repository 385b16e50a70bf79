"""How methods over chains draft and verify, round by round. A method is a generator: it yields orders, receives
reports, commits verdicts.

Owns the order of drafting and verifying; never calls a model. `tree_rounds` is the same for trees. Invariant: whatever
is drafted, the session receives only what the verdict says.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from specbranch.config import SpeculativeConfig
from specbranch.core.lookup import Ngrams
from specbranch.core.market import Offer
from specbranch.core.orders import NOTHING, Branch, Orders, Plan, Reports, Verdict
from specbranch.core.policy import Policy
from specbranch.core.session import Session

MethodRounds = Generator[Orders | Offer, Any, None]  # receives Reports for Orders, a Grant for an Offer
InFlight = Branch | None  # a chain that was drafted and not judged yet; None: the next one is still to be drafted
Decode = Callable[[Session, SpeculativeConfig, Policy], MethodRounds]
PREFILL = Plan(0)
GIVEN_AT_ONCE = 32  # tokens of a given text in one forward, beside other requests' rows


def autoregressive(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """One token a forward: what every other method must equal."""
    while not session.finished:
        reports = yield Orders(verify=session.verify_plainly())
        absorb(session, policy, NOTHING, reports)


def speculative(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """Serial speculative decoding: draft a chain, then verify it; AdaEDL with the entropy policy."""
    while not session.finished:
        reports = yield Orders(draft=session.draft(policy.chain()))
        pending = _chain(session, policy, reports)
        reports = yield Orders(verify=session.verify(pending))
        absorb(session, policy, pending, reports)


def lookup(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """Verify what followed the same words earlier in the text; nothing is drafted by a model."""
    ngrams = Ngrams(session.tokens, config.ngram_max, config.ngram_min)

    def found(behind: tuple[int, ...] = ()) -> tuple[int, ...]:
        return ngrams.find(min(policy.chain().length, session.room - len(behind) - 1), behind)[1]

    while not session.finished:
        tokens = found()
        pending = Branch(0, tokens, (1.0,) * len(tokens))
        session.stats.drafted += len(tokens)
        reports = yield Orders(verify=session.verify(pending, found))
        absorb(session, policy, pending, reports)


def pearl(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """PEARL: while the pending chain is verified, draft its one likeliest continuation; after a rollback start from
    nothing pending."""
    pending: InFlight = None
    while not session.finished:
        session.stats.begin(pending is not None)
        chain = pending or NOTHING
        reports = yield Orders(session.draft(policy.fork(chain), chain), session.verify(chain))
        pending = absorb(session, policy, chain, reports)
    _abandon(session, pending)


def specbranch(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """SpecBranch: a serial draft stage, then branch stages, in which the draft hedges at the unsure token, until
    none is hit."""
    pending: InFlight = None
    while not session.finished:
        session.stats.begin(pending is not None)
        if pending is None:
            pending = yield from _draft_stage(session, policy)
        reports = yield Orders(session.draft(policy.fork(pending), pending), session.verify(pending))
        pending = absorb(session, policy, pending, reports)
    _abandon(session, pending)


def given(session: Session, tokens: Sequence[int], then: Callable[[], MethodRounds]) -> MethodRounds:
    """Have the target say a text that is given, to learn how likely it finds each token; `then` decodes what is
    left of the request."""
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
    verdict = yield from prefill(session, with_draft)
    policy.observe(NOTHING, verdict)
    yield from decode(session, config, policy)


def prefill(session: Session, with_draft: bool) -> Generator[Orders, Reports, Verdict]:
    """Both models read the prompt, the target says the first token. Nothing of it counts as decoding."""
    draft = session.draft(PREFILL) if with_draft else None
    reports = yield Orders(draft, session.verify())
    session.stats.take(reports)
    verdict = verdict_of(reports)
    session.commit((), verdict)
    return verdict


def absorb(session: Session, policy: Policy, pending: Branch, reports: Reports) -> InFlight:
    """Commit a verdict and settle the branches; returns what the surviving one drafted beyond its head, trimmed, or
    None."""
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
    return _counted(session, behind, policy.inherit(behind))


def _abandon(session: Session, pending: InFlight) -> None:
    """Count what was in flight when the request ended."""
    session.stats.unused += len(pending.tokens) if pending else 0


def _draft_stage(session: Session, policy: Policy) -> Generator[Orders, Reports, Branch]:
    """Draft a chain while the target waits, unless the policy wants none."""
    plan = policy.chain()
    if plan.length == 0:
        return NOTHING
    reports = yield Orders(draft=session.draft(plan))
    return _chain(session, policy, reports)


def _chain(session: Session, policy: Policy, reports: Reports) -> Branch:
    """Turn a draft stage's report into the next pending chain."""
    session.stats.take(reports)
    return _counted(session, reports.branches[0], policy.trim(reports.branches[0])) if reports.branches else NOTHING


def _counted(session: Session, drafted: Branch, kept: Branch) -> Branch:
    """Count what was cut off."""
    session.stats.dropped += len(drafted.tokens) - len(kept.tokens)
    return kept


def verdict_of(reports: Reports) -> Verdict:
    """Return the verdict of a verify order, which every executor reports."""
    if reports.verdict is None:
        raise ValueError("the executor reported no verdict for a verify order")
    return reports.verdict
