"""A dissolved pipeline begins again on standbys, while the others go on."""

import pytest
import rounding
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

STEPS = 60
GROWTHS = {
    "without replicas": (Shape(2, 2, num_steps=STEPS), "none", ("node3@iter2:1.0B1",), 2),
    # The first growth cannot be made then, and two other standbys become the pipeline.
    "with mirrors, after a loss of one of them": (
        Shape(2, 2, num_steps=STEPS, num_mirrors=2),
        "eager",
        ("node0@iter2:0.0F1", "node1@iter2:1REDUCE", "node4@change:0RECV_STATE"),
        4,
    ),
}


@pytest.mark.parametrize("name", GROWTHS)
def test_standbys_become_a_pipeline(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, faults, num_standbys = GROWTHS[name]
    victims = [fault.partition("@")[0] for fault in faults]
    job = rounding.run(scenarios, shape, redundancy, *faults, num_standbys=num_standbys)
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, victims, whole) == []
    (end,) = job.events("finished_job")
    assert [p["shape"]["num_microbatches"] for p in end["pipelines"]] == [4, 4]
    assert all(p["stages"] == p["ranks"] for p in end["pipelines"])
    has_replicas = all(None not in p["replicas"] for p in end["pipelines"])
    assert has_replicas == (redundancy != "none")
    # What each new holder got, and for how long it had nothing to do but wait for it.
    fetches = job.events("fetch")
    assert len(fetches) >= 2 * (1 + has_replicas)
    assert all(e["bytes"] > 0 and e["seconds"] >= 0 for e in fetches)
    assert any("begins again on" in line for line in job.result.lines)
