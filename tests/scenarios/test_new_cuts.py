"""Pipelines are cut anew while they train: after a loss, for a standby, and in vain."""

import pytest
import rounding
from forked_jobs import FinishedJob
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

STEPS = 16
THREE = Shape(3, 1, num_microbatches=6, num_layers=6, num_steps=STEPS)
TWO = Shape(2, 1, num_microbatches=6, num_layers=6, num_steps=STEPS, num_mirrors=2)


def cuts(job: FinishedJob) -> list[list[list[int]]]:
    """The stages of the first pipeline after each change."""
    return [event["pipelines"][0]["shape"]["spans"] for event in job.events("changed")]


def test_those_who_are_left_share_the_layers_evenly(scenarios: ScenarioRunner) -> None:
    job = rounding.run(scenarios, THREE, "lazy", "node1@iter2:1.0B1")
    whole = rounding.undisturbed(scenarios, THREE)
    assert rounding.complaints(job, THREE, ["node1"], whole) == []
    assert cuts(job) == [[[0, 4], [4, 8]]]
    (changed,) = job.events("changed")
    (pipeline,) = changed["pipelines"]
    assert set(pipeline["stages"]) == set(pipeline["replicas"]) == {"node0", "node2"}
    assert any("pipeline 0 is cut anew" in line for line in job.result.lines)


def test_a_standby_joins_and_a_later_loss_is_a_takeover_in_the_new_cut(
    scenarios: ScenarioRunner,
) -> None:
    fault = "node0@iter12:0COMMIT"
    job = rounding.run(scenarios, TWO, "eager", fault, num_standbys=1)
    whole = rounding.undisturbed(scenarios, TWO)
    assert rounding.complaints(job, TWO, ["node0"], whole) == []
    assert cuts(job)[0] == [[0, 3], [3, 5], [5, 8]]


@pytest.mark.parametrize(
    ("fault", "lost"),
    [("node1@change:5RECV_UNIT", ["node1", "node2"]), ("node2@change:3RECV_UNIT", ["node2"])],
    ids=["of who trains", "of who joins"],
)
def test_a_loss_meanwhile_leaves_the_old_cut_in_force(
    scenarios: ScenarioRunner, fault: str, lost: list[str]
) -> None:
    """Its step begins anew, and a standby whose new cut is given up is let go."""
    job = rounding.run(scenarios, TWO, "eager", fault, num_standbys=1)
    whole = rounding.undisturbed(scenarios, TWO)
    assert rounding.complaints(job, TWO, lost, whole) == []
    assert cuts(job) == []
    assert any("the new cut is given up" in line for line in job.result.lines)
