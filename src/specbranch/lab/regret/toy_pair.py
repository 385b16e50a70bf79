"""The toy pair of a case: a target that follows a script, and a draft that knows it with a given chance.

Owns the scripts and both runners. Invariants: what a runner answers depends on a hash of *every* token it was fed, so a
wrong cache leaves the script and gives another text. The draft's candidates are the same for every method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specbranch.config import SpeculativeConfig
from specbranch.core.lookup import Ngrams
from specbranch.core.runner import Ask, Feed, Judged, Proposal, Trial, Verdicts
from specbranch.core.slots import ROOT
from specbranch.core.verify import accept_match
from specbranch.lab.regret.case import REQUEST_TOKENS, Case, Draws
from specbranch.lab.replay.runners import PlainSlots
from specbranch.lab.replay.several import SPARE_SLOTS

SCRIPT_VOCABULARY = 2048
PROMPT_TOKENS = 64
TOKENS_BEYOND = 32  # of a script behind the last token of its request: what is verified there is never emitted
CANDIDATES = 8  # that the draft has at a position; the planner asks for no more
_MASK = (1 << 64) - 1


class Mark(NamedTuple):
    """What a runner knows after a node."""

    state: int  # a hash of all tokens up to here
    agreement: float
    token: int  # the target's next one


@dataclass(frozen=True, slots=True)
class Script:
    """A request's prompt and the target's answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # with a few tokens beyond its end


@dataclass(frozen=True, slots=True)
class Scripts:
    """The scripts of a case, and what is known after each of their prefixes."""

    case: Case
    requests: tuple[Script, ...]
    marks: Mapping[int, Mark]  # by state
    proposals: dict[int, Proposal] = field(default_factory=dict)  # the draft's, by state: computed once for all methods

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return 1 + max(SCRIPT_VOCABULARY, *(max(*one.prompt, *one.answer) for one in self.requests))

    @property
    def longest(self) -> int:
        """How many tokens the longest text has."""
        return max(len(one.prompt) + len(one.answer) for one in self.requests)

    def mark_of(self, text: Sequence[int]) -> Mark:
        """Return what is known after a text."""
        mark = Mark(0, self.case.agreement, 0)
        for token in text:
            mark = self.after(mark, token)
        return mark

    def after(self, mark: Mark, token: int) -> Mark:
        """Return what is known after one more token.

        Off the scripts the agreement stays; the target's token is a hash.
        """
        state = mixed(mark.state, token)
        return self.marks.get(state) or Mark(state, mark.agreement, state % SCRIPT_VOCABULARY)

    def proposal(self, mark: Mark) -> Proposal:
        """Return what the draft proposes there."""
        found = self.proposals.get(mark.state)
        if found is None:
            found = self.proposals[mark.state] = _proposal(mark, self.case)
        return found


def make_scripts(case: Case) -> Scripts:
    """Write the texts of a case."""
    requests, marks = list[Script](), dict[int, Mark]()
    for number, phases in enumerate(case.phases):
        agreements = [phase.agreement for phase in phases for _ in range(phase.tokens)]
        script = _script(case, number)
        requests.append(script)
        state = 0
        for token in script.prompt:
            state = mixed(state, token)
        for at, token in enumerate(script.answer):
            marks[state] = Mark(state, agreements[min(at, len(agreements) - 1)], token)
            state = mixed(state, token)
    return Scripts(case, tuple(requests), marks)


def _script(case: Case, number: int) -> Script:
    """Write one text: each token is the one that prompt lookup finds, with the phase's chance, or another one."""
    draws, usual = Draws(f"script {case.seed} {number}"), SpeculativeConfig()
    tokens = [SCRIPT_VOCABULARY + number, *(_word(draws) for _ in range(PROMPT_TOKENS - 1))]
    ngrams = Ngrams(tokens, usual.ngram_max, usual.ngram_min)
    chances = [phase.lookup for phase in case.phases[number] for _ in range(phase.tokens)]
    for at in range(REQUEST_TOKENS + TOKENS_BEYOND):
        found = ngrams.propose(1)
        if draws.chance(chances[min(at, len(chances) - 1)]):
            tokens.append(found[0] if found else tokens[1 + at % (PROMPT_TOKENS - 1)])
        else:
            tokens.append(_other_word(draws, found))
    return Script(tuple(tokens[:PROMPT_TOKENS]), tuple(tokens[PROMPT_TOKENS:]))


