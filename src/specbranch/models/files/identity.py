"""Telling models apart by their files, without loading them.

Owns the digest. It reads both ends of each file, which is quick and enough to tell one model from another; it is no
check of wholeness. An inflated model is its recipe and its source.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from specbranch.errors import ModelError
from specbranch.lab.inflation.recipe import AGAIN, Inflation, read_inflation, source_of
from specbranch.models.files.locate import Located, locate

EDGE = 1 << 20  # bytes read of each end of a file
KINDS = (".safetensors", ".gguf", ".json")
ASIDE = ("provenance.json",)  # says how it was made, not what it is
LENGTH = 16  # hexadecimal digits


def model_identity(name: str) -> str:
    """Return a short digest of the model that a path or Hub id names: file names, sizes, and what stands at both
    ends of each."""
    return identity_of(locate(name))


def identity_of(located: Located) -> str:
    """Return the digest of a model on disk."""
    path = located.path
    if located.kind == "inflation":
        recipe = read_inflation(path)
        return sha256(f"{recipe.digest} {identity_of(source_of(recipe))}".encode()).hexdigest()[:LENGTH]
    files = (
        [path]
        if path.is_file()
        else sorted(file for file in path.iterdir() if file.suffix in KINDS and file.name not in ASIDE)
    )
    digest = sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        digest.update(_ends(file))
    return digest.hexdigest()[:LENGTH]


def checked_source(recipe: Inflation) -> Located:
    """Find the source of a recipe, and refuse another than it was made for."""
    found = source_of(recipe)
    if (identity := identity_of(found)) != recipe.source_identity:
        told = f"({identity}, not {recipe.source_identity})"
        raise ModelError(f"{found.path} is not the model that {recipe.name} was made of {told}. {AGAIN}")
    return found


def _ends(file: Path) -> bytes:
    with file.open("rb") as held:
        first = held.read(EDGE)
        held.seek(max(file.stat().st_size - EDGE, 0))
        return first + held.read(EDGE)
