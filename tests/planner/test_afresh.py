"""Who takes which place where all begin again from a checkpoint."""

from itertools import product

import pytest

from megatron_bamboo.planner.afresh import Beginning, begin_again
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.healing import vacancies, with_standby
from megatron_bamboo.planner.plan import Checkpoint, PipelinePlan, Plan, initial_plan
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.schedule.redundancy import Redundancy

SAVED = Checkpoint(5, "/saves")


def beginning(stages: int, pipelines: int, redundancy: Redundancy) -> Beginning:
    arrangement = equal_pipelines(stages, pipelines, 4)
    works = (0, *[1] * (arrangement.num_units - 2), 0)
    return Beginning(arrangement, Balance(works, redundancy))


def again(
    stages: int,
    pipelines: int,
    lost: set[str],
    standbys: tuple[str, ...] = (),
    redundancy: Redundancy = Redundancy.LAZY,
) -> Plan:
    begun = beginning(stages, pipelines, redundancy)
    names = [f"node{number}" for number in range(begun.arrangement.num_nodes)]
    before = initial_plan(names, begun.arrangement, redundancy)
    alive = tuple(name for name in names if name not in lost) + standbys
    return begin_again(before, alive, lost, SAVED, begun)


def test_standbys_fill_the_places_and_the_rest_stays_as_it_was() -> None:
    plan = again(2, 2, {"node0", "node1"}, ("node4", "node5", "node6"))
    assert [pipe.stages for pipe in plan.pipelines] == [("node4", "node5"), ("node2", "node3")]
    assert plan.pipelines[0].replicas == ("node5", "node4")
    assert (plan.epoch, plan.restored, plan.lost) == (1, SAVED, ("node0", "node1"))
    assert (plan.dismissed, plan.change, plan.decision) == ((), None, None)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.reason == (
        "all begin again from step 5 in /saves, on 2 nodes for the 2 stages of pipeline 0, 2 nodes "
        "for the 2 stages of pipeline 1; microbatches 4, 4"
    )


def test_with_fewer_nodes_some_run_two_stages_and_no_microbatch_moves() -> None:
    plan = again(4, 2, {"node1", "node2", "node3"})
    first, second = plan.pipelines
    # Three nodes and two: one of the second pipeline's goes to the first.
    assert first.stages == ("node0", "node6", "node7", "node7")
    assert first.replicas == ("node7", "node0", "node6", "node6")
    assert second.stages == ("node4", "node4", "node5", "node5")
    assert second.replicas == ("node5", "node5", "node4", "node4")
    assert (plan.arrangement.microbatches, plan.dismissed) == ((4, 4), ())
    assert "bits" not in plan.reason


def test_a_standby_takes_a_place_that_has_had_nobody() -> None:
    plan = again(2, 1, {"node1"})
    (place,) = vacancies(plan)
    healed = with_standby(plan.pipelines[0], place.rank, "node9")
    assert healed.stages == ("node0", "node9")
    assert healed.replicas == ("node9", "node0")


def test_pipelines_for_which_there_are_too_few_nodes_are_dissolved() -> None:
    plan = again(4, 2, {"node0", "node1", "node2", "node3", "node4"})
    first, second = plan.pipelines
    assert len(set(first.stages)) == 3
    assert (second.stages, plan.arrangement.microbatches) == ((), (8, 0))
    assert plan.reason == (
        "all begin again from step 5 in /saves, on 3 nodes for the 4 stages of pipeline 0, none "
        "for pipeline 1; microbatches 8, 0; from here on the bits are those of this arrangement, "
        "not of the first one"
    )
    without = again(4, 2, {"node0"}, redundancy=Redundancy.NONE)
    assert without.arrangement.microbatches == (8, 0)
    assert len(set(without.pipelines[0].stages)) == 4
    assert len(without.dismissed) == 3


def check_places(pipeline: PipelinePlan) -> None:
    """Each node runs the stage of its rank, and others only up to the next node's."""
    ranks = pipeline.placement()
    assert list(ranks) == sorted(ranks)
    assert all(rank <= stage for stage, rank in enumerate(ranks))
    assert all(ranks[rank] == rank for rank in ranks)
    assert len(set(pipeline.ranks)) == len(pipeline.ranks)
    for node, shadow in zip(pipeline.stages, pipeline.replicas, strict=True):
        assert (shadow is None) == (len(set(pipeline.stages)) == 1)
        assert shadow != node


@pytest.mark.parametrize(("stages", "pipelines"), [*product((1, 2, 3, 5, 8), (1, 2, 3))])
def test_whoever_is_left_each_stage_has_one_place(stages: int, pipelines: int) -> None:
    redundancy = Redundancy.NONE if stages == 1 else Redundancy.LAZY
    total = stages * pipelines
    for alive in range(1, total + 1):
        lost = {f"node{number}" for number in range(total - alive)}
        plan = again(stages, pipelines, lost, redundancy=redundancy)
        running = [pipe for pipe in plan.pipelines if pipe.stages]
        assert plan.arrangement.total_microbatches == 4 * pipelines
        placed = [node for pipe in running for node in dict.fromkeys(pipe.stages)]
        assert len(set(placed)) == len(placed)
        assert {*placed, *plan.dismissed, *lost} == {f"node{n}" for n in range(total)}
        for pipe in running:
            if redundancy is not Redundancy.NONE:
                check_places(pipe)
        if redundancy is not Redundancy.NONE and alive >= pipelines * -(-stages // 2):
            assert plan.arrangement.microbatches == (4,) * pipelines
            assert not plan.dismissed
