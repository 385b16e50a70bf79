"""The settings of jobs for which a target writes: options and defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specbranch.assembly import chosen_device
from specbranch.training.distill.writer_settings import WriterSettings, question_room

Fetch = Callable[[str], str]  # from a model's name to the path or id to load it from
CPU_ROWS = 16
SHORT_TEXTS = 640  # tokens of a conversation where nothing else is said


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
    writing_length: int | None = None

    @property
    def device_name(self) -> str:
        """The device it runs on."""
        return chosen_device(self.device)

    def writing(self, seconds: float, rows: int, seed: int, length: int = SHORT_TEXTS) -> WriterSettings:
        """Return how the target writes, with default seconds and, on a GPU, default rows and length."""
        usual_rows, usual = (CPU_ROWS, SHORT_TEXTS) if self.device_name == "cpu" else (rows, length)
        length = usual if self.writing_length is None else self.writing_length
        return WriterSettings(
            seconds=seconds if self.seconds_writing is None and self.tokens is None else self.seconds_writing,
            tokens=self.tokens,
            rows=usual_rows if self.writing_rows is None else self.writing_rows,
            length=length,
            question_tokens=question_room(length),
            prompts=self.prompts,
            seed=seed,
        )
