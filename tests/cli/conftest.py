"""Commands in this process: much quicker than one each, and a traceback fails the test by itself."""

from __future__ import annotations

import io
import sys

import pytest
from in_process import Command, Done

from specbranch.cli.main import run


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs one command as `specbranch ARGUMENTS… < stdin` would."""

    def call(*arguments: str, stdin: str | bytes = "") -> Done:
        sent = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sent), encoding="utf-8"))
        capsys.readouterr()
        code = run(list(arguments))
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def models(pair: tuple[str, str]) -> list[str]:
    """A pair and a method that drafts a lot with it; a --method given later wins."""
    small = ["--dtype", "float64", "--device", "cpu", "--context-length", "256"]
    return ["--target", pair[0], "--draft", pair[1], "--method", "specbranch", *small]
