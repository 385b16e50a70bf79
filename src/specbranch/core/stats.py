"""Counters of a request; every metric is defined here and nowhere else. The fates of drafted tokens are in `fates`.

Invariants: drafted = accepted + rejected + siblings + losing + dropped + unused (`check`). `Stats.from_summary`
restores what `Stats.summary` returns, so requests are added up here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, Self

from specbranch.core.arms import Arms
from specbranch.core.fates import FATE_NAMES, FATES, THROWN_AWAY, Fates, Settled, branch_points, tree_standings
from specbranch.core.orders import NO_PREFILL, Branch, Reports, Span, Verdict
from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree

SAME_NAME = (
    *("target_forwards", "drafted", "rejections", "branch_points", "branch_points_reached", "branch_hits"),
    *("rounds_overlapped", "rounds_begun", "rounds_without_draft", "draft_restarts", "late_captures"),
    *("prompt_tokens_read", "prompt_tokens_cached", "draft_prompt_tokens_read", "draft_prompt_tokens_cached"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens"),
)
AS_THEY_ARE = {  # fields that a summary has unchanged, and their names there
    "emitted": "tokens",
    "branch_hits_other": "branch_hits_other_head",
    "both_busy": "both_busy_seconds",
    "queued": "queued_seconds",
    **{fate: FATE_NAMES[fate].counted for fate in FATES},
    **{name: name for name in SAME_NAME},
}


@dataclass(slots=True)
class Stats(Fates):
    """Counters of one request, the fates of its drafted tokens among them.

    Prefill (up to the first token) counts apart.
    """

    emitted: int = 0
    target_forwards: int = 0  # decoding only
    drafted: int = 0
    rounds_all_accepted: int = 0
    rounds_rejected_inside: int = 0
    rejections: int = 0  # rounds in which a token of the main path was rejected
    branch_points: int = 0
    branch_points_reached: int = 0  # those whose presumed tokens were all accepted, so that a hit was possible
    branch_hits: int = 0
    branch_hits_other: int = 0  # on a head that was not the first
    hits_at: list[int] = field(default_factory=list)  # by the number of accepted tokens before the head
    tested_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    rounds_overlapped: int = 0  # target forwards during which the draft worked
    rounds_begun: int = 0  # rounds for which the draft had worked during the verify before
    rounds_without_draft: int = 0  # target forwards during or before which the draft was lost
    draft_restarts: int = 0
    late_captures: int = 0  # CUDA graphs captured and kernels compiled in its rounds
    prompt_tokens_read: int = 0  # prefilled by the target: all but the last token, which is a decode step
    prompt_tokens_cached: int = 0  # taken from the target's prefix cache instead
    draft_prompt_tokens_read: int = 0
    draft_prompt_tokens_cached: int = 0
    accepted_prediction_tokens: int = 0  # verified tokens that a caller's prediction proposed, and emitted
    rejected_prediction_tokens: int = 0  # the others of them
    queued: float = 0.0  # seconds in the queue
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    draft_busy: float = 0.0  # decoding only, like the next
    target_busy: float = 0.0
    both_busy: float = 0.0  # seconds in which both models worked
    arms: Arms = field(default_factory=Arms)  # rounds by what they did; empty for methods that do not plan
    _lost: bool = False  # since the last target forward
    _rejected: bool = False  # by the last verdict

    @property
    def ttft(self) -> float:
        """Seconds from the start to the first token: both prefills."""
        return self.first_token - self.started

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.finished - self.first_token

    @property
    def host_seconds(self) -> float:
        """Seconds of decoding in which neither model worked."""
        return max(self.decode_seconds - self.draft_busy - self.target_busy + self.both_busy, 0.0)

    def begin(self, read: bool) -> None:
        """Count a round; `read`: the draft has worked for it already."""
        self.rounds_begun += read

    def take(self, reports: Reports) -> None:
        """Count the drafted tokens, or that the draft was lost."""
        self.drafted += sum([len(branch.tokens) for branch in reports.branches])
        self._lost |= reports.draft_lost

    def note_prompt(self, session: int, reports: Reports) -> None:
        """Count prompt tokens that both models prefilled, and those from the prefix cache."""
        target, draft = (
            span.prompts.get(session, NO_PREFILL) if span is not None else NO_PREFILL
            for span in (reports.verifying, reports.drafting)
        )
        self.prompt_tokens_read += target.read
        self.prompt_tokens_cached += target.cached
        self.draft_prompt_tokens_read += draft.read
        self.draft_prompt_tokens_cached += draft.cached

    def judge(self, pending: Branch, verdict: Verdict, taken: int | None = None) -> None:
        """Count what a verdict decided of the pending chain.

        `taken` tokens of it were emitted; those beyond the request's end are unused.
        """
        accepted = len(verdict.path)
        ended = taken is not None and taken <= accepted
        good = taken if taken is not None and ended else accepted
        sent = len(pending.tokens)
        self.add_chain(sent, good, ended)
        self.end_round()
        self._verified(good, good, missed=good < sent and not ended)

    def settle(self, branches: tuple[Branch, ...], kept: Branch | None, accepted: int, ended: bool = False) -> None:
        """Count the branches drafted during a verify: one was hit, or the first is rejected and the others lost."""
        if not branches:
            return
        survivor = len(branches[0].tokens if kept is None else kept.tokens)
        whole = sum([len(branch.tokens) for branch in branches])
        self.add_branches(survivor, whole - survivor, kept is not None, ended)
        if ended:
            return
        points = {branch.after for branch in branches}
        self.branch_points += len(points)
        self.branch_points_reached += accepted in points
        if kept is None:
            self.rejections += not self._rejected
        else:
            self._hit(kept.after, kept is next(b for b in branches if b.after == kept.after))

    def end_round(self) -> None:
        """End a round: count it if the draft was lost in it."""
        self.rounds_without_draft += self._lost
        self._lost = False

    def judge_tree(self, tree: Tree, sent: Sequence[int], path: Sequence[int], hit: int | None, taken: int) -> None:
        """Count what a verdict decided of a tree: `sent` was verified, `path` accepted, `hit` is the bonus token's
        node.

        `taken` tokens were emitted; those beyond the request's end are unused. Drafted tokens that were not verified
        count when they are dropped.
        """
        ended = taken <= len(path)
        good = min(taken, len(path))
        main_path = tree.main_path(sent)
        fates = Settled(0, *map(len, tree_standings(tree, sent, main_path, path, hit))).fates(ended)
        fates.add_chain(len(path), good, ended)
        followed = len(set(main_path).intersection(path[:good]))
        self._verified(good, followed, fates.rejected > 0)
        end, points = path[-1] if path else ROOT, branch_points(tree)
        self.branch_points += len(points)
        if not ended:
            self.branch_points_reached += end in points
            if hit is not None:
                fates.accepted += 1
                self._hit(len(path), hit == max(tree.children(end), key=lambda n: (tree.nodes[n].reach, -n)))
        self.drafted += fates.total
        self.add(fates)

    def count_predicted(self, sent: int, emitted: int) -> None:
        """Count verified tokens that came from the caller's prediction."""
        self.accepted_prediction_tokens += emitted
        self.rejected_prediction_tokens += sent - emitted

    def count_plain(self, seconds: float) -> None:
        """Count a round of plain decoding, in which the target worked for some seconds."""
        if self._lost:
            self.end_round()
        self.target_forwards += 1
        self.target_busy += seconds
        self._rejected = False

    def count_forest(
        self, tree: Tree, sent: Sequence[int], path: Sequence[int], hit: int | None, taken: int, seconds: float
    ) -> None:
        """Count a round of the forest, in which the target worked for some seconds; the rest as for `judge_tree`."""
        self.end_round()
        self.target_busy += seconds
        if tree.nodes:
            self.judge_tree(tree, sent, path, hit, taken)
        else:
            self.judge_plain()

    def judge_plain(self) -> None:
        """Count a verdict behind which no tree was verified."""
        self._verified(0, 0, missed=False)

    def abandon_tree(self, tree: Tree) -> None:
        """Count the drafted tokens that are left when a tree is dropped."""
        left = sum(node.scored and not node.sent for node in tree.nodes)
        self.drafted += left
        self.unused += left

    def _verified(self, good: int, followed: int, missed: bool) -> None:
        """Count a verdict that accepted `good` tokens: `followed` of them on the main path, then a rejection if
        `missed`."""
        self.target_forwards += 1
        self.rounds_all_accepted += not missed and good > 0
        self.rounds_rejected_inside += missed and good > 0
        self.rejections += missed
        self._rejected = missed
        while len(self.tested_at) < followed + missed:
            self.tested_at.append(0)
            self.accepted_at.append(0)
        for at in range(followed):
            self.tested_at[at] += 1
            self.accepted_at[at] += 1
        if missed:
            self.tested_at[followed] += 1

    def _hit(self, after: int, on_first: bool) -> None:
        """Count a branch hit."""
        self.branch_hits += 1
        self.branch_hits_other += not on_first
        self.hits_at += [0] * (after + 1 - len(self.hits_at))
        self.hits_at[after] += 1

    def clock(self, reports: Reports) -> None:
        """Add the seconds that both models worked in a decoding round."""
        drafting, verifying = reports.drafting, reports.verifying
        self.draft_busy += _seconds(drafting)
        self.target_busy += _seconds(verifying)
        if drafting is not None and verifying is not None:
            self.rounds_overlapped += 1
            self.both_busy += max(min(drafting.end, verifying.end) - max(drafting.start, verifying.start), 0.0)

    def check(self) -> None:
        """Raise if a drafted token is missing in the count."""
        if self.total != self.drafted:
            raise AssertionError(f"{self.drafted} drafted, but {self.total} accounted for: {self}")

    def summary(self) -> dict[str, Any]:
        """Return the metrics under their public names."""
        main_path = self.drafted - self.losing - self.siblings
        decoded = max(self.emitted - 1, 0)
        return {
            "tokens": self.emitted,
            "queued_seconds": self.queued,
            "ttft_seconds": self.ttft,
            "decode_seconds": self.decode_seconds,
            "tokens_per_second": _over(decoded, self.decode_seconds),
            "end_to_end_tokens_per_second": _over(self.emitted, self.finished - self.started),
            "target_forwards": self.target_forwards,
            "tokens_per_forward": _over(decoded, self.target_forwards),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rollback_rate": _over(self.rejected + self.dropped, main_path),
            "rejections": self.rejections,
            "run_between_rejections": _over(decoded, self.rejections),
            "rollback": {FATE_NAMES[fate].counted: self.of(fate) for fate in THROWN_AWAY},
            "unused": self.unused,
            "acceptance_by_position": [_over(a, t) for a, t in zip(self.accepted_at, self.tested_at, strict=True)],
            "tested_by_position": list(self.tested_at),
            "accepted_by_position": list(self.accepted_at),
            "branch_points": self.branch_points,
            "branch_hits": self.branch_hits,
            "branch_hits_other_head": self.branch_hits_other,
            "branch_points_reached": self.branch_points_reached,
            "branch_hits_by_position": list(self.hits_at),
            "branch_hit_rate": _over(self.branch_hits, self.branch_points_reached),
            "draft_idle_seconds": max(self.decode_seconds - self.draft_busy, 0.0) if self.draft_busy else None,
            "target_idle_seconds": max(self.decode_seconds - self.target_busy, 0.0),
            "both_busy_seconds": self.both_busy,
            "host_seconds": self.host_seconds,
            "rounds_overlapped": self.rounds_overlapped,
            "rounds_begun": self.rounds_begun,
            "rounds_without_draft": self.rounds_without_draft,
            "draft_restarts": self.draft_restarts,
            "late_captures": self.late_captures,
            "prompt_tokens_read": self.prompt_tokens_read,
            "prompt_tokens_cached": self.prompt_tokens_cached,
            "draft_prompt_tokens_read": self.draft_prompt_tokens_read,
            "draft_prompt_tokens_cached": self.draft_prompt_tokens_cached,
            "accepted_prediction_tokens": self.accepted_prediction_tokens,
            "rejected_prediction_tokens": self.rejected_prediction_tokens,
            "tokens_by_method": self.arms.tokens,
            "arms": self.arms.to_dict(),
        }

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> Self:
        """Build from a summary, with a clock that starts at 0.

        Missing values count as 0: other engines and earlier versions report fewer.
        """
        counts = {**summary, **summary.get("rollback", {})}
        plain: dict[str, Any] = {name: counts.get(public) or 0 for name, public in AS_THEY_ARE.items()}
        first, decode = summary["ttft_seconds"], summary["decode_seconds"]
        tells_positions = "accepted_by_position" in summary  # earlier versions had only what was tested
        return cls(
            **plain,
            first_token=first,
            finished=first + decode,
            draft_busy=_busy(decode, summary.get("draft_idle_seconds")),
            target_busy=_busy(decode, summary.get("target_idle_seconds")),
            hits_at=list(summary.get("branch_hits_by_position", ())),
            tested_at=list(summary["tested_by_position"]) if tells_positions else [],
            accepted_at=list(summary["accepted_by_position"]) if tells_positions else [],
            arms=Arms.from_dict(summary.get("arms", {})),
        )

    def go_on_with(self, other: Stats) -> None:
        """Add another request as if this one had continued with it.

        The other's first token ends a prefill, like the first one here, so it does not count as decoded.
        """
        self.arms.join(other.arms)
        self.emitted += max(other.emitted - 1, 0)
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in SUMMED_BY_POSITION:
            setattr(self, name, _added(getattr(self, name), getattr(other, name)))


# Summed fields are found by type, so that a new counter is not forgotten; flags are of the present round.
SUMMED = tuple(one.name for one in fields(Stats) if type(one.default) in (int, float) and one.name != "emitted")
SUMMED_BY_POSITION = tuple(one.name for one in fields(Stats) if one.default_factory is list)


def _busy(whole: float, idle: float | None) -> float:
    return 0.0 if idle is None else whole - idle


def _added(one: Iterable[int], other: Iterable[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def _seconds(span: Span | None) -> float:
    return span.seconds if span is not None else 0.0


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
