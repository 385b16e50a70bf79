"""What a pair of models costs on some hardware: seconds by rows fed, measured or assumed.

Owns the numbers, their interpolation and their file; knows nothing of methods. A file is one JSON object with the
fields of `CostProfile`; what it does not say is as the defaults have it, so that an older file stays valid.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import IntEnum
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from specbranch.errors import BadParameter, unknown

Points = tuple[tuple[float, float], ...]  # (rows, seconds), by rows
CURVES = ("target", "draft")
SLOPES = ("target_per_context", "draft_per_context")
SECONDS_KEYS = ("slow_down", "draft_slow_down", "draft_setup", "host", "asking", "hearing")
TEXT_KEYS = ("pair", "hardware", "note", "target_identity", "draft_identity")

ABOUT = {"pair", "hardware", "note", "provenance"}  # words that change no charge


class Beginning(IntEnum):
    """How a round is begun."""

    BY_ITSELF = 0  # by a device: plain decoding goes on, a tree is verified where it has grown
    HEARD = 1  # by the host as soon as it hears of the verdict: what follows was planned before
    ASKED = 2


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Seconds of a target forward by its tokens, of a draft step by its width, and what overlap adds to both."""

    target: Points
    draft: Points
    slow_down: float = 0.0  # seconds added to the target for each draft step run beside it
    host: float = 0.0  # seconds a round costs outside both models
    pair: str = ""  # the models it was measured with
    hardware: str = ""
    note: str = ""  # how it was measured, and what was assumed
    devices: int = 1  # that both models together take; plain decoding and lookup take one
    overlap: bool = True  # whether both models work at once; if not, a round takes the draft's time and the target's
    draft_slow_down: float = 0.0  # seconds added to each draft step run beside the target
    draft_setup: float = 0.0  # seconds a draft takes once for all the steps of a round
    asking: float = 0.0  # seconds before a round that the host has to plan and ask for; see `Beginning`
    hearing: float = 0.0  # seconds before what it starts without a plan; so a chain's step takes as many at least
    context: int = 0  # tokens before the rows where `target` and `draft` were measured
    target_per_context: Points = ()  # (rows, seconds) added for each token of context beyond that
    draft_per_context: Points = ()
    target_identity: str = ""  # digests of the models' files; empty: it holds for any pair
    draft_identity: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)  # date, versions, threads, spread …

    def __post_init__(self) -> None:
        for name in (*CURVES, *SLOPES):
            object.__setattr__(self, name, _points(name, getattr(self, name), name in SLOPES))
        self._require(SECONDS_KEYS, _is_seconds, "seconds ≥ 0")
        self._require(TEXT_KEYS, lambda value: isinstance(value, str), "a text")
        self._require(("overlap",), lambda value: isinstance(value, bool), "true or false")
        self._require(
            ("context",), lambda value: isinstance(value, int) and _is_seconds(value), "a number of tokens ≥ 0"
        )
        self._require(("devices",), lambda value: type(value) is int and value >= 1, "a whole number ≥ 1")
        self._require(("provenance",), lambda value: isinstance(value, Mapping), "an object")

    @property
    def knows_target(self) -> bool:
        """It says what a target forward takes."""
        return True

    @property
    def knows_draft(self) -> bool:
        """It says what a draft step takes."""
        return True

    @property
    def prices_all(self) -> bool:
        """Whether a round takes as long however it is begun."""
        return not (self.asking or self.hearing)

    @property
    def begins_ahead(self) -> bool:
        """Whether it tells what is saved where a round is begun with the verdict before it."""
        return self.asking > 0.0

    @property
    def ahead_saves(self) -> float:
        """Seconds that this saves."""
        return max(self.asking - self.hearing, 0.0)

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Seconds of one target forward over `tokens` rows; `context`: after how many others, nothing: as measured."""
        return self._at(self.target, self.target_per_context, tokens, context)

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Seconds of one draft forward over `width` rows, likewise."""
        return self._at(self.draft, self.draft_per_context, width, context)

    def host_seconds(self, begun: Beginning) -> float:
        """Seconds of a round outside both models, by how it is begun."""
        return self.host + (0.0, self.hearing, self.asking)[begun]

    def check_pair(self, target: str, draft: str | None) -> None:
        """Refuse models other than those it was measured with, if it names any; where there is no draft, none is
        compared."""
        models = ("target", self.target_identity, target), ("draft", self.draft_identity, draft)
        wrong = [name for name, measured, given in models if measured and given is not None and measured != given]
        if wrong:
            differ = f"{' and '.join(wrong)} differ{'s' if len(wrong) == 1 else ''}"
            raise BadParameter(
                f"This cost profile was measured with {self.pair or 'another pair'}, whose {differ} from the one asked "
                "for, so its times would be wrong. Measure this pair with `specbranch profile`, or take the profile "
                "all the same with --force-profile (force_profile=True)."
            )

    def save(self, path: Path) -> None:
        """Write as JSON, leaving out what is as the defaults have it."""
        path.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def digest(self) -> str:
        """Tells what it charges from what others do, in a few characters; words about it change nothing."""
        charges = {name: value for name, value in self.to_dict().items() if name not in ABOUT}
        return sha256(json.dumps(charges, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without what is as the defaults have it."""
        always = (*CURVES, "slow_down", "host")
        return {name: value for name, value in asdict(self).items() if name in always or value != _DEFAULTS[name]}

    @classmethod
    def load(cls, path: Path) -> CostProfile:
        """Read from JSON, refusing unknown keys."""
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadParameter(f"Cost profile {path} cannot be read ({error}); expected a JSON object.") from error
        names = [f.name for f in fields(cls)]
        if not isinstance(values, dict) or not {"target", "draft"} <= values.keys():
            raise BadParameter(
                f"Cost profile {path} is incomplete; expected a JSON object with at least 'target' and 'draft'."
            )
        for key in values:
            if key not in names:
                raise unknown("cost profile key", key, names)
        return cls(**values)

    def _require(self, names: Sequence[str], is_good: Callable[[Any], bool], expected: str) -> None:
        for name in names:
            if not is_good(value := getattr(self, name)):
                raise BadParameter(f"Cost profile: {name} is {value!r}; expected {expected}.")

    def _at(self, curve: Points, slope: Points, rows: int, context: float | None) -> float:
        seconds = _between(curve, rows)
        if context is None or not slope:
            return seconds
        # A slope is measured between two contexts; below the shorter one it must not eat up the forward itself.
        return max(seconds + max(_between(slope, rows), 0.0) * (context - self.context), seconds / 2)


_DEFAULTS: dict[str, Any] = {
    f.name: f.default if f.default is not MISSING else f.default_factory() if f.default_factory is not MISSING else None
    for f in fields(CostProfile)
}


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _points(name: str, given: Any, may_be_empty: bool = False) -> Points:
    """Check the points of one curve; a slope may be missing, and may be 0."""
    try:
        points = tuple((float(x), float(y)) for x, y in given)
    except (TypeError, ValueError):
        points, may_be_empty = (), False
    rising = all(a[0] < b[0] for a, b in pairwise(points))
    good = rising and all((y > 0 or (y == 0 and name in SLOPES)) and y < math.inf for _, y in points)
    if not good or not (points or may_be_empty):
        raise BadParameter(f"Cost profile: {name} is {given!r}; expected (rows, seconds > 0) pairs by rising rows.")
    return points


def _between(points: Points, x: float) -> float:
    """Interpolate linearly; constant below the first point, on along the last slope above the last."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    at = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
