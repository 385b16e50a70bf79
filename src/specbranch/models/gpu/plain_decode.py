"""Plain decoding of a batch on a GPU: the host launches each step before it has read the one before.

Owns the step in flight: which sequences have a row in it, at which position, and where their tokens come from. The
device passes the sampled tokens from one step to the next; the host only learns them. With grammars a step is launched
before its masks are known: its tokens are chosen once the host knows the tokens before them. Rows of verify orders of
other sequences go with the step that is launched. Does not own the launch (`launching.py`), the arrays of a step
(`decode_rows.py`) or verdicts (`answers.py`). Invariant: a row that is not read after all, because its request has
ended, was preempted or paused, has no effect: what it wrote lies behind the sequence, and all later work of the device
comes after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from specbranch.core.grammar import Guide
from specbranch.core.orders import TokenLogprobs
from specbranch.core.request import Request
from specbranch.core.runner import NO_MASKS, NO_TOKEN, PlainStep, Verdicts, VerifyWork
from specbranch.errors import CacheFull, SpecBranchError
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu.decode_rows import DecodeRow, DecodeRows
from specbranch.models.gpu.layout import CONFIDENCE
from specbranch.models.gpu.shaped_decode import Unchosen, logprobs_in
from specbranch.models.runners.sequences import OpenSequence

Texts = Mapping[int, Sequence[int]]  # the tokens of sequences; all but the last are computed


class DecodeLauncher(Protocol):
    """The runner, as far as decoding needs it."""

    @property
    def context_length(self) -> int:
        """How many tokens one sequence may hold."""
        ...

    def sequence(self, seq: int) -> OpenSequence | None:
        """Return an open sequence."""
        ...

    def request(self, seq: int) -> Request:
        """Return the request of a sequence."""
        ...

    def decodes(self, seq: int, length: int) -> bool:
        """True if the device samples the token behind `length` tokens by itself."""
        ...

    def reserve(self, seq: int, start: int, stop: int) -> Table:
        """Make the KV slots from `start` to `stop` writable, or raise CacheFull; returns the page table."""
        ...

    def fits_one_step(self, rows: int, longest: int) -> bool:
        """True if so many rows, the longest behind `longest` tokens, are one step."""
        ...

    def launch_decode(
        self, rows: DecodeRows, verify: VerifyWork | None = None
    ) -> tuple[Reading | Unchosen, Verdicts | None]:
        """Launch a decode step, with prefill that was put off and rows of `verify`; returns its results and its
        verdicts, in flight. With grammars, its tokens are not chosen yet."""
        ...

    def commit(self, tokens: Mapping[int, int]) -> None:
        """Append a computed token to the prefix of each sequence."""
        ...


class Entry(NamedTuple):
    """A sequence that gets its first row in a step."""

    token: int
    position: int


@dataclass(slots=True)
class Flight:
    """A step that was launched and is not read yet."""

    rows: DecodeRows
    positions: list[int]  # of the rows
    row_of: dict[int, int]  # by sequence; those that are closed have none
    results: Reading | Unchosen
    # What each row computes: a token, or the one that row r of the step before has sampled, as -1 - r. Once that step
    # is read, all are tokens.
    tokens: list[int]
    verdicts: Verdicts | None = None  # on rows of verify orders
    verify_rows: int = 0

    def choose(self, now: Mapping[int, int], masks: Mapping[int, Guide]) -> None:
        """Choose the tokens of a step with grammars; `masks`: what may follow the texts of sequences."""
        if isinstance(self.results, Unchosen):
            self.results = self.results.choose({row: masks[seq] for seq, row in now.items() if seq in masks})

    def reads(self, texts: Texts) -> dict[int, int]:
        """Return the rows that compute the last token of a text, by sequence."""
        row_of, tokens, positions = self.row_of, self.tokens, self.positions
        return {
            seq: row
            for seq, text in texts.items()
            if (row := row_of.get(seq)) is not None and tokens[row] == text[-1] and positions[row] == len(text) - 1
        }


class PlainDecoder:
    """Decodes sequences of a runner, one step ahead."""

    def __init__(self, launcher: DecodeLauncher) -> None:
        self._launcher = launcher
        self._flight: Flight | None = None
        self._joining: dict[int, int] = {}  # by sequence, the token that it begins to decode with

    def join(self, seq: int, token: int) -> None:
        """See `DecodesBatches.join`."""
        self._joining[seq] = token

    def forget(self, seq: int) -> None:
        """Forget the row of a sequence in flight."""
        self._joining.pop(seq, None)
        if self._flight is not None:
            self._flight.row_of.pop(seq, None)

    def forget_all(self) -> None:
        """Forget all rows in flight; a later step computes them again."""
        self._flight = None

    def decode(
        self,
        texts: Texts,
        going_on: Collection[int],
        verify: VerifyWork | None = None,
        masks: Mapping[int, Guide] = NO_MASKS,
    ) -> PlainStep | None:
        """See `DecodesBatches.decode`."""
        joining, self._joining = self._joining, {}
        flight, self._flight = self._flight, None
        now = {} if flight is None else flight.reads(texts)
        entering = {seq: Entry(text[-1], len(text) - 1) for seq, text in texts.items() if seq not in now}
        if not self.fits(texts, verify) or not self._are_computed(entering):
            return None
        failed: dict[int, SpecBranchError] = {}
        ahead = bool(now)
        if flight is None or not now:
            flight = self._launch(self._with_memory(entering, failed), {})
            if flight is None:
                return PlainStep(dict, 0, False, frozenset(), failed)
            now, entering = flight.row_of, {}
        flight.choose(now, masks)  # the step behind it begins with these tokens
        entered = self._with_memory(entering, failed)
        kept, changed = self._kept(flight, now, going_on)
        if joining:
            others, more = kept.keys() | entered.keys(), verify.rows if verify else 0
            entered |= self._joined(joining, others, self._longest(texts, verify), more)
        self._flight = following = self._launch_next(flight, kept, entered, changed, verify)
        logprobs: dict[int, TokenLogprobs] = {}

        def sampled() -> dict[int, int]:
            return self._read(flight, now, texts, following, logprobs)

        launched = frozenset(following.row_of if following else ())
        rows, verdicts = len(flight.rows) + flight.verify_rows, following.verdicts if following else None
        return PlainStep(sampled, rows, ahead, launched, failed, logprobs, verdicts)

    def fits(self, texts: Texts, verify: VerifyWork | None = None) -> bool:
        """See `DecodesBatches.fits`."""
        longest, fits = self._longest(texts, verify), self._launcher.fits_one_step
        return fits(len(texts), longest) and (verify is None or fits(len(texts) + verify.rows, longest))

    def _longest(self, texts: Texts, verify: VerifyWork | None) -> int:
        """Return the tokens of the longest text once two more steps are computed, or of a verified sequence."""
        longest = 2 + max(map(len, texts.values()), default=0)
        for feed in verify.work if verify else ():
            sequence = self._launcher.sequence(feed.seq)
            assert sequence is not None
            longest = max(longest, len(sequence.slots) + len(feed.tokens))
        return longest

    def _are_computed(self, entering: Mapping[int, Entry]) -> bool:
        """True if all tokens before the last are computed."""
        for seq, entry in entering.items():
            sequence = self._launcher.sequence(seq)
            if sequence is None or sequence.slots.tokens or len(sequence.slots.prefix) != entry.position:
                return False
        return True

    def _with_memory(
        self, entering: Mapping[int, Entry], failed: dict[int, SpecBranchError]
    ) -> dict[int, tuple[DecodeRow, Entry]]:
        """Return the rows of sequences that find memory; `failed` gets the errors of the others."""
        found: dict[int, tuple[DecodeRow, Entry]] = {}
        for seq, entry in entering.items():
            try:
                table = self._launcher.reserve(seq, entry.position, entry.position + 1)
                found[seq] = DecodeRow(table, self._launcher.request(seq)), entry
            except CacheFull as error:
                failed[seq] = error
        return found

    def _kept(
        self, flight: Flight, now: Mapping[int, int], going_on: Collection[int]
    ) -> tuple[dict[int, int], list[int]]:
        """Return the sequences that have a row in the step behind `flight`, too, with their rows in `flight`.

        Also returns the rows whose page tables have changed.
        """
        kept, changed = dict[int, int](), list[int]()
        rows, positions, most = flight.rows.rows, flight.positions, self._launcher.context_length - 1
        for seq, row in now.items():
            position = positions[row]
            if seq not in going_on or position >= most:
                continue
            if not rows[row].table.is_writable(position + 1):
                changed.append(row)
                if not self._with_memory({seq: Entry(0, position + 1)}, {}):
                    continue  # it gets a row once there is memory
            kept[seq] = row
        return kept, changed

    def _launch_next(
        self,
        flight: Flight,
        kept: dict[int, int],
        entered: dict[int, tuple[DecodeRow, Entry]],
        changed: Sequence[int],
        verify: VerifyWork | None,
    ) -> Flight | None:
        """Launch the step behind `flight`: of sequences that go on, and of those that have no row in it yet."""
        if not entered and kept and list(kept.values()) == [*range(len(flight.rows))]:
            flight.rows.advance(changed)
            positions = [position + 1 for position in flight.positions]
            return self._flown(flight.rows, positions, kept, [*range(-1, -1 - len(positions), -1)], verify)
        return self._launch(entered, kept, flight, verify)

    def _flown(
        self,
        rows: DecodeRows,
        positions: list[int],
        row_of: dict[int, int],
        tokens: list[int],
        verify: VerifyWork | None,
    ) -> Flight:
        results, verdicts = self._launcher.launch_decode(rows, verify)
        return Flight(rows, positions, row_of, results, tokens, verdicts, verify.rows if verify else 0)

    def _joined(
        self, joining: Mapping[int, int], others: Collection[int], longest: int, more: int
    ) -> dict[int, tuple[DecodeRow, Entry]]:
        """Return the rows of sequences that begin to decode, as far as they fit into a step with the `others`.

        `longest`: tokens of the longest of these. `more`: rows of verify orders.
        """
        entering: dict[int, Entry] = {}
        for seq, token in joining.items():
            sequence = self._launcher.sequence(seq)
            if seq in others or sequence is None or sequence.slots.tokens:
                continue
            position = len(sequence.slots.prefix)
            if not self._launcher.decodes(seq, position + 1):
                continue
            longest = max(longest, position + 1)
            if self._launcher.fits_one_step(len(others) + len(entering) + 1 + more, longest):
                entering[seq] = Entry(token, position)
        return self._with_memory(entering, {})

    def _launch(
        self,
        entered: Mapping[int, tuple[DecodeRow, Entry]],
        kept: Mapping[int, int],
        before: Flight | None = None,
        verify: VerifyWork | None = None,
    ) -> Flight | None:
        """Launch a step; `kept`: sequences that go on, with their rows in the step before."""
        if not kept and not entered:
            return None
        going_on = [] if before is None else [(before.rows.rows[at], before.positions[at] + 1) for at in kept.values()]
        rows = [*(row for row, _ in going_on), *(row for row, _ in entered.values())]
        positions = [*(position for _, position in going_on), *(entry.position for _, entry in entered.values())]
        tokens = [*(-1 - row for row in kept.values()), *(entry.token for _, entry in entered.values())]
        texts = [self._text(seq, entry) if row.is_shaped else () for seq, (row, entry) in entered.items()]
        made = DecodeRows(rows, positions, tokens, before.rows if before else None, [*kept.values(), *texts])
        row_of = {seq: row for row, seq in enumerate((*kept, *entered))}
        return self._flown(made, positions, row_of, tokens, verify)

    def _text(self, seq: int, entry: Entry) -> list[int]:
        """Return the tokens of a sequence, up to the one that its first row computes."""
        sequence = self._launcher.sequence(seq)
        assert sequence is not None
        return [*sequence.slots.prefix, entry.token]

    def _read(
        self,
        flight: Flight,
        now: Mapping[int, int],
        texts: Texts,
        following: Flight | None,
        logprobs: dict[int, TokenLogprobs],
    ) -> dict[int, int]:
        """Wait for a step, commit the tokens that it has computed, and return those that it has sampled."""
        assert not isinstance(flight.results, Unchosen)
        results = flight.results()
        sampled: list[int] = results[:, 0].astype(np.int64).tolist()
        for row in np.isnan(results[:, CONFIDENCE]).nonzero()[0].tolist():  # its logits are not all finite
            sampled[row] = NO_TOKEN
        self._launcher.commit({seq: texts[seq][-1] for seq in now})
        if flight.rows.shaped:
            for seq, row in now.items():
                top = flight.rows.rows[row].request.params.logprobs
                if top is not None and sampled[row] != NO_TOKEN:
                    logprobs[seq] = logprobs_in(results, row, top)
        if following is not None:
            following.tokens = [token if token >= 0 else sampled[-1 - token] for token in following.tokens]
        return {seq: sampled[row] for seq, row in now.items()}
