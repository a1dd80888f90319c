"""Who writes a checkpoint: each stage once, by a live holder, whatever was lost."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.checkpoint.writers import writers_of
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import (
    Arrangement,
    PipelineShape,
    equal_pipelines,
    spans_of_layers,
)
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import NoHolder, plan_after_loss


def plan_of(num_stages: int, num_pipelines: int) -> Plan:
    nodes = [f"node{number}" for number in range(num_stages * num_pipelines)]
    return initial_plan(nodes, equal_pipelines(num_stages, num_pipelines, 4), "lazy")


def test_stages_are_spread_over_the_pipelines() -> None:
    writers = writers_of(plan_of(4, 2), 1)
    assert writers.workers == ("node0", "node5", "node2", "node7")
    assert [writers.stages_of(f"node{n}") for n in (0, 5, 1)] == [(0,), (1,), ()]
    assert writers.lead == "node0"


def test_a_node_with_two_stages_writes_both() -> None:
    plan = plan_after_loss(plan_of(3, 1), {"node2"}, None)
    writers = writers_of(plan, 1)
    assert writers.workers == ("node0", "node1")
    assert writers.stages_of("node1") == (1, 2)


def test_who_is_only_getting_a_stage_has_nothing_of_the_step_that_is_saved() -> None:
    passed = StepDecision(3, True, (), "as the test wants it")
    plan = go_on_after(plan_of(3, 2), {"node3", "node4"}, passed, range(1, 9), None, {})
    assert (plan.pipelines[1].stages[1], plan.lacking) == ("node5", {(1, 1, "node5")})
    writers = writers_of(plan, 1)
    assert writers.stages_of("node1") == (1,)
    made = plan.after(StepDecision(4, True, (), "as the test wants it"))
    assert writers_of(made, 1).stages_of("node5") == (1,)


def test_all_workers_of_a_node_write_whoever_asks() -> None:
    plan = plan_of(2, 1)
    of_nodes = writers_of(plan, 2)
    assert of_nodes.workers == ("node0:0", "node0:1", "node1:0", "node1:1")
    assert of_nodes.stages_of("node1:0") == of_nodes.stages_of("node1:1") == (1,)
    assert {writers_of(plan.for_tensor_rank(rank, 2), 2) for rank in (0, 1)} == {of_nodes}


def test_where_the_optimizer_is_shared_out_each_primary_writes_its_share() -> None:
    writers = writers_of(plan_of(2, 2), 1, sharded=True)
    assert writers.workers == ("node0", "node3", "node1", "node2")
    assert writers.stages == ((0,), (1,), (), ())
    assert writers.shares == ((0,), (1,), (1,), (0,))
    later = plan_after_loss(plan_of(2, 2), {"node3"}, None)
    writers = writers_of(later, 1, sharded=True)
    assert writers.lead == "node0"
    assert writers.shares_of("node2") == (0, 1) == tuple(sorted(writers.shares_of("node2")))
    assert sorted(writers.shares_of("node0") + writers.shares_of("node1")) == [0, 1]
    assert writers_of(later, 1).shares_of("node2") == ()


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 2),
    st.lists(st.integers(0, 19), max_size=6),
)
def test_each_stage_is_written_by_one_live_primary(
    num_stages: int, num_pipelines: int, tensor_size: int, losses: list[int]
) -> None:
    plan = plan_of(num_stages, num_pipelines)
    for number in losses:
        if f"node{number}" in plan.nodes:
            try:
                plan = plan_after_loss(plan, {f"node{number}"}, None)
            except NoHolder:
                return
    writers = writers_of(plan, tensor_size)
    assert len(set(writers.workers)) == len(writers.workers)
    for rank in range(tensor_size):
        mine = [w for w in writers.workers if tensor_size == 1 or w.endswith(f":{rank}")]
        written = [stage for worker in mine for stage in writers.stages_of(worker)]
        assert sorted(written) == list(range(num_stages))
        for worker in mine:
            node = worker.partition(":")[0]
            assert node in plan.nodes
            for stage in writers.stages_of(worker):
                assert any(pipe.stages[stage] == node for pipe in plan.pipelines)


def test_each_unit_is_written_once_where_pipelines_are_cut_apart() -> None:
    """By pipelines that are cut alike, here the first and the last; shares by all primaries."""
    cuts = ((1, 2, 1), (2, 2), (1, 2, 1))
    arrangement = Arrangement(tuple(PipelineShape(spans_of_layers(cut), 2) for cut in cuts))
    plan = initial_plan([f"node{n}" for n in range(8)], arrangement, "lazy")
    writers = writers_of(plan, 1)
    assert dict(zip(writers.workers, writers.stages, strict=True)) == {
        **{"node0": (0,), "node6": (1,), "node2": (2,)},
    }
    shares = writers_of(plan, 1, sharded=True)
    assert [shares.shares_of(f"node{n}") for n in range(8)] == [
        *[(0,), (1,), (2,), (0,), (1,), (0,), (1,), (2,)],
    ]
