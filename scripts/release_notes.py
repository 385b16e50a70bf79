"""Print the section of CHANGELOG.md for the version of the package, which a release carries as its notes.

With a tag, such as v0.1.0, it refuses a tag of another version, and a version that is marked as unreleased.

    python scripts/release_notes.py [TAG]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^## (\S+)(.*)$", re.MULTILINE)  # version, what is said of it


def main() -> None:
    """Print the notes, or end with a sentence."""
    tag = sys.argv[1] if len(sys.argv) > 1 else None
    print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version(), tag))


def version() -> str:
    """Return the version, read from the source: the package need not be installed."""
    text = (ROOT / "src" / "specbranch" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def notes(changelog: str, wanted: str, tag: str | None = None) -> str:
    """Return the text of one version's section."""
    if tag not in (None, f"v{wanted}"):
        raise SystemExit(f"The tag is {tag}, the package is version {wanted}; expected the tag v{wanted}.")
    heads = list(SECTION.finditer(changelog))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        if head[1] == wanted:
            if tag is not None and "unreleased" in head[2]:
                raise SystemExit(f"CHANGELOG.md says that {wanted} is unreleased. Write its date there, and tag again.")
            return changelog[head.end() : following.start() if following else None].strip()
    raise SystemExit(f"CHANGELOG.md has no section '## {wanted}'. Write one: what changed for users since the last.")


if __name__ == "__main__":
    main()
