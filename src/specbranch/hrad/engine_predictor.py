"""`EnginePredictor`: the H-RAD predictor of an engine: found, checked and attached to the target's verifier.

Owns the way from a predictor's name to a verifier that gives signals. It does not compute them: see `forecaster.py`.
Torch is imported when a method first uses signals. Invariant: whatever is wrong with a predictor, decoding continues
without it, and one warning says so.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from specbranch.assembly import identity
from specbranch.config import SpeculativeConfig
from specbranch.core.methods import Method
from specbranch.errors import ModelError
from specbranch.exec.verifier import Verifier
from specbranch.pairs import predictor_folder

if TYPE_CHECKING:
    from specbranch.hrad.forecaster import TargetForecaster
    from specbranch.hrad.predictor import Predictor

log = logging.getLogger("specbranch")


class EnginePredictor:
    """The predictor of one engine, for the methods that use its signals. It is loaded when the first of them asks."""

    def __init__(self, predictor: str | None, target: str, draft: str | None, verifier: Verifier) -> None:
        """`predictor`: a folder; None: the one that comes with the pair."""
        self._names = predictor, target, draft
        self._verifier = verifier
        self._found: list[TargetForecaster | None] = []  # empty until it was looked for; then one entry

    def serves(self, method: Method, config: SpeculativeConfig) -> bool:
        """Return True if the method uses signals and the predictor can give them."""
        if not method.uses_signals(config):
            return False
        if not self._found:
            self._found.append(self._look())
            self._verifier.forecaster = self._found[0]
        found = self._found[0]
        return found is not None and found.reaches(config.num_speculative_tokens)

    @property
    def is_used(self) -> bool:
        """True if a predictor was found for a method that uses one."""
        return any(found is not None for found in self._found)

    def look_for(self, draft: str) -> None:
        """From now on look for a predictor of another draft."""
        predictor, target, _ = self._names
        self._names, self._found = (predictor, target, draft), []

    def _look(self) -> TargetForecaster | None:
        from specbranch.hrad.forecaster import ON, TargetForecaster

        try:
            return TargetForecaster(find_predictor(*self._names), self._verifier.runner)
        except ModelError as error:
            log.warning("%s %s", error, ON)
            return None


def find_predictor(predictor: str | None, target: str, draft: str | None) -> Predictor:
    """Load the named predictor, or the one that comes with the pair. Refuse a missing one and one of another pair."""
    from specbranch.hrad.predictor import Predictor, PredictorError

    folder = Path(predictor) if predictor is not None else predictor_folder(draft)
    if folder is None:
        raise PredictorError(
            "There is no predictor (H-RAD) for this pair. Train one with `specbranch train-predictor`."
        )
    found = Predictor.load(folder)
    found.check_pair(identity(target), None if draft is None else identity(draft))
    return found
