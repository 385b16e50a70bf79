"""Who may import whom, read from the source: each layer only those below it, core only the standard library, no
torch before a model."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from specbranch.core.methods import METHODS
from tiers import tiered

SOURCE = Path(__file__).parents[1] / "src" / "specbranch"
# From the bottom up; those of one line must not import one another. A new package has to find its line here.
LAYERS = (
    {"errors"},
    {"config", "extras", "files", "charts", "machine_load", "progress", "provenance", "gguf_header", "file_values"}
    | {"kept_text"}
    | {"older_names"},
    {"core"},
    {"exec"},
    {"clock"},
    {"models", "text", "grammar"},
    {"pairs"},
    {"assembly", "experiences"},
    {"decoding", "hrad"},
    {"answer"},
    {"submission", "engine_core"},
    {"draft_exchange"},
    {"engine"},
    {"engine_thread"},
    {"async_engine"},
    {"serve"},
    {"cluster"},
    {"training.distill"},
    {"training.hrad"},
    {"training.export"},
    {"training.making"},
    {"lab.processes", "lab.recheck", "lab.suites", "lab.traces", "lab.toys"},
    {"lab.study", "lab.replay"},
    {"lab.measure"},
    {"lab.inflation", "lab.doctor"},
    {"lab.bench", "lab.regret"},
    {"lab.scale"},
    {"cli"},
)
BUILDINGS = ("training", "lab")  # the engine imports neither
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The drawers of models/ from the bottom up: each imports only those before it, lazily or not.
DRAWERS = ("families", "files", "cpu", "cache", "forward", "sampling", "runners", "gpu", "loading", "drafts")
# A lazy import that closes a circle: these kernels share constants with the module that launches them.
LAUNCHED = {("models/gpu/receiving.py", "specbranch.models.gpu.send_kernels.send")}
WITHOUT_TORCH = (  # layers that load without it
    *(
        "errors",
        "config",
        "extras",
        "core",
        "exec",
        "clock",
        "pairs",
        "answer",
        "assembly",
        "experiences",
        "decoding",
        "engine_core",
        "engine",
        "submission",
        "engine_thread",
        "async_engine",
        "lab.recheck",
        "cli",
    ),
)
# Answers a prompt by every method; prints the methods, then what was imported from outside the engine.
EVERY_METHOD = """
import sys
from specbranch import LLM, SamplingParams
from specbranch.core.methods import METHODS

target, draft = sys.argv[1:]
for name, method in METHODS.items():
    models = (target, draft) if method.uses_draft else (target,)
    with LLM(*models, method=name, device="cpu", context_length=128, keep_experience=False) as llm:
        assert llm.generate("A branch is a guess", SamplingParams(max_tokens=8, ignore_eos=True)).token_ids
print(*METHODS)
print("outside:", *(name for name in sys.modules if name.startswith(("specbranch.lab", "specbranch.training"))))
"""
HEAVY = {"torch", "transformers", "numpy", "numba", "safetensors", "optuna", "accelerate"}


@dataclass(frozen=True)
class Import:
    """One import: from which file, of what, and whether it happens as soon as the file is imported."""

    file: str
    module: str  # dotted, absolute
    at_once: bool


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def layer(path: Path) -> str:
    """The first part of a file's path in the package, two parts in the lab and in training."""
    first, *rest = path.relative_to(SOURCE).with_suffix("").parts
    return f"{first}.{rest[0]}" if first in BUILDINGS and rest[0] != "__init__" else first


@cache
def imports(path: Path) -> list[Import]:
    name = str(path.relative_to(SOURCE))
    return [Import(name, module, at_once) for module, at_once in _walk(ast.parse(path.read_text()), True)]


