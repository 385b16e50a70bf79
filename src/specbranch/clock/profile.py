"""Cost profiles: the seconds of a pair of models on some hardware, by rows, measured or assumed.

Owns the numbers, their interpolation and their file; knows nothing of methods. A file is one JSON object with the
fields of `CostProfile`. Invariant: missing fields have their defaults, so an older file stays valid.
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

from specbranch.core.cost_curves import ForestCosts
from specbranch.core.costs import RunKind
from specbranch.errors import BadParameter, unknown

Points = tuple[tuple[float, float], ...]  # (rows, seconds), by rows
CURVES = ("target", "draft")
SLOPES = ("target_per_context", "draft_per_context")
SECONDS_KEYS = ("slow_down", "draft_slow_down", "draft_setup", "host", "asking", "hearing")
TEXT_KEYS = ("pair", "hardware", "note", "target_identity", "draft_identity")

ABOUT = {"pair", "hardware", "note", "provenance"}  # descriptions: they change no charge


class Beginning(IntEnum):
    """How a round is started."""

    BY_ITSELF = 0  # by the device: plain decoding goes on, or a tree is verified on the device that extended it
    HEARD = 1  # by the host as soon as it has the verdict: the round was planned before
    ASKED = 2  # by the host, which plans first


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Seconds of a target forward by rows, of a draft step by rows, and what overlap adds to both."""

    target: Points
    draft: Points
    slow_down: float = 0.0  # seconds that each draft step adds to a target forward at the same time
    host: float = 0.0  # seconds of a round outside both models
    pair: str = ""  # the models it was measured with
    hardware: str = ""
    note: str = ""  # how it was measured, and what was assumed
    devices: int = 1  # that both models use together; plain decoding and lookup use one
    overlap: bool = True  # both models work at once; if not, their times add up
    draft_slow_down: float = 0.0  # seconds that a target forward adds to each draft step at the same time
    draft_setup: float = 0.0  # seconds that the draft needs once in a round, beside its steps
    asking: float = 0.0  # host seconds before a round that it has to plan; see `Beginning`
    hearing: float = 0.0  # host seconds before a round without a plan; also the least seconds of a chain's step
    context: int = 0  # context length at which `target` and `draft` were measured
    target_per_context: Points = ()  # (rows, seconds) added for each further token of context
    draft_per_context: Points = ()
    target_identity: str = ""  # digests of the models' files; empty: it is valid for any pair
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
        """True: the profile has the seconds of a target forward."""
        return True

    @property
    def knows_draft(self) -> bool:
        """True: the profile has the seconds of a draft step."""
        return True

    @property
    def prices_all(self) -> bool:
        """True if the cost model covers the whole round: the start of a round costs the same in every case."""
        return not (self.asking or self.hearing)

    @property
    def factor(self) -> float:
        """1: a profile's machine is never slower."""
        return 1.0

    @property
    def plain_due(self) -> bool:
        """False: a profile knows what a plain round takes."""
        return False

    @property
    def forest(self) -> ForestCosts:
        """Nothing beyond the forwards: a profile has their times alone."""
        return ForestCosts()

    @property
    def last_run(self) -> None:
        """Unknown: the times of both models say all."""
        return None

    @property
    def launches_ahead(self) -> bool:
        """True if the profile knows what launching the next round ahead saves."""
        return self.asking > 0.0

    @property
    def ahead_saves(self) -> float:
        """Seconds that launching ahead saves in a round."""
        return max(self.asking - self.hearing, 0.0)

    @property
    def draft_host(self) -> float:
        """Seconds of the host that drafting before a verify adds to a round: it is a run of its own."""
        return self.host

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Return the seconds of one target forward over `tokens` rows; `context`: tokens before them, None: as
        measured."""
        return self._at(self.target, self.target_per_context, tokens, context)

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Return the seconds of one draft forward over `width` rows; `context` as for the target."""
        return self._at(self.draft, self.draft_per_context, width, context)

    def gap(self, kind: RunKind, sessions: int = 1) -> float:
        """Return the seconds of the host before a run of this kind: a plain one goes on by itself."""
        return self.host + (0.0 if kind == "plain" else self.hearing if kind == "verify" else self.asking)

    def host_of_drafting(self, sessions: int) -> float:
        """Return the seconds of a round with a draft before its verify, outside both models."""
        return self.gap("draft") + self.gap("verify")

    def host_seconds(self, begun: Beginning) -> float:
        """Return the seconds of a round outside both models, by how it is started."""
        return self.host + (0.0, self.hearing, self.asking)[begun]

    def check_pair(self, target: str, draft: str | None) -> None:
        """Refuse other models than those the profile was measured with, if it names any; None: there is no draft."""
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
        """Write as JSON, without fields that have their defaults."""
        path.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def digest(self) -> str:
        """A short digest of all that changes charges; descriptions do not."""
        charges = {name: value for name, value in self.to_dict().items() if name not in ABOUT}
        return sha256(json.dumps(charges, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without fields that have their defaults."""
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
    """Interpolate linearly; constant below the first point, along the last slope above the last."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    at = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
