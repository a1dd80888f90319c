"""The benchmark's command on the smallest shape: it runs, and both sides train the same."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "throughput.py"
SMALL = ("--layers", "2", "--hidden", "16", "--sequence", "8", "--microbatches", "2")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_both_tables_have_all_rows_and_both_sides_the_same_losses() -> None:
    options = ["--stages", "2", "--chunks", "1", "--pairs", "2", "--steps", "1", "--profile"]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, *options], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    _, throughput, profile = (text.splitlines() for text in result.stdout.split("\n\n"))
    (shape,) = (cells(line) for line in throughput[2:])
    assert shape[:3] == ["2", "1", "2"]
    # The gradient norm is added in another order, so clipping may round in another way.
    assert float(shape[-1]) < 1e-5
    parts = {row[2]: [float(cell) for cell in row[3:]] for row in map(cells, profile[2:])}
    assert len(parts) == 9
    # A rank begins its step a little before the last one has ended the step before.
    del parts["all else"]
    # Whatever part has no time on one side or the other is not counted there.
    assert all(min(seconds) > 0 for seconds in parts.values()), parts


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
