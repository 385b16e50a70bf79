"""Compares the vocabularies of draft and target: does every id that both have mean the same token?

Owns the comparison. Ids that only one of them has are allowed: a vocabulary padded to a round size, or tokens added for
one model. The draft never proposes them, and losslessness does not depend on them. Vocabularies that differ are
translated (`translation.py`).
"""

from __future__ import annotations

from specbranch.text.tokenizer import Tokenizer


def compare_vocabularies(target: Tokenizer, draft: Tokenizer) -> int | None:
    """Return how many ids both have from 0 on; None if one of them means different tokens."""
    common = min(target.vocabulary_size, draft.vocabulary_size)
    if target.fingerprint == draft.fingerprint:
        return common
    ours, theirs = target.vocabulary(), draft.vocabulary()
    differ = any(i in ours and i in theirs and ours[i] != theirs[i] for i in range(common))
    return None if differ or not common else common
