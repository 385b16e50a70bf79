"""docs/cli.md says what the commands say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_cli_docs.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_cli_docs", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_docs_are_what_the_commands_print() -> None:
    written = script()
    assert written.FILE.read_text(encoding="utf-8") == written.document(), "run scripts/write_cli_docs.py"


def test_the_docs_hold_every_command() -> None:
    from specbranch.cli.main import COMMANDS

    text = script().document()
    assert all(f"## specbranch {name}\n" in text for name in (*COMMANDS, "models pull"))
