"""Programs of their own that need Triton: its interpreter replaces its functions for the whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or "SPECBRANCH_TRITON_TESTS" not in os.environ,
    reason="they need Triton, a minute or two, and SPECBRANCH_TRITON_TESTS=1",
)


def run_program(name: str, *arguments: str) -> str:
    """Run a program beside this file, and return what it prints."""
    child = Path(__file__).with_name(name)
    done = subprocess.run([sys.executable, str(child), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
