"""A run that is stopped after a save, and goes on from it: no bit is lost, no step done twice."""

from pathlib import Path

import pytest
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.checkpoint.folder import read_tracker
from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.observe.compare import compare_runs, format_comparison

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("loses", [False, True], ids=["whole", "while a loss is decided"])
def test_what_was_saved_at_a_stop_is_gone_on_from(
    scenarios: ScenarioRunner, tmp_path: Path, loses: bool
) -> None:
    shape, root = Shape(2, 2), str(tmp_path / "save")
    injections = ("node1@iter1:1.0B0",) if loses else ()
    job = scenarios.start(shape, "lazy", *injections, more_flags=("--save", root))
    job.wait_for_event("plan")  # they build their stages now
    assert bamboo(["stop", "--save", str(job.request.job_dir)]) == 0
    ended = job.finish()
    assert ended.result.status == Status.STOPPED, ended.result.message
    step = read_tracker(Path(root))
    assert step is not None and 1 <= step < 7
    assert f"which holds step {step}" in ended.result.message
    assert ended.result.left_behind == []
    next_job = scenarios.run(shape, "lazy", more_flags=("--load", root))
    assert next_job.result.status == Status.FINISHED, next_job.result.message
    comparison = compare_runs(scenarios.undisturbed(shape), next_job.job_dir)
    assert comparison.equal and comparison.num_losses == 7 - step, format_comparison(comparison)
