"""Inflated models are known to the engine only through the registry, in this process and in the draft's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbranch import LLM, SamplingParams
from specbranch.assembly import ModelChoice, drafter_recipe
from specbranch.config import ExecutorName
from specbranch.errors import ModelError
from specbranch.exec.child import _made
from specbranch.exec.messages import Hello, Recipe
from specbranch.exec.wire import from_bytes, to_bytes
from specbranch.lab.inflation import source
from specbranch.lab.inflation.recipe import MARKER, write_inflation
from specbranch.lab.inflation.shapes import ShapeChoice
from specbranch.lab.inflation.sizing import sized
from specbranch.models.files import sources
from specbranch.models.files.locate import locate
from specbranch.models.files.sources import MadeKind, made_model, register_source, source_modules
from tiers import tiered

pytestmark = pytest.mark.usefixtures("one_thread")
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True)
ASKED: dict[str, Any] = {"device": "cpu", "dtype": "float64", "options": {"context_length": 128}}
GROWN = ShapeChoice.parse("hidden=48,layers=3,heads=4,kv_heads=2,head_dim=16,intermediate=64")
MODULE = "specbranch.lab.inflation.source"


@pytest.fixture(scope="module")
def inflated(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Target and draft of the tiny pair in a larger shape."""
    folder = tmp_path_factory.mktemp("inflated")
    for model in pair:
        write_inflation(folder / Path(model).name, sized(model, model, GROWN).recipe)
    target, draft = (str(folder / Path(model).name) for model in pair)
    return target, draft


@pytest.fixture
def nobody_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_KINDS", {})


@pytest.mark.parametrize("executor", tiered(("serial", "process"), "serial".__eq__))
def test_an_inflated_pair_says_what_its_source_says(
    executor: ExecutorName, pair: tuple[str, str], inflated: tuple[str, str]
) -> None:
    plain = LLM(pair[0], method="autoregressive", **ASKED).generate("A branch is a guess", PARAMS)
    with LLM(*inflated, method="speculative", executor=executor, **ASKED) as llm:
        output = llm.generate("A branch is a guess", PARAMS)
    assert output.token_ids == plain.token_ids
    assert output.stats["accepted"] > 0


def test_the_recipe_of_a_draft_process_names_the_sources(inflated: tuple[str, str]) -> None:
    sent = from_bytes(to_bytes(Hello((), drafter_recipe(ModelChoice(inflated[1]), 400))))
    assert isinstance(sent, Hello) and MODULE in sent.recipe.modules


def test_a_draft_process_imports_the_sources_before_it_makes_its_model() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_source"):
        _made(Recipe("specbranch.assembly:make_drafter_by", {}, ("no_such_source",)))


@pytest.mark.usefixtures("nobody_registered")
def test_a_recipe_that_nobody_registered_is_a_sentence(pair: tuple[str, str], inflated: tuple[str, str]) -> None:
    expected = rf"holds {MARKER}, the recipe of .* Import it first, such as {MODULE}; the specbranch commands do"
    for models in ((inflated[0],), (pair[0], inflated[1])):
        with pytest.raises(ModelError, match=expected):
            LLM(*models, device="cpu")


@pytest.mark.usefixtures("nobody_registered")
@pytest.mark.parametrize("text", ["{", "[]", '{"source": "elsewhere"}', "[" * 100_000])
def test_other_files_are_taken_for_no_recipe(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf file"):
        locate(str(tmp_path))


@pytest.mark.usefixtures("nobody_registered")
def test_registering_twice_is_harmless(inflated: tuple[str, str]) -> None:
    assert made_model(inflated[0]) is None and source_modules() == ()
    for _ in range(2):
        register_source(MadeKind(MARKER, MODULE, source.read_inflated))
    made = made_model(inflated[0])
    assert made is not None and made.how == "inflated" and not made.is_draft
    assert source_modules() == (MODULE,)
