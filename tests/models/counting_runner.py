"""A GPU runner that counts what it started before it was asked, and how much of that was asked for then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbranch.core.runner import Feed, Judged
from specbranch.models.gpu.begun import Followed, Received
from specbranch.models.gpu.early_starts import EarlyStarts
from specbranch.models.gpu.growing import TextRead
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.runners.weak_host import weakly

COUNTS = ("received", "received_right", "followed", "followed_right", "texts_read", "texts_right")


class CountingStarts(EarlyStarts):
    """Counts steps started for a tree (`received`) and behind a verdict (`followed`), and texts read ahead."""

    received = received_right = followed = followed_right = texts_read = texts_right = 0

    def read_ahead(self, feed: Feed) -> bool:
        read = super().read_ahead(feed)
        self.texts_read += read
        return read

    def took(self, text: TextRead) -> None:
        super().took(text)
        self.texts_right += 1

    def _begin(self, *given: Any) -> None:
        before = self.step
        super()._begin(*given)
        self.received += self.step is not before and isinstance(self.step, Received)

    def follow(self, *given: Any) -> Judged:
        before = self.step
        found = super().follow(*given)
        self.followed += self.step is not before and isinstance(self.step, Followed)
        return found

    def taken(self, work: Sequence[Feed], *given: Any) -> Any:
        step = self.step
        found = super().taken(work, *given)
        right = step is not None and found is step.results
        self.received_right += right and isinstance(step, Received)
        self.followed_right += right and isinstance(step, Followed)
        return found


class CountingRunner(GpuRunner):
    """The runner under test; it has the counts of its early starts as attributes of its own."""

    def _make_early_starts(self) -> EarlyStarts:
        self.counts = CountingStarts(self.launcher, self.sequences, self.context_length, weakly(self))
        return self.counts

    def __getattr__(self, name: str) -> int:
        if name in COUNTS:
            count: int = getattr(self.counts, name)
            return count
        raise AttributeError(name)
