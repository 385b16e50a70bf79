"""Sampling parameters of a plain decode step: penalties, bias, filters and log-probabilities, behind the step's graph.

Owns the tables of the tokens that occurred, one row for each sequence with penalties. The device adds each sampled
token to them itself, so the next step is launched before the host knows that token. Rows without such parameters keep
the tokens that the graph has sampled: one request with a grammar costs the others of a batch little. Does not own the
arithmetic (`models/sampling/sample.py`). Invariant: a row's token and log-probabilities are those that
`GpuRunner.verify` gives for the same text; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbranch.core.grammar import Guide
from specbranch.core.orders import TokenLogprobs
from specbranch.core.request import Spot
from specbranch.core.runner import NO_MASKS
from specbranch.models.files.head_columns import finder
from specbranch.models.forward.transfer import Reading, Transfer
from specbranch.models.gpu.decode_rows import DecodeRows
from specbranch.models.gpu.launching import wide
from specbranch.models.gpu.layout import CONFIDENCE, PARENT_FIELD
from specbranch.models.gpu.step import Ran
from specbranch.models.sampling import sample
from specbranch.models.sampling.sample import Asked
from specbranch.models.sampling.sampler import logprobs_of
from specbranch.models.sampling.sheet import is_penalised, masks_of, sheet_of

LOGPROBS = CONFIDENCE + 1  # where log-probabilities begin in a row of results: ids, then their values
STATIC = ("bias", "least", "rank", "share", "temperature")  # parameters that are the same in every step
Pick = Callable[[Tensor, Tensor], Tensor]  # from logits and the section of sampling numbers to tokens


class Penalties:
    """Tokens that occurred in the texts of some rows, and what that costs them.

    The tables hold what is subtracted from a logit, and by what it is scaled. A step changes one entry of each row, so
    that applying them takes one operation or two.
    """

    def __init__(self, rows: DecodeRows, width: int, transfer: Transfer) -> None:
        """Count the tokens of new rows; those of the step before bring their counts along."""
        self.at = [at for at, row in enumerate(rows.rows) if is_penalised(row.request.params)]
        self._all = len(self.at) == len(rows.shaped)
        scales = any(rows.rows[at].request.params.repetition_penalty != 1.0 for at in self.at)
        sent = transfer.up({**self._numbers(rows), **self._texts(rows, width)})  # one copy, which waits for nothing
        self._rows, self._repetition = sent["rows"].clone(), sent["repetition"].clone()
        self._frequency, self._presence = sent["frequency"].clone(), sent["presence"].clone()
        shape, device = (len(self.at), width), transfer.device
        self._answered = torch.zeros(shape, dtype=torch.int32, device=device)  # how often a token is in the answer
        self._less = torch.zeros(shape, dtype=torch.float32, device=device)
        self._scale = torch.ones(shape, dtype=torch.float32, device=device) if scales else None
        self._one = torch.ones((len(self.at), 1), dtype=torch.int32, device=device)
        for own, at in enumerate(self.at):
            source = rows.sources[at]
            if isinstance(source, int):
                self._take(own, rows.before, source)
            else:
                self._count_text(own, sent[f"text {own}"], sent[f"answer {own}"])

    def _numbers(self, rows: DecodeRows) -> dict[str, np.ndarray]:
        params = [rows.rows[at].request.params for at in self.at]
        return {
            "rows": np.array([rows.shaped.index(at) for at in self.at]),
            "repetition": np.array([[p.repetition_penalty] for p in params], dtype=np.float32),
            "frequency": np.array([[p.frequency_penalty] for p in params]),
            "presence": np.array([[p.presence_penalty] for p in params]),
        }

    def _texts(self, rows: DecodeRows, width: int) -> dict[str, np.ndarray]:
        """Return the tokens of new rows: all, and those of the answer."""
        found: dict[str, np.ndarray] = {}
        for own, at in enumerate(self.at):
            source, length = rows.sources[at], rows.rows[at].request.prompt_length
            if not isinstance(source, int):
                found[f"text {own}"] = np.array([token for token in source if token < width], dtype=np.int64)
                found[f"answer {own}"] = np.array([t for t in source[length:] if t < width], dtype=np.int64)
        return found

    def _count_text(self, own: int, text: Tensor, answer: Tensor) -> None:
        """Count the tokens of a new row."""
        counts = self._answered[own]
        counts.index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
        less = (self._frequency[own] * counts + self._presence[own]).float()
        self._less[own] = torch.where(counts > 0, less, self._less[own])
        if self._scale is not None:
            self._scale[own].index_copy_(0, text, self._repetition[own].expand(len(text)))

    def _take(self, own: int, before: DecodeRows | None, row: int) -> None:
        """Take the counts of a row of the step before."""
        assert before is not None and isinstance(before.shaping, Shaping) and before.shaping.penalties is not None
        there = before.shaping.penalties
        at = there.at.index(row)
        self._answered[own], self._less[own] = there._answered[at], there._less[at]
        if self._scale is not None and there._scale is not None:
            self._scale[own] = there._scale[at]

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits with the penalties, in float32; the given ones stay as they are."""
        some = logits if self._all else logits[self._rows]
        if self._scale is not None:
            some = torch.where(some < 0, some * self._scale, some / self._scale)
        some = some - self._less
        return some if self._all else logits.index_copy(0, self._rows, some)

    def count(self, tokens: Tensor) -> None:
        """Add the tokens that the shaped rows of the step have sampled.

        No number of the host is written here by index: torch would copy it up, and wait for the device first.
        """
        own = tokens[self._rows][:, None]
        self._answered.scatter_add_(1, own, self._one)
        self._less.scatter_(1, own, (self._frequency * self._answered.gather(1, own) + self._presence).float())
        if self._scale is not None:
            self._scale.scatter_(1, own, self._repetition)


