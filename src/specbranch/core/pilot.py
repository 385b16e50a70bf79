"""Which way of decoding to take next: the choice behind `auto`.

Owns what is remembered between requests (`Experience`) and the choice within one (`Pilot`). Invariant: a choice depends on committed
tokens, past verdicts and times alone, never on a drafted token that is not judged yet.
"""

from __future__ import annotations

from dataclasses import replace

from specbranch.config import SpeculativeConfig
from specbranch.core.arms import LOOKUPS, OVERLAPPED, PLAIN, SERIAL, Arm, Prices, Walker, as_top
from specbranch.core.costs import Costs, LearnedCosts
from specbranch.core.orders import Branch, Orders, Reports
from specbranch.core.policy import Entropy, Policy, make_policy
from specbranch.core.rounds import InFlight
from specbranch.core.session import Session
from specbranch.core.trail import Habits, Trail

CARRIED = (24.0, 100.0)  # for how many tokens, of late and in the long run, the requests before count in a new one
GUESSED = (12.0, 12.0)  # and the usual, before anything was seen
STRETCH = 8  # tokens between two choices
OFTEN, SELDOM = 3, 8  # choices between two looks at the costs, while they are learned and when they are known
TIMED = 3  # tokens to time an arm by
MUTE = 8  # draft orders in a row without an answer after which a draft counts as gone: the text may have outgrown it
MARGIN = 1.03  # another arm must promise this much more than the one at work
AHEAD = 64  # tokens over which reading what the draft has missed must pay
PROBING = 0.015  # share of the time that probes may take
TIMING = Arm("speculative", 2)  # how a draft is timed that nothing is known of


class Experience:
    """What is known of a pair: costs, the draft's habits, what each arm gave lately. Outlives requests; one for each engine."""

    def __init__(self, costs: Costs | None = None, has_draft: bool = True) -> None:
        """Without `costs` they are learned."""
        self.costs: Costs = LearnedCosts() if costs is None else costs
        self.learned = self.costs if isinstance(self.costs, LearnedCosts) else None
        self.has_draft = has_draft
        self.habits = Habits()
        drafting = (*SERIAL, *(OVERLAPPED if self.costs.overlap else ())) if has_draft else ()
        self.walkers = [Walker(arm) for arm in (PLAIN, *LOOKUPS, *drafting)]
        self.arm = PLAIN
        self.credit = 0.0  # seconds that probes may take

    def pilot(self, session: Session, config: SpeculativeConfig) -> Pilot:
        """Return who chooses for a request."""
        return Pilot(self, session, config)

    def keep(self, walkers: list[Walker], arm: Arm) -> None:
        """Take over what a request has shown."""
        self.walkers, self.arm = walkers, arm


