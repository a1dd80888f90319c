"""The door through which Megatron-core is imported."""

import os
import subprocess
import sys
from pathlib import Path


def import_megatron(apex_folder: Path | None) -> subprocess.CompletedProcess[str]:
    """Import the tokenizer in a fresh process that finds this apex, if any."""
    code = "import megatron_bamboo.data.tokenizer"
    path = [str(apex_folder)] if apex_folder else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, *sys.path[1:]])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_import_prints_nothing() -> None:
    result = import_megatron(None)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_an_unrelated_apex_is_one_line_and_status_two(tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise AssertionError('imported')")
    result = import_megatron(tmp_path)
    assert result.returncode == 2
    assert "pip uninstall apex" in result.stderr and result.stderr.count("\n") == 1
