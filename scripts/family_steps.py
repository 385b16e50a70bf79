"""One case of `measure_families.py`: a model of random weights, its steps timed, and their bits compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from family_shapes import bytes_read, random_family, shape_of
from measure_gpu import bandwidth, device_name, milliseconds
from torch import Tensor

from specbranch.core.pages import PAGE, Pool
from specbranch.models.cache.kv_memory import Memory, Table
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.attention import attend_plainly
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.kernel_step import KernelStep, step_of
from specbranch.models.gpu.layout import pack, views
from specbranch.models.gpu.small import PLAIN_FUNCTIONS
from specbranch.models.gpu.step import GpuStep, Graphs

DTYPE = torch.bfloat16
COMPARED = 13  # rows that are compared with plain torch where there are experts


class Measured:
    """A model and some sequences behind one context, whose pages they share."""

    def __init__(self, shape: str, stored: Any, context: int, device: str) -> None:
        self.arch, self.context, self.device = shape_of(shape), context, torch.device(device)
        self.peak = bandwidth(device)  # before the weights take the memory
        self.weights = random_family(self.arch, self.device, DTYPE, stored)
        self.decoder = Decoder(self.arch, self.weights, context + PAGE)
        self.most_pages = -(-(context + PAGE) // PAGE)
        self.shared = list(range(self.most_pages - 2))  # the last two of a sequence are its own
        self.pool = Pool(len(self.shared) + 2 * 17)
        self.memory = Memory(self.arch, self.pool.pages + 1, self.device, DTYPE)
        for page in self.memory.data:  # all at once would take twice the memory
            page.normal_()
        step = step_of(self.decoder, self.memory)
        chooser = Chooser(step.picks, self.arch.vocabulary)
        self.graphs = Graphs(step, self.most_pages, chooser=chooser)

    def parts(self, rows: int, replays: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield parts of the result as they are measured."""
        kernels = isinstance(self.graphs.step, KernelStep)
        yield "made", {"kernels": kernels, "device": device_name(self.device.type), "read_tb_s": self.peak}
        with torch.inference_mode():
            self.get_ready([self.chain(1), self.chain(rows), [self.single(at) for at in range(rows)]])
            yield "captured", {}
            for count in (1, rows):
                yield f"{count} rows", self.timed(count, replays)
            yield "batch", {"batch_bits": self.same_in_a_batch(rows)}
            yield "chain", {"chain_bits": self.same_in_a_chain(rows)}
            yield "plain", self.against_plain()

    def table(self, number: int) -> Table:
        """Return the page table of a sequence: the context, then pages of its own."""
        own = len(self.shared) + 2 * number
        return Table(self.pool, [*self.shared, own, own + 1])

    def chain(self, count: int) -> list[Rows]:
        """Return rows of one sequence behind the context, one after the other."""
        seen = [(2 << at) - 1 for at in range(count)]
        tokens = [1 + 7 * at % (self.arch.vocabulary - 1) for at in range(count)]
        return [Rows(self.table(16), tokens, self.context, self.context, seen)]

    def single(self, number: int) -> Rows:
        """Return one row of a sequence of its own."""
        return Rows(self.table(number), [1 + 5 * number % (self.arch.vocabulary - 1)], self.context, self.context, [1])

    def get_ready(self, works: list[list[Rows]]) -> None:
        """Compile the kernels of some steps in threads, and capture them."""
        kinds = [(pack(work, self.spare, least=self.graphs.step.least)[1], 0, 1, False) for work in works]
        self.graphs.compile(kinds)
        self.graphs.capture(kinds)

    @property
    def spare(self) -> int:
        """The KV slot that padding is written to."""
        return self.pool.pages * PAGE

    def run(self, work: list[Rows]) -> Tensor:
        """Return a copy of the logits of all rows."""
        packed, bucket = pack(work, self.spare, least=self.graphs.step.least)
        self.graphs.bring(packed)
        return self.graphs.run_brought(bucket, 0, 1).logits[: sum(len(part.tokens) for part in work)].clone()

    def timed(self, count: int, replays: int) -> dict[str, Any]:
        """Time a chain's step, beside the time that its bytes take."""
        packed, bucket = pack(self.chain(count), self.spare, least=self.graphs.step.least)
        self.graphs.bring(packed)
        if not bool(self.graphs.run_brought(bucket, 0, 1).logits.isfinite().all()):
            raise ValueError(f"a step of {count} rows gave logits that are no numbers")
        times = milliseconds(lambda: self.graphs.run_brought(bucket, 0, 1), replays, self.device)
        ms, read = statistics.median(times), self.bytes_of(count)
        floor = read / self.peak / 1e9
        found = {"ms": ms, "least_ms": min(times), "gb": read / 1e9, "floor_ms": floor, "share": floor / ms}
        return {f"{name}_{count}": value for name, value in found.items()}

    def bytes_of(self, rows: int) -> float:
        """Return the bytes that a chain's step has to read."""
        return bytes_read(self.weights, self.arch, rows, self.context, DTYPE.itemsize)

    def same_in_a_batch(self, rows: int) -> bool:
        """True if each sequence's row has the same bits alone and in one step with all others."""
        work = [self.single(at) for at in range(rows)]
        together = self.run(work)
        return torch.equal(together, torch.cat([self.run([one]) for one in work]))

    def same_in_a_chain(self, rows: int) -> bool:
        """True if each row of a chain has the same bits in one step with all others and in a step of its own."""
        (whole,) = self.chain(rows)
        together = self.run([whole])
        alone = [self.run([whole.cut(at)[1].cut(1)[0]]) for at in range(rows)]
        return torch.equal(together, torch.cat(alone))

    def against_plain(self) -> dict[str, Any]:
        """Compare a row with the same in plain torch, through the last two layers; with experts the middle one of some.

        Both round at other places, so a near tie of two experts may give another one to a row, and through all layers
        would give it to most.
        """
        count = COMPARED if self.arch.experts else 1
        last = {name: getattr(self.arch, name)[-2:] for name in ("windows", "tables")}
        arch = replace(self.arch, layers=2, expert_layers=(0, 1) if self.arch.experts else (), **last)
        decoder = Decoder(arch, replace(self.weights, layers=self.weights.layers[-2:]), self.context + PAGE)
        memory = Memory(arch, self.pool.pages + 1, self.device, DTYPE)
        memory.data.normal_()
        packed, bucket = pack(self.chain(count), self.spare)
        step = views(torch.from_numpy(packed).to(self.device), bucket, self.most_pages)
        found = step_of(decoder, memory).forward(step)[0][:count].float()
        expected = GpuStep(decoder, memory, attend_plainly, PLAIN_FUNCTIONS).forward(step)[0][:count].float()
        errors = (found - expected).abs().amax(-1) / expected.abs().max()
        same = (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.5
        return {"plain_error": float(errors.median()), "plain_worst": float(errors.max()), "plain_token": bool(same)}
