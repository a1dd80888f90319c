"""The benchmark's command on the smallest pipeline, and what a memory-balanced one is."""

import subprocess
import sys
from pathlib import Path

import pytest
from overhead import memory_balanced
from timed_jobs import Emulation

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
SMALL = ("--stages", "2", "--layers", "2", "--microbatches", "3", "--seconds", "0.3")
ONE_KIND = ("--quick", "--pipelines", "memory-balanced", "--rounds", "1")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(480)
def test_all_modes_are_timed(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *SMALL, *ONE_KIND]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines()[4:]]
    assert [row[1] for row in rows] == ["none", "lazy", "eager", "bubble"]
    assert [row[2] for row in rows] == ["3"] * 4
    assert rows[0][4] == "+0.00%"
    assert all(float(seconds) > 0.2 for row in rows for seconds in row[3].split())


def test_a_memory_balanced_pipeline_has_the_same_work_and_more_of_it_in_the_end() -> None:
    equal = Emulation.equal(8, 16, 16, 7.0)
    balanced = memory_balanced(equal)
    assert sum(balanced.forward_ms) == pytest.approx(sum(equal.forward_ms), rel=1e-4)
    assert balanced.forward_ms == tuple(sorted(balanced.forward_ms))
    assert balanced.forward_ms[-1] / balanced.forward_ms[0] == pytest.approx(18 / 11, rel=1e-3)


def test_equal_layers_take_the_seconds_that_are_asked_for() -> None:
    equal = Emulation.equal(8, 16, 16, 7.0)
    assert isinstance(equal.costs.forward, tuple) and isinstance(equal.costs.backward, tuple)
    slot = float(equal.costs.forward[0]) + float(equal.costs.backward[0])  # type: ignore[arg-type]
    assert (16 + 8 - 1) * slot == pytest.approx(7.0, rel=1e-3)
