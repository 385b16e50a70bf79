"""A file of settings: YAML, TOML or JSON, with the names of options as its keys.

Owns reading and the form of keys. What the keys mean is in `settings_sources.py`. Invariant: a key counts once,
however it is written, and every mistake names the file.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specbranch.errors import BadParameter

BASE_KEY = "config"  # names another file, whose settings these override


@dataclass(frozen=True, slots=True)
class FileValue:
    """A value of a file, and the file."""

    value: Any
    file: Path

    def __str__(self) -> str:
        return f"{self.value!r:.80}"


def read_file(file: Path) -> dict[str, FileValue]:
    """Return the values of a file and of its base, by names with underscores."""
    values = _keyed(file)
    base = values.pop(BASE_KEY, None)
    found = {name: FileValue(value, file) for name, value in values.items() if value is not None}
    if base is None:
        return found
    under = _keyed(Path(base)) if isinstance(base, str) else {BASE_KEY: base}
    if BASE_KEY in under:
        raise BadParameter(f"config in {file} is {base!r:.80}; expected a file of settings that names no other.")
    return {name: FileValue(value, Path(base)) for name, value in under.items() if value is not None} | found


def _keyed(file: Path) -> dict[str, Any]:
    parsed = _parsed(file)
    if not isinstance(parsed, dict):
        raise BadParameter(f"The settings in {file} are {parsed!r:.80}; expected names of options with values.")
    found: dict[str, Any] = {}
    for key, value in parsed.items():
        if not isinstance(key, str):
            raise BadParameter(f"{file} has the key {key!r}; expected names of options. Quote names such as on and no.")
        name = key.replace("-", "_")
        if name in found:
            raise BadParameter(f"{file} has {key!r} twice, once with - and once with _. Take one out.")
        found[name] = value
    return found


def _parsed(file: Path) -> Any:
    """Parse a file by its name; what is neither YAML nor TOML is JSON, as `specbranch tune` writes it."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix in (".yaml", ".yml"):
            return yaml.safe_load(text) or {}
        return tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        said = f"The settings in {file} cannot be read ({reason})"
        raise BadParameter(f"{said}; expected a file in YAML (.yaml), TOML (.toml) or JSON (.json).") from None
