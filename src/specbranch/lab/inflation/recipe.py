"""The recipe of an inflated model: which small model has which larger shape, with which seed.

Owns the folder with its one file, inflation.json, of a few hundred bytes. The weights are generated where the model
runs, and never written. Invariant: a loaded recipe names the same source that it was checked with.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from specbranch.errors import BadParameter, ModelError
from specbranch.files import replacing, spoken
from specbranch.lab.inflation.shapes import Shape

FORMAT = 1
MARKER = "inflation.json"  # the recipe file
InflatedKind = Literal["model", "draft"]
AGAIN = "Make it again with `specbranch inflate`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Inflation:
    """A small model in the shape of a larger one."""

    kind: InflatedKind  # draft: made by `specbranch distill`, to run with its target
    source: str  # a known name, a Hub id or a whole path
    source_identity: str
    shape: str  # the shape's name, or what it was made of
    sizes: Shape
    head_rows: int  # of the output head that each step is charged with
    head_scored: int  # those of them that mean a token
    seed: int = 0
    checked: dict[str, Any] = field(default_factory=dict)  # how far it was from its source
    format: int = FORMAT

    @property
    def name(self) -> str:
        """The name for sentences."""
        return f"{Path(self.source).name} as {self.shape}"

    @property
    def digest(self) -> str:
        """A digest that does not depend on where the source is or how it was checked."""
        telling = replace(self, source="", checked={})
        return sha256(json.dumps(asdict(telling), sort_keys=True).encode()).hexdigest()

    def text(self) -> str:
        """Return the recipe as it is written."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def is_inflation(name: str | Path) -> bool:
    """Return True if a name is a folder that `specbranch inflate` made."""
    return (Path(name).expanduser() / MARKER).is_file()


def read_inflation(folder: str | Path) -> Inflation:
    """Read a recipe."""
    file = Path(folder).expanduser() / MARKER
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ModelError(f"{file} has format {values['format']!r}; this version reads format {FORMAT}. {AGAIN}")
        return Inflation(**{**values, "sizes": Shape(**values["sizes"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is no recipe of an inflated model ({error}). {AGAIN}") from None


def write_inflation(folder: Path, recipe: Inflation) -> None:
    """Write a recipe, replacing an existing one; refuse a folder with other contents."""
    refuse_other_folder(folder)
    with spoken(folder, "Name another folder with --out."), replacing(folder / MARKER) as part:
        part.write_text(recipe.text(), encoding="utf-8")


def refuse_other_folder(folder: Path) -> None:
    """Raise if a folder holds anything but a recipe."""
    if folder.exists() and not is_inflation(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise BadParameter(
            f"{folder} is there already and holds no recipe of an inflated model. Name another folder with --out."
        )
