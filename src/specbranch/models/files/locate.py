"""Finding a model's files by name: a folder, a GGUF file, a folder with a recipe, or an id on the Hugging Face Hub.

Owns the way from a name to a path, not the files' contents. Models from the Hub go to the Hub's own cache. Invariant:
the returned path exists; a folder has a config.json, or the recipe of a registered kind (see `sources.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specbranch.errors import ModelError, nearest
from specbranch.models.files.sources import MadeModel, is_made, made_alone, unknown_recipe

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
UNWANTED = ["original/*", "onnx/*", "consolidated*", "*/*.safetensors"]
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Located:
    """A model on disk."""

    kind: Literal["folder", "gguf", "made"]
    path: Path


def locate(name: str) -> Located:
    """Find a model by path or Hub id; download it from the Hub if it is not here yet."""
    path = Path(name).expanduser()
    if path.exists():
        return _local(path)
    if _looks_like_path(name):
        raise ModelError(
            f"There is no model at {name!r}.{_near(path)} Give a folder with config.json, a .gguf file, or a Hub id."
        )
    return Located("folder", _from_hub(name, path))


def base_of(model: MadeModel) -> Located:
    """Find the model that another is made from; download it first if it is a known name."""
    from specbranch.models.files import store

    known = model.base in store.KNOWN and not Path(model.base).exists()
    try:
        return locate(str(store.pull(model.base)) if known else model.base)
    except ModelError as error:
        raise ModelError(f"The source of {model.name} cannot be had. {error} {model.again}") from None


def stored_base(located: Located) -> Located:
    """Return a stored model itself, and the base of a made one, which has the same tokenizer and output."""
    return base_of(made_alone(located.path)) if located.kind == "made" else located


def _local(path: Path) -> Located:
    if path.is_file():
        if path.suffix == ".gguf":
            return Located("gguf", path)
        raise ModelError(f"{path} is a file but no .gguf; give a .gguf file, or the folder that holds config.json.")
    if is_made(path):
        return Located("made", path)
    if (path / "config.json").is_file():
        return Located("folder", path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return Located("gguf", files[0])
    if files:
        raise ModelError(
            f"{path} holds {len(files)} GGUF files; name one of them: {', '.join(file.name for file in files)}."
        )
    if (recipe := unknown_recipe(path)) is not None:
        raise ModelError(
            f"{path} holds {recipe.name}, the recipe of a model that is made rather than stored, and no module that "
            f"makes it was imported. Import it first, such as specbranch.lab.{recipe.stem}.source; the specbranch "
            "commands do."
        )
    raise ModelError(f"{path} holds neither config.json nor a .gguf file; is the model one folder further down?")


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith(".gguf") or HUB_ID.fullmatch(name) is None


def _near(path: Path) -> str:
    """Return a sentence with the closest name in the same folder."""
    if not path.parent.is_dir():
        return f" The folder {str(path.parent)!r} does not exist either."
    return nearest(path.name, (other.name for other in path.parent.iterdir()))


def _from_hub(name: str, path: Path) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except (OSError, ValueError, RuntimeError) as error:  # the Hub's errors are subclasses of these
        raise ModelError(_hub_sentence(name, error, constants.HF_HUB_OFFLINE) + _near(path)) from None
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"The Hub repository {name!r} has no config.json; if it holds GGUF files, fetch one and give its path."
        )
    return folder


def _hub_sentence(name: str, error: Exception, offline: bool) -> str:
    """Return the error sentence: what was tried, and what to do next."""
    kind = type(error).__name__
    tried = f"There is no local path {name!r}, and as a Hub id"
    if offline or kind == "OfflineModeIsEnabled":
        return (
            f"{tried} it is not in the cache, while HF_HUB_OFFLINE forbids fetching it. Fetch it once online, or "
            "give a local path."
        )
    if kind == "GatedRepoError":
        return f"{tried} it needs a licence to be accepted: visit its page on the Hub, then set HF_TOKEN."
    if kind == "RepositoryNotFoundError":
        return f"{tried} it does not exist or is private (then set HF_TOKEN)."
    return f"{tried} it could not be fetched ({kind}). Check the network and HF_ENDPOINT, or give a local path."
