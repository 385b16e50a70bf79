"""The tokens of a reduced output head, as some drafts have: each is one column of the logits.

Owns the mapping between columns and token ids. Invariant: ids ascend, so the first of several equal columns is the
lowest id, and the columns below an id come first. Sampling from such columns equals sampling from the whole vocabulary
with −∞ at all other tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specbranch.errors import ModelError

Find = Callable[[int], int | None]  # token to column; None: it has none


class Columns:
    """The token ids of the columns, ascending, and the size of the whole vocabulary."""

    def __init__(self, ids: Tensor, vocabulary: int) -> None:
        tokens: list[int] = ids.tolist()
        if not tokens or tokens[0] < 0 or tokens[-1] >= vocabulary or not bool((ids[1:] > ids[:-1]).all()):
            raise ModelError(
                f"The head's {len(tokens)} tokens are not ascending ids below {vocabulary}. Make the draft again."
            )
        self.ids, self.vocabulary = ids, vocabulary
        self._tokens = tokens
        self.tokens = np.array(tokens)
        self._columns = {token: column for column, token in enumerate(tokens)}

    def below(self, vocabulary: int) -> int:
        """Return how many columns have a token below `vocabulary`; they are the first ones."""
        return bisect_left(self._tokens, vocabulary)

    def find(self, token: int) -> int | None:
        """Return the column of a token, None if it has none."""
        return self._columns.get(token)

    def spread(self, logits: Tensor) -> Tensor:
        """Spread logits […, columns] over the whole vocabulary, −∞ at all other tokens."""
        whole = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        return whole.index_copy_(-1, self.ids, logits)


def finder(columns: Columns | None, width: int) -> Find:
    """Return the mapping from tokens to the first `width` columns; without `columns` a token is its own column."""
    if columns is None:
        return lambda token: token if token < width else None

    def find(token: int) -> int | None:
        column = columns.find(token)
        return column if column is not None and column < width else None

    return find
