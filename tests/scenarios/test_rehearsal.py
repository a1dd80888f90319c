"""A small campaign of ``bamboo rehearse``, as its user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_gpt import SCRIPT, Shape, flags, prepare_text

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(3, 1, num_steps=16)
KINDS = ("flip", "kill")
LOSSES = f"--losses 2 --per-run 1 --kinds {','.join(KINDS)}".split()
CAMPAIGN = [*LOSSES, "--nodes", "3", "--jobs", "2", "--fork-workers"]
VERIFIED = ("--bamboo-lease", "3", "--bamboo-verify-replicas", "2")


@pytest.mark.timeout(600)
def test_a_campaign_finds_nothing_and_goes_on_where_it_was(tmp_path: Path) -> None:
    prepare_text(tmp_path)
    folder = tmp_path / "campaign"
    training = [str(SCRIPT), *flags(tmp_path, SHAPE, "lazy"), *VERIFIED]
    options = [*CAMPAIGN, "--dir", str(folder)]
    command = [sys.executable, "-m", "megatron_bamboo", "rehearse", *options, "--", *training]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    strikes = [strike for result in results for strike in result["strikes"]]
    assert len(strikes) >= 2
    assert {strike["how"] for strike in strikes} == set(KINDS)
    assert "0 broken" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (again.returncode, "run 1" in again.stdout) == (0, False)
