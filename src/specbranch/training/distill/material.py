"""A target's text as training material: conversations in one file, dealt out in packed batches.

Owns the file and the packing. Invariants: a conversation is never split over two rows of a batch. A batch depends only
on the material, the sizes, the seed, the epoch and its index, so training can resume at any batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specbranch.errors import BadParameter, ModelError
from specbranch.files import replacing
from specbranch.models.files.disk import read_tensors

MATERIAL_FORMAT = "specbranch-material-1"
PADDING = -1  # segment of positions without a conversation
GIVEN = "given"  # the kind of a prompt of the user's
GIVEN_WEIGHT = 2.0  # how much a conversation with such a prompt counts; others count 1
# of conversations; files hold their numbers, so a new one goes to the end
TEXT_KINDS = (
    *("talk", "sums", "code", "texts", GIVEN, "summaries", "about", "translation", "extraction", "editing", "data"),
    "turns",
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed conversations; `weight` says how much the prediction after each token counts."""

    tokens: Tensor  # int64 [rows, length]
    positions: Tensor  # int64 [rows, length], from 0 in each conversation
    segments: Tensor  # int64 [rows, length], numbered from 0 in each row; PADDING where nothing is
    weight: Tensor  # float32 [rows, length], 0 at the last token of a conversation and in padding
    source: Tensor  # int64 [rows, length], where the token stands in the material; 0 in padding
    # int32 [stretches + 1], where each stretch of one segment begins in the flattened batch; see `with_edges`
    edges: Tensor | None = None

    def parts(self, rows: int) -> Iterator[Batch]:
        """Split into batches of at most this many rows."""
        parts = (
            torch.split(getattr(self, name), rows) for name in ("tokens", "positions", "segments", "weight", "source")
        )
        return (Batch(*part) for part in zip(*parts, strict=True))

    def with_edges(self) -> Batch:
        """Add the edges of segments; padding is a segment too."""
        row = torch.arange(self.segments.shape[0]).unsqueeze(1) * (int(self.segments.max()) + 2)
        owner = (self.segments - PADDING + row).flatten()
        inner = owner.diff().nonzero().view(-1) + 1
        ends = torch.tensor([0]), inner, torch.tensor([owner.numel()])
        return replace(self, edges=torch.cat(ends).to(torch.int32))


