"""H-RAD in a replay: a predictor's signals along a record, computed once and stored.

Owns those signals and their folder. A predictor reads the target's hidden states, which depend on the text alone. So
its signal at a token of a record is the same for every method. Invariant: a stored signal is the predictor's for
exactly that record.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

from specbranch.core.forecast import Signal
from specbranch.core.runner import Runner
from specbranch.files import replacing
from specbranch.hrad.forecaster import TargetForecaster, reached
from specbranch.hrad.predictor import Predictor
from specbranch.lab.replay.record import Record
from specbranch.training.hrad.collect import states_along

SIGNAL_ROWS = 64  # tokens read in one forward


class RecordedSignals:
    """The signals of one predictor, record by record."""

    def __init__(self, predictor: Predictor, target: Runner, folder: Path, model: str) -> None:
        """`model` identifies the target in file names."""
        self.predictor = predictor
        self._forecast, self._target = TargetForecaster(predictor, target), reached(target)
        self._folder, self._model = folder / predictor.digest, model
        self.longest = predictor.about.longest
        self._held: dict[str, list[Signal | None]] = {}

    def of(self, record: Record) -> RecordedForecaster:
        """Return the forecaster for a replay."""
        key = sha256(f"{record.task.key(self._model)} {record.tokens}".encode()).hexdigest()[:32]
        if key not in self._held:
            self._held[key] = self._kept(key, len(record.tokens)) or self._read(record, key)
        return RecordedForecaster(len(record.task.prompt), self._held[key])

    def _kept(self, key: str, count: int) -> list[Signal | None] | None:
        """Return the stored signals; unreadable ones, or ones of another length, count as none."""
        with suppress(OSError, ValueError, EOFError):
            chances = np.load(self._folder / f"{key}.npy")
            if chances.ndim == 3 and len(chances) == count:
                return [Signal(tuple(tuple(map(float, classes)) for classes in position)) for position in chances]  # type: ignore[misc]
        return None

    def _read(self, record: Record, key: str) -> list[Signal | None]:
        states = states_along(self._target, record.task.prompt, record.tokens, self.predictor.about.layers, SIGNAL_ROWS)
        signals = self._forecast.along(states, record.tokens)
        if all(signal is not None for signal in signals):
            self._keep(key, np.array([signal.chances for signal in signals if signal is not None], dtype=np.float32))
        return signals

    def _keep(self, key: str, chances: np.ndarray) -> None:
        # Without room it is read again next time.
        with suppress(OSError), replacing(self._folder / f"{key}.npy") as part, part.open("wb") as file:
            np.save(file, chances)


class RecordedForecaster:
    """A `core.forecast.Forecaster` over a record, with the signal at each of its tokens."""

    def __init__(self, start: int, signals: Sequence[Signal | None]) -> None:
        self._start, self._signals = start, signals

    def signal(self, said: tuple[float, ...] | None, position: int) -> Signal | None:
        """Return the signal for the record's token at this position."""
        at = position - self._start
        return self._signals[at] if 0 <= at < len(self._signals) else None
