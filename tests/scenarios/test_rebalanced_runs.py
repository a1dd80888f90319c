"""Pipelines that have lost a node get fewer microbatches, where the user lets them."""

import pytest
import rounding
from forked_jobs import FinishedJob
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.rehearsal.record import Events
from megatron_bamboo.rehearsal.work import work_complaints

pytestmark = pytest.mark.multiprocess

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


@pytest.mark.parametrize("name", RUNS)
def test_slower_pipelines_get_fewer_microbatches(scenarios: ScenarioRunner, name: str) -> None:
    """The second victim is lost in a microbatch that its pipeline did not have in the beginning."""
    shape, redundancy = RUNS[name]
    kills = ("node1@iter2:1.0B1", "node3@iter11:1.0B4")
    job = rounding.run(scenarios, shape, redundancy, *kills)
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, ["node1", "node3"], whole) == []
    assert shares(job) == [e["after"] for e in job.events("shares")] == [[3, 5], [4, 4]]
    assert any("microbatches 4, 4 become 3, 5" in line for line in job.result.lines)
    assert work_complaints(Events.read(job.job_dir), JobShape.read(job.job_dir)) == []
