"""evaluation.json in a draft's folder: how often its target chose the draft's candidates.

Owns the format and the checks. Does not own the counts (`core/draft_evaluation.py`). `specbranch distill` writes the
file, and so does `specbranch draft-eval --save`; a folder without one is complete. Invariant: a file with an impossible
number is refused as a whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbranch.core.draft_evaluation import ClassCounts, DraftEvaluation
from specbranch.core.trees import CLASSES, EDGES
from specbranch.errors import BadParameter, ModelError
from specbranch.file_values import FileValues, read_object
from specbranch.files import write_whole
from specbranch.models.drafts.draft_name import draft_config
from specbranch.models.files.identity import EVALUATION
from specbranch.models.files.locate import base_of
from specbranch.models.files.sources import made_model

EVALUATION_FORMAT = 1
MEASURE_AGAIN = "Measure it again with `specbranch draft-eval --save`, or delete the file."


def read_evaluation(draft: str) -> DraftEvaluation | None:
    """Return the evaluation in a draft's folder, that of its base for a made draft; None if there is none.

    Raises a ModelError for a damaged file.
    """
    made = made_model(draft)
    folder = Path(draft) if made is None else base_of(made).path
    path = folder / EVALUATION
    if draft_config(folder) is None or not path.exists():
        return None
    return _evaluation(FileValues(read_object(path), str(path)))


def check_folder(draft: str) -> Path:
    """Return the folder that an evaluation of this draft may be saved in; refuse anything but a draft's own folder."""
    if (made := made_model(draft)) is not None:
        raise BadParameter(
            f"{draft} is {made.how} from {made.base}. Save the evaluation of that draft: it serves both."
        )
    if draft_config(draft) is None:
        raise BadParameter(
            f"{draft} is no folder of a draft made by `specbranch distill`; only there an evaluation can be saved. "
            "Leave --save out."
        )
    return Path(draft)


def write_evaluation(folder: Path, evaluation: DraftEvaluation) -> Path:
    """Write evaluation.json into a draft's folder, and return its path."""
    path = folder / EVALUATION
    write_whole(path, evaluation_text(evaluation))
    return path


def evaluation_text(evaluation: DraftEvaluation) -> str:
    """Return the content of the file, a line for each list of counts."""
    values = {name: json.dumps(value, ensure_ascii=False) for name, value in evaluation_to_dict(evaluation).items()}
    lines = ",\n".join(f'  "{name}": {value}' for name, value in values.items())
    return f"{{\n{lines}\n}}\n"


def evaluation_to_dict(evaluation: DraftEvaluation) -> dict[str, Any]:
    """Return JSON values. `edges` are the borders between the classes of the draft's probability."""
    return {
        "format": EVALUATION_FORMAT,
        "text": evaluation.text,
        "positions": evaluation.positions,
        "hits": evaluation.hits,
        "covered": evaluation.covered,
        "edges": list(EDGES),
        "first_met": list(evaluation.first.met),
        "first_right": list(evaluation.first.right),
        "other_met": list(evaluation.other.met),
        "other_right": list(evaluation.other.right),
    }


def _evaluation(values: FileValues) -> DraftEvaluation:
    if values.get("format") != EVALUATION_FORMAT or list(values.items("edges")) != list(EDGES):
        raise ModelError(f"{values.name} is of another version of specbranch. {MEASURE_AGAIN}")
    first, other = (_counts(values, kind) for kind in ("first", "other"))
    found = DraftEvaluation(first, other, values.text("text", ""))
    if (fault := found.fault) is not None:
        raise ModelError(f"{values.name} is impossible: {fault}. {MEASURE_AGAIN}")
    for name in ("positions", "hits", "covered"):
        if values.count(name, least=0) != (counted := getattr(found, name)):
            values.refuse(name, f"{counted}, the sum of its classes")
    return found


def _counts(values: FileValues, kind: str) -> ClassCounts:
    met, right = (values.counts(f"{kind}_{what}", CLASSES) for what in ("met", "right"))
    if any(some > all_ for all_, some in zip(met, right, strict=True)):
        values.refuse(f"{kind}_right", f"no number above that of {kind}_met")
    return ClassCounts(met, right)
