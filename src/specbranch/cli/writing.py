"""What commands share that let a target write: the target itself, the material it wrote, and how far the writing has
come."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from specbranch.errors import BadParameter

if TYPE_CHECKING:
    import torch
    from rich.progress import TaskID

    from specbranch.distill.material import Material
    from specbranch.distill.writer import WritingTarget, Written
    from specbranch.distill.writer_settings import WriterSettings
    from specbranch.models.files.architecture import Architecture
    from specbranch.models.files.tensor_file import TensorSource


def material_files(path: Path) -> list[Path]:
    """Return the files of material that a path names: itself, or those in it."""
    if path.is_dir():
        return sorted(path.glob("material*.safetensors"), key=lambda file: (len(file.name), file.name))
    return [path] if path.is_file() else []


def material_in(path: Path) -> Material:
    """Read a file of material, or all of a folder as one."""
    from specbranch.distill.material import Material

    return joined([Material.load(file) for file in material_files(path)])


def joined(parts: list[Material]) -> Material:
    """Put several together."""
    from specbranch.distill.material import Material

    return parts[0] if len(parts) == 1 else Material.join(parts)


def title_and_licence(name: str) -> tuple[str, str | None]:
    """Return what to call the target in files that others read (no path of this machine), and its licence where it
    is known."""
    from specbranch.models.files.store import KNOWN

    if name in KNOWN:
        return name, KNOWN[name].licence
    path = Path(name).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else name, None


def load_target(arch: Architecture, file: TensorSource, device: str) -> WritingTarget:
    """Load a target that is to write."""
    import torch

    if arch.charged is not None:
        raise BadParameter(f"{arch.name} is inflated: its source says the same for less. Name the source here.")
    from specbranch.distill.writer import WritingTarget
    from specbranch.models.files.weights import read_weights

    place = torch.device(device)
    return WritingTarget(
        arch, read_weights(arch, file, place, torch.float32 if place.type == "cpu" else torch.bfloat16)
    )


def or_usual(given: int | None, usual: int) -> int:
    """Return what was given, or what is usual."""
    return usual if given is None else given


def hardware(device: torch.device) -> str:
    """Return what a device is called."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def commit() -> str:
    """Return the commit this code is of: of the checkout it lies in, or as the environment says where there is none."""
    from specbranch.provenance import source_commit

    return source_commit() or os.environ.get("SPECBRANCH_COMMIT", "unknown")


class TrainingBars:
    """Progress of writing and training on standard error; where nobody watches, a line at each comparison."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task: TaskID | None = None
        self._what = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def slice(self, settings: WriterSettings, what: str) -> Any:
        """Return what shows the progress of one piece of the writing."""

        def show(written: Written) -> None:
            total, done = (settings.tokens, written.tokens) if settings.tokens else (settings.seconds, written.seconds)
            speed = written.tokens / max(written.seconds, 1e-9)
            self.show(
                what,
                total,
                done,
                f"{written.tokens:,} tokens, {written.conversations:,} conversations, {speed:,.0f} tokens/s",
            )

        return show

    def heard(self, tokens: int, of: int) -> None:
        """Show how far the target has gone over its material again."""
        self.show("Listening", of, tokens, f"{tokens:,} tokens")

    def trained(self, record: Mapping[str, Any]) -> None:
        """Show how far the training has come."""
        note = f"loss {record['loss']:.3f}" if "loss" in record else ""
        self.show("Training", record["of"], record["step"], note)
        if "top1" in record and not record.get("final"):
            loss = f"{note}, " if note else ""
            told = f"step {record['step']:,}: {loss}top-1 {record['top1']:.3f}, top-3 {record['top3']:.3f}"
            self._bars.console.print(told, highlight=False)

    def show(self, what: str, total: float | None, done: float, note: str) -> None:
        """Show how far some work has come."""
        if self._task is None or what != self._what:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._what, self._task = what, self._bars.add_task(what, total=None, note="")
        self._bars.update(self._task, total=total, completed=done, note=note)