def _walk(node: ast.AST, at_once: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, at_once) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute here"
            yield from ((f"{child.module}.{alias.name}", at_once) for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _walk(child, False)
        else:
            yield from _walk(
                child, at_once and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            )


def own(module: str) -> str | None:
    """Which of our layers an import reaches; None for other packages and for what the package itself holds (its
    version)."""
    top, *parts = module.split(".")
    reached = ".".join(parts[:2]) if parts[:1] and parts[0] in BUILDINGS else ".".join(parts[:1])
    return reached if top == "specbranch" and reached in RANK else None


def test_every_file_belongs_to_a_layer() -> None:
    assert {layer(path) for path in files()} - {"__init__", "__main__", *BUILDINGS} <= RANK.keys()


def test_a_file_imports_only_what_lies_below_it() -> None:
    here = [(found, layer(path)) for path in files() for found in imports(path)]
    wrong = [
        f"{found.file} imports {found.module}"
        for found, of in here
        if of in RANK and (there := own(found.module)) not in (None, of) and RANK[there] >= RANK[of]
    ]
    assert here and not wrong


def test_the_engine_imports_neither_training_nor_the_lab_not_even_lazily() -> None:
    for path in files():
        if layer(path) != "cli" and not layer(path).startswith(BUILDINGS):
            for found in imports(path):
                top, *inside = found.module.split(".")
                assert top != "specbranch" or inside[:1] not in ([name] for name in BUILDINGS), (
                    f"{found.file} imports {found.module}"
                )


@pytest.mark.slow
def test_an_engine_runs_every_method_without_training_or_the_lab(pair: tuple[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERY_METHOD, *pair], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    ran, outside = done.stdout.splitlines()
    assert ran.split() == list(METHODS) and outside == "outside:"


@pytest.mark.parametrize("path", sorted((SOURCE / "models").rglob("*.py")), ids=lambda path: path.stem)
def test_a_drawer_of_models_imports_only_those_below_it(path: Path) -> None:
    here = path.relative_to(SOURCE / "models").with_suffix("").parts[0]
    if here == "__init__":
        return
    for found in imports(path):
        parts = found.module.split(".")
        if parts[:2] == ["specbranch", "models"]:
            assert DRAWERS.index(parts[2]) <= DRAWERS.index(here), f"{found.file} imports {found.module}"


def test_core_needs_the_standard_library_only() -> None:
    for path in files():
        if layer(path) in ("errors", "config", "extras", "core"):
            for found in imports(path):
                top = found.module.split(".")[0]
                assert top == "specbranch" or top in sys.stdlib_module_names, f"{found.file} imports {found.module}"


def test_no_torch_is_imported_before_a_model_is_loaded() -> None:
    for path in files():
        if layer(path) in (*WITHOUT_TORCH, "__init__"):
            for found in imports(path):
                assert not (found.at_once and found.module.split(".")[0] in HEAVY), (
                    f"{found.file} imports {found.module} at once"
                )


def test_extras_are_imported_only_where_they_are_used() -> None:
    found = {
        (one.file, one.module, one.at_once)
        for path in files()
        for one in imports(path)
        if one.module in ("optuna", "accelerate")
    }
    assert found == {("lab/bench/tuning.py", "optuna", False)}


def test_what_a_server_needs_is_imported_by_the_server_alone() -> None:
    needed = {"fastapi", "uvicorn", "starlette", "pydantic"}
    found = [one for path in files() for one in imports(path) if one.module.split(".")[0] in needed]
    servers = {"serve", "cluster"}  # a cluster's front is a server, too
    assert found and {one.file.partition("/")[0] for one in found} == servers
    others = [one for path in files() if layer(path) not in servers for one in imports(path)]
    assert not [one for one in others if own(one.module) in servers and one.at_once]


def test_ray_is_imported_by_the_cluster_alone() -> None:
    found = {one.file for path in files() for one in imports(path) if one.module.split(".")[0] == "ray"}
    assert found and all(file.startswith("cluster/") for file in found)


def test_the_package_itself_imports_only_its_words_at_once() -> None:
    at_once = {own(found.module) for found in imports(SOURCE / "__init__.py") if found.at_once} - {None}
    assert at_once <= {"errors", "config"}


def test_modules_import_one_another_in_no_circle() -> None:
    names = _module_files()
    _refuse_circles(
        {
            name: {_module(found.module, names) for found in imports(path) if found.at_once} - {None, name}
            for name, path in names.items()
        }
    )


def test_models_import_one_another_in_no_circle_not_even_lazily() -> None:
    names = {name: path for name, path in _module_files().items() if name.startswith("specbranch.models.")}
    counted = {
        name: [found.module for found in imports(path) if (found.file, found.module) not in LAUNCHED]
        for name, path in names.items()
    }
    _refuse_circles(
        {name: {_module(one, names) for one in imported} - {None, name} for name, imported in counted.items()}
    )


def _module_files() -> dict[str, Path]:
    """Every file of ours by its module's name."""
    return {
        ".".join(("specbranch", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in files()
    }


def _refuse_circles(edges: Mapping[str, Set[str | None]]) -> None:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a circle: {' → '.join((*above, name))}"
        if name not in done:
            for other in edges[name]:
                visit(str(other), (*above, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def _module(imported: str, names: dict[str, Path]) -> str | None:
    """The module of ours that `from a.b import c` reads: a.b.c if that is one, else a.b."""
    if imported in names:
        return imported
    above = imported.rpartition(".")[0]
    return above if above in names and above != "specbranch" else None


@pytest.mark.parametrize(
    "what",
    tiered(
        (
            "specbranch",
            "specbranch.core.methods, specbranch.core.loop",
            "specbranch.exec.serial, specbranch.exec.streams, specbranch.exec.process, specbranch.exec.child",
            "specbranch.clock.virtual_clock",
            "specbranch.engine",
            "specbranch.cli.main",
            "specbranch.lab.inflation.source",
        ),
        ("specbranch.engine", "specbranch.cli.main").__contains__,
    ),
)
def test_importing_needs_no_torch(what: str) -> None:
    code = f"import sys, {what}; sys.exit(', '.join(sorted({HEAVY!r} & sys.modules.keys())) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_picture_in_the_docs_shows_these_layers() -> None:
    sys.path.insert(0, str(SOURCE.parents[1] / "scripts"))
    from draw_layers import drawn, layers

    assert (SOURCE.parents[1] / "docs" / "layers.svg").read_text(encoding="utf-8") == drawn(layers())
