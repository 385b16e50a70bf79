"""Compares the vocabularies of draft and target: does every id that both have mean the same token?

Owns the comparison. Ids that only one of them has are allowed: a vocabulary padded to a round size, or tokens added for
one model. The draft never proposes them, and losslessness does not depend on them. Vocabularies that differ are
translated (`translation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from specbranch.errors import VocabularyMismatch
from specbranch.text.tokenizer import Tokenizer

SHOWN_TOKENS = 3  # in an error


def compare_vocabularies(target: Tokenizer, draft: Tokenizer) -> int | None:
    """Return how many ids both have from 0 on; None if one of them means different tokens."""
    common = min(target.vocabulary_size, draft.vocabulary_size)
    if target.fingerprint == draft.fingerprint:
        return common
    ours, theirs = target.vocabulary(), draft.vocabulary()
    return common if common and not _different(ours, theirs, common) else None


def compare_tokens(ours: Mapping[int, str], theirs: Mapping[int, str], common: int) -> int:
    """Return `common`, or raise if the target's tokens and those of a draft elsewhere differ below that id."""
    different = _different(ours, theirs, common)
    if different or not common:
        raise VocabularyMismatch(_sentence(different, ours, theirs, common))
    return common


def _different(ours: Mapping[int, str], theirs: Mapping[int, str], common: int) -> list[int]:
    return [i for i in range(common) if i in ours and i in theirs and ours[i] != theirs[i]]


def _sentence(different: list[int], ours: Mapping[int, str], theirs: Mapping[int, str], common: int) -> str:
    shown = "; ".join(
        f"{i} is {ours[i]!r} to the target and {theirs[i]!r} to the draft" for i in different[:SHOWN_TOKENS]
    )
    more = f"; and {len(different) - SHOWN_TOKENS} more" if len(different) > SHOWN_TOKENS else ""
    return (
        f"Draft and target have different vocabularies: {len(different)} of {common} shared token ids differ "
        f"({shown}{more}). "
        "Use a draft of the target's own family, or method 'lookup', which needs no draft."
    )
