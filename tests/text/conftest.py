"""Tokenizers that several tests share; training them takes a moment each."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_tokenizers import KINDS, save
from specbranch.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(KINDS[request.param](), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def byte_level_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(save(KINDS["byte level"](), tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def byte_fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(save(KINDS["byte fallback"](), tmp_path_factory.mktemp("byte_fallback")))
