"""The decoding methods by name, what each needs, and the default.

Owns the table; how a method drafts and verifies is in `rounds`, `tree_rounds` and `lookahead`. Invariant: every method
emits the tokens of PLAIN (under the ratio rule: its distribution).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbranch.config import HeadKind, Part, PolicyName, SpeculativeConfig
from specbranch.core import rounds
from specbranch.core.experience import Experience
from specbranch.core.lookahead import lookahead
from specbranch.core.planner import Planner
from specbranch.core.policies import POLICIES, make_policy
from specbranch.core.policy import Policy
from specbranch.core.prediction import ngrams_of
from specbranch.core.rounds import Decode, MethodRounds
from specbranch.core.session import Session
from specbranch.core.tree_rounds import decode_tree
from specbranch.errors import BadParameter, unknown

__all__ = ["METHODS", "PLAIN", "Method", "MethodRounds", "best_fit", "find_method"]


PLAIN = "autoregressive"  # the method that every other must equal


@dataclass(frozen=True, slots=True)
class Method:
    """A decoding method and what it needs."""

    decode: Decode | None  # over chains; None: over trees, by the planner alone
    summary: str
    needs_draft: bool = True
    policy: PolicyName = "fixed"
    heads: HeadKind = "sampled"  # under the ratio rule; under match heads are always the top ones
    without: tuple[Part, ...] = ()  # parts of the planner it does not have
    guesses: bool = False  # the target guesses tokens in extra rows of a verify

    @property
    def uses_draft(self) -> bool:
        """True if the method can use a draft model."""
        return self.needs_draft or self.policy == "planner"

    def plans(self, config: SpeculativeConfig) -> bool:
        """True if the planner decides, so that rounds depend on costs."""
        return (config.policy or self.policy) == "planner"

    def uses_signals(self, config: SpeculativeConfig) -> bool:
        """True if a predictor's signals make any difference to it."""
        return POLICIES[config.policy or self.policy].uses_signals(config)

    def check(self, name: str, config: SpeculativeConfig) -> None:
        """Refuse a policy that the method cannot follow, and parts to leave out that the policy does not have."""
        policy = config.policy or self.policy
        parts = POLICIES[policy].parts
        if other := [part for part in config.without if part not in parts]:
            has = f"it has {', '.join(parts)}" if parts else "it has no parts"
            raise BadParameter(f"Policy {policy!r} has no part {other[0]!r} to leave out; {has}.")
        both = self.decode is not None and self.policy == "planner"
        if not both and (policy == "planner") != (self.policy == "planner"):
            fitting = "planner" if self.policy == "planner" else "fixed, confidence or entropy"
            raise BadParameter(
                f"Method {name!r} cannot follow policy {policy!r}; expected {fitting}. Leave the policy out."
            )
        if POLICIES[policy].needs_branches and not both:
            raise BadParameter(
                f"Policy {policy!r} is one of method 'specbranch', not of {name!r}. Take that method, or another "
                "policy."
            )

    def start(self, session: Session, config: SpeculativeConfig, experience: Experience) -> MethodRounds:
        """Start decoding a session; the planner uses `experience` and adds to it.

        If costs are learned, the loop has to learn them.
        """
        if self.plans(config):
            return decode_tree(session, self._planner(session, config, experience))
        return self.run(session, config, make_policy(config, self.policy, self.heads))

    def run(self, session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
        """Start decoding a session by another policy than the method's own."""
        if self.decode is None:
            raise ValueError("a method that grows trees has no policy but the planner")
        return rounds.whole(session, config, policy, self.decode, self.needs_draft)

    def _planner(self, session: Session, config: SpeculativeConfig, experience: Experience) -> Planner:
        without, first = {*self.without, *config.without}, session.request.prompt_length
        ngrams = ngrams_of(session.tokens, first, session.prediction, config.ngram_max, config.ngram_min)
        return Planner(
            experience,
            ngrams=rounds.guided(session, None if "lookup" in without else ngrams),
            overlap="overlap" not in without,
            trees="trees" not in without,
            branches="branches" not in without,
            learns="learning" not in without,
            ahead=session.state is None,
            ngram_sizes=None if "lookup" in without else (config.ngram_max, config.ngram_min),
        )


METHODS: dict[str, Method] = {
    "autoregressive": Method(
        rounds.autoregressive, "plain decoding, one token a forward: the reference", needs_draft=False
    ),
    "speculative": Method(rounds.speculative, "serial speculative decoding with a fixed draft length"),
    "adaptive": Method(rounds.speculative, "AdaEDL: serial, the draft stops by entropy", policy="entropy"),
    "pearl": Method(rounds.pearl, "PEARL: draft and verify at the same time, one branch"),
    "tree": Method(
        None,
        "serial, but the draft proposes a tree instead of a chain",
        policy="planner",
        without=("overlap", "lookup"),
    ),
    "specbranch": Method(
        rounds.specbranch,
        "SpecBranch: trees and branches while the target verifies, planned by what pays",
        policy="planner",
    ),
    "lookup": Method(rounds.lookup, "prompt n-grams instead of a draft model", needs_draft=False),
    "lookahead": Method(
        lookahead, "the target guesses its own n-grams (lookahead decoding)", needs_draft=False, guesses=True
    ),
    "auto": Method(
        None, "like specbranch, with a draft or without one: whatever pays", needs_draft=False, policy="planner"
    ),
}


def best_fit(config: SpeculativeConfig, has_draft: bool) -> tuple[str, SpeculativeConfig]:
    """Return the method to use and its settings: the requested one, else the default.

    The default is `specbranch`; without a draft it is `auto`, which uses lookup.
    """
    name = config.method or ("specbranch" if has_draft else "auto")
    find_method(name, has_draft).check(name, config)
    return name, replace(config, method=name)


def find_method(name: str, has_draft: bool) -> Method:
    """Return the method of that name, or raise with the names there are, or with what it lacks."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    method = METHODS[name]
    if method.needs_draft and not has_draft:
        raise BadParameter(
            f"Method {name!r} needs a draft model, and none was given. Give one with draft=/--draft, or use 'lookup'."
        )
    return method
