"""Losses in the step in which state moves to its new holders, and in the gather after it.

Which step that is depends on when a loss is found, so the moment is named by its action alone.
"""

import pytest
from evidence import Expected
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.agent.outcome import Status

pytestmark = pytest.mark.multiprocess

FOUR = Shape(4, 1, num_steps=20)
TWO = Shape(4, 2, num_steps=20)
HALF = Shape(4, 1, num_steps=20, variant="bf16")
# Pipelines that share the optimizer's state.
SHARING = Shape(4, 2, num_steps=20, variant="zero")
SHARING_HALF = Shape(4, 2, num_steps=20, variant="zero-bf16")
# Its shadow then runs both stages; node3 and node0 get to shadow what it held.
FIRST = "node1@iter2:1.0B1"

# A new shadow, its neighbour, or a node of another pipeline.
WITHOUT_STANDBYS = {
    "a new shadow gets nothing": (FOUR, "lazy", "node3@change:1RECV_STATE"),
    "a new shadow before the commit": (HALF, "eager", "node3@change:3COMMIT"),
    "a new shadow before the step": (FOUR, "bubble", "node3@change:3STEP"),
    "an onlooker": (TWO, "lazy", "node5@change:1REDUCE"),
    "a new shadow with a share of the optimizer": (SHARING, "lazy", "node3@change:1RECV_STATE"),
    "before the commit of a share": (SHARING_HALF, "lazy", "node3@change:3COMMIT"),
    "before the step of a share": (SHARING, "eager", "node3@change:3STEP"),
    "in the gather": (SHARING, "lazy", "node3@change:1RGATHER"),
    "in the gather of another pipeline": (SHARING_HALF, "bubble", "node5@change:1GATHER"),
}
# It is node8, or node4 where there is one pipeline.
OF_A_STANDBY = {
    "it gets nothing": (FOUR, "lazy", "node4@change:1RECV_STATE"),
    "it has one of two": (HALF, "eager", "node4@change:2RECV_STATE"),
    "before its first commit": (FOUR, "bubble", "node4@change:1COMMIT"),
    "it gets no share of the optimizer": (SHARING, "lazy", "node8@change:1RECV_STATE"),
    "before its first commit of a share": (SHARING_HALF, "eager", "node8@change:1COMMIT"),
}
JOINED = {
    "before its first step": (FOUR, "lazy", "node4@change:1STEP"),
    "before its first step of a share": (SHARING, "lazy", "node8@change:1STEP"),
    "in its first gather": (SHARING_HALF, "lazy", "node8@change:1GATHER"),
    "in its first gather as a shadow": (SHARING, "eager", "node8@change:2RGATHER"),
}
SENDERS = {
    "the only holder of the victim's stage": ("node0@change:1SEND_STATE", 1, "node0"),
    "the only holder of its own stage": ("node2@change:2SEND_STATE", 2, "node2"),
}


def victim(injection: str) -> str:
    return injection.split("@")[0]


@pytest.mark.parametrize(
    "name",
    in_ci(
        WITHOUT_STANDBYS,
        "a new shadow before the commit",
        "a new shadow with a share of the optimizer",
    ),
)
def test_a_loss_while_new_shadows_are_made(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, second = WITHOUT_STANDBYS[name]
    job = scenarios.run(shape, redundancy, FIRST, second)
    lost = ["node1", victim(second)]
    expected = Expected(shape, redundancy, lost, knows_takeovers=False)
    assert scenarios.complaints(job, expected) == []


@pytest.mark.parametrize(
    "name", in_ci(OF_A_STANDBY, "it has one of two", "before its first commit of a share")
)
def test_a_standby_that_is_lost_before_it_has_joined(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, second = OF_A_STANDBY[name]
    job = scenarios.run(shape, redundancy, FIRST, second, num_standbys=1)
    lost, place = ["node1", victim(second)], {victim(second): "node1"}
    expected = Expected(shape, redundancy, lost, place, knows_takeovers=False)
    assert scenarios.complaints(job, expected) == []


@pytest.mark.parametrize("name", in_ci(JOINED, "in its first gather"))
def test_a_standby_that_is_lost_as_soon_as_it_has_joined(
    scenarios: ScenarioRunner, name: str
) -> None:
    shape, redundancy, second = JOINED[name]
    job = scenarios.run(shape, redundancy, FIRST, second, num_standbys=1)
    lost, place = ["node1", victim(second)], {victim(second): "node1"}
    assert scenarios.complaints(job, Expected(shape, redundancy, lost, place)) == []


@pytest.mark.parametrize("name", SENDERS)
@pytest.mark.parametrize("shape", [FOUR, SHARING], ids=str)
@pytest.mark.parametrize("num_standbys", in_ci([0, 1], 1))
def test_a_sender_that_is_lost_with_the_only_copy_ends_the_job(
    scenarios: ScenarioRunner, name: str, shape: Shape, num_standbys: int
) -> None:
    second, stage, node = SENDERS[name]
    job = scenarios.run(shape, "lazy", FIRST, second, num_standbys=num_standbys)
    assert job.result.status == Status.NO_HOLDER
    assert f"pipeline 0: stage {stage} has no live holder ({node} was its only one)" in (
        job.result.message
    )
    assert job.result.left_behind == []
