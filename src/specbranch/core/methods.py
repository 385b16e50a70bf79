"""The decoding methods by name, what each needs, and which one fits.

Owns the table; how a method drafts and verifies is in `rounds`, how `auto` chooses among them in `pilot`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbranch.config import HeadKind, PolicyName, SpeculativeConfig
from specbranch.core import rounds
from specbranch.core.auto import auto
from specbranch.core.pilot import Experience
from specbranch.core.policy import Policy, make_policy
from specbranch.core.rounds import Rounds, Stretcher
from specbranch.core.session import Session
from specbranch.errors import BadParameter, unknown

__all__ = ["METHODS", "Method", "Rounds", "best_fit", "find_method"]


@dataclass(frozen=True, slots=True)
class Method:
    """A decoding method and what it needs."""

    stretch: Stretcher | None  # nothing: it is made of the others' stretches
    summary: str
    needs_draft: bool = True
    policy: PolicyName = "fixed"
    heads: HeadKind = "sampled"  # under the ratio rule; under match heads are always the top ones

    @property
    def uses_draft(self) -> bool:
        """Whether a draft model is of any use to it."""
        return self.needs_draft or self.stretch is None

    def start(self, session: Session, config: SpeculativeConfig, experience: Experience | None = None) -> Rounds:
        """Begin decoding a session; `experience` is what `auto` goes by, and adds to."""
        if self.stretch is None:
            return auto(session, config, (experience or Experience()).pilot(session, config))
        return self.run(session, config, make_policy(config, self.policy, self.heads))

    def run(self, session: Session, config: SpeculativeConfig, policy: Policy) -> Rounds:
        """Begin decoding a session by another policy than the method's own."""
        if self.stretch is None:
            raise ValueError("auto has no policy of its own")
        return rounds.whole(session, config, policy, self.stretch, self.needs_draft)


METHODS: dict[str, Method] = {
    "autoregressive": Method(rounds.autoregressive, "plain decoding, one token a forward: the reference", needs_draft=False),
    "speculative": Method(rounds.speculative, "serial speculative decoding with a fixed draft length"),
    "adaptive": Method(rounds.speculative, "AdaEDL: serial, the draft stops by entropy", policy="entropy"),
    "pearl": Method(rounds.pearl, "PEARL: draft and verify at the same time, one branch"),
    "specbranch": Method(
        rounds.specbranch, "SpecBranch: draft and verify at the same time, branches at the unsure token", policy="confidence"
    ),
    "lookup": Method(rounds.lookup, "prompt n-grams instead of a draft model", needs_draft=False),
    "auto": Method(None, "whichever of these promises most, chosen anew as the text goes on", needs_draft=False),
}


def best_fit(config: SpeculativeConfig, has_draft: bool, overlap: bool) -> tuple[str, SpeculativeConfig]:
    """Return the method to use and its settings: the one asked for, else what fits.

    Without a draft the text itself is looked up. Branches are drafted while the target is at work, so they pay where the two overlap; where
    they take turns, each branch that loses is time lost, and a chain that stops where the draft is unsure is quicker.
    """
    fit = "lookup" if not has_draft else "specbranch" if overlap else "adaptive"
    name = fit if config.method is None else config.method
    return name, replace(config, method=name)


def find_method(name: str, has_draft: bool) -> Method:
    """Return the method of that name, or say which there are and what it lacks."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    method = METHODS[name]
    if method.needs_draft and not has_draft:
        raise BadParameter(f"Method {name!r} needs a draft model, and none was given. Give one with draft=/--draft, or use 'lookup'.")
    return method
