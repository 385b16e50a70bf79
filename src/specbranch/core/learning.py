"""What a request learns from verdicts: acceptance in its text, what drafts brought, what rounds were expected to bring.

Owns the chances that the next trees get, and the comparison of promises with what came. Does not own the statistics
that outlive requests (`experience.py`), or what a round does (`planner.py`). Invariant: chances depend on verdicts
alone.
"""

from __future__ import annotations

from itertools import accumulate

from specbranch.core.arms import Arm, ArmRound
from specbranch.core.drift import DRIFT_KEPT, Drift
from specbranch.core.experience import Experience
from specbranch.core.slots import ROOT
from specbranch.core.trees import NOT_SCORED, Node, Tree, class_of, look_class, standing

BEYOND_PACE = 0.05  # weight of a round in what drafts bring beyond what they promise
BEYOND_KEPT = 0.99  # of that, after a round without a draft
MOST_BEYOND = 4.0  # tokens: a round counts at most that much
SEEN_SHARE = 0.5  # weight of the accepted tokens of a round in what it brought; the expected ones have the rest
USUAL_POSITIONS = 4.0  # positions that what is usual counts as, beside those of the present text
USUAL_LOOKS = 4.0  # lookups that what is usual counts as, beside those of the present text
LOOKS_KEPT = 0.9  # part of the counted lookups of a text that stays after one more
LOOKED_PACE = 0.05  # weight of a round in the mean number of tokens that lookup brings
SURE = 4  # candidates: computing a node was useful if the target's token is among this many; few others are verified

LookedUp = tuple[int, int]  # class of the match, first token behind it


