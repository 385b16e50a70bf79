"""What a pair of models costs on some hardware: seconds by rows fed, measured or assumed.

Owns the numbers and their interpolation; knows nothing of methods.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from specbranch.errors import BadParameter, unknown

Points = tuple[tuple[float, float], ...]  # (rows, seconds), by rows


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Seconds of a target forward by its tokens, of a draft step by its width, and what overlap adds to the target."""

    target: Points
    draft: Points
    slow_down: float = 0.0  # seconds added to the target for each draft step run beside it
    host: float = 0.0  # seconds a round costs outside both models

    def __post_init__(self) -> None:
        for name in ("target", "draft"):
            object.__setattr__(self, name, _points(name, getattr(self, name)))
        for name in ("slow_down", "host"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise BadParameter(f"Cost profile: {name} is {value!r}; expected seconds ≥ 0.")

    def target_seconds(self, tokens: int) -> float:
        """Seconds of one target forward over `tokens` rows."""
        return _between(self.target, tokens)

    def draft_seconds(self, width: int) -> float:
        """Seconds of one draft forward over `width` rows."""
        return _between(self.draft, width)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> CostProfile:
        """Read from JSON, refusing unknown keys."""
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadParameter(f"Cost profile {path} cannot be read ({error}); expected a JSON object.") from error
        names = [f.name for f in fields(cls)]
        if not isinstance(values, dict) or not {"target", "draft"} <= values.keys():
            raise BadParameter(f"Cost profile {path} is incomplete; expected a JSON object with at least 'target' and 'draft'.")
        for key in values:
            if key not in names:
                raise unknown("cost profile key", key, names)
        return cls(**values)


def _points(name: str, given: Any) -> Points:
    """Check the points of one curve."""
    try:
        points = tuple((float(x), float(y)) for x, y in given)
    except (TypeError, ValueError):
        points = ()
    if not points or not all(a[0] < b[0] for a, b in pairwise(points)) or not all(0 < y < math.inf for _, y in points):
        raise BadParameter(f"Cost profile: {name} is {given!r}; expected (rows, seconds > 0) pairs by rising rows.")
    return points


def _between(points: Points, x: float) -> float:
    """Interpolate linearly; constant below the first point, on along the last slope above the last."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    at = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
