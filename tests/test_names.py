"""A constant's name says whose it is: it is defined once, in one module."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "specbranch"
CONSTANT = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")  # a name that begins with an underscore is its module's own
# Modules whose names do not count, and why.
LEFT_OUT = {
    "models/gpu/receiving.py": "goes with the next rounds",
}


def test_no_constant_is_defined_twice() -> None:
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        where = str(path.relative_to(SOURCE))
        if where not in LEFT_OUT:
            for name in constants(ast.parse(path.read_text(encoding="utf-8"))):
                owners[name].append(where)
    assert not {name: found for name, found in owners.items() if len(found) > 1}


def test_modules_that_are_left_out_exist() -> None:
    assert all((SOURCE / name).is_file() for name in LEFT_OUT)


def test_copies_for_a_device_and_names_of_a_function_do_not_count() -> None:
    source = "A = 1\nB: int = 2\nC, D = 3, 4\nE = tl.constexpr(A)\n_F = 5\nT = TypeVar('T')\ndef f():\n    G = 6\n"
    assert sorted(constants(ast.parse(source))) == ["A", "B", "C", "D"]


def constants(module: ast.Module) -> Iterator[str]:
    """The constants that a module defines. A kernel's file holds copies for the device, made by `tl.constexpr`."""
    for node in module.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not _is_copy(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (one.id for one in names if isinstance(one, ast.Name) and CONSTANT.fullmatch(one.id))


def _is_copy(value: ast.expr | None) -> bool:
    called = (node.func for node in ast.walk(value) if isinstance(node, ast.Call)) if value is not None else ()
    return any(ast.unparse(function) in ("tl.constexpr", "TypeVar") for function in called)
