"""The benchmark of many agents with thirty: all that is lost is decided, and it is small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "many_agents.py"
SMALL = ("--agents", "30", "--minutes", "0.02", "--lease", "3")


@pytest.mark.multiprocess
def test_of_thirty_agents_six_are_lost_and_decided_about() -> None:
    command = [sys.executable, str(SCRIPT), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    *table, found = done.stdout.splitlines()
    assert all(line.split()[3] == "MiB" for line in table)
    findings = json.loads(found)
    for losses in (findings["died"], findings["silent"]):
        assert losses["number"] == 3
        assert losses["epochs"] >= 1
        assert 0 < losses["seconds"] <= losses["longest_seconds"]
    assert max(findings["mib"]) < 100


def test_pipelines_are_whole() -> None:
    command = [sys.executable, str(SCRIPT), "--agents", "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 2
    assert "--agents 25: pipelines have 10 stages" in done.stderr
