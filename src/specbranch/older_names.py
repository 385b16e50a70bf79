"""Older spellings of arguments, accepted for a while with a DeprecationWarning.

Owns the sentence that says what to write instead. It does not own the options themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar

from specbranch.errors import BadParameter


class OptionsValue(Protocol):
    """A frozen dataclass of options that can be made from a mapping."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping, refusing keys that do not exist."""
        ...


Options = TypeVar("Options", bound=OptionsValue)


def with_older(
    kind: type[Options], given: Options | Mapping[str, Any] | None, older: Mapping[str, Any], caller: str
) -> Options:
    """Return the given options, changed by `caller`'s older keywords.

    Unknown names are refused. Known ones raise a DeprecationWarning at the line that calls `caller`.
    """
    if given is not None and not isinstance(given, (kind, Mapping)):
        raise BadParameter(f"options is {given!r:.60}; expected {kind.__name__} or a mapping.")
    options = given if isinstance(given, kind) else kind.from_dict(given if isinstance(given, Mapping) else {})
    if not older:
        return options
    kind.from_dict(older)  # refuses what is no option
    was, shown = (", ".join(form.format(name) for name in older) for form in ("{}=…", "'{}': …"))
    said = f"{caller}({was}) is the older spelling; write options={{{shown}}}."
    warnings.warn(said, DeprecationWarning, stacklevel=3)
    return replace(options, **older)  # type: ignore[type-var] # every kind is a dataclass
