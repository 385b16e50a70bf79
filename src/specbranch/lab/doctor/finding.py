"""The finding of one check, as a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and what to do about it."""

    level: Level
    about: str
    said: str
    advice: str = ""


def well(about: str, said: str, advice: str = "") -> Finding:
    """Return a finding without any problem."""
    return Finding("ok", about, said, advice)


def note(about: str, said: str, advice: str = "") -> Finding:
    """Return a finding that could be better."""
    return Finding("note", about, said, advice)


def problem(about: str, said: str, advice: str = "") -> Finding:
    """Return a finding that does not work."""
    return Finding("problem", about, said, advice)
