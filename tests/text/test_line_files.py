"""Files of lines: what is on each, and where something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbranch.errors import BadParameter
from specbranch.text.line_files import prompts_in


def test_a_line_separator_inside_json_ends_no_line(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "one\u2028two\x85three"}\n"four"\n', encoding="utf-8")
    assert prompts_in(rows) == ["one\u2028two\x85three", "four"]


@pytest.mark.parametrize("line", ['{"turns": []}', "3", '{"prompt": null}', "{"])
def test_a_line_without_a_prompt_is_named_by_its_number(line: str, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(f'"one"\n\n{line}\n', encoding="utf-8")
    with pytest.raises(BadParameter, match=r"prompts\.jsonl, line 3 .*expected JSON lines"):
        prompts_in(rows)
