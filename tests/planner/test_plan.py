import pytest

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import NoHolder, plan_after_loss

NODES = tuple(f"node{i}" for i in range(8))
DECISION = StepDecision(7, True, ((0.1).hex(), (2.0).hex()), "node1 passed its commit")


def start(redundancy: str = "lazy") -> Plan:
    return initial_plan(NODES, equal_pipelines(4, 2, 8), redundancy)


def test_nodes_fill_one_pipeline_after_another_and_shadow_their_successors() -> None:
    plan = start()
    assert [pipe.stages for pipe in plan.pipelines] == [NODES[:4], NODES[4:]]
    assert plan.pipelines[1].replicas == ("node7", "node4", "node5", "node6")
    assert plan.pipelines[1].placement() == (0, 1, 2, 3)
    assert plan.pipelines[1].replica_ranks() == (3, 0, 1, 2)
    assert (plan.epoch, plan.arrangement.microbatches, plan.nodes) == (0, (8, 8), NODES)
    assert plan.pipeline_of("node5") == 1


@pytest.mark.parametrize("num_stages", [1, 4])
def test_no_replicas_without_redundancy_or_without_a_neighbour(num_stages: int) -> None:
    mode = "none" if num_stages == 4 else "eager"
    plan = initial_plan(NODES, equal_pipelines(num_stages, len(NODES) // num_stages, 8), mode)
    assert all(pipe.replicas == (None,) * num_stages for pipe in plan.pipelines)


def test_nodes_that_make_no_whole_pipelines_are_refused() -> None:
    with pytest.raises(
        ValueError, match="8 nodes do not make whole pipelines of 3 and 3 stages: start 6"
    ):
        initial_plan(NODES, equal_pipelines(3, 2, 8), "lazy")
    with pytest.raises(ValueError, match="named once"):
        initial_plan(("node0", "node0"), equal_pipelines(2, 1, 8), "lazy")


@pytest.mark.parametrize("victim", range(4))
def test_the_shadow_runs_the_lost_stage(victim: int) -> None:
    plan = plan_after_loss(start(), {f"node{victim}"}, DECISION)
    shadow = (victim - 1) % 4
    expected = [victim if stage == victim else stage for stage in range(4)]
    expected[victim] = shadow
    assert plan.pipelines[0].placement() == tuple(expected)
    without_replica = {victim, (victim + 1) % 4}
    assert {
        stage for stage, holder in enumerate(plan.pipelines[0].replicas) if holder is None
    } == without_replica
    assert plan.pipelines[0].ranks == NODES[:4]
    assert plan.pipelines[1] == start().pipelines[1]
    assert (plan.epoch, plan.lost, plan.decision) == (1, (f"node{victim}",), DECISION)
    assert plan.reason == (
        f"node{shadow} takes over stage {victim} of pipeline 0 from node{victim}"
    )
    assert set(plan.nodes) == set(NODES) - {f"node{victim}"}


def test_losses_that_leave_a_holder_add_up() -> None:
    plan = plan_after_loss(start(), {"node1", "node6"}, DECISION)
    plan = plan_after_loss(plan, {"node3"}, DECISION)
    assert plan.pipelines[0].stages == ("node0", "node0", "node2", "node2")
    assert plan.pipelines[1].stages == ("node4", "node5", "node5", "node7")
    assert (plan.epoch, plan.lost) == (2, ("node3",))


def test_a_stage_without_a_holder_is_named() -> None:
    with pytest.raises(NoHolder, match=r"pipeline 1: stage 2 has no live holder \(node6 was its"):
        plan_after_loss(start("none"), {"node6"}, DECISION)
    with pytest.raises(NoHolder, match=r"pipeline 0: stage 3 .*node3 and node2 are both lost"):
        plan_after_loss(start(), {"node3", "node2"}, DECISION)
    degraded = plan_after_loss(start(), {"node6"}, DECISION)
    with pytest.raises(NoHolder) as caught:
        plan_after_loss(degraded, {"node5"}, DECISION)
    assert (caught.value.pipeline, caught.value.stage) == (1, 2)


def test_a_plan_comes_back_exactly() -> None:
    for plan in (start(), start("none"), plan_after_loss(start(), {"node2"}, DECISION)):
        assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises((TypeError, ValueError)):
        Plan.from_json(start().to_json().replace('"reason"', '"season"'))


def test_the_plan_of_a_tensor_rank_names_its_workers() -> None:
    plan = plan_after_loss(start(), {"node2"}, DECISION)
    own = plan.for_tensor_rank(1, 2)
    first = own.pipelines[0]
    assert first.stages == ("node0:1", "node1:1", "node1:1", "node3:1")
    assert first.replicas == ("node3:1", "node0:1", None, None)
    assert first.ranks == ("node0:1", "node1:1", "node2:1", "node3:1")
    assert first.placement() == plan.pipelines[0].placement()
    assert own.lost == ("node2:1",)
    assert (own.epoch, own.arrangement, own.decision) == (1, plan.arrangement, DECISION)
    assert own.pipeline_of("node5:1") == plan.pipeline_of("node5")


def test_with_one_worker_a_node_the_plan_is_the_same() -> None:
    plan = plan_after_loss(start(), {"node2"}, DECISION)
    assert plan.for_tensor_rank(0, 1) == plan


def test_plans_of_tensor_ranks_share_no_worker() -> None:
    names = [set(start().for_tensor_rank(rank, 3).nodes) for rank in range(3)]
    assert len(set.union(*names)) == sum(map(len, names)) == 3 * len(NODES)
