"""The kinds of steps that earlier processes met, in a file, so that the next one captures them first.

Owns the file of one model, device, method and batch size. Compiled kernels are not here: Triton keeps these itself, in
$TRITON_CACHE_DIR or ~/.triton. Invariants: the file is replaced as a whole. A file that is damaged, or of another
version, is ignored with a warning; it is never an error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from specbranch.files import replacing
from specbranch.models.files.store import cache_folder
from specbranch.models.gpu.layout import MOST_STEP_ROWS, Bucket
from specbranch.models.gpu.step import StepKind

log = logging.getLogger("specbranch")

KINDS_FORMAT = 1
MOST_SAVED_KINDS = 256  # of a file; a damaged one might have any number
MOST_BUCKET_SIZE = 1 << 20  # of a dimension of a bucket


class KindsFile:
    """The file for one key; `folder`: None: in the cache folder."""

    def __init__(self, key: Mapping[str, Any], folder: Path | None = None) -> None:
        self._key = {"format": KINDS_FORMAT, "bucket": list(Bucket._fields), **key}
        digest = sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self.path = (folder or cache_folder() / "kinds") / f"{digest[:16]}.json"

    def read(self) -> list[StepKind]:
        """Return the kinds that earlier processes met, the latest first."""
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if values["key"] != self._key:
                raise ValueError("it is of another model or another version")
            return [_kind(one) for one in values["kinds"][:MOST_SAVED_KINDS]]
        except FileNotFoundError:
            return []
        except Exception as error:  # of any kind: a warm-up works without the file
            log.warning("The kinds of steps in %s are ignored (%s).", self.path, error)
            return []

    def add(self, met: Iterable[StepKind]) -> None:
        """Write the kinds that this process met, before those of earlier ones; a file that cannot be written is no
        error."""
        try:
            before = self.read() if self.path.exists() else []
            kinds = list(dict.fromkeys((*met, *before)))[:MOST_SAVED_KINDS]
            if kinds == before:
                return
            written = [[*bucket, layers, count, grows] for bucket, layers, count, grows in kinds]
            with replacing(self.path) as part:
                part.write_text(json.dumps({"key": self._key, "kinds": written}), encoding="utf-8")
        except OSError as error:
            log.warning("The kinds of steps cannot be saved in %s (%s).", self.path, error)


def _kind(values: list[Any]) -> StepKind:
    """Check the numbers of a kind: one from a damaged file would be captured in vain, or fail."""
    *sizes, layers, count, grows = values
    bucket = Bucket(*sizes)
    numbers = (*bucket, layers, count)
    whole = all(isinstance(number, int) and 0 <= number <= MOST_BUCKET_SIZE for number in numbers)
    if not whole or not isinstance(grows, bool) or not 1 <= bucket.rows <= MOST_STEP_ROWS or bucket.groups < 1:
        raise ValueError(f"{values!r:.60} is no kind of step")
    return bucket, layers, count, grows