class Pilot:
    """Chooses for one request."""

    def __init__(self, experience: Experience, session: Session, config: SpeculativeConfig) -> None:
        self.experience, self.session, self.config = experience, session, config
        self.walkers = [walker.anew(*CARRIED) for walker in experience.walkers]
        self.arm = experience.arm
        self.trail = Trail(session.tokens, experience.habits, config.ngram_max, config.ngram_min)
        self._at_work = self._favourite = self.arm  # what is done now, and what would be done without probing
        self._policies: dict[Arm, Policy] = {}
        self._until = 0  # tokens of the text at which to choose again
        self._read = 0  # tokens of the text that the draft was told
        self._turn = 0  # choices made
        self._prices = Prices(experience.costs)
        self._seconds = 0.0  # all rounds together
        self._marked = (0.0, len(session.tokens) + 1)  # seconds and tokens when an arm was last chosen
        self._probing = False
        self._silent = 0  # draft orders in a row that brought nothing
        # The draft is to read the prompt, unless it was not worth its while lately.
        self.opens_with_draft = experience.has_draft and (self.arm.drafts or experience.habits.seen == 0)

    def begin(self) -> None:
        """The prompt was read and the first token said."""
        self.trail = Trail(self.session.tokens, self.experience.habits, self.config.ngram_max, self.config.ngram_min)
        self._read = len(self.session.tokens) - 1 if self.opens_with_draft else 0
        if self.experience.learned is not None:
            self.experience.learned.pause()

    def going(self, pending: InFlight) -> bool:
        """Whether the arm at work is to go on for another round."""
        self.trail.follow(self.session.tokens)
        due = len(self.session.tokens) >= self._until
        return not (self.session.finished or due) and self._now(pending) == self._at_work

    def note(self, orders: Orders, reports: Reports) -> None:
        """Learn from a round; its own tokens are entered when the next one is noted."""
        self.trail.follow(self.session.tokens)
        if orders.draft is not None:
            self.trail.claim(orders.draft, tuple(_by_top(branch, orders.draft.plan.measure) for branch in reports.branches))
            self._read = len(orders.draft.on)
            self._silent = 0 if reports.branches else self._silent + 1
        if self.experience.learned is not None:
            self.experience.learned.observe(orders, reports)
        spans = [span for span in (reports.drafting, reports.verifying) if span is not None]
        if spans:
            self._seconds += max(span.end for span in spans) - min(span.start for span in spans)

    def choose(self, pending: InFlight) -> Arm:
        """Return the arm to go on with, until `going` says otherwise."""
        self.trail.follow(self.session.tokens)
        if len(self.session.tokens) >= self._until:
            untimed = self._untimed()
            self.arm = untimed or self._best()
            self._until = len(self.session.tokens) + (TIMED if untimed else STRETCH)
        self._at_work = self._now(pending)
        return self._at_work

    def _now(self, pending: InFlight) -> Arm:
        """What the chosen arm does next: it may look first."""
        free = pending is None or not pending.tokens
        return self._prices.found if self.arm.look and free and self.trail.known >= self.arm.look else self.arm

    def policy(self, arm: Arm, config: SpeculativeConfig) -> Policy:
        """The arm's policy, the same one each time."""
        if arm not in self._policies:
            self._policies[arm] = _policy_of(arm, config)
        return self._policies[arm]

    def finish(self) -> None:
        """Hand on what was learned."""
        self.trail.follow(self.session.tokens)
        self.experience.keep(self.walkers, self._favourite)

    def _untimed(self) -> Arm | None:
        """What has to be timed before anything can be compared."""
        learned = self.experience.learned
        if learned is None:
            return None
        if not learned.knows_target:
            return PLAIN
        return TIMING if self._can_draft and not learned.knows_draft else None

    @property
    def _can_draft(self) -> bool:
        return self.experience.has_draft and self._silent < MUTE

    def _best(self) -> Arm:
        prices = self._priced()
        self._foresee(prices)
        for walker in self.walkers:
            walker.walk(self.trail, prices)
        rates = {walker.arm: self._rate(walker, prices) for walker in self.walkers if self._can_draft or not walker.arm.drafts}
        best = max(rates, key=rates.__getitem__)
        here = rates.get(self.arm, 0.0)
        chosen = self._favourite = best if rates[best] > MARGIN * here else self.arm
        self._settle(rates[chosen])
        return self._probe(chosen, rates, prices) or chosen

    def _priced(self) -> Prices:
        """Prices as they are: while costs are being learned, and as the context grows, they change."""
        if self._turn % (OFTEN if self.experience.learned else SELDOM) == 0:
            self._prices = Prices(self.experience.costs, len(self.session.tokens))
        self._turn += 1
        return self._prices

    def _foresee(self, prices: Prices) -> None:
        """Before anything was seen, go by a draft's usual habits."""
        if any(walker.rate for walker in self.walkers):
            return
        usual = Trail.imagined(self.experience.habits, 200)
        for walker in self.walkers:
            walker.walk(usual, prices)
        self.walkers = [walker.anew(*GUESSED) for walker in self.walkers]

    def _rate(self, walker: Walker, prices: Prices) -> float:
        """Tokens a second to expect, what the draft has to read first included."""
        if not walker.rate:
            return 1.0 / prices.verified(1) if walker.arm == PLAIN else 0.0
        late = len(self.session.tokens) - self._read if walker.arm.drafts and not self.arm.drafts else 0
        return AHEAD / (AHEAD / walker.rate + prices.reading(late))

    def _probe(self, chosen: Arm, rates: dict[Arm, float], prices: Prices) -> Arm | None:
        """Return an arm that drafts, if it is time to look again whether drafting pays."""
        drafting = [arm for arm in rates if arm.drafts and not arm.look and prices.at_most(arm) > MARGIN * rates[chosen]]
        if chosen.drafts or not drafting:
            return None
        best = max(drafting, key=rates.__getitem__)
        dearer = max(1.0 / max(rates[best], 1e-9) - 1.0 / rates[chosen], 0.0)
        price = STRETCH * dearer + prices.reading(len(self.session.tokens) - self._read)
        self._probing = self.experience.credit >= price
        return best if self._probing else None

    def _settle(self, rate: float) -> None:
        """Take what the last stretch has cost beyond the best from the credit, if it was a probe; any other adds to it."""
        seconds, tokens = self._seconds - self._marked[0], len(self.session.tokens) - self._marked[1]
        self.experience.credit += -max(seconds - tokens / rate, 0.0) if self._probing else PROBING * seconds
        self._marked, self._probing = (self._seconds, len(self.session.tokens)), False


def _policy_of(arm: Arm, config: SpeculativeConfig) -> Policy:
    match arm.method:
        case "adaptive":
            policy = Entropy(arm.length, arm.stop_below)
            policy.pace = 0.0  # the threshold is chosen here; one that moved by itself would not be the one that was forecast
            return policy
        case "specbranch":
            return make_policy(config, "confidence", "sampled")
        case _:
            return make_policy(config, "fixed", "sampled")


def _by_top(branch: Branch, measure: str) -> Branch:
    """The branch with confidences of the usual measure."""
    return branch if measure == "top" else replace(branch, confidence=tuple(map(as_top, branch.confidence)))
