"""The one-time conversion of a tokenizer that comes in another form (GGUF, SentencePiece) to a folder with
tokenizer.json.

Owns the folders of converted tokenizers and the call to transformers that fills them. Invariant: such a folder is whole
or absent, and its name changes when the files it was made from do.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from specbranch.errors import ModelError
from specbranch.gguf_header import read_header

TOKENIZER = "tokenizer.json"
# What transformers would choose for a GGUF of these architectures; to choose, it reads the whole file header by its
# slowest reader.
GGUF_CLASSES = {"llama": "PreTrainedTokenizerFast", "qwen2": "Qwen2TokenizerFast", "qwen3": "Qwen2TokenizerFast"}


def file_key(file: Path) -> str:
    """Name the conversion of one file, by its name, size and time."""
    found = file.stat()
    return _key(file.stem, (file.name, found.st_size, found.st_mtime_ns))


def folder_key(folder: Path) -> str:
    """Name the conversion of a folder, by the names, sizes and times of its files."""
    files = sorted(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir() if file.is_file()
    )
    return _key(folder.resolve().name, files)


def _key(name: str, identity: Any) -> str:
    return f"{name}-{sha256(json.dumps(identity).encode()).hexdigest()[:12]}"


@contextmanager
def kept_folder(cache_folder: Path | None, key: str) -> Iterator[Path]:
    """The folder of a converted tokenizer; without a cache it lasts for the block only."""
    if cache_folder is not None:
        yield cache_folder / key
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / key


def convert(source: Path, into: Path, gguf_file: str | None) -> None:
    """Let transformers read the tokenizer and save it as tokenizer.json; `into` appears whole or not at all."""
    try:
        found = _tokenizer_class(source, gguf_file).from_pretrained(
            str(source), **({"gguf_file": gguf_file} if gguf_file else {})
        )
    except Exception as error:  # whatever a damaged or unknown file makes it raise
        raise ModelError(f"The tokenizer in {source / (gguf_file or '')} cannot be read: {error}") from error
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        found.save_pretrained(folder)
        if not (Path(folder) / TOKENIZER).is_file():
            raise ModelError(
                f"The tokenizer in {source} has no fast form, so it cannot be used here. Give a model with {TOKENIZER}."
            )
        _keep_endings(source, Path(folder), gguf_file)
        _move(Path(folder), into)


def _tokenizer_class(source: Path, gguf_file: str | None) -> Any:
    import transformers

    if gguf_file is None or (source / "tokenizer_config.json").is_file():  # which names a class
        return transformers.AutoTokenizer
    architecture = read_header(source / gguf_file).metadata.get("general.architecture")
    return getattr(transformers, GGUF_CLASSES.get(str(architecture), "AutoTokenizer"))


def _keep_endings(source: Path, into: Path, gguf_file: str | None) -> None:
    """Carry over what says where a text ends: the configuration files, or the GGUF's own entries."""
    if gguf_file is None:
        for name in ("generation_config.json", "config.json"):
            if (source / name).is_file():
                shutil.copy(source / name, into / name)
        return
    endings = _gguf_endings(source / gguf_file)
    if endings:
        (into / "generation_config.json").write_text(json.dumps({"eos_token_id": endings}), encoding="utf-8")


def _gguf_endings(path: Path) -> list[int]:
    metadata = read_header(path).metadata
    found = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in found if isinstance(token, int) and token >= 0))


def _move(folder: Path, into: Path) -> None:
    staged = folder / "whole"
    staged.mkdir()
    for file in [file for file in folder.iterdir() if file.is_file()]:
        file.replace(staged / file.name)
    try:
        staged.replace(into)
    except OSError:
        if not (into / TOKENIZER).is_file():  # else another process was first, with the same content
            raise
