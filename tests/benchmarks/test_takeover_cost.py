"""The benchmark's command on the smallest pipeline: it runs, goes on, and prints its tables."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "takeover_cost.py"
SMALL = ("--stages", "2", "--layers", "2", "--microbatches", "3", "--seconds", "0.6")
ONE_KIND = ("--quick", "--modes", "eager", "--moments", "0.5")


def run(results: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *SMALL, *ONE_KIND, "--results", str(results)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.multiprocess
@pytest.mark.timeout(480)
def test_a_kill_is_measured_once_and_its_cost_is_in_the_tables(tmp_path: Path) -> None:
    first, again = run(tmp_path / "results"), run(tmp_path / "results")
    assert first.returncode == 0, first.stderr
    assert again.stdout == first.stdout and "round" not in again.stderr
    undisturbed, costs, _, parts, verdict = first.stdout.split("\n\n")
    assert undisturbed.startswith("Undisturbed, median: eager ")
    (row,) = (line.split(" | ") for line in costs.splitlines()[2:])
    assert row[:4] == ["| eager", "0", "50%", "1"]
    assert float(row[4]) > 0
    assert len(parts.splitlines()) == 3
    assert verdict.startswith("1 kills: median pause ")
