"""The benchmark's command on four nodes: it trains, goes on, and finds all as it must be."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loss_curve.py"
QUICK = ("--quick", "--orders", "1")


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *QUICK, "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# The curve and its measure are tested by themselves, and so is such a job.
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_a_curve_is_compared_step_by_step(tmp_path: Path) -> None:
    first, again = run(tmp_path), run(tmp_path)
    assert first.stdout == again.stdout and "trains" not in again.stderr
    curve, state, plans, _ = first.stdout.split("\n\n")
    rows = [line.strip("| ").split(" | ") for line in curve.splitlines()[2:]]
    assert len(rows) == 12 and rows[0][1] == "4" and rows[-1][1] == "4"
    assert any("1" in row[1].split() for row in rows)
    kinds = [line.strip("| ").split(" | ")[0] for line in state.splitlines()[2:]]
    assert {"parameter", "exp_avg", "exp_avg_sq"} <= set(kinds)
    assert "begins again on" in plans
