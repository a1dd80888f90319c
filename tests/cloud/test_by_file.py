"""A file that is there is a notice."""

from pathlib import Path

import pytest

from megatron_bamboo.cloud.asking import BadAnswer
from megatron_bamboo.cloud.by_file import ByFile
from megatron_bamboo.cloud.source import NOTHING, Word
from megatron_bamboo.membership.leaving import Notice


def test_a_file_comes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = ByFile(path)
    assert source.look() == NOTHING
    for text, seconds in (("", None), ("30\n", 30.0)):
        path.write_text(text)
        assert source.look() == Word(Notice(f"file {path}", seconds))
    path.unlink()
    assert source.look() == NOTHING


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notice"
    path.write_text(text)
    with pytest.raises(BadAnswer, match=str(path)):
        ByFile(path).look()


def test_a_folder_is_no_notice(tmp_path: Path) -> None:
    with pytest.raises(BadAnswer, match="cannot be read"):
        ByFile(tmp_path).look()
