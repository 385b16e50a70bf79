"""Look at a built site for links, anchors and pictures that lead nowhere, and for anything fetched from elsewhere.

python scripts/check_site.py build/site

Owns what counts as broken. Links to other sites are not followed: a build needs no network. Invariant: a page that
loads a script, a style or a picture from another site is a problem, so that the site can be read without a network.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

NOT_FOUND = "404.html"  # is shown at any address, so its links start at the root of a server
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
LOADING = {"stylesheet", "preload", "icon", "modulepreload", "preconnect", "dns-prefetch"}  # kinds of <link>
FETCHED_BY_CSS = re.compile(r"(?:url\(|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)")


@dataclass(slots=True)
class Read:
    """What a page refers to."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)  # fetched when the page is shown


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.read = Read()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.read.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.read.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.read.loaded.append(given[LOADED[tag]])
        if tag == "link" and LOADING & set(given.get("rel", "").split()):
            self.read.loaded.append(given.get("href", ""))


@cache
def read(page: Path) -> Read:
    """Read a page."""
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader.read


def problems(site: Path) -> list[str]:
    """Return a sentence for each link that leads nowhere, and for each thing that is fetched from elsewhere."""
    pages = sorted(site.rglob("*.html"))
    if not pages:
        return [f"{site} holds no page. Build the site first: make docs."]
    read.cache_clear()
    found = [said for page in pages for said in _of_page(page, site)]
    for style in sorted(site.rglob("*.css")):
        text = style.read_text(encoding="utf-8")
        found += [f"{style.relative_to(site)}: fetches {url}." for url in FETCHED_BY_CSS.findall(text)]
    return found


def _of_page(page: Path, site: Path) -> list[str]:
    name, refers = page.relative_to(site), read(page)
    outside = [f"{name}: fetches {url} from another site." for url in refers.loaded if _is_elsewhere(url)]
    local = [url for url in (*refers.links, *refers.loaded) if not _is_elsewhere(url)]
    broken = [f"{name}: {url!r} {reason}." for url in local if (reason := _missing(url, page, site))]
    return [*outside, *broken]


def _is_elsewhere(url: str) -> bool:
    return bool(urlsplit(url).netloc or urlsplit(url).scheme in ("mailto", "data", "javascript"))


def _missing(url: str, page: Path, site: Path) -> str:
    """Return what is wrong with a link inside the site; an empty text if nothing is."""
    path, anchor = unquote(urlsplit(url).path), unquote(urlsplit(url).fragment)
    from_root = path.startswith("/") or page.name == NOT_FOUND
    target = page if not path else (site / path.lstrip("/") if from_root else page.parent / path)
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "leads to no file"
    if anchor and target.suffix == ".html" and anchor not in read(target).anchors:
        return "leads to no such part of its page"
    return ""


if __name__ == "__main__":
    said = problems(Path(sys.argv[1]))
    print("\n".join(said) or "All links lead somewhere, and nothing is fetched from elsewhere.")
    sys.exit(bool(said))
