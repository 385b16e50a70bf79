"""The kernels of a step as recorders: what a step launches, and with which arguments, without Triton or a GPU."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specbranch.core.pages import PAGE, Pool
from specbranch.models.cache.kv_memory import Memory, Table
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.kernel_step import KernelStep
from specbranch.models.gpu.layout import pack, views

MODULES = ("product_kernels", "family_kernels", "expert_kernels")


@dataclass
class Launch:
    """One launch: the kernel's name, its grid, and its arguments; of tensors their shapes."""

    name: str
    grid: tuple[int, ...]
    args: list[Any]
    constants: dict[str, Any] = field(default_factory=dict)


class Recorded(ModuleType):
    """Stands for a module of kernels."""

    launches: list[Launch]

    def __getattr__(self, name: str) -> Recorder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(name, self.launches)


@dataclass
class Recorder:
    """Stands for a kernel."""

    name: str
    launches: list[Launch]
    grid: tuple[int, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return Recorder(self.name, self.launches, grid)

    def __call__(self, *args: Any, **constants: Any) -> None:
        told = {name: shown(value) for name, value in constants.items()}
        self.launches.append(Launch(self.name, self.grid, [shown(value) for value in args], told))


def shown(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def recorded_step(decoder: Decoder, patch: pytest.MonkeyPatch, rows: int = 4, before: int = 40) -> list[Launch]:
    """What a step of a chain launches."""
    launches: list[Launch] = []
    package = importlib.import_module("specbranch.models.gpu")
    for name in MODULES:
        module = Recorded(name)
        module.launches = launches
        patch.setitem(sys.modules, f"{package.__name__}.{name}", module)
        patch.setattr(package, name, module, raising=False)
    pool = Pool(4)
    step = KernelStep(decoder, Memory(decoder.arch, pool.pages + 1, torch.device("cpu"), decoder.dtype))

    def attend(queries: Tensor, keys: Tensor, values: Tensor, step: Any, out: Tensor, *further: Any) -> None:
        launches.append(Launch("attend", (), [shown(value) for value in further]))

    step.attend = attend  # type: ignore[assignment]
    table = Table(pool)
    table.reach(before + rows)
    packed, bucket = pack([Rows(table, [1] * rows, before, before, [(2 << at) - 1 for at in range(rows)])], 4 * PAGE)
    assert isinstance(packed, np.ndarray)
    step.forward(views(torch.from_numpy(packed), bucket))
    return launches
