"""The package as a user gets it: built from the sources, and installed in an environment without this repository.

The environment has the dependencies of the one that the tests run in, as links. The package itself is not among them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt")
OWN = "specbranch"  # in the names of all that an installation of the project has
LEFT_OUT = (".pth", "__pycache__")  # a .pth may lead back to the sources


@dataclass(frozen=True)
class Built:
    """The two files of a release."""

    sdist: Path
    wheel: Path


@dataclass(frozen=True)
class Installed:
    """An environment that has the wheel, and an empty folder to work in."""

    folder: Path
    work: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command, in a folder that has nothing of the project, and without its settings."""
        pipes: dict[str, Any] = {"cwd": self.work, "env": _environment(), "text": True}
        return subprocess.run([str(part) for part in command], capture_output=True, check=False, **pipes)

    def started(self, *command: str | Path) -> subprocess.Popen[str]:
        """Start a command in the same way; what it says on standard error can be read."""
        pipes: dict[str, Any] = {"cwd": self.work, "env": _environment(), "text": True}
        return subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, **pipes)


def build(folder: Path) -> Built:
    """Build the sdist from a copy of the sources, and the wheel from the sdist."""
    copy = folder / "sources"
    copy.mkdir(parents=True)
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    out = folder / "dist"
    _done([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)])
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(sdist, wheel)


def install(wheel: Path, folder: Path) -> Installed:
    """Make an environment with the wheel and links to this environment's packages."""
    made = Installed(folder / "venv", folder / "empty")
    made.work.mkdir(parents=True)
    venv.create(made.folder, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    _link_packages(made.folder / "lib" / version / "site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(made.python)]
    _done([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    return made


def _environment() -> dict[str, str]:
    """This process's variables without Python's and the project's own, but with the place of the default model."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPECBRANCH_"))}
    kept |= {name: os.environ[name] for name in ("SPECBRANCH_CACHE", "SPECBRANCH_WHEEL") if name in os.environ}
    return {**kept, "SPECBRANCH_EXPERIENCE": "off", "OMP_NUM_THREADS": "1"}


def _link_packages(into: Path) -> None:
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for found in Path(folder).iterdir():
            if OWN not in found.name and not found.name.endswith(LEFT_OUT):
                (into / found.name).symlink_to(found)


def _done(command: list[str]) -> None:
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
