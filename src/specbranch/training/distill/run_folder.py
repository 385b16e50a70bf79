"""DIR/training, the folder of a run: what it needs to resume, and which run it belongs to.

Owns run.json, the lock and the names of the material's files. Invariant: one process at a time works in the folder.
None resumes a run of another target or with other writing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specbranch.errors import BadParameter, ModelError
from specbranch.files import spoken
from specbranch.models.files.disk import RESUME, write_durably
from specbranch.training.distill.writer_settings import WriterSettings


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run that makes a draft in `out`."""

    out: Path
    target: str
    fingerprint: str
    writing: WriterSettings | None  # None: the material is given, and nothing is written

    @property
    def path(self) -> Path:
        """The folder of the run's files."""
        return self.out / "training"

    def part(self, number: int) -> Path:
        """Return the file of one part of the material."""
        return self.path / f"material-{number}.safetensors"

    @contextmanager
    def claimed(self, resume: bool) -> Iterator[None]:
        """Lock the folder inside the block; refuse one that is in use or holds another run."""
        lock = self._locked()
        try:
            if (held := self._noted()) is not None:
                self._check(held, resume)
            yield
        finally:
            lock.release()

    def note(self) -> None:
        """Write run.json; the settings of earlier writing stay if nothing is written now."""
        writing = (self._noted() or {}).get("writing") if self.writing is None else _saved_settings(self.writing)
        values = {"target": self.target, "target_fingerprint": self.fingerprint, "writing": writing}
        write_durably(self._note, json.dumps(values, indent=2).encode())

    @property
    def _note(self) -> Path:
        return self.path / "run.json"

    def _locked(self) -> FileLock:
        lock = FileLock(self.path / "run.lock", timeout=0)
        with spoken(self.path, RESUME):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout:
                busy = f"Another distill is at work in {self.out}"
                raise BadParameter(f"{busy}. Wait until it ends, or name another folder with --out.") from None
        return lock

    def _noted(self) -> dict[str, Any] | None:
        if not self._note.exists():
            return None
        try:
            return dict(json.loads(self._note.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(
                f"{self._note} is damaged ({error}). Delete the folder {self.path} to start again."
            ) from None

    def _check(self, held: dict[str, Any], resume: bool) -> None:
        if held.get("target_fingerprint") != self.fingerprint:
            raise BadParameter(
                f"{self.out} holds a run for {held.get('target')}, not for this target. Name another folder with --out."
            )
        if not resume:
            raise BadParameter(
                f"{self.out} already holds a run. Resume it with --resume, or name another folder with --out."
            )
        theirs = held.get("writing")
        if theirs is None or self.writing is None:
            return
        ours = _saved_settings(self.writing)
        if other := [name for name, value in ours.items() if theirs.get(name) != value]:
            changed = ", ".join(f"{name} was {theirs.get(name)}, now {ours[name]}" for name in other)
            raise BadParameter(
                f"{self.out} was started with other settings: {changed}. Resume with the same, or name another folder."
            )


def _saved_settings(writing: WriterSettings) -> dict[str, Any]:
    return {**asdict(writing), "prompts": sha256(json.dumps(writing.prompts).encode()).hexdigest()}
