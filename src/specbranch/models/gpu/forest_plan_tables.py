"""The plan of a round of the forest in device memory, with the scratch memory of the kernels that work by it.

Owns one array with the prices of the verify, how trees grow, and the chances of candidates, and where each draft step
notes its rows for the host. Does not own what is planned (`core/forest_plan.py`), or the sessions' tables
(`forest_layout.py`). Invariant: addresses never change; a plan that is there already is not copied again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specbranch.core.forest import ForestPlan
from specbranch.core.forest_plan import MOST_DRAFT_STEPS, NO_PRICE
from specbranch.core.trees import CLASSES, Chances, Growth
from specbranch.models.gpu.forest_growing import ForestGrowth, growth_numbers
from specbranch.models.gpu.forest_layout import CHANCE_PARTS, GROWTH_SCALARS, WANT_FIELDS, Weights, chance_numbers
from specbranch.models.gpu.granting import Granting, new_granting, price_numbers
from specbranch.models.gpu.launching import StepLauncher
from specbranch.models.gpu.layout import Bucket
from specbranch.models.gpu.tree_layout import ENTRIES, LANES, LOOKED_CELLS

CAPACITIES = (1, 4, 16, 64)  # numbers of rows for which kernels are compiled
TABLE_ROWS = CAPACITIES[-1]  # rows of the tables
NO_CHANCES = Chances((0.0,) * CLASSES, (0.0,) * CLASSES, (0.0,) * LOOKED_CELLS, (0.0,) * LOOKED_CELLS)


class PlanTables:
    """A plan in device memory, one piece: prices of the verify, how trees grow, and the chances of candidates."""

    def __init__(self, device: torch.device) -> None:
        self._granting = new_granting(TABLE_ROWS, device)
        sizes = (self._granting.prices.shape[0], len(GROWTH_SCALARS) + LANES, sum(CHANCE_PARTS.values()))
        self._all = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        prices, growth, chances = torch.split(self._all, list(sizes))
        self._granting = replace(self._granting, prices=prices)
        self._growth, self._chances, self._device = growth, chances, device
        self._now, self._wants = (
            torch.zeros(TABLE_ROWS, count, dtype=torch.int32, device=device) for count in (LANES, len(WANT_FIELDS))
        )
        self._total = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        # Rows of each draft step, in three sets: reading a round waits for its verify, and its draft steps may still be
        # in flight when the round behind the next one is launched. Each begins at 16 bytes, as kernels are compiled so.
        pinned, count = device.type == "cuda", 4 * (1 + MOST_DRAFT_STEPS)
        self._totals = [torch.zeros(count, dtype=torch.int32, pin_memory=pinned) for _ in range(3)]
        self._total_views = [[part[at : at + 1] for at in range(0, count, 4)] for part in self._totals]
        self.no_results = torch.zeros(1, 4 + 2 * ENTRIES, device=device)
        self._brought: tuple[ForestPlan, int, Bucket] | None = None
        self._made = ForestGrowth(
            Growth((NO_PRICE,), NO_CHANCES), self._growth, Weights(NO_CHANCES, self._chances), self._now, self._wants,
            self._total,
        )  # fmt: skip

    @property
    def weights(self) -> Weights:
        """What trees are weighed by."""
        return self._made.weights

    def growth_of(self, sessions: int) -> ForestGrowth:
        """Return how the trees of so many sessions grow."""
        return replace(self._made, now=self._now[:sessions], wants=self._wants[:sessions])

    def fresh_totals(self, steps: int) -> list[Tensor]:
        """Return where the rows of each draft step of a round are noted; -1: they are not known yet."""
        self._totals.append(self._totals.pop(0))
        self._total_views.append(self._total_views.pop(0))
        self._totals[0].numpy()[: 4 * (steps + 1)] = -1
        return self._total_views[0]

    def granting(self, sessions: int) -> Granting:
        """Return the scratch memory for so many sessions."""
        whole = self._granting
        offers = whole.reaches.shape[1]
        return Granting(
            whole.reaches[:sessions], whole.offered[:sessions], whole.depths[:sessions], whole.ranks[:sessions],
            whole.ranked[: sessions * offers], whole.now[:sessions], whole.prices, whole.total,
        )  # fmt: skip

    def bring(
        self, plan: ForestPlan, rows: int, bucket: Bucket, sessions: int, launcher: StepLauncher
    ) -> ForestGrowth | None:
        """Copy a plan to the device unless it is there; returns how trees grow. `rows`: of the verify, at most."""
        if self._brought != (plan, rows, bucket):
            # Rows within the bucket cost nothing more, so all go to the likeliest nodes.
            prices = price_numbers(self._granting, 0.0, [0.0] * bucket.rows, 0, rows)
            parts = [prices]
            if plan.growth is not None:
                within, numbers = growth_numbers(plan.growth)
                padded = np.zeros(self._growth.shape[0])
                padded[: len(numbers)] = numbers
                parts += [padded, chance_numbers(within.chances)]
                self._made = replace(self._made, growth=within, weights=Weights(within.chances, self._chances))
            launcher.transfer.into(self._all, np.concatenate(parts))
            self._brought = plan, rows, bucket
        return None if plan.growth is None else self.growth_of(sessions)
