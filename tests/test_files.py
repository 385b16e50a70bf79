"""A file is there whole or as it was, whatever happens while it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbranch.errors import BadParameter
from specbranch.files import replacing, write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_at_the_end_alone(durable: bool, tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "file"
    write_whole(file, "old")
    with replacing(file, durable=durable) as part:
        part.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new" and list(file.parent.iterdir()) == [file]


def test_what_is_interrupted_leaves_the_old_file_alone(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "file") as part:
        part.write_text("ne")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadParameter, match="cannot be written"):
        write_whole(tmp_path / "file" / "below", "text")
