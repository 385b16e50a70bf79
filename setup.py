"""The long description of the package: README.md, readable where the repository's files are not beside it.

All other settings are in pyproject.toml. SPECBRANCH_SOURCE_URL is the address of the repository's files at the built
version, such as https://github.com/NAME/specbranch/blob/v0.1.0: relative links and pictures then point there. Without
it, such links become their text and such pictures are left out.
"""

import os
import re
from pathlib import Path

from setuptools import setup

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")  # picture or not, text, path


def long_description(readme: str, source_url: str) -> str:
    """Return the README with absolute links, or without relative ones if there is no address."""
    files, pictures = source_url.rstrip("/"), source_url.rstrip("/").replace("/blob/", "/raw/")

    def absolute(found: re.Match[str]) -> str:
        mark, text, path = found.groups()
        if not files:
            return "" if mark else text
        return f"{mark}[{text}]({pictures if mark else files}/{path})"

    return RELATIVE.sub(absolute, readme)


if __name__ == "__main__":
    setup(
        long_description=long_description(
            Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
            os.environ.get("SPECBRANCH_SOURCE_URL", ""),
        ),
        long_description_content_type="text/markdown",
    )