@dataclass(frozen=True, slots=True)
class Material:
    """Conversations, each with the position at which its answer starts."""

    tokens: Tensor  # int32 [all tokens], all conversations one after the other
    starts: Tensor  # int64 [conversations + 1]
    answers: Tensor  # int64 [conversations], counted from the conversation's own start
    about: Mapping[str, Any] = field(default_factory=dict)  # how it was made: seeds, counts, settings
    # bool [all tokens]: given, behind an answer's start, as a later question of the conversation; None: nothing is
    later: Tensor | None = None
    kinds: Tensor | None = None  # int64 [conversations], numbers in TEXT_KINDS; None: unknown

    def __post_init__(self) -> None:
        if fault := _fault(self.tokens, self.starts, self.answers) or _fault_of_marks(self):
            raise ValueError(f"This is no material: {fault}.")

    def __len__(self) -> int:
        return self.answers.numel()

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each conversation [conversations]."""
        return self.starts.diff()

    @property
    def answer_tokens(self) -> int:
        """The number of answer tokens."""
        given = 0 if self.later is None else int(self.later.sum())
        return int((self.lengths - self.answers).sum()) - given

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """How each separately written part was made."""
        found: list[Mapping[str, Any]] = self.about.get("parts", [self.about])
        return found

    def counts(self) -> dict[str, int]:
        """Return the amount of material."""
        return {
            "conversations": len(self),
            "tokens_written": self.tokens.numel(),
            "answer_tokens": self.answer_tokens,
        }

    def sequence(self, index: int) -> list[int]:
        """Return the tokens of one conversation."""
        found: list[int] = self.tokens[self.starts[index] : self.starts[index + 1]].tolist()
        return found

    def frequencies(self, vocabulary: int) -> Tensor:
        """Count each token id in the answers [vocabulary]."""
        within, owner = _positions(self.lengths)
        written = within >= self.answers[owner]
        written = written if self.later is None else written & ~self.later
        return torch.bincount(self.tokens[written].long(), minlength=vocabulary)

    def by_kind(self) -> dict[str, int]:
        """Count the conversations of each kind; nothing if kinds are unknown."""
        if self.kinds is None:
            return {}
        counts = torch.bincount(self.kinds, minlength=len(TEXT_KINDS)).tolist()
        return {kind: count for kind, count in zip(TEXT_KINDS, counts, strict=True) if count}

    def select(self, chosen: Tensor) -> Material:
        """Return some of the conversations, in the given order."""
        lengths = self.lengths[chosen]
        within, owner = _positions(lengths)
        at = self.starts[chosen][owner] + within
        later = None if self.later is None else self.later[at]
        kinds = None if self.kinds is None else self.kinds[chosen]
        return Material(self.tokens[at], _starts(lengths), self.answers[chosen], self.about, later, kinds)

    def split(self, held_out: float, seed: int = 0) -> tuple[Material, Material]:
        """Hold out a share of the conversations, at least one; return (the others, the held-out ones), each in
        writing order."""
        if not 0 < held_out < 1:
            raise BadParameter(f"held_out is {held_out}; expected a share between 0 and 1.")
        if len(self) < 2:
            raise BadParameter(
                f"The material holds {len(self)} conversations; setting some apart needs two or more. Write longer."
            )
        order = torch.randperm(len(self), generator=_generator(seed, "split"))
        apart = min(max(round(held_out * len(self)), 1), len(self) - 1)
        return self.select(order[apart:].sort().values), self.select(order[:apart].sort().values)

    def batches(
        self,
        length: int,
        size: int,
        seed: int,
        epoch: int,
        first: int = 0,
        question_weight: float = 0.0,
        answer_weight: float = 1.0,
    ) -> Iterator[Batch]:
        """Deal all conversations once, shuffled and packed in `size` rows of `length` tokens, starting with batch
        number `first`.

        A conversation longer than a row loses its end. The last batch is filled with empty rows.
        """
        if length < 2 or size < 1:
            raise BadParameter(
                f"A batch of {size} rows of {length} tokens holds nothing; expected at least 1 row of 2."
            )
        rows = self._rows(length, seed, epoch)
        for start in range(first * size, len(rows), size):
            yield self._batch(rows[start : start + size], length, size, question_weight, answer_weight)

    def save(self, path: Path) -> None:
        """Write everything to one file, which appears as a whole or not at all."""
        tensors = {"tokens": self.tokens, "starts": self.starts, "answers": self.answers}
        marks = {"later": self.later, "kinds": self.kinds}
        tensors |= {name: marked for name, marked in marks.items() if marked is not None}
        metadata = {"format": MATERIAL_FORMAT, "about": json.dumps(dict(self.about), sort_keys=True)}
        try:
            with replacing(path) as part:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"The material could not be written to {path}: {error}. Free some space, or choose another folder."
            ) from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file written by `save`."""
        try:
            held, metadata = read_tensors(path, MATERIAL_FORMAT)
            marks = held.get("later"), held.get("kinds")
            return cls(held["tokens"], held["starts"], held["answers"], json.loads(metadata["about"]), *marks)
        except FileNotFoundError:
            raise ModelError(f"There is no material at {path}.") from None
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ModelError(
                f"{path} is damaged or no material: {error}. Delete it, and it is written again."
            ) from None

    @classmethod
    def join(cls, parts: Sequence[Material], about: Mapping[str, Any] | None = None) -> Self:
        """Concatenate several, in order."""
        lengths = torch.cat([part.lengths for part in parts])
        tokens, answers = (
            torch.cat(ours) for ours in ([part.tokens for part in parts], [part.answers for part in parts])
        )
        if about is None:
            about = {"parts": [dict(part.about) for part in parts]}
        return cls(tokens, _starts(lengths), answers, about, _joined_later(parts), _joined_kinds(parts))

    def _rows(self, length: int, seed: int, epoch: int) -> list[Tensor]:
        """Return the conversations of each row: in shuffled order, a row takes as many as fit."""
        order = torch.randperm(len(self), generator=_generator(seed, f"epoch {epoch}"))
        cuts, filled = [0], 0
        for at, tokens in enumerate(self.lengths.clamp(max=length)[order].tolist()):
            if filled + tokens > length:
                cuts.append(at)
                filled = 0
            filled += tokens
        return [order[start:stop] for start, stop in pairwise([*cuts, len(order)]) if start < stop]

    def _batch(
        self, rows: Sequence[Tensor], length: int, size: int, question_weight: float, answer_weight: float
    ) -> Batch:
        chosen = torch.cat(list(rows))
        within, owner = _positions(self.lengths[chosen].clamp(max=length))
        last = torch.ones_like(within, dtype=torch.bool)
        last[:-1] = owner.diff() > 0
        # The prediction at the position before an answer's first token is that token's.
        source = self.starts[chosen][owner] + within
        answering = within + 1 >= self.answers[chosen][owner]
        if self.later is not None:
            answering &= ~self.later[(source + 1).clamp(max=len(self.later) - 1)]
        weight = torch.where(answering, answer_weight, question_weight).masked_fill(last, 0.0).to(torch.float32)
        if self.kinds is not None:
            weight = torch.where((self.kinds[chosen] == TEXT_KINDS.index(GIVEN))[owner], GIVEN_WEIGHT * weight, weight)
        position = (
            _first_positions(self.lengths[chosen].clamp(max=length), [len(row) for row in rows], length)[owner] + within
        )
        segment = torch.cat([torch.arange(len(row)) for row in rows])[owner]
        tokens = self.tokens[source].long()
        filled = (
            _scatter(position, values, size * length) for values in (tokens, within, segment - PADDING, weight, source)
        )
        tokens, positions, segments, weight, source = (whole.view(size, length) for whole in filled)
        return Batch(tokens, positions, segments + PADDING, weight, source)


