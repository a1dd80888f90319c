"""Nodes change their pipeline while all train: lent, merged, split off, and in vain."""

from dataclasses import replace

import pytest
import rounding
from forked_jobs import FinishedJob
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.membership.workers import node_of

pytestmark = pytest.mark.multiprocess

STEPS = 30
# Four nodes and two, of which the layers can be shared out evenly only over three and three.
UNEVEN = Shape.unequal(((2, 2, 1, 1), (3, 3)), (5, 3), num_steps=STEPS)
LENT = {
    "lazy": UNEVEN,
    "float16 and mirrors": replace(UNEVEN, variant="fp16", num_mirrors=2),
    "evaluated": replace(UNEVEN, variant="evaluated"),
    "workers that share layers": replace(UNEVEN, tensor_size=2),
}
IN_VAIN = {
    "of who is lent": ("node2@change:4RECV_UNIT", "node2"),
    "of who stays": ("node0@change:0COMMIT", "node0"),
    "of who gets the node": ("node4@change:4RECV_UNIT_GRADIENT", "node4"),
}


def crews(job: FinishedJob) -> list[list[list[str]]]:
    """After each change by pipeline who is in it."""
    changes = [event["pipelines"] for event in job.events("changed")]
    return [[sorted(set(pipe["stages"])) for pipe in pipelines] for pipelines in changes]


@pytest.mark.parametrize("name", in_ci(LENT, "lazy"))
def test_the_larger_pipeline_lends_a_node_and_its_later_loss_is_a_takeover(
    scenarios: ScenarioRunner, name: str
) -> None:
    shape = LENT[name]
    job = rounding.run(scenarios, shape, "lazy", "node2@iter25:1COMMIT")
    assert rounding.complaints(job, shape, ["node2"], rounding.undisturbed(scenarios, shape)) == []
    assert crews(job)[0] == [["node0", "node1", "node3"], ["node2", "node4", "node5"]]
    assert any("pipeline 1 is cut anew with node2: " in line for line in job.result.lines)
    taken = {(e["pipeline"], node_of(e["victim"])) for e in job.events("takeover")}
    assert taken == {(1, "node2")}


@pytest.mark.parametrize("name", in_ci(IN_VAIN, "of who is lent"))
def test_a_loss_meanwhile_leaves_all_in_their_pipelines(
    scenarios: ScenarioRunner, name: str
) -> None:
    fault, lost = IN_VAIN[name]
    job = rounding.run(scenarios, UNEVEN, "lazy", fault)
    whole = rounding.undisturbed(scenarios, UNEVEN)
    assert rounding.complaints(job, UNEVEN, [lost], whole) == []
    assert any("the new cut is given up" in line for line in job.result.lines)


@pytest.mark.slow
def test_a_pipeline_that_one_node_runs_alone_joins_the_other(scenarios: ScenarioRunner) -> None:
    shape = Shape.unequal(((2, 1), (2, 1)), (4, 4), num_steps=STEPS)
    job = rounding.run(scenarios, shape, "lazy", "node3@iter2:1.0F1", "node1@iter25:1COMMIT")
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, ["node1", "node3"], whole) == []
    assert [["node0", "node1", "node2"], []] in crews(job)


@pytest.mark.slow
def test_one_that_has_fewer_nodes_than_its_stages_need_joins_the_other(
    scenarios: ScenarioRunner,
) -> None:
    shape = Shape(3, 2, 4, num_steps=STEPS, num_layers=6)
    flags = ("--bamboo-least-nodes", "3")
    job = rounding.run(scenarios, shape, "lazy", "node4@iter2:1.0B1", more_flags=flags)
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, ["node4"], whole) == []
    assert crews(job)[-1] == [["node0", "node1", "node2", "node3", "node5"], []]


@pytest.mark.slow
def test_a_dissolved_pipeline_is_split_off_from_one_that_has_nodes_to_spare(
    scenarios: ScenarioRunner,
) -> None:
    shape = Shape.unequal(((2, 2, 2, 2), (4, 4)), (4, 4), num_steps=STEPS)
    faults = ("node4@iter2:0.0F1", "node5@iter2:1.0F0")
    job = rounding.run(scenarios, shape, "lazy", *faults)
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, ["node4", "node5"], whole) == []
    (after,) = crews(job)
    assert [len(nodes) for nodes in after] == [2, 2]
