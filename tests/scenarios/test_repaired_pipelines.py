"""A pipeline that misses stages gets them from another one, and no bit changes.

It begins its step anew; the others go on with what they have done of it.
"""

import pytest
from evidence import Expected
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.agent.outcome import Status

pytestmark = pytest.mark.multiprocess

THREE = Shape(3, 2, num_steps=8)
BOTH = ("node0@iter3:0.0B1", "node1@iter3:1.0B1")
LOSSES = {
    "both holders at once": (THREE, "eager", BOTH),
    "both at the commit": (THREE, "lazy", ("node1@iter3:1COMMIT", "node2@iter3:2COMMIT")),
    # What had come of the state counts for nothing then, and another holder sends it.
    "and then who sends it": (THREE, "eager", (*BOTH, "node4@change:1SEND_STATE")),
    "each what the other has": (
        THREE,
        "lazy",
        (*BOTH, "node4@iter3:1.0B2", "node5@iter3:2.0B2"),
    ),
    "workers that share layers": (
        Shape(3, 2, num_steps=8, tensor_size=2),
        "lazy",
        BOTH,
    ),
}


@pytest.mark.parametrize("name", in_ci(LOSSES, "and then who sends it"))
def test_a_stage_that_others_have_comes_back(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, faults = LOSSES[name]
    victims = [fault.partition("@")[0] for fault in faults]
    job = scenarios.run(shape, redundancy, *faults)
    said = "\n".join(job.result.lines)
    expected = Expected(shape, redundancy, victims, knows_takeovers=False)
    assert scenarios.complaints(job, expected) == []
    assert "which nobody else there has" in said


def test_standbys_become_a_pipeline_that_is_lost_as_a_whole(scenarios: ScenarioRunner) -> None:
    shape, victims = Shape(2, 2, num_steps=8), ("node0", "node1")
    faults = ("node0@iter3:0.0B1", "node1@iter3:1REDUCE")
    job = scenarios.run(shape, "lazy", *faults, num_standbys=2)
    said = "\n".join(job.result.lines)
    joined = {"node4": "node0", "node5": "node1"}
    expected = Expected(shape, "lazy", victims, joined, knows_takeovers=False)
    assert scenarios.complaints(job, expected) == []
    assert "node4 gets stage 0 of pipeline 0" in said


def test_without_a_node_for_it_the_job_says_that_others_have_its_state(
    scenarios: ScenarioRunner,
) -> None:
    faults = ("node0@iter3:0.0B1", "node1@iter3:1REDUCE")
    job = scenarios.run(Shape(2, 2, num_steps=8), "lazy", *faults)
    assert job.result.status == Status.NO_HOLDER
    assert "others have its state, but none of its nodes is left" in job.result.message
    assert job.result.left_behind == []
