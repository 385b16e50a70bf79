"""The agreement of a draft with its target by kind of text, and as tokens a forward.

Owns the figures and which conversation is of which kind. Both models read the texts in packed batches, as in training.
Invariant: every answer's token counts once, in the kind of its conversation.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbranch.errors import SpecBranchError
from specbranch.models.files.architecture import Architecture
from specbranch.text.tokenizer import Tokenizer
from specbranch.training.distill.material import TEXT_KINDS, Material
from specbranch.training.distill.model import Stack, counted, judge
from specbranch.training.distill.openings import Script
from specbranch.training.distill.teacher import moved
from specbranch.training.distill.writer_settings import WriterSettings

log = logging.getLogger("specbranch")

KIND_CHAIN = 5  # drafted tokens of a forward
ORIGINAL = "original"  # the kind of all, where the openings are not those of this version


@dataclass(frozen=True, slots=True)
class KindAgreement:
    """The agreement on the answers of one kind."""

    kind: str
    tokens: int
    top1: float
    top3: float
    tokens_per_forward: float  # of greedy decoding with a chain of KIND_CHAIN


def agreement_by_kind(
    teacher: Stack, student: Stack, texts: Material, kinds: Sequence[str], length: int, rows: int
) -> list[KindAgreement]:
    """Compare a draft with its target on all answers; `kinds`: of each conversation."""
    ranks = _ranks(teacher, student, texts, length, rows)
    by_kind: defaultdict[str, list[list[int | None]]] = defaultdict(list)
    for index, found in ranks.items():
        by_kind[kinds[index]].append(found)
    return [_figures(kind, by_kind[kind]) for kind in dict.fromkeys(kinds) if kind in by_kind]


def kinds_of(material: Material, tokenizer: Tokenizer, arch: Architecture) -> list[str]:
    """Return the kind of each conversation that a target wrote: as it was noted, otherwise by its opening."""
    if material.kinds is not None:
        return [TEXT_KINDS[kind] for kind in material.kinds.tolist()]
    settings = material.parts[0].get("settings", {})
    length = settings.get("length", arch.context_length)
    try:
        script = Script.of(tokenizer, arch, WriterSettings(tokens=1, length=min(length, arch.context_length)))
    except SpecBranchError as error:
        log.warning("The kinds of the original material are not known: %s", error)
        return [ORIGINAL] * len(material)
    return [script.kind_of(material.sequence(index)) for index in range(len(material))]


def tokens_per_forward(answers: Sequence[Sequence[int | None]]) -> float:
    """Return the tokens of answers by the forwards that a chain of KIND_CHAIN drafted tokens leaves of them.

    `answers`: the rank of the target's choice among the draft's, at each token; 0 is a hit.
    """
    forwards = 0
    for ranks in answers:
        at = 0
        while at < len(ranks):
            chain = ranks[at : at + KIND_CHAIN]
            at += next((n for n, rank in enumerate(chain) if rank != 0), len(chain)) + 1
            forwards += 1
    return sum(map(len, answers)) / max(forwards, 1)


def _figures(kind: str, answers: Sequence[Sequence[int | None]]) -> KindAgreement:
    every = [rank for ranks in answers for rank in ranks]
    top1, top3 = (sum(rank is not None and rank < most for rank in every) / len(every) for most in (1, 3))
    return KindAgreement(kind, len(every), top1, top3, tokens_per_forward(answers))


@torch.no_grad()
def _ranks(teacher: Stack, student: Stack, texts: Material, length: int, rows: int) -> dict[int, list[int | None]]:
    """Return the rank of the target's choice at each token of each answer, by conversation."""
    found: defaultdict[int, list[int | None]] = defaultdict(list)
    for batch in texts.batches(length, rows, seed=0, epoch=0):
        at = batch.weight.flatten().nonzero().squeeze(-1)
        owner = torch.searchsorted(texts.starts, batch.source.flatten()[at], right=True) - 1
        here = moved(batch, student)
        both = counted(teacher(here), [student(here)], [batch.weight])
        for index, position in zip(owner.tolist(), judge(both, student, teacher.head, 3)[0], strict=True):
            found[index].append(None if position is None else position.rank)
    return dict(sorted(found.items()))