def material_files(path: Path) -> list[Path]:
    """Return the material files of a path: itself, or those in the folder."""
    if path.is_dir():
        return sorted(path.glob("material*.safetensors"), key=lambda file: (len(file.name), file.name))
    return [path] if path.is_file() else []


def material_in(path: Path) -> Material:
    """Read a material file, or all files of a folder as one."""
    return joined([Material.load(file) for file in material_files(path)])


def joined(parts: Sequence[Material]) -> Material:
    """Concatenate several; a single one stays as it is."""
    return parts[0] if len(parts) == 1 else Material.join(parts)


def _fault(tokens: Tensor, starts: Tensor, answers: Tensor) -> str | None:
    """Return what is wrong with the tensors of a material, if anything."""
    if (tokens.dtype, starts.dtype, answers.dtype) != (torch.int32, torch.int64, torch.int64):
        return f"its tensors are {tokens.dtype}, {starts.dtype} and {answers.dtype}, expected int32, int64 and int64"
    if starts.numel() != answers.numel() + 1 or starts[0] != 0 or starts[-1] != tokens.numel():
        return "its starts do not cover its tokens"
    lengths = starts.diff()
    if bool((lengths < 1).any()) or bool((answers < 1).any()) or bool((answers > lengths).any()):
        return "an answer begins outside its conversation"
    return None


def _fault_of_marks(material: Material) -> str | None:
    """Return what is wrong with the marks of tokens and conversations, if anything."""
    for name, like, dtype in (("later", material.tokens, torch.bool), ("kinds", material.answers, torch.int64)):
        marks = getattr(material, name)
        if marks is not None and (marks.shape != like.shape or marks.dtype != dtype):
            return f"{name} is {marks.dtype} of {list(marks.shape)}, expected {dtype} of {list(like.shape)}"
    if material.kinds is not None and bool(((material.kinds < 0) | (material.kinds >= len(TEXT_KINDS))).any()):
        return f"it has kinds beyond {len(TEXT_KINDS)}"
    return None


def _joined_later(parts: Sequence[Material]) -> Tensor | None:
    """Concatenate the marks of tokens; parts without any have none marked."""
    if all(part.later is None for part in parts):
        return None
    return torch.cat(
        [torch.zeros_like(part.tokens, dtype=torch.bool) if part.later is None else part.later for part in parts]
    )


def _joined_kinds(parts: Sequence[Material]) -> Tensor | None:
    """Concatenate the kinds; None if those of a part are unknown."""
    known = [part.kinds for part in parts if part.kinds is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


def _positions(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's position in its conversation, and the number of that conversation."""
    owner = torch.repeat_interleave(lengths)
    return torch.arange(owner.numel()) - _starts(lengths)[owner], owner


def _first_positions(lengths: Tensor, counts: Sequence[int], length: int) -> Tensor:
    """Return the start of each conversation in the flattened batch, `counts` of them per row."""
    before = _starts(lengths)[:-1]
    heads = _starts(torch.tensor(counts))[:-1]  # each row's first conversation
    row = torch.repeat_interleave(torch.tensor(counts))
    return before - before[heads][row] + row * length


def _scatter(position: Tensor, values: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=values.dtype).index_copy_(0, position, values)


def _generator(seed: int, purpose: str) -> torch.Generator:
    digest = sha256(f"{seed} {purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