def _word(draws: Draws) -> int:
    """Draw a token; few are frequent and many are rare, as in a text."""
    return int(SCRIPT_VOCABULARY * draws.between((0.0, 1.0)) ** 3)


def _other_word(draws: Draws, found: tuple[int, ...]) -> int:
    word = _word(draws)
    return (word + 1) % SCRIPT_VOCABULARY if (word,) == found else word


class _ScriptedRunner(PlainSlots[Mark]):
    """Follows the scripts of a case."""

    def __init__(self, scripts: Scripts) -> None:
        super().__init__(scripts.vocabulary, scripts.longest + SPARE_SLOTS)
        self._scripts = scripts

    def _start(self) -> Mark:
        return self._scripts.mark_of(())

    def _after(self, mark: Mark, token: int, position: int) -> Mark:
        return self._scripts.after(mark, token)


class ScriptedTarget(_ScriptedRunner):
    """The target of a case."""

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Add nodes, and verify them against the scripts."""
        self.feed(work)
        judged = [self._judged(trial) for trial in trials]
        return Verdicts(lambda: judged)

    def _judged(self, trial: Trial) -> Judged:
        marks = self._marks[trial.seq]
        said = [marks[trial.node(node)].token for node in range(ROOT, len(trial.nodes))]
        return Judged(*accept_match(trial.order, said))


class ScriptedDraft(_ScriptedRunner):
    """The draft of a case: its first candidate is the target's token with the phase's chance."""

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        """Add nodes, and return candidates after each asked one."""
        self.feed(work)
        return [self._proposal(self._marks[ask.seq][ask.node], ask.width) for ask in asks]

    def _proposal(self, mark: Mark, width: int) -> Proposal:
        found = self._scripts.proposal(mark)
        return Proposal(found.tokens[:width], found.confidence, odds=found.odds[:width])


def _proposal(mark: Mark, case: Case) -> Proposal:
    """Draw the candidates after a text: how sure the draft is there, and at which rank the target's token stands."""
    agreement = mark.agreement
    sure = agreement + case.spread * (2.0 * _uniform(mark.state, 1) - 1.0) * min(agreement, 1.0 - agreement)
    rank = 0 if _uniform(mark.state, 2) < sure else _later_rank(mark.state, case.second)
    first = mark.state // 7
    others = (token % SCRIPT_VOCABULARY for token in range(first, first + 13 * CANDIDATES + 1, 13))
    wrong = [token for token in others if token != mark.token]
    tokens = (*wrong[:rank], mark.token, *wrong[rank:])[:CANDIDATES]
    stated = min(max(sure**case.bias, 0.01), 0.99)
    return Proposal(tokens, stated, odds=_odds(stated, case.second, len(tokens)))


def _later_rank(state: int, second: float) -> int:
    """Return the rank of the target's token where it is not the first candidate."""
    tries = (at for at in range(1, CANDIDATES) if _uniform(state, 2 + at) < second)
    return next(tries, CANDIDATES)


def _odds(stated: float, second: float, count: int) -> tuple[float, ...]:
    """Return how likely each candidate is beside the first: the rest of the probability falls geometrically."""
    odds, rest = [1.0], (1.0 - stated) / stated
    while len(odds) < count:
        odds.append(min(rest * second, 1.0))
        rest *= 1.0 - second
    return tuple(odds)


def mixed(state: int, token: int) -> int:
    """Return the state after a token: a hash of all tokens so far (the finaliser of splitmix64)."""
    mixed = (state + 0x9E3779B97F4A7C15 * (token + 1)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def _uniform(state: int, purpose: int) -> float:
    return mixed(state, SCRIPT_VOCABULARY * 64 + purpose) / 2.0**64
