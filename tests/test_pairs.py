"""Pairs by name: where their drafts are found, what is refused, and that `LLM` takes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specbranch import LLM, SamplingParams, pairs
from specbranch.errors import BadParameter, ModelError
from specbranch.models.drafts.draft_name import KEY
from specbranch.models.files.store import KNOWN
from specbranch.pairs import DEFAULT_PAIR, PAIRS, MissingDraft, Pair, card, chosen_models, draft_folder, draft_path

PROMPT = "A branch is a guess"
DRAFTING = {"policy": "confidence"}  # whether it pays or not


def test_every_pair_has_a_known_target() -> None:
    assert all(pair.name == name and pair.target in KNOWN for name, pair in PAIRS.items())
    assert {"smollm2-weak", "smollm2-default", "smollm2-strong"} <= PAIRS.keys() and DEFAULT_PAIR in PAIRS


def test_the_default_draft_is_in_the_package_and_belongs_to_its_target() -> None:
    folder = draft_folder(DEFAULT_PAIR)
    assert folder.parent == Path(pairs.__file__).parent / "drafts"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 30e6
    assert {"README.md", "config.json", "model.safetensors", "provenance.json"} <= {
        file.name for file in folder.iterdir()
    }


def test_nothing_named_is_the_default_pair_and_a_name_is_taken_as_it_is() -> None:
    target = PAIRS[DEFAULT_PAIR].target
    assert chosen_models(None, None, None) == (target, DEFAULT_PAIR)
    assert chosen_models("smollm2-weak", None, None) == ("smollm2-135m", "smollm2-weak")
    assert chosen_models(None, "big", None) == ("big", None)
    assert chosen_models(None, "big", "small") == ("big", "small")
    assert chosen_models(None, None, "small") == (target, "small")


@pytest.mark.parametrize(
    ("target", "draft", "said"), [("big", None, "target 'big'"), ("big", "small", "target 'big' and draft 'small'")]
)
def test_a_pair_beside_a_model_is_refused(target: str, draft: str | None, said: str) -> None:
    with pytest.raises(BadParameter, match=f"'smollm2-weak' was given together with {said}"):
        LLM(target, draft, pair="smollm2-weak")


def test_an_unknown_pair_offers_the_nearest_and_lists_all() -> None:
    with pytest.raises(
        BadParameter, match=r"Did you mean 'smollm2-strong'\?.*smollm2-default, smollm2-strong, smollm2-weak"
    ):
        LLM(pair="smollm2-strng")


def test_a_draft_that_is_not_here_says_where_one_is_to_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pairs, "IN_CHECKOUT", tmp_path)
    (tmp_path / "smollm2-weak").mkdir()  # started, not finished
    for attempt in (
        lambda: draft_folder("smollm2-weak"),
        lambda: LLM(pair="smollm2-weak"),
        lambda: LLM(draft="smollm2-weak"),
    ):
        with pytest.raises(
            MissingDraft, match=r"checkout of the repository.*scripts/train_drafts\.py.*SPECBRANCH_DRAFTS"
        ):
            attempt()
    assert card("smollm2-weak") is None


def test_a_draft_of_another_target_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(draft_folder(DEFAULT_PAIR), tmp_path / "smollm2-weak")
    file = tmp_path / "smollm2-weak" / "config.json"
    values = json.loads(file.read_text())
    values[KEY] |= {"target": "another-model", "target_fingerprint": "0" * 64}
    file.write_text(json.dumps(values))
    monkeypatch.setenv(pairs.DRAFTS_VARIABLE, str(tmp_path))
    monkeypatch.setattr("specbranch.assembly.load_tokenizer", None)  # would be called next
    with pytest.raises(
        ModelError, match=r"'smollm2-weak' runs on smollm2-135m, but the draft in .* was made for another-model"
    ):
        LLM(pair="smollm2-weak")


def test_a_folder_named_in_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(draft_folder(DEFAULT_PAIR), tmp_path / "smollm2-weak")
    monkeypatch.setenv(pairs.DRAFTS_VARIABLE, str(tmp_path))
    assert draft_path("smollm2-weak") == str(tmp_path / "smollm2-weak")
    assert draft_path(DEFAULT_PAIR) == str(pairs.IN_PACKAGE / DEFAULT_PAIR)
    assert draft_path("some/folder") == "some/folder"


def test_a_card_tells_layers_size_and_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(draft_folder(DEFAULT_PAIR), tmp_path / "smollm2-weak")
    monkeypatch.setenv(pairs.DRAFTS_VARIABLE, str(tmp_path))
    (tmp_path / "smollm2-weak" / "provenance.json").write_text('{"seed": 1, "figures": {"top1": 0.5, "top3": 0.75}}')
    found = card("smollm2-weak")
    layers = json.loads((tmp_path / "smollm2-weak" / "config.json").read_text())["num_hidden_layers"]
    assert found is not None and (found.layers, found.top1, found.top3) == (layers, 0.5, 0.75)
    assert 5 < found.megabytes < 30
    (tmp_path / "smollm2-weak" / "provenance.json").write_text("[")
    without = card("smollm2-weak")
    assert without is not None and without.top1 is None


def test_llm_decodes_a_pair_by_name_as_plain_decoding_does(tiny: Pair) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30)
    with LLM(pair="tiny", speculative=DRAFTING, device="cpu", dtype="float64", options={"context_length": 128}) as llm:
        output = llm.generate(PROMPT, params)
        plain = llm.using("autoregressive").generate(PROMPT, params)
    assert output.token_ids == plain.token_ids and plain.stats["drafted"] == 0
    assert output.stats["drafted"] > 0 and llm.target == tiny.target


def test_llm_without_names_is_the_default_pair(tiny: Pair) -> None:
    llm = LLM(speculative=DRAFTING, device="cpu", options={"context_length": 64})
    assert (llm.target, llm.method) == (tiny.target, "specbranch")
    assert llm.generate(PROMPT, SamplingParams(max_tokens=10)).stats["drafted"] > 0


def test_a_pairs_draft_can_be_named_beside_its_target(tiny: Pair) -> None:
    llm = LLM(tiny.target, "tiny", speculative=DRAFTING, device="cpu", options={"context_length": 64})
    assert llm.generate(PROMPT, SamplingParams(max_tokens=10)).stats["drafted"] > 0


@pytest.mark.parametrize("method", ["autoregressive", "lookup"])
def test_a_method_without_a_draft_does_not_even_look_for_it(
    method: str, tiny: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(pairs.DRAFTS_VARIABLE, str(tmp_path))
    assert (
        LLM(method=method, device="cpu", options={"context_length": 64})
        .generate(PROMPT, SamplingParams(max_tokens=5))
        .token_ids
    )
    with pytest.raises(MissingDraft):
        LLM(device="cpu", options={"context_length": 64})


@pytest.mark.slow
@pytest.mark.default_model
def test_the_default_pair_gives_the_tokens_of_plain_decoding(default_model: Path) -> None:
    params = SamplingParams(max_tokens=40)
    messages = [{"role": "user", "content": "Name three things a lighthouse keeper needs."}]
    with LLM(device="cpu") as llm:
        plain = llm.using("autoregressive").chat(messages, params)
        for method in ("specbranch", "tree", "speculative"):
            drafted = llm.using(method).chat(messages, params)
            assert drafted.token_ids == plain.token_ids
        assert drafted.stats["tokens_per_forward"] > 1.2, "planned methods draft only where that pays"
