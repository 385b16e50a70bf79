"""The decoding methods. Each is a generator: it yields a round's orders, receives the reports, and commits what the target accepted.

Owns the order of drafting and verifying; never calls a model. Invariant: whatever a method drafts, the session receives only what
the verdict says.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from specbranch.config import HeadKind, PolicyName, SpeculativeConfig
from specbranch.core.lookup import Ngrams
from specbranch.core.orders import NOTHING, Branch, Orders, Plan, Reports, Verdict
from specbranch.core.policy import Policy, make_policy
from specbranch.core.session import Session
from specbranch.errors import BadParameter, unknown

Rounds = Generator[Orders, Reports, None]
PREFILL = Plan(0)


def autoregressive(session: Session, config: SpeculativeConfig, policy: Policy) -> Rounds:
    """One token a forward: what every other method must equal."""
    yield from _open(session, with_draft=False)
    while not session.finished:
        reports = yield Orders(verify=session.verify())
        _absorb(session, policy, NOTHING, reports)


def speculative(session: Session, config: SpeculativeConfig, policy: Policy) -> Rounds:
    """Serial speculative decoding: draft a chain, then verify it; AdaEDL with the entropy policy."""
    yield from _open(session)
    while not session.finished:
        reports = yield Orders(draft=session.draft(policy.chain()))
        pending = _chain(session, policy, reports)
        reports = yield Orders(verify=session.verify(pending))
        _absorb(session, policy, pending, reports)


def lookup(session: Session, config: SpeculativeConfig, policy: Policy) -> Rounds:
    """Verify what followed the same words earlier in the text; nothing is drafted by a model."""
    yield from _open(session, with_draft=False)
    ngrams = Ngrams(session.tokens, config.ngram_max, config.ngram_min)
    while not session.finished:
        tokens = ngrams.propose(min(policy.chain().length, session.room - 1))
        pending = Branch(0, tokens, (1.0,) * len(tokens))
        session.stats.drafted += len(tokens)
        reports = yield Orders(verify=session.verify(pending))
        _absorb(session, policy, pending, reports)


def pearl(session: Session, config: SpeculativeConfig, policy: Policy) -> Rounds:
    """PEARL: while the pending chain is verified, draft its one likeliest continuation; after a rollback start from nothing pending."""
    yield from _open(session)
    pending = NOTHING
    while not session.finished:
        reports = yield Orders(session.draft(policy.fork(pending), pending), session.verify(pending))
        pending = _absorb(session, policy, pending, reports) or NOTHING
    _abandon(session, pending)


def specbranch(session: Session, config: SpeculativeConfig, policy: Policy) -> Rounds:
    """SpecBranch: a serial draft stage, then branch stages, in which the draft hedges at the unsure token, until none is hit."""
    yield from _open(session)
    while not session.finished:
        reports = yield Orders(draft=session.draft(policy.chain()))
        pending: Branch | None = _chain(session, policy, reports)
        while pending is not None and not session.finished:
            reports = yield Orders(session.draft(policy.fork(pending), pending), session.verify(pending))
            pending = _absorb(session, policy, pending, reports)
        _abandon(session, pending or NOTHING)


@dataclass(frozen=True, slots=True)
class Method:
    """A decoding method and what it needs."""

    run: Callable[[Session, SpeculativeConfig, Policy], Rounds]
    summary: str
    needs_draft: bool = True
    policy: PolicyName = "fixed"
    heads: HeadKind = "sampled"  # under the ratio rule; under match heads are always the top ones

    def start(self, session: Session, config: SpeculativeConfig) -> Rounds:
        """Begin decoding a session."""
        return self.run(session, config, make_policy(config, self.policy, self.heads))


METHODS: dict[str, Method] = {
    "autoregressive": Method(autoregressive, "plain decoding, one token a forward: the reference", needs_draft=False),
    "speculative": Method(speculative, "serial speculative decoding with a fixed draft length"),
    "adaptive": Method(speculative, "AdaEDL: serial, the draft stops by entropy", policy="entropy"),
    "pearl": Method(pearl, "PEARL: draft and verify at the same time, one branch"),
    "specbranch": Method(specbranch, "SpecBranch: draft and verify at the same time, branches at the unsure token", policy="confidence"),
    "lookup": Method(lookup, "prompt n-grams instead of a draft model", needs_draft=False),
}


def find_method(name: str, has_draft: bool) -> Method:
    """Return the method of that name, or say which there are and what it lacks."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    method = METHODS[name]
    if method.needs_draft and not has_draft:
        raise BadParameter(f"Method {name!r} needs a draft model, and none was given. Give one with draft=/--draft, or use 'lookup'.")
    return method


def _open(session: Session, with_draft: bool = True) -> Rounds:
    """Prefill: both models read the prompt, the target says the first token. Nothing of it counts as decoding."""
    draft = session.draft(PREFILL) if with_draft else None
    reports = yield Orders(draft, session.verify())
    session.stats.take(reports)
    session.commit(NOTHING, _verdict(reports))


def _chain(session: Session, policy: Policy, reports: Reports) -> Branch:
    """Turn a draft stage's report into the next pending chain."""
    session.stats.take(reports)
    return _trim(session, policy, reports.branches[0]) if reports.branches else NOTHING


def _absorb(session: Session, policy: Policy, pending: Branch, reports: Reports) -> Branch | None:
    """Commit a verdict and settle the branches; returns what the surviving one drafted beyond its head, trimmed, or None."""
    verdict, kept, stats = _verdict(reports), reports.kept, session.stats
    stats.take(reports)
    stats.judge(pending, verdict)
    stats.settle(reports.branches, kept, len(verdict.path))
    session.commit(pending, verdict, kept)
    policy.observe(pending, verdict)
    if kept is None:
        return None
    return _trim(session, policy, kept.cut(1))


def _trim(session: Session, policy: Policy, branch: Branch) -> Branch:
    kept = policy.trim(branch)
    session.stats.dropped += len(branch.tokens) - len(kept.tokens)
    return kept


def _abandon(session: Session, pending: Branch) -> None:
    session.stats.unused += len(pending.tokens)


def _verdict(reports: Reports) -> Verdict:
    if reports.verdict is None:
        raise ValueError("the executor reported no verdict for a verify order")
    return reports.verdict
