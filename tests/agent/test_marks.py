"""Marks by which nodes find that they are not alike."""

import os
from pathlib import Path

from megatron_bamboo.agent.marks import (
    BLOCK_BYTES,
    MISSING,
    NUM_BLOCKS,
    code_marks,
    difference,
    file_marks,
    mark_of,
)

WHOLE_BYTES = NUM_BLOCKS * BLOCK_BYTES


def test_any_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "vocab.json"
    marks = set()
    for content in (b"", b"a", b"ab", b"b", b"a" * (BLOCK_BYTES + 1), b"a" * BLOCK_BYTES + b"b"):
        file.write_bytes(content)
        assert mark_of(file).startswith(f"{len(content)} bytes, ")
        marks.add(mark_of(file))
    assert len(marks) == 6


def test_of_a_large_file_size_ends_and_blocks_between_count(tmp_path: Path) -> None:
    file, size = tmp_path / "text.bin", 4 * WHOLE_BYTES
    marks = set()
    for place in (None, 0, size - 1, (size - BLOCK_BYTES) * 7 // (NUM_BLOCKS - 1)):
        with file.open("wb") as stream:
            stream.truncate(size)
            if place is not None:
                os.pwrite(stream.fileno(), b"x", place)
        marks.add(mark_of(file))
    assert len(marks) == 4
    # Between two blocks a byte may change unseen.
    with file.open("r+b") as stream:
        before = mark_of(file)
        os.pwrite(stream.fileno(), b"y", BLOCK_BYTES + 1)
    assert mark_of(file) == before


def test_what_differs_is_named_with_both_marks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    inputs = (("--vocab-file", "vocab.json"), ("--merge-file", "merges.txt"))
    here = {**code_marks(), **file_marks(tmp_path, "train.py", inputs)}
    assert here["script train.py"] == mark_of(tmp_path / "train.py")
    assert here["--vocab-file vocab.json"] == MISSING
    assert "megatron_bamboo/agent/marks.py" in here and "torch" in here
    assert difference(here, here) is None
    (tmp_path / "vocab.json").write_text("{}")
    other = {**code_marks(), **file_marks(tmp_path, "train.py", inputs)}
    found = mark_of(tmp_path / "vocab.json")
    assert difference(here, other) == f"--vocab-file vocab.json: here missing, the job's {found}"
    (tmp_path / "merges.txt").write_text("a b")
    other = {**code_marks(), **file_marks(tmp_path, "train.py", inputs)}
    assert (difference(other, here) or "").endswith("the job's missing (and 1 more)")
    assert "megatron_bamboo/new.py: here 1 bytes" in (
        difference({**here, "megatron_bamboo/new.py": "1 bytes, 00"}, here) or ""
    )


def test_a_file_that_cannot_be_read_has_a_mark_too(tmp_path: Path) -> None:
    assert mark_of(tmp_path) == "unreadable: Is a directory"
