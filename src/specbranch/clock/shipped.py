"""Cost profiles by name: those that ship in `clock/profiles`, one JSON file each.

Owns the way from a name to a profile, not its content. Invariant: the names are those of the files in that folder.
"""

from __future__ import annotations

from pathlib import Path

from specbranch.clock.profile import CostProfile
from specbranch.errors import unknown

WALL = "wall"  # the name of the real clock, next to the names of profiles
PROFILES_FOLDER = Path(__file__).parent / "profiles"


def shipped_profiles() -> tuple[str, ...]:
    """Return the names that `load_profile` knows."""
    return tuple(sorted(file.name.removesuffix(".json") for file in PROFILES_FOLDER.glob("*.json")))


def load_profile(name: str | Path) -> CostProfile:
    """Return a shipped profile by its name, or read one from a file, whose name ends in .json."""
    if str(name) in shipped_profiles():
        return CostProfile.load(PROFILES_FOLDER / f"{name}.json")
    if Path(name).suffix != ".json":
        raise unknown("cost profile", str(name), (*shipped_profiles(), "FILE.json"))
    return CostProfile.load(Path(name))
