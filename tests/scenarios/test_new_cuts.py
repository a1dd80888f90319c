"""Pipelines are cut anew while they train: after a loss, for a standby, and in vain."""

import pytest
import rounding
from forked_jobs import FinishedJob
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.observe.compare import compare_runs

pytestmark = pytest.mark.multiprocess

STEPS = 16
LAYERS = 6
TWO = Shape(2, 1, 6, num_layers=LAYERS, num_steps=STEPS, num_mirrors=2)
SHARING = Shape(2, 2, 4, num_layers=LAYERS, num_steps=STEPS, variant="zero")
HALVES, THIRDS = [[0, 4], [4, 8]], [[0, 3], [3, 5], [5, 8]]
# Without other pipelines no sum is in another order then.
SHRUNK = {
    "alone": Shape(3, 1, 6, num_layers=LAYERS, num_steps=STEPS),
    "with a shared optimizer": Shape(3, 2, 8, num_layers=LAYERS, num_steps=STEPS, variant="zero"),
}
WIDENED = {
    "float16 and mirrors": Shape(
        2, 1, 6, num_layers=LAYERS, num_steps=STEPS, num_mirrors=2, variant="fp16"
    ),
    "two chunks a stage": Shape(2, 1, 6, num_layers=8, num_steps=STEPS, num_chunks=2),
    "workers that share layers": Shape(2, 1, 6, num_layers=LAYERS, num_steps=STEPS, tensor_size=2),
}
IN_VAIN = {
    "of who trains": (TWO, "node1@change:5RECV_UNIT", ["node1", "node2"]),
    "of who joins": (TWO, "node2@change:3RECV_UNIT", ["node2"]),
    "with a shared optimizer": (SHARING, "node1@change:5RECV_UNIT", ["node1", "node4"]),
}


def cuts(job: FinishedJob) -> list[list[list[int]]]:
    """The stages of the first pipeline after each change."""
    return [event["pipelines"][0]["shape"]["spans"] for event in job.events("changed")]


@pytest.mark.parametrize("name", in_ci(SHRUNK, "with a shared optimizer"))
def test_those_who_are_left_share_the_layers_evenly(scenarios: ScenarioRunner, name: str) -> None:
    shape = SHRUNK[name]
    job = rounding.run(scenarios, shape, "lazy", "node1@iter2:1.0B1")
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, ["node1"], whole) == []
    assert compare_runs(whole, job.job_dir).equal == (shape.num_pipelines == 1)
    assert cuts(job) == [HALVES]
    (changed,) = job.events("changed")
    pipeline = changed["pipelines"][0]
    assert set(pipeline["stages"]) == set(pipeline["replicas"]) == {"node0", "node2"}
    assert any("pipeline 0 is cut anew" in line for line in job.result.lines)


@pytest.mark.parametrize("name", in_ci(WIDENED, "float16 and mirrors"))
def test_a_standby_joins_and_a_later_loss_is_a_takeover_in_the_new_cut(
    scenarios: ScenarioRunner, name: str
) -> None:
    shape = WIDENED[name]
    job = rounding.run(scenarios, shape, "eager", "node0@iter12:0COMMIT", num_standbys=1)
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, ["node0"], whole) == []
    assert compare_runs(whole, job.job_dir).equal
    assert len(cuts(job)[0]) == 3 * shape.num_chunks


@pytest.mark.parametrize("name", in_ci(IN_VAIN, "of who trains"))
def test_a_loss_meanwhile_leaves_the_old_cut_in_force(scenarios: ScenarioRunner, name: str) -> None:
    """Its step begins anew, and a standby whose new cut is given up is let go."""
    shape, fault, lost = IN_VAIN[name]
    job = rounding.run(scenarios, shape, "eager", fault, num_standbys=1)
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, lost, whole) == []
    assert THIRDS not in cuts(job)
    assert any("the new cut is given up" in line for line in job.result.lines)


@pytest.mark.slow
def test_a_loss_in_the_gather_after_it_finds_the_change_made(scenarios: ScenarioRunner) -> None:
    job = rounding.run(scenarios, SHARING, "lazy", "node0@change:0GATHER", num_standbys=1)
    whole = rounding.undisturbed(scenarios, SHARING)
    assert rounding.complaints(job, SHARING, ["node0"], whole) == []
    assert cuts(job)[0] == THIRDS


def test_a_dissolved_pipeline_begins_again_on_fewer_nodes(scenarios: ScenarioRunner) -> None:
    """Of its three nodes two are lost; the third is let go, and comes back as a standby."""
    shape = Shape(3, 2, 6, num_layers=LAYERS, num_steps=2 * STEPS)
    faults = ("node3@iter2:0.0F1", "node4@iter2:1.0F1")
    job = rounding.run(scenarios, shape, "lazy", *faults, num_standbys=1)
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, ["node3", "node4"], whole) == []
    (changed,) = job.events("changed")
    assert [pipeline["shape"]["spans"] for pipeline in changed["pipelines"]] == [THIRDS, HALVES]
    assert any("pipeline 1 begins again" in line for line in job.result.lines)
