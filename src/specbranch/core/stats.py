"""What a request did and where its drafted tokens went; every metric is defined here and nowhere else.

Invariant (`check`): drafted = accepted + rejected + siblings + losing + dropped + unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specbranch.core.orders import Branch, Reports, Span, Verdict
from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree


@dataclass(slots=True)
class Stats:
    """Counters of one request. Prefill (up to the first token) is kept apart from decoding."""

    emitted: int = 0
    target_forwards: int = 0  # decoding only
    drafted: int = 0
    accepted: int = 0  # drafted tokens that were emitted, branch heads included
    rejected: int = 0  # on the main line: the chain a plain method would have sent
    siblings: int = 0  # verified beside the main line, and not taken
    losing: int = 0  # on branches that lost
    dropped: int = 0  # by the length rule
    unused: int = 0  # still in flight, or beyond the end of the request
    rounds_all_accepted: int = 0
    rounds_rejected_inside: int = 0
    rejections: int = 0  # rounds in which a token of the main line was rejected
    branch_points: int = 0
    branch_points_reached: int = 0  # those whose presumed tokens were all accepted, so that they could be hit
    branch_hits: int = 0
    branch_hits_other: int = 0  # on a head that was not the first
    hits_at: list[int] = field(default_factory=list)  # by how many tokens were taken before the head
    tested_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    rounds_overlapped: int = 0  # target forwards beside which a draft worked
    rounds_begun: int = (
        0  # target forwards of rounds that began with something the draft had read before, in an earlier one's shadow
    )
    rounds_without_draft: int = 0  # target forwards during or before which the worker was lost
    draft_restarts: int = 0
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    draft_busy: float = 0.0  # decoding only, like the next
    target_busy: float = 0.0
    both_busy: float = 0.0  # of it, beside the draft
    choices: list[tuple[int, str]] = field(default_factory=list)  # what `auto` chose: tokens emitted before, method
    _lost: bool = False  # since the last target forward
    _rejected: bool = False  # by the last verdict

    @property
    def by_method(self) -> dict[str, int]:
        """Tokens emitted by each method that `auto` chose."""
        counts: dict[str, int] = {}
        for (at, method), (end, _) in pairwise([*self.choices, (self.emitted, "")]):
            counts[method] = counts.get(method, 0) + end - at
        return counts

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
        """Note that a round begins, and whether the draft has read something for it already."""
        self.rounds_begun += read

    def chose(self, method: str) -> None:
        """Note that `auto` goes on with a method."""
        if not self.choices or self.choices[-1][1] != method:
            self.choices.append((self.emitted, method))

    def take(self, reports: Reports) -> None:
        """Count what was drafted, or that the worker was lost."""
        self.drafted += sum(len(branch.tokens) for branch in reports.branches)
        self._lost |= reports.draft_lost

    def judge(self, pending: Branch, verdict: Verdict, taken: int | None = None) -> None:
        """Count what a verdict did to the pending chain. `taken` tokens of it were emitted; beyond the request's end
        they are unused."""
        ended = taken is not None and taken <= len(verdict.path)
        good = taken if ended and taken is not None else len(verdict.path)
        length = good if ended else len(pending.tokens)
        self.unused += len(pending.tokens) - length
        self.target_forwards += 1
        self.end_round()
        self.accepted += good
        self.rejected += length - good
        self.rounds_all_accepted += good == length > 0
        self.rounds_rejected_inside += 0 < good < length
        self.rejections += good < length
        self._rejected = good < length
        for at in range(min(good + 1, length)):
            if at == len(self.tested_at):
                self.tested_at.append(0)
                self.accepted_at.append(0)
            self.tested_at[at] += 1
            self.accepted_at[at] += at < good

    def settle(self, branches: tuple[Branch, ...], kept: Branch | None, accepted: int, ended: bool = False) -> None:
        """Count what became of the branches drafted beside a verification: one kept, or the first one voided and the
        others lost.

        Where the request `ended` inside the chain, no branch was ever decided.
        """
        if not branches:
            return
        if ended:
            self.unused += sum(len(branch.tokens) for branch in branches)
            return
        survivor = kept if kept is not None else branches[0]
        self.losing += sum(len(b.tokens) for b in branches if b is not survivor)
        points = {b.after for b in branches}
        self.branch_points += len(points)
        self.branch_points_reached += accepted in points
        if kept is None:
            self.rejected += len(survivor.tokens)
            self.rejections += not self._rejected
            return
        self.accepted += 1
        self.branch_hits += 1
        self.branch_hits_other += kept is not next(b for b in branches if b.after == kept.after)
        self._hit(kept.after)

    def end_round(self) -> None:
        """Count whether the round that a verdict ended was without its draft."""
        self.rounds_without_draft += self._lost
        self._lost = False

    def judge_tree(self, tree: Tree, sent: Sequence[int], path: Sequence[int], hit: int | None, taken: int) -> None:
        """Count what a verdict did to a tree: `sent` was verified, `path` accepted, then the target said the token of
        `hit`.

        `taken` tokens were emitted; beyond the request's end they are unused. What was drafted and not sent counts when
        it is thrown away.
        """
        ended = taken <= len(path)
        good = min(taken, len(path))
        line = tree.main_line(sent)
        missed = 0 if ended else sum(n not in path for n in line)
        self.target_forwards += 1
        self.drafted += len(sent)
        self.accepted += good
        self.rejected += missed
        self.rejections += missed > 0
        self.rounds_all_accepted += not missed and good > 0
        self.rounds_rejected_inside += missed > 0 and good > 0
        self.siblings += 0 if ended else len(sent) - good - missed
        self.unused += len(sent) - good if ended else 0
        self._positions(line, path[:good], ended)
        self._settle_tree(tree, path, None if ended else hit, ended)

    def abandon_tree(self, tree: Tree) -> None:
        """Count what was left when the request ended."""
        left = sum(node.fed and not node.sent for node in tree.nodes)
        self.drafted += left
        self.unused += left

    def _positions(self, line: Sequence[int], path: Sequence[int], ended: bool) -> None:
        """Count acceptance by position along the main line, as far as it was followed."""
        for at, node in enumerate(line):
            good = at < len(path) and path[at] == node
            if not good and ended:
                return
            if at == len(self.tested_at):
                self.tested_at.append(0)
                self.accepted_at.append(0)
            self.tested_at[at] += 1
            self.accepted_at[at] += good
            if not good:
                return

    def _settle_tree(self, tree: Tree, path: Sequence[int], hit: int | None, ended: bool) -> None:
        below = {hit} if hit is not None else set()
        lost = 0
        for n, node in enumerate(tree.nodes):
            if node.parent in below:
                below.add(n)
            elif node.fed and not node.sent and n != hit:
                lost += 1
        self.drafted += lost + (hit is not None)
        self.unused += lost if ended else 0
        self.losing += 0 if ended else lost
        end = path[-1] if path else ROOT
        heads = [n for n in tree.children(end) if not tree.nodes[n].sent]
        self.branch_points += len(
            {
                node.parent
                for node in tree.nodes
                if not node.sent and (node.parent == ROOT or tree.nodes[node.parent].sent)
            }
        )
        self.branch_points_reached += bool(heads) and not ended
        if hit is not None:
            self.accepted += 1
            self.branch_hits += 1
            self.branch_hits_other += hit != max(tree.children(end), key=lambda n: (tree.nodes[n].reach, -n))
            self._hit(len(path))

    def _hit(self, after: int) -> None:
        self.hits_at += [0] * (after + 1 - len(self.hits_at))
        self.hits_at[after] += 1

    def clock(self, reports: Reports) -> None:
        """Add the time both models worked in a decoding round."""
        drafting, verifying = reports.drafting, reports.verifying
        self.draft_busy += _seconds(drafting)
        self.target_busy += _seconds(verifying)
        if drafting is not None and verifying is not None:
            self.rounds_overlapped += 1
            self.both_busy += max(min(drafting.end, verifying.end) - max(drafting.start, verifying.start), 0.0)

    def check(self) -> None:
        """Raise if a drafted token went missing."""
        fate = self.accepted + self.rejected + self.siblings + self.losing + self.dropped + self.unused
        if fate != self.drafted:
            raise AssertionError(f"{self.drafted} drafted, but {fate} accounted for: {self}")

    def summary(self) -> dict[str, Any]:
        """Return the metrics under their public names."""
        line = self.drafted - self.losing - self.siblings
        decoded = max(self.emitted - 1, 0)
        return {
            "tokens": self.emitted,
            "ttft_seconds": self.ttft,
            "decode_seconds": self.decode_seconds,
            "tokens_per_second": _over(decoded, self.decode_seconds),
            "end_to_end_tokens_per_second": _over(self.emitted, self.finished - self.started),
            "target_forwards": self.target_forwards,
            "tokens_per_forward": _over(decoded, self.target_forwards),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rollback_rate": _over(self.rejected + self.dropped, line),
            "rejections": self.rejections,
            "run_between_rejections": _over(decoded, self.rejections),
            "rollback": {
                "rejected": self.rejected,
                "tree_siblings": self.siblings,
                "losing_branches": self.losing,
                "dropped_by_length": self.dropped,
            },
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
            "tokens_by_method": self.by_method,
        }


def _seconds(span: Span | None) -> float:
    return span.seconds if span is not None else 0.0


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
