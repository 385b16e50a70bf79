"""Build the documentation site: build/site, from docs/, the other documents, the examples and the docstrings.

python scripts/build_docs.py            # or: make docs

Owns which source becomes which page. zensical.toml has the navigation. A link that leads nowhere ends the build: first
zensical looks at links in markdown, then `check_site.py` at the finished pages. Invariant: links in the sources work in
the repository, too; only here they are changed to the pages of the site.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from check_site import problems
from write_reference import pages as reference_pages

ROOT = Path(__file__).parents[1]
MOVED = {  # documents outside docs/, and their pages
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "plugins/llm-specbranch/README.md": "llm-plugin.md",
}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
BAR_IN_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")  # GitHub wants it escaped in a table, the site does not


def main() -> None:
    """Build the site, or say which links lead nowhere."""
    site = build(ROOT, ROOT / "build")
    print(f"The site is in {site}. Look at it with: python -m http.server --bind 127.0.0.1 --directory {site}")


def build(root: Path, out: Path) -> Path:
    """Write the pages of a checkout to `out`/pages and build `out`/site from them; return that folder."""
    for name, text in sources(root).items():
        target = out / "pages" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode())
    _remove_others(out / "pages", sources(root))
    return run_zensical(root / "zensical.toml", out)


def run_zensical(config: Path, out: Path) -> Path:
    """Build the site of the pages in `out`; a link that leads nowhere ends it."""
    settings = out / "zensical.toml"  # beside its folders: zensical takes them from there
    text = config.read_text(encoding="utf-8")
    settings.write_text(text.replace('"build/pages"', '"pages"').replace('"build/site"', '"site"'), encoding="utf-8")
    shutil.rmtree(out / "site", ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(settings)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr.partition('Traceback')[0]}\nThe site was not built.")
    if found := problems(out / "site"):
        sys.exit("\n".join([*found, f"The site has {len(found)} links that lead nowhere."]))
    return out / "site"


def sources(root: Path) -> dict[str, str | bytes]:
    """Return what the site is built from, by its path there."""
    pages = {f"docs/{path.name}": path.name for path in (root / "docs").iterdir()} | MOVED
    found: dict[str, str | bytes] = {}
    for source, page in pages.items():
        path = root / source
        found[page] = (
            moved(path.read_text(encoding="utf-8"), source, pages) if path.suffix == ".md" else path.read_bytes()
        )
    found["examples.md"] = f"{found['examples.md']}{_programs(root / 'examples')}"
    return found | {f"reference/{name}": text for name, text in reference_pages().items()}


def moved(text: str, source: str, pages: Mapping[str, str]) -> str:
    """Return a document with its links as the site needs them. Links to what is no page stay as they are."""
    here, page = PurePosixPath(source).parent, pages[source]

    def change(link: re.Match[str]) -> str:
        target = os.path.normpath(here / link[2])
        there = pages.get(target)
        return link[0] if there is None else f"{link[1]}{os.path.relpath(there, PurePosixPath(page).parent)}{link[3]}"

    return BAR_IN_CODE.sub(lambda code: code[0].replace("\\|", "|"), LINK.sub(change, text))


def _programs(folder: Path) -> str:
    parts = [
        f"\n## {path.name}\n```python\n{path.read_text(encoding='utf-8')}```\n" for path in sorted(folder.glob("*.py"))
    ]
    return "".join(parts)


def _remove_others(folder: Path, kept: Mapping[str, object]) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in kept:
            path.unlink()


if __name__ == "__main__":
    main()
