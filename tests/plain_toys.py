"""Toys that decode a batch plainly, with one step launched ahead, as a GPU's runner does: the twin of its protocol."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paged_toys import PagedToyRunner
from specbranch.core.grammar import Guide
from specbranch.core.orders import Context, Verify
from specbranch.core.runner import NO_MASKS, Feed, PlainStep, Trial, Verdicts, VerifyWork
from specbranch.core.slots import ROOT
from specbranch.errors import CacheFull, SpecBranchError
from specbranch.lab.toys.toys import ToyRunner


class DecodesAhead(ToyRunner):
    """Gives each sequence a token only in a step that it has a row in; the next step is launched with this one."""

    steps = 0  # that were read
    verified = 0  # trials of other sequences whose rows went with a step
    _flight: dict[int, int]  # by sequence, the position of its row in the step that is launched
    _joining: dict[int, int]

    def _prepared(self) -> None:
        self.__dict__.setdefault("_flight", {})
        self.__dict__.setdefault("_joining", {})

    def decodes(self, seq: int, length: int) -> bool:
        """All but a few, so that a batch may have others, too."""
        request = self._requests[seq]
        return not request.by_ratio and request.params.logprobs is None and request.seed % 40 != 39

    def fits(self, texts: Mapping[int, Sequence[int]], verify: VerifyWork | None = None) -> bool:
        return True

    def join(self, seq: int, token: int) -> None:
        self._prepared()
        self._joining[seq] = len(self.slots(seq).prefix)

    def decode(
        self,
        texts: Mapping[int, Sequence[int]],
        going_on: Collection[int],
        verify: VerifyWork | None = None,
        masks: Mapping[int, Guide] = NO_MASKS,
    ) -> PlainStep | None:
        self._prepared()
        assert verify is None or not {trial.seq for trial in verify.trials} & texts.keys()
        assert going_on <= texts.keys()  # type: ignore[operator]
        now = [seq for seq, text in texts.items() if self._flight.get(seq) == len(text) - 1]
        entering = [seq for seq in texts if seq not in now]
        for seq in entering:
            slots = self.slots(seq)
            if slots.tokens or len(slots.prefix) != len(texts[seq]) - 1:
                return None
        failed: dict[int, SpecBranchError] = {}
        ahead = bool(now)
        found: dict[int, int] = {}
        for seq in now or entering:
            try:
                found[seq] = self._next(seq, texts[seq], masks.get(seq))
            except CacheFull as error:
                failed[seq] = error
        late = entering if now else []
        self._flight = {seq: len(texts[seq]) for seq in found if seq in going_on}
        self._flight |= {seq: len(texts[seq]) - 1 for seq in late} | self._joining
        self._joining = {}
        self.steps += 1
        verdicts = None
        if verify is not None and self._flight:
            judged = self.verify(verify.work, verify.trials)()  # a device has all that it needs
            verdicts, self.verified = Verdicts(lambda: judged), self.verified + len(judged)
        return PlainStep(lambda: found, len(found), ahead, frozenset(self._flight), failed, {}, verdicts)

    def _next(self, seq: int, text: Sequence[int], mask: Guide | None) -> int:
        """Return the token behind a text, whose last token is computed now."""
        self.demand(seq, 1)
        trial = Trial(seq, Verify(Context(0, tuple(text)), allowed=None if mask is None else (mask,)), 0, ())
        (judged,) = self.verify([Feed(seq, (text[-1],), (ROOT,))], [trial])()
        self.keep(seq, (0,), 1)
        return judged.token

    def _close(self, seq: int) -> None:
        self._prepared()
        self._flight.pop(seq, None)
        self._joining.pop(seq, None)
        super()._close(seq)

    def _rewind(self, seq: int, length: int) -> None:
        self._prepared()
        self._flight.pop(seq, None)
        super()._rewind(seq, length)


class PlainToyRunner(DecodesAhead):
    """A toy without bounds."""


class PlainPagedToyRunner(DecodesAhead, PagedToyRunner):
    """A toy with a bounded cache."""
