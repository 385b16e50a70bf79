"""Every pinned cut of a product: its result is right, and a row's bits do not depend on the number of rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specbranch.models.cpu.linear import PlainLinear
from specbranch.models.files.matrix import Matrix
from specbranch.models.forward.stored_linear import StoredLinear
from specbranch.models.gpu.products import BITS, PINNED, Stored, cut_of, product_of

pytestmark = pytest.mark.gpu
SMALL = [("qkv", 960, 576), ("down", 576, 1536), ("head", 301, 384), ("qkv", 2048, 1536), ("down", 1536, 8960)]
CASES: list[tuple[Stored, str, int, int]] = [
    (stored, *case)
    for stored, cuts in PINNED.items()
    for case in [*cuts, *SMALL]
    if stored != "int4" or case[2] % 128 == 0
]
UNPINNED = [kind for kind in BITS if kind not in PINNED and kind != "int4-zeros"]
CASES += [(stored, *case) for stored in UNPINNED for case in SMALL]
NO_NORM = SimpleNamespace(qk_norm=False, head_dim=128)


def multiplied(
    name: str, linear: PlainLinear | StoredLinear, x: torch.Tensor, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """x·Wᵀ by the head's kernel, cut as the product is; rows are divided by the root of `sums` [rows, sums], or of
    ones."""
    from specbranch.models.gpu import product_kernels

    product = product_of(name, linear, NO_NORM)  # type: ignore[arg-type]
    rows = len(x)
    grid = product.grid(rows)
    held = torch.zeros(grid[0] * product.tiles(rows).rows, product.ins, device="cuda", dtype=x.dtype)
    held[:rows] = x
    squares, out = (
        torch.full((len(held), 1), float(product.ins), device="cuda"),
        torch.zeros(len(held), product.outs, device="cuda"),
    )
    if sums is not None:
        squares = torch.ones(len(held), sums.shape[1], device="cuda")
        squares[:rows] = sums
    _, scale = product.tensors()
    of_x, weight = product.operands(held, product.tiles(rows))
    how = {**product.how(rows, False), "PARTS": 1, "UNIT": product.tiles(rows).cut.step}
    product_kernels.scored[grid](
        of_x, weight, scale, squares, out, 0.0, rows, product.outs, product.ins, NORMS=squares.shape[1], **how
    )
    return out[:rows]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("stored", "name", "outs", "ins"), CASES)
def test_a_row_has_the_same_bits_in_a_tile_of_any_size(
    stored: Stored, name: str, outs: int, ins: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(outs)
    weight = torch.randn(outs, ins, device="cuda", dtype=dtype) * ins**-0.5
    spread = torch.exp(torch.randn(2048, ins, device="cuda"))  # numbers of very different sizes: orders of sums show
    x = (torch.randn(2048, ins, device="cuda") * spread).to(dtype)
    linear = PlainLinear(weight, None) if stored == "plain" else StoredLinear(Matrix(weight).stored_as(stored))
    expected = (
        x.float() @ (linear.matrix.widened(torch.float32) if isinstance(linear, StoredLinear) else weight).float().T
    ).cpu()
    rows = (0, 15, 17, 31, 64, 100, 129, 300, 511, 2047)
    alone = torch.cat([multiplied(name, linear, x[row : row + 1]) for row in rows])
    assert (alone.cpu() - expected[list(rows)]).abs().max() < 0.001 * x.float().norm(dim=1).max()
    for count in (16, 18, 32, 64, 128, 130, 256, 512, 2048):
        among = multiplied(name, linear, x[:count])
        for at, row in enumerate(rows):
            if row < count:
                assert torch.equal(among[row], alone[at]), (
                    f"row {row} among {count}, by {cut_of(name, outs, ins, stored)}"
                )


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")], ids=str)
def test_a_sum_of_squares_that_is_not_finite_spoils_its_row_and_no_other(bad: float) -> None:
    torch.manual_seed(0)
    linear = PlainLinear(torch.randn(301, 384, device="cuda", dtype=torch.bfloat16), None)
    x = torch.randn(4, 384, device="cuda", dtype=torch.bfloat16)
    sums = torch.rand(4, 8, device="cuda") + 0.5
    sound = multiplied("head", linear, x, sums)
    expected = (x.float() @ linear.weight.float().T) * torch.rsqrt(sums.sum(1, keepdim=True) / 384)
    assert ((sound - expected).abs().max() / expected.abs().max()).item() < 1e-3
    sums[2, 5] = bad
    found = multiplied("head", linear, x, sums)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], sound[[0, 1, 3]])
