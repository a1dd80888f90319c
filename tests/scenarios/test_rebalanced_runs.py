"""Pipelines that have lost a node get fewer microbatches, where the user lets them.

Beside an undisturbed run only the order of sums differs; each sample of each step is still in
exactly one microbatch of one pipeline.
"""

import pytest
from forked_jobs import FinishedJob
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.observe.compare import compare_runs, format_comparison
from megatron_bamboo.observe.saved_run import open_run
from megatron_bamboo.rehearsal.record import Events, said_steps
from megatron_bamboo.rehearsal.work import work_complaints

pytestmark = pytest.mark.multiprocess

# With Adam's usual epsilon gradients that are nothing but rounding would make whole steps.
FLAGS = ("--adam-eps", "1e-3", "--bamboo-policy", "auto")
STEPS = 20
RUNS = {
    "with mirrors": (Shape(2, 2, num_steps=STEPS, num_mirrors=2), "lazy"),
    "eager, with a shared optimizer": (Shape(2, 2, num_steps=STEPS, variant="zero"), "eager"),
}


def shares(job: FinishedJob) -> list[list[int]]:
    """The microbatches of the pipelines after each change."""
    return [
        [pipeline["shape"]["num_microbatches"] for pipeline in event["pipelines"]]
        for event in job.events("changed")
    ]


def numbers(values: tuple[str, str]) -> list[float]:
    return [float.fromhex(value) for value in values]


@pytest.mark.parametrize("name", RUNS)
def test_slower_pipelines_get_fewer_microbatches(scenarios: ScenarioRunner, name: str) -> None:
    """The second victim is lost in a microbatch that its pipeline did not have in the beginning."""
    shape, redundancy = RUNS[name]
    undisturbed = scenarios.run(shape, "none", more_flags=FLAGS)
    kills = ("node1@iter2:1.0B1", "node3@iter11:1.0B4")
    job = scenarios.run(shape, redundancy, *kills, more_flags=FLAGS)
    assert job.result.status == 0, job.result.message
    assert [node for node, _cause in job.result.lost] == ["node1", "node3"]
    assert shares(job) == [e["after"] for e in job.events("shares")] == [[3, 5], [4, 4]]
    assert any("microbatches 4, 4 become 3, 5" in line for line in job.result.lines)
    assert said_steps(job.result.lines) == list(range(1, STEPS + 1))
    assert work_complaints(Events.read(job.job_dir), JobShape.read(job.job_dir)) == []
    check_samples(job, shape.total_microbatches)
    lost, whole = (open_run(run.job_dir).losses for run in (job, undisturbed))
    for step, values in lost.items():
        assert numbers(values) == pytest.approx(numbers(whole[step]), rel=1e-5), step
    comparison = compare_runs(undisturbed.job_dir, job.job_dir)
    assert not comparison.copies, format_comparison(comparison)
    assert all(d.max_abs < 1e-5 for d in comparison.tensors), format_comparison(comparison)


def check_samples(job: FinishedJob, batch: int) -> None:
    """Each of a step is read for one place alone [1]."""
    read = {
        (event["step"], event["pipeline"], event["microbatch"], *event["samples"])
        for event in job.events("samples")
    }
    assert sorted(sample for *_, sample in read) == list(range(batch * STEPS))
