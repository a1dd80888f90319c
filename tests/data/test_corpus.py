import json
from pathlib import Path

import pytest

from megatron_bamboo.data import corpus


def test_over_a_megabyte_of_english_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "deep" / "b.jsonl"
    assert corpus.main(["--output", str(first)]) == 0
    assert corpus.main(["--output", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size > 1_000_000
    texts = [json.loads(line)["text"] for line in first.read_text(encoding="utf-8").splitlines()]
    assert all(text.strip() for text in texts)
    assert sum(text.count(" the ") for text in texts) > 1000
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.jsonl"]


def test_docstrings_are_those_of_modules_classes_and_functions() -> None:
    source = '"""Module."""\nclass A:\n    "Class."\n    async def f(self): "Function."\nx = 1\n'
    assert list(corpus.docstrings(source)) == ["Module.", "Class.", "Function."]


def test_the_test_suite_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sys, "stdlib_module_names", frozenset({"json", "abc"}))
    for name in ("abc.py", "json/__init__.py", "json/tests/test_all.py", "other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in corpus.standard_library_sources(tmp_path)]
    assert found == ["abc.py", "json/__init__.py"]
