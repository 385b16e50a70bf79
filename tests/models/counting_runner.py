"""A GPU runner that counts what it started before it was asked, and how much of that was asked for then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbranch.core.runner import Feed, Judged
from specbranch.models.gpu.begun import Followed, Received
from specbranch.models.gpu.runner import GpuRunner


class CountingRunner(GpuRunner):
    """Counts steps started for a tree (`received`) and behind a verdict (`followed`), and texts read ahead."""

    received = received_right = followed = followed_right = texts_read = texts_right = 0

    def read_ahead(self, feed: Feed) -> bool:
        read = super().read_ahead(feed)
        self.texts_read += read
        return read

    def _plant(self, growing: Any, room: int, bucket: Any, read: Any) -> None:
        super()._plant(growing, room, bucket, read)
        self.texts_right += read is not None

    def _begin(self, *given: Any) -> None:
        before = self._ahead
        super()._begin(*given)
        self.received += self._ahead is not before and isinstance(self._ahead, Received)

    def _follow(self, *given: Any) -> Judged:
        before = self._ahead
        found = super()._follow(*given)
        self.followed += self._ahead is not before and isinstance(self._ahead, Followed)
        return found

    def _results(self, work: Sequence[Feed], *given: Any) -> Any:
        ahead = self._ahead
        found = super()._results(work, *given)
        right = ahead is not None and found is ahead.results
        self.received_right += right and isinstance(ahead, Received)
        self.followed_right += right and isinstance(ahead, Followed)
        return found
