"""Exact joint laws of toy models, and the chi-square test that compares them with what was emitted.

Owns the enumeration, the statistics and the drawing of many sessions for the law tests, not the cases. Invariant: the
expected law is made from the target's logits alone, so nothing of the machinery under test takes part in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from scipy import stats as scipy_stats

from specbranch.config import Rule, SamplingParams
from specbranch.core.loop import Loop
from specbranch.core.methods import MethodRounds
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.core.stats import Stats
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import ToyLaw, ToyRunner, ToySampler, shaped

Tokens = tuple[int, ...]
SOUND = 1e-4  # a correct law passes above this; the seeds are fixed, so it passes always
CAUGHT = 1e-6  # a planted fault must fall below this
PROMPT: Tokens = (0, 1)
_COUNTED = [f.name for f in fields(Stats) if f.default == 0 and f.type == "int"]


def joint_law(law: ToyLaw, prompt: Sequence[int], length: int, temperature: float = 1.0) -> dict[Tokens, float]:
    """Return the probability of every continuation of `length` tokens."""
    joint: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        joint = {
            (*line, t): mass * p for line, mass in joint.items() for t, p in _next(law, (*prompt, *line), temperature)
        }
    return joint


def _next(law: ToyLaw, tokens: Sequence[int], temperature: float) -> Iterable[tuple[int, float]]:
    return enumerate(shaped(law.logits_of(tokens), temperature))


def p_value(counts: Mapping[Tokens, int], expected: Mapping[Tokens, float], least: float = 5.0) -> float:
    """Chi-square of counts against a law; cells expected fewer than `least` times are pooled. Something impossible
    gives 0."""
    if any(expected.get(cell, 0.0) <= 0.0 for cell, count in counts.items() if count):
        return 0.0
    total = sum(counts.values())
    cells = sorted(((mass * total, counts.get(cell, 0)) for cell, mass in expected.items()), reverse=True)
    wanted, seen = _pool(cells, least)
    return float(scipy_stats.chisquare(seen, wanted * (seen.sum() / wanted.sum())).pvalue)


def _pool(cells: Sequence[tuple[float, int]], least: float) -> tuple[np.ndarray, np.ndarray]:
    """Keep the large cells, add up the small ones; what is still small then joins the smallest large one."""
    large = [c for c in cells if c[0] >= least]
    small = [c for c in cells if c[0] < least]
    rest = (sum(w for w, _ in small), sum(s for _, s in small))
    if rest[0] >= least:
        large.append(rest)
    elif small:
        large[-1] = (large[-1][0] + rest[0], large[-1][1] + rest[1])
    return np.array([w for w, _ in large]), np.array([float(s) for _, s in large])


def independence(first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray) -> float:
    """Chi-square of a contingency table: the p-value under independence of two labelled series."""
    table = scipy_stats.contingency.crosstab(first, second).count
    return float(scipy_stats.chi2_contingency(table).pvalue)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two toy models and the workers that run them; tests plant their faults here."""

    target: ToyLaw
    draft: ToyLaw
    sampler: ToySampler = field(default_factory=ToySampler)  # the target's
    runner: type[ToyRunner] = ToyRunner  # likewise

    def executor(self) -> Serial:
        """Both models in the reference executor."""
        return Serial(Verifier(self.runner(self.target, 64, sampler=self.sampler)), Drafter(ToyRunner(self.draft, 64)))


@dataclass(slots=True)
class Drawn:
    """What many sessions emitted, in the order of their seeds, and their counters added up."""

    outputs: list[Tokens] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)

    def take(self, session: Session) -> None:
        """Add a finished session."""
        session.stats.check()
        self.outputs.append(tuple(session.output))
        for name in _COUNTED:
            self.totals[name] += getattr(session.stats, name)

    def p_value(self, expected: Mapping[Tokens, float]) -> float:
        """Chi-square of the joint tokens."""
        return p_value(Counter(self.outputs), expected)


def requests(params: SamplingParams, rule: Rule, seeds: Iterable[int], samples: Iterable[int] = (0,)) -> list[Request]:
    """One request for each seed and sample."""
    numbers = list(samples)
    return [Request(params, seed, len(PROMPT), sample, rule) for seed in seeds for sample in numbers]


def draw(pair: Pair, start: Callable[[Session], MethodRounds], wanted: Sequence[Request], batch: int = 50) -> Drawn:
    """Run a session for each request, `batch` of them side by side."""
    return draw_with(pair.executor(), start, wanted, batch)


def draw_with(
    executor: Serial, start: Callable[[Session], MethodRounds], wanted: Sequence[Request], batch: int
) -> Drawn:
    """The same with an executor."""
    loop, drawn = Loop(executor), Drawn()
    for begin in range(0, len(wanted), batch):
        sessions = [Session(begin + i, PROMPT, request, 64) for i, request in enumerate(wanted[begin : begin + batch])]
        for session in sessions:
            loop.join(session, start(session))
        while loop.live:
            loop.step()
        for session in sessions:
            drawn.take(session)
    return drawn
