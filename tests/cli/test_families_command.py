"""`specbranch models families`, and the sentence for a head inside the target's own files."""

from __future__ import annotations

import json

import pytest
from in_process import Command

from specbranch.models.families.table import FAMILIES
from specbranch.models.files.architecture import Architecture
from tiny_models import CONFIGS, FURTHER


def test_the_table_names_every_family_and_the_json_has_its_fields(command: Command) -> None:
    said = command("models", "families").out
    assert all(f"  {name} " in said for name in FAMILIES)
    assert "qwen3_5" in said and "--runner transformers" in said
    rows = json.loads(command("models", "families", "--json").out)
    assert [row["name"] for row in rows] == list(FAMILIES)
    assert all(set(row) == {"name", "about", "model_types", "gguf", "steps", "limits"} for row in rows)


@pytest.mark.parametrize("kind", {**CONFIGS, **FURTHER})
def test_a_family_is_said_to_be_compiled_if_its_layers_are_plain(kind: str) -> None:
    arch = Architecture.from_config({**CONFIGS, **FURTHER}[kind]().to_dict())
    assert arch.of_family.compiled == arch.is_plain(16)


def test_a_head_inside_the_target_is_refused_as_a_draft(command: Command) -> None:
    result = command("generate", "--draft", "mtp", "Hello")
    assert result.code == 2
    assert "a head inside the target's own files (mtp.pre_fc_norm_embedding" in result.err
