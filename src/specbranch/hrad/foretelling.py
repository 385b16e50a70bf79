"""H-RAD beside an engine: which predictor a pair has, whether it fits, and who hears what it says.

Owns the way from a predictor's name to a target's verifier that gives signals. Everything heavy is imported when a
method first heeds one. Whatever is wrong with a predictor, decoding goes on without it, and that is said once.
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


class Foretelling:
    """What becomes of drafts, foretold to those methods of one engine that heed it."""

    def __init__(self, predictor: str | None, target: str, draft: str | None, verifier: Verifier) -> None:
        """`predictor`: a folder; nothing: the one that comes with the pair."""
        self._asked = predictor, target, draft
        self._verifier = verifier
        self._found: list[TargetForecaster | None] = []  # the one there is, once it was looked for

    def serves(self, method: Method, config: SpeculativeConfig) -> bool:
        """Whether a method that heeds signals is given any."""
        if not method.uses_signals(config):
            return False
        if not self._found:
            self._found.append(self._look())
            self._verifier.forecaster = self._found[0]
        found = self._found[0]
        return found is not None and found.reaches(config.num_speculative_tokens)

    def _look(self) -> TargetForecaster | None:
        from specbranch.hrad.forecaster import ON, TargetForecaster

        try:
            return TargetForecaster(find_predictor(*self._asked), self._verifier.runner)
        except ModelError as error:
            log.warning("%s %s", error, ON)
            return None


def find_predictor(predictor: str | None, target: str, draft: str | None) -> Predictor:
    """Load the predictor named, or the one that comes with the pair; one that is missing or of another pair is
    refused."""
    from specbranch.hrad.predictor import Predictor, PredictorError

    folder = Path(predictor) if predictor is not None else predictor_folder(draft)
    if folder is None:
        raise PredictorError(
            "There is no predictor (H-RAD) for this pair. Train one with `specbranch train-predictor`."
        )
    found = Predictor.load(folder)
    found.check_pair(identity(target), None if draft is None else identity(draft))
    return found
