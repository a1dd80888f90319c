"""Nodes die in different pipelines, one after another, or without any live holder left."""

import itertools

import pytest
from in_ci import several_in_ci
from moments import MODES
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

SURVIVED = {
    "two pipelines in one step": (Shape(3, 2), ("node1@iter2:1.0B1", "node5@iter2:2.0F2")),
    "one stage of two pipelines": (Shape(3, 3), ("node1@iter2:1.0B2", "node7@iter2:1.0F3")),
    "all pipelines": (Shape(3, 3), ("node0@iter2:0.0B0", "node4@iter2:1.0B3", "node8@iter3:2.0B1")),
    "one after another": (Shape(3, 2), ("node2@iter2:2.0RECV_F1", "node3@iter4:0.0SEND_F2")),
    "stages 1 and 3 at once": (Shape(4, 1), ("node1@iter2:1.0B1", "node3@iter2:3.0B1")),
    "stages 0 and 2 at once": (Shape(4, 2), ("node4@iter2:0.0F3", "node6@iter2:2.0SEND_B0")),
    "stages 0 and 2 in turn": (Shape(4, 1), ("node0@iter2:0.0B2", "node2@iter3:2.0RECV_B1")),
    "in the first step and the last": (Shape(3, 2), ("node0@iter1:0.0F0", "node4@iter7:1.0B3")),
    "both in the first step": (Shape(3, 2), ("node2@iter1:2.0B3", "node3@iter1:0.0RECV_B0")),
}
CASES = tuple(zip(SURVIVED, itertools.cycle(MODES), strict=False))


@pytest.mark.parametrize(("name", "redundancy"), several_in_ci(CASES, *CASES[2::2]))
def test_losses_apart_change_no_bit(scenarios: ScenarioRunner, name: str, redundancy: str) -> None:
    shape, injections = SURVIVED[name]
    victims = [injection.split("@")[0] for injection in injections]
    assert scenarios.survive(shape, redundancy, victims, *injections) == []


@pytest.mark.parametrize(
    ("shape", "injections", "message"),
    [
        (
            Shape(3, 1),
            ("node1@iter2:1.0B1", "node0@iter3:0.0F0"),
            "pipeline 0: stage 1 has no live holder (node0 was its only one)",
        ),
        # Its share of the optimizer's state nobody else has.
        (
            Shape(3, 2, variant="zero"),
            ("node3@iter2:0.0F2", "node4@iter3:1.0B0"),
            "pipeline 1: stage 1 has no live holder (node4 was its only one)",
        ),
    ],
)
def test_a_stage_without_holder_ends_the_job_with_a_reason(
    scenarios: ScenarioRunner, shape: Shape, injections: tuple[str, ...], message: str
) -> None:
    job = scenarios.run(shape, "lazy", *injections)
    assert job.result.status == 3
    assert message in job.result.message
    assert job.result.left_behind == []
    assert len(job.result.lost) == 2
