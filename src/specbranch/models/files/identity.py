"""The identity of a model: a digest of its files, computed without loading them.

Owns the digest. It covers names, sizes and both ends of each file: quick, and enough to tell models apart. It does not
prove that a file is complete. A made model's digest covers its recipe and its base. Invariant: equal files have equal
digests wherever they lie.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from specbranch.errors import ModelError
from specbranch.models.files.locate import Located, base_of, locate
from specbranch.models.files.sources import MadeModel, made_model

EDGE = 1 << 20  # bytes that are read at each end of a file
KINDS = (".safetensors", ".gguf", ".json")
EVALUATION = "evaluation.json"  # in a draft's folder, see `models/drafts/evaluation_file.py`
ASIDE = ("provenance.json", EVALUATION)  # left out: how the model was made and how good it is, not what it is
LENGTH = 16  # hexadecimal digits


def model_identity(name: str) -> str:
    """Return a short digest of the model that a path or Hub id names."""
    return identity_of(locate(name))


def identity_of(located: Located) -> str:
    """Return the digest of a model on disk."""
    path = located.path
    if (made := made_model(path)) is not None:
        return sha256(f"{made.digest} {identity_of(base_of(made))}".encode()).hexdigest()[:LENGTH]
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


def checked_base(model: MadeModel) -> Located:
    """Find the model that another is made from; raise a ModelError if it has changed since."""
    found = base_of(model)
    if (identity := identity_of(found)) != model.base_identity:
        differs = f"({identity}, not {model.base_identity})"
        raise ModelError(f"{found.path} is not the model that {model.name} was made of {differs}. {model.again}")
    return found


def _ends(file: Path) -> bytes:
    with file.open("rb") as opened:
        first = opened.read(EDGE)
        opened.seek(max(file.stat().st_size - EDGE, 0))
        return first + opened.read(EDGE)
