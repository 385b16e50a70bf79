"""A mixture of experts in plain torch: the router's choice, and the chosen experts' outputs.

Owns the order of sums. Two ways lead to the same sums. On a CPU the rows of each chosen expert are multiplied in tiles
of a fixed size. On other devices, where nothing may wait for the device, every expert multiplies all rows. Invariant:
a row's outputs are added in the order of expert numbers, whoever else shares an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbranch.models.cpu.linear import PRODUCT_ROWS, Linear
from specbranch.models.families.operations import Experts
from specbranch.models.forward.arithmetic import gated, wide


@dataclass(frozen=True, slots=True)
class ExpertLinears:
    """The matrices of a layer with experts, as callables."""

    form: Experts
    router: Linear
    gate_up: tuple[Linear, ...]  # by expert
    down: tuple[Linear, ...]

    def __call__(self, h: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs [rows, hidden]."""
        ids, weights = chosen(self.router(h), self.form)
        return self._by_expert(h, ids, weights) if h.device.type == "cpu" else self._all(h, ids, weights)

    def run(self, expert: int, h: Tensor) -> Tensor:
        """Return one expert's output."""
        return self.down[expert](gated(self.gate_up[expert](h), self.form.activation))

    def _by_expert(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        outputs = h.new_empty(*ids.shape, h.shape[-1])  # [rows, active, hidden]
        for expert in sorted(set(ids.flatten().tolist())):
            for rows, places in _tiles(ids == expert):
                outputs[rows, places] = self.run(expert, h[rows]) * weights[rows, places].unsqueeze(-1)
        first, *others = outputs.unbind(1)
        for output in others:
            first = first + output
        return first

    def _all(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(h)
        for expert in range(self.form.count):
            mine = ids == expert
            weight = torch.where(mine, weights, 0).sum(-1, keepdim=True)
            total = torch.where(mine.any(-1, keepdim=True), total + self.run(expert, h) * weight, total)
        return total


def chosen(logits: Tensor, form: Experts) -> tuple[Tensor, Tensor]:
    """Return the numbers of the chosen experts [rows, active], ascending, and their weights in the type of `logits`.

    Of experts with equal scores the lowest number is chosen.
    """
    scores = wide(logits)
    odds = scores.softmax(-1) if form.routing == "all_first" else scores
    best, ids = (part[..., : form.active] for part in torch.sort(odds, dim=-1, descending=True, stable=True))
    if form.routing == "best_first":
        best = best.softmax(-1)
    elif form.weights_sum_to_one:
        best = best / best.sum(-1, keepdim=True)
    ids, order = ids.sort(-1)
    return ids, best.gather(-1, order).to(logits.dtype)


def _tiles(mine: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return rows and places of the True entries [rows, active], as many as a tile of the product at a time."""
    rows, places = mine.nonzero(as_tuple=True)
    return list(zip(torch.split(rows, PRODUCT_ROWS), torch.split(places, PRODUCT_ROWS), strict=True))
