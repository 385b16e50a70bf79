"""The API reference, written from the docstrings and signatures of what users import.

python scripts/write_reference.py FOLDER

Owns which names are on which page, and how a docstring becomes markdown. `make docs` calls it; nothing it writes is
kept in the repository. Invariant: every name of `specbranch.__all__` is on a page (a test checks it).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import specbranch
from specbranch import LLM, AsyncLLM, LoadOptions, Output, RequestOptions, SamplingParams, SpeculativeConfig, errors
from specbranch.answer import Chunk, Piece
from specbranch.core.orders import TokenLogprobs
from specbranch.core.scheduler import Snapshot
from specbranch.engine import LLMView
from specbranch.submission import Submission

SECTION = re.compile(r"^(Args|Attributes):\n", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+): ", re.MULTILINE)
PAGE_NAME = re.compile(r"\bdocs/(\w+)\.md\b")
SHORT = 88  # columns of a signature in one line


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the reference."""

    title: str
    about: str
    things: tuple[type, ...]


def error_types(module: ModuleType) -> tuple[type, ...]:
    """Return the exceptions of a module, in the order in which it defines them."""
    return tuple(one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Exception))


PAGES = {
    "llm": Page("LLM, for one caller", "Loaded models. One thread uses them at a time.", (LLM, LLMView)),
    "async_llm": Page(
        "AsyncLLM, for many callers",
        "Loaded models for many requests at once ([how](../many.md)).",
        (AsyncLLM, Submission, Snapshot),
    ),
    "settings": Page(
        "Settings",
        "All settings are frozen dataclasses. Wherever one is expected, a mapping with its names will do.",
        (SamplingParams, SpeculativeConfig, LoadOptions, RequestOptions),
    ),
    "outputs": Page("Outputs", "What an answer is, whole or in chunks.", (Output, Chunk, Piece, TokenLogprobs)),
    "errors": Page(
        "Errors",
        "Errors that users can cause. Each message is a sentence: what was got, what was expected, what to do.",
        error_types(errors),
    ),
}


def pages() -> dict[str, str]:
    """Return every page by the name of its file."""
    written = {f"{name}.md": _page(page) for name, page in PAGES.items()}
    return {"index.md": _index(), **written}


def _index() -> str:
    rows = [f"| [`{_name(one)}`]({name}.md#{_anchor(one)}) | {_first(one)} |" for name, one in _all_things()]
    head = "# Python\nWritten from the docstrings. Importing `specbranch` imports no torch; loading a model does.\n"
    return "\n".join([head, "| name | |", "|---|---|", *rows, ""])


def _all_things() -> Iterator[tuple[str, type]]:
    for name, page in PAGES.items():
        for one in page.things:
            yield name, one


def _page(page: Page) -> str:
    return "\n".join([f"# {page.title}", page.about, "", *(part for one in page.things for part in _class(one))])


def _class(one: type) -> Iterator[str]:
    """Yield the parts of a class: its text, how it is made, its properties and methods."""
    text, entries = split(inspect.getdoc(one) or "")
    yield f"## {_name(one)}\n"
    yield f"*{_where(one)}*\n"
    yield text + "\n"
    if is_dataclass(one):
        yield from _fields(one, entries)
    elif one.__name__ in specbranch.__all__ and not issubclass(one, Exception):  # others are made by these
        yield from _function(_name(one), one.__init__)
    own = {name: value for name, value in vars(one).items() if not name.startswith("_")}
    yield from _properties(own)
    for name, value in own.items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(function):
            yield f"### {_name(one)}.{name}\n"
            yield from _function(name, function)


def _where(one: type) -> str:
    exported = one.__name__ in specbranch.__all__
    module = "specbranch" if exported else one.__module__
    bases = [base.__name__ for base in one.__bases__ if base.__module__.startswith("specbranch")]
    kind = f", a kind of {' and '.join(f'`{base}`' for base in bases)}" if bases else ""
    return f"from `{module}`{kind}"


def _fields(one: Any, entries: Mapping[str, str]) -> Iterator[str]:
    yield "| field | type | default | |"
    yield "|---|---|---|---|"
    for field in fields(one):
        if not field.name.startswith("_"):
            about = _cell(entries.get(field.name, ""))
            yield f"| `{field.name}` | `{field.type}` | {_default(field)} | {about} |"
    yield ""


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "" if field.default_factory is MISSING else f"`{field.default_factory()!r}`"


def _properties(own: Mapping[str, Any]) -> Iterator[str]:
    found = {name: value for name, value in own.items() if isinstance(value, property)}
    if not found:
        return
    yield "| property | type | |"
    yield "|---|---|---|"
    for name, value in found.items():
        kind = inspect.signature(value.fget).return_annotation if value.fget else ""
        yield f"| `{name}` | `{kind}` | {_cell(_linked(inspect.getdoc(value) or ''))} |"
    yield ""


def _function(name: str, function: Any) -> Iterator[str]:
    text, entries = split(inspect.getdoc(function) or "")
    kind = "async " if inspect.iscoroutinefunction(function) else ""
    yield f"```python\n{kind}{signature(name, function)}\n```\n"
    yield text + "\n"
    if entries:
        yield "| argument | |"
        yield "|---|---|"
        yield from (f"| `{one}` | {_cell(about)} |" for one, about in entries.items())
        yield ""


def signature(name: str, function: Any) -> str:
    """Return a signature as it is written, without `self`; in several lines if it is long."""
    found = inspect.signature(function)
    parameters = [one for key, one in found.parameters.items() if key not in ("self", "cls")]
    texts = [_parameter(one) for one in parameters]
    kinds = [one.kind for one in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = found.return_annotation
    behind = "" if returned in (inspect.Signature.empty, "None") else f" -> {returned}"
    whole = f"{name}({', '.join(texts)}){behind}"
    if len(whole) <= SHORT:
        return whole
    return f"{name}(\n" + "".join(f"    {one},\n" for one in texts) + f"){behind}"


def _parameter(one: inspect.Parameter) -> str:
    """Return a parameter with its annotation as the source has it."""
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    default = "" if one.default is one.empty else f" = {one.default!r}"
    return f"{stars}{one.name}: {one.annotation}{default}"


def split(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring as markdown, and the entries of its Args or Attributes."""
    text, *sections = SECTION.split(docstring)
    if not sections:
        return _linked(text.strip()), {}
    names = ENTRY.split(sections[1])[1:]
    entries = {name: _linked(inspect.cleandoc(about)) for name, about in zip(names[::2], names[1::2], strict=True)}
    return _linked(text.strip()), entries


def _linked(text: str) -> str:
    """Make links of the pages that a text names; what looks like a tag is meant as it stands."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [PAGE_NAME.sub(r"[\g<0>](../\1.md)", part.replace("<", "&lt;")) for part in parts[::2]]
    return "".join(parts)


def _first(one: type) -> str:
    return _cell(_linked((inspect.getdoc(one) or "").partition("\n\n")[0]))


def _cell(text: str) -> str:
    """Return a text as a cell of a table; a bar within code ends no cell on the site."""
    parts = re.split(r"(`[^`]*`)", text.replace("\n", " "))
    parts[::2] = [part.replace("|", "&#124;") for part in parts[::2]]
    return "".join(parts)


def _name(one: type) -> str:
    return one.__name__


def _anchor(one: type) -> str:
    return one.__name__.lower()


def main() -> None:
    """Write the pages to the folder that is named."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