@dataclass(frozen=True, slots=True)
class Shaping:
    """The parameters of a step's shaped rows, on the device; they serve all steps of the same sequences."""

    rows: Tensor | None  # which rows of the step these are; None: all
    asked: Asked
    penalties: Penalties | None
    # index among these rows, position from which its end tokens are allowed, these tokens
    forbids: Sequence[tuple[int, int, frozenset[int]]]
    top: int | None  # the most log-probabilities that a row wants


@dataclass(frozen=True, slots=True)
class Scored:
    """What a step leaves for its shaped rows: copies, as a later step writes to the same memory."""

    logits: Tensor  # of the shaped rows
    choosing: Tensor  # their sampling numbers
    sampled: Tensor | None  # what the graph has sampled for all rows; None: all are shaped


class ShapedSampler:
    """Samples the rows of plain decode steps by all their parameters."""

    def __init__(self, transfer: Transfer, width: int, pick: Pick, picks: Tensor) -> None:
        """`pick` writes the tokens to `picks`, where the next step finds those of the step before."""
        self._transfer, self._width, self._pick, self._picks = transfer, width, pick, picks

    def taken(self, rows: DecodeRows, ran: Ran, choosing: Tensor) -> Scored:
        """Take what is needed of a step that was launched; `choosing`: the section of its sampling numbers."""
        shaping = rows.shaping if isinstance(rows.shaping, Shaping) else self._shaping(rows)
        rows.shaping, rows.before, rows.sources = shaping, None, ()
        logits = ran.logits[: len(rows), : self._width]
        if shaping.rows is None:
            return Scored(wide(logits), choosing.clone(), None)
        assert ran.results is not None
        sampled = ran.results[: len(rows), : CONFIDENCE + 1].clone()
        logits, choosing = logits.index_select(0, shaping.rows), choosing.index_select(1, shaping.rows)
        choosing[PARENT_FIELD] = torch.arange(len(rows.shaped), device=choosing.device)  # each row is a root
        return Scored(logits.float() if logits.dtype.itemsize < 4 else logits, choosing, sampled)

    def read_later(self, rows: DecodeRows, scored: Scored, masks: Mapping[int, Guide] = NO_MASKS) -> Reading:
        """Start to read the results of a step."""
        return self._transfer.later(self.results(rows, scored, masks))

    def results(self, rows: DecodeRows, scored: Scored, masks: Mapping[int, Guide] = NO_MASKS) -> Tensor:
        """Return a row's token, 1, NaN if its scores are no numbers, and log-probabilities [rows, numbers].

        `masks`: the tokens that are allowed, by row.
        """
        shaping = rows.shaping
        assert isinstance(shaping, Shaping)
        found = self._shaped(rows, shaping, scored, masks)
        if scored.sampled is None or shaping.rows is None:
            return found
        whole = found.new_zeros(len(rows), found.shape[1])
        whole[:, : CONFIDENCE + 1] = scored.sampled
        whole.index_copy_(0, shaping.rows, found)
        self._picks[: len(rows)] = whole[:, 0]
        return whole

    def _shaped(self, rows: DecodeRows, shaping: Shaping, scored: Scored, masks: Mapping[int, Guide]) -> Tensor:
        """Return the results of the shaped rows."""
        logits = scored.logits
        asked = {**shaping.asked, **self._forbidden(rows, shaping), **self._masks(rows, masks)}
        edited = sample.edited(logits, asked)
        if shaping.penalties is not None:
            edited = shaping.penalties.apply(edited)
        tokens = self._pick(sample.uncut(edited, asked), scored.choosing)
        if shaping.penalties is not None:
            shaping.penalties.count(tokens)
        finite = edited.amax(dim=-1) < torch.inf  # no comparison holds for NaN
        one = torch.ones_like(tokens, dtype=torch.float64)
        parts = [tokens.double()[:, None], one[:, None], torch.where(finite, one, torch.nan)[:, None]]
        if shaping.top is not None:
            ids, logs = sample.logprobs(logits, tokens, shaping.top)
            parts += [ids.double(), logs]
        return torch.cat(parts, dim=-1)

    def _masks(self, rows: DecodeRows, masks: Mapping[int, Guide]) -> dict[str, Tensor]:
        """Return the masks of the shaped rows as packed bits; a row without one may have any token."""
        if not masks:
            return {}
        width = self._width
        spots = [Spot(rows.rows[at].request, 0, list, allowed=masks.get(at)) for at in rows.shaped]
        return self._transfer.up(masks_of(spots, width, finder(None, width), None))

    def _shaping(self, rows: DecodeRows) -> Shaping:
        """Bring the parameters of the shaped rows to the device."""
        requests = [rows.rows[at].request for at in rows.shaped]
        # far behind min_tokens, and without a history: penalties have tables
        spots = [Spot(one, one.prompt_length + one.params.min_tokens, list) for one in requests]
        arrays = sheet_of(spots, self._width, finder(None, self._width))
        asked = {name: array for name, array in arrays.items() if name in STATIC}
        if len(rows.shaped) < len(rows):
            asked["rows"] = np.array(rows.shaped)
        sent = {name: tensor.clone() for name, tensor in self._transfer.up(asked).items()} if asked else {}
        numbers = sent.pop("rows", None)
        penalised = any(is_penalised(one.params) for one in requests)
        forbids = [
            (at, one.prompt_length + one.params.min_tokens - 1, one.ending_ids)
            for at, one in enumerate(requests)
            if one.params.min_tokens and one.ending_ids
        ]
        tops = [one.params.logprobs for one in requests if one.params.logprobs is not None]
        penalties = Penalties(rows, self._width, self._transfer) if penalised else None
        return Shaping(numbers, sent, penalties, forbids, max(tops, default=None))

    def _forbidden(self, rows: DecodeRows, shaping: Shaping) -> dict[str, Tensor]:
        """Return the end tokens of rows that are too short to end, as edits."""
        found = [
            (row, token, -np.inf)
            for row, allowed_from, ends in shaping.forbids
            if rows.positions[rows.shaped[row]] < allowed_from
            for token in ends
            if token < self._width
        ]
        if not found:
            return {}
        return self._transfer.up({"forbid": np.array(found, dtype=np.float64).T.copy()})


@dataclass(frozen=True, slots=True)
class Unchosen:
    """A step that was launched before its masks were known: its tokens are chosen later, before the next step."""

    sampler: ShapedSampler
    rows: DecodeRows
    scored: Scored

    def choose(self, masks: Mapping[int, Guide]) -> Reading:
        """Choose the tokens; `masks`: those that are allowed, by row."""
        return self.sampler.read_later(self.rows, self.scored, masks)


def logprobs_in(results: np.ndarray, row: int, top: int) -> TokenLogprobs:
    """Return the log-probabilities of a row of results; another row may have asked for more."""
    numbers: list[float] = results[row, LOGPROBS:].tolist()
    return logprobs_of(numbers if top else [numbers[0], numbers[len(numbers) // 2]], top)