class Learning:
    """Learns for one request."""

    def __init__(self, experience: Experience, learns: bool = True) -> None:
        """`learns`: False leaves the acceptance rates as they are."""
        self.experience, self.insight, self.costs = experience, experience.insight, experience.costs
        self._learns = learns
        self._drafted, self._looked = Drift(), Drift()
        self._judged = self._hit = self._covered = 0.0  # positions of the latest tokens that the draft has scored
        depths = len(self.insight.looked_by_depth)
        self._looks, self._looked_right = [0.0] * depths, [0.0] * depths  # by depth, of the present text
        self.drift = 0.0  # of drafted tokens in the present text, in log-odds
        self.chances = self.insight.chances()
        self._promised: float | None = None  # tokens beyond its price that a draft of this round promised
        self._accepted = 0  # drafted tokens that the target accepted in this round
        self._expected = 0.0  # drafted tokens that it was expected to accept
        self._probed = 0.0  # seconds that a probe of this round was expected to take

    def note_promise(self, tokens: float) -> None:
        """Note what drafting in this round promises beyond its price, to compare it with what the round brings."""
        self._promised = tokens

    def note_probe(self, seconds: float) -> None:
        """Note what a probe of this round is expected to take."""
        self._probed = seconds

    def accept(self, tree: Tree, path: list[int], verified: list[int]) -> None:
        """Note which of the verified nodes the target has accepted in this round."""
        self._accepted = sum([not tree.nodes[n].look for n in path])
        self._expected = sum([tree.nodes[n].reach for n in verified if not tree.nodes[n].look])

    def end_round(self, batch_size: int, rate: float, added: float) -> None:
        """Compare what drafting brought with what it promised; `added`: seconds beyond those of a plain round."""
        if self._promised is not None:
            tokens = SEEN_SHARE * self._accepted + (1.0 - SEEN_SHARE) * self._expected
            beyond = min(max(tokens - rate * added - self._promised, -MOST_BEYOND), MOST_BEYOND)
            self.insight.beyond += BEYOND_PACE * (beyond - self.insight.beyond)
        elif batch_size == 1:
            self.insight.beyond *= BEYOND_KEPT
        if self._probed and self._accepted and batch_size == 1:
            self.experience.return_probe(min(self._probed, self._accepted / rate))
        self._promised, self._accepted, self._expected, self._probed = None, 0, 0.0, 0.0

    def record_verdict(self, tree: Tree, path: list[int], token: int) -> None:
        """Learn how good candidates are: the target accepted the nodes of `path`, then chose `token`."""
        if not self._learns:
            return
        self._record_looked(tree, path)
        self._pass_tokens(1 + len(path))
        if not len(tree):
            return
        truth = [*(tree.nodes[n].token for n in path), token]
        for parent, true_token in zip((ROOT, *path), truth, strict=True):
            children = [tree.nodes[n] for n in tree.children(parent)]
            scored = tree.nodes[parent].scored if parent != ROOT else tree.root_scored
            for node in children:
                self._record_candidate(node, scored, node.token == true_token)
            if scored:
                covered = any(node.token == true_token and node.rank < SURE for node in children)
                self.insight.learn("cover", 0, covered)  # 0: the only class of this tally
                hit = any(node.token == true_token and node.rank == 0 and node.said > 0.0 for node in children)
                self.insight.learn("hits", 0, hit)
                self._judged, self._hit, self._covered = self._judged + 1.0, self._hit + hit, self._covered + covered
        self._update_chances()

    def hits_in_text(self) -> tuple[float, float]:
        """Return how often the draft's first candidate is right in the present text, and one of its candidates."""
        insight, count = self.insight, self._judged + USUAL_POSITIONS
        right = (self._hit + USUAL_POSITIONS * insight.hits.shares()[0]) / count
        covered = (self._covered + USUAL_POSITIONS * insight.covered) / count
        return min(right, 0.99), min(max(covered, right), 0.995)

    def record_lookup(self, depth: int, right: bool) -> None:
        """Learn whether lookup alone was right for so many tokens more than `depth`, from one place of the text on."""
        usual = self.insight.looked_by_depth
        self._looks[depth] = LOOKS_KEPT * self._looks[depth] + 1.0
        self._looked_right[depth] = LOOKS_KEPT * self._looked_right[depth] + right
        usual[depth] += LOOKED_PACE * (right - usual[depth])

    def lookup_in_text(self) -> tuple[float, ...]:
        """Return how often lookup is right in the present text, by depth; never more often than for fewer tokens."""
        counts = zip(self._looks, self._looked_right, self.insight.looked_by_depth, strict=True)
        shares = [(right + USUAL_LOOKS * share) / (looks + USUAL_LOOKS) for looks, right, share in counts]
        return tuple(accumulate(shares, min))

    def pass_round(self, tree: Tree, path: list[int], taken: int) -> None:
        """Let a round pass whose verdict is not learned from, except how many tokens lookup brought."""
        self._record_looked(tree, path)
        self._pass_tokens(taken)

    def record_plain(self, looked_up: LookedUp | None, token: int) -> None:
        """Learn from a plain round how good lookup is, at no cost: the target chose `token`."""
        if not self._learns:
            return
        self._pass_tokens(1)
        if looked_up is not None:
            look, proposed = looked_up
            chance = self.chances.looked[look_class(look, NOT_SCORED)]
            self._record_candidate(Node(proposed, ROOT, chance, chance, 1, 1, 0.0, look), False, proposed == token)
        self._update_chances()

    def _pass_tokens(self, count: int) -> None:
        self._drafted.pass_tokens(count)
        self._looked.pass_tokens(count)
        kept = DRIFT_KEPT**count
        self._judged, self._hit, self._covered = kept * self._judged, kept * self._hit, kept * self._covered

    def _update_chances(self) -> None:
        """Compute the chances of the next trees: what is usual, and how far the present text is from that."""
        insight = self.insight
        self.drift = self._drafted.against(insight.first.shares())
        self.chances = insight.chances(self.drift, self._looked.against(insight.looked.shares()))

    def _record_looked(self, tree: Tree, path: list[int]) -> None:
        """Learn how many tokens lookup alone would have brought in this round."""
        looked = sum(bool(tree.nodes[n].look) for n in path)
        self.insight.looked_tokens += LOOKED_PACE * (looked - self.insight.looked_tokens)

    def _record_candidate(self, node: Node, parent_scored: bool, right: bool) -> None:
        """Learn from one candidate, by the draft's probability and by the class of its lookup."""
        insight, from_draft = self.insight, node.said > 0.0
        if from_draft:
            if not node.rank and not node.look:
                self._drafted.observe(class_of(node.said), right)
            insight.learn("other" if node.rank else "first", class_of(node.said), right)
        if not node.look:
            return
        at = look_class(node.look, standing(node, parent_scored))
        if from_draft:
            insight.learn("shift", at, right - node.chance)  # the error of the probability that was expected
        else:
            self._looked.observe(at, right)
            insight.learn("looked", at, right)

    def expect(self, planned: ArmRound) -> None:
        """Note the seconds that the model expects of a round.

        In a batch all sessions are assumed to draft as this one does.
        """
        costs, sessions = self.costs, planned.sessions
        if planned.before:
            planned.draft_seconds = self._modelled_draft(planned, planned.before)
            planned.host_seconds = costs.host_of_drafting(sessions)
        else:
            planned.host_seconds = costs.gap("lookup" if planned.verified else "plain", sessions)
        planned.target_seconds = costs.target_seconds(planned.rows, planned.context)

    def count_arm(self, planned: ArmRound, tokens: int, seconds: float) -> Arm:
        """Count a round that has ended for its arm, and return it."""
        beside = self._seconds_beside(planned) if planned.during else 0.0
        expected = planned.expected_seconds(beside) if self.costs.knows_target else 0.0
        counted = Arm(1, tokens, seconds, planned.expected_tokens, expected)
        self.experience.arms.add(planned.name, counted)
        return counted

    def _seconds_beside(self, planned: ArmRound) -> float:
        """Return the seconds of a verify with draft steps beside it: each slows the other down."""
        costs, count = self.costs, len(planned.during)
        drafting = self._modelled_draft(planned, planned.during) + count * costs.draft_slow_down
        return max(planned.target_seconds + count * costs.slow_down, drafting)

    def _modelled_draft(self, planned: ArmRound, steps: tuple[int, ...]) -> float:
        """Return the seconds of draft steps, by the rows that one session has in each."""
        costs, sessions = self.costs, planned.sessions
        return costs.draft_setup + sum([costs.draft_seconds(rows * sessions, planned.context) for rows in steps])
