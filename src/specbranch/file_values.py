"""Values from files that others wrote (a config.json, a GGUF header, a tokenizer's settings), read by type and range.

Owns the checks and their sentence. Invariant: a returned value has the requested type and is in its range. Anything
else is a ModelError that names the file, the key, the value and what was expected. A null counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from specbranch.errors import ModelError

MOST_CONTEXT_TOKENS = 1 << 31  # of a context; token ids are below, too
TOO_LARGE = 1 << 53  # a whole number that no size reaches


@dataclass(frozen=True, slots=True)
class FileValues:
    """Values by name, and what to call the file they are from."""

    values: Mapping[str, Any]
    name: str
    prefix: str = ""  # of every key, as a GGUF's architecture or a group within a file

    def get(self, key: str) -> Any:
        """Return a value as it is; None if it is absent."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = TOO_LARGE) -> int:
        """Return a whole number. Without a default it must not be absent."""
        value = self._or(key, default)
        if not _is_whole(value) or not least <= value <= most:
            self.refuse(key, _whole_numbers(least, most))
        return int(value)

    def number(self, key: str, default: float | None, least: float, most: float) -> float:
        """Return a finite number."""
        value = self._or(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # no comparison holds for NaN
            self.refuse(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return True or False."""
        value = self._or(key, default)
        if value is not True and value is not False:
            self.refuse(key, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._or(key, default)
        if not isinstance(value, str) or not _is_unicode(value):
            self.refuse(key, "a string")
        return value

    def items(self, key: str) -> Sequence[Any]:
        """Return a list; an empty one if it is absent."""
        value = self._or(key, [])
        if not isinstance(value, (list, tuple)):
            self.refuse(key, "a list")
        return value

    def counts(self, key: str, length: int) -> tuple[int, ...]:
        """Return a list of so many whole numbers, 0 or more."""
        value = self.items(key)
        if len(value) != length or not all(_is_whole(one) and 0 <= one < TOO_LARGE for one in value):
            self.refuse(key, f"a list of {length} whole numbers ≥ 0")
        return tuple(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Return token ids, each once: of one number, or of a list. None are returned if it is absent."""
        value = self._or(key, [])
        several = value if isinstance(value, (list, tuple)) else [value]
        if not all(_is_whole(one) and 0 <= one < MOST_CONTEXT_TOKENS for one in several):
            self.refuse(key, "a token id, or a list of them")
        return tuple(dict.fromkeys(several))

    def group(self, key: str) -> FileValues:
        """Return the values within a value; an empty group if it is absent."""
        value = self._or(key, {})
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return FileValues(value, self.name, f"{self.prefix}{key}.")

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise the error for a value."""
        value = self.values.get(key)
        got = "no" if value is None else "an odd" if _is_deep(value) else f"{value!r:.60} as"
        raise ModelError(
            f"{self.name} has {got} {self.prefix}{key}; expected {expected}. The file may be damaged or incomplete: "
            "fetch it again, or repair it."
        )

    def _or(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged and could not be read: {error}. Fetch the model again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: it holds no JSON object. Fetch the model again.")
    return value


def _is_unicode(text: str) -> bool:
    """Return True if a text has no half of a surrogate pair, which JSON can contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_deep(value: Any) -> bool:
    """Return True if a value is nested too deeply, or too large, to be shown."""
    try:
        repr(value)
    except (RecursionError, ValueError):  # a whole number may have too many digits
        return True
    return False


def _whole_numbers(least: int, most: int) -> str:
    return f"a whole number ≥ {least}" if most == TOO_LARGE else f"a whole number from {least} to {most}"
