"""A job that would have to go on unprotected saves, and waits until another node has come."""

from pathlib import Path

import pytest
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.observe.compare import compare_runs, format_comparison

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(2, 1, num_steps=6)


def test_no_step_is_begun_before_a_node_has_come(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    flags = ("--bamboo-on-too-few", "wait", "--save", str(tmp_path / "save"))
    fault = "node1@iter3:1.0B1"
    job = scenarios.run(SHAPE, "lazy", fault, more_flags=flags, respawn_seconds=0.5)
    assert job.result.status == 0, job.result.message
    said = "\n".join(job.result.lines)
    waits = said.index("] saves step 3 and waits for nodes: pipeline 0 has one node left")
    assert said.index("] lost node1 (") < waits  # which is why
    assert f"saved step 3 to {tmp_path / 'save'}" in said
    assert "epoch 2: in step 4 node1.2 takes stage 1 of pipeline 0" in said
    assert {event["epoch"] for event in job.events("action") if event["step"] == 4} == {2}
    comparison = compare_runs(scenarios.undisturbed(SHAPE), job.job_dir)
    assert comparison.equal, format_comparison(comparison)
