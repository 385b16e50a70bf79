"""The settings of jobs for which a target writes: options and defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specbranch.assembly import chosen_device
from specbranch.training.distill.writer_settings import WriterSettings, question_room

Fetch = Callable[[str], str]  # from a model's name to the path or id to load it from
CPU_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingJob:
    """The request; None stands for the device's default."""

    target: str
    out: Path
    device: str | None = None
    seconds_writing: float | None = None
    tokens: int | None = None
    prompts: tuple[str, ...] = ()
    material: Path | None = None  # what was written before; then nothing is written
    writing_rows: int | None = None
    writing_length: int = 640

    @property
    def device_name(self) -> str:
        """The device it runs on."""
        return chosen_device(self.device)

    def writing(self, seconds: float, rows: int, seed: int) -> WriterSettings:
        """Return how the target writes, with default seconds and, on a GPU, default rows."""
        usual_rows = CPU_ROWS if self.device_name == "cpu" else rows
        return WriterSettings(
            seconds=seconds if self.seconds_writing is None and self.tokens is None else self.seconds_writing,
            tokens=self.tokens,
            rows=usual_rows if self.writing_rows is None else self.writing_rows,
            length=self.writing_length,
            question_tokens=question_room(self.writing_length),
            prompts=self.prompts,
            seed=seed,
        )
