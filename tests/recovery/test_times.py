"""What iterations take by the schedule, and how much longer those with takeovers are."""

from dataclasses import replace

import pytest
from recovering import costs_of, nodes_of

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, equal_pipelines
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.recovery.times import IterationTimes
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import loss_at, rehearse
from megatron_bamboo.schedule.simulate import simulate
from megatron_bamboo.schedule.takeover import take_over

TIMES = IterationTimes(costs_of(8))


def plan_of(arrangement: Arrangement) -> Plan:
    return initial_plan(nodes_of(arrangement.num_nodes), arrangement, Redundancy.LAZY)


FOUR = plan_of(Arrangement((PipelineShape(((0, 2), (2, 4), (4, 6), (6, 8)), 8),)))
COSTS = Costs(2.0, 4.0)


def test_whole_pipelines_take_what_their_slowest_takes() -> None:
    # Microbatches of the slowest stage, and the first one through all others.
    assert TIMES.of(FOUR.pipelines) == 6 * (8 + 3)
    shapes = (PipelineShape(((0, 8),), 3), PipelineShape(((0, 4), (4, 8)), 9))
    assert TIMES.of(plan_of(Arrangement(shapes)).pipelines) == max(3 * 24, 12 * (9 + 1))


def test_a_dissolved_pipeline_takes_no_time() -> None:
    shapes = (PipelineShape(((0, 4), (4, 8)), 2), PipelineShape(((0, 4), (4, 8)), 9))
    first, second = plan_of(Arrangement(shapes)).pipelines
    dissolved = replace(second, stages=(), replicas=())
    assert TIMES.of((first, dissolved)) == 12 * (2 + 1)
    assert TIMES.stretch((first, dissolved), {"node0"}, 0.0) > 0


def test_chunks_are_interleaved() -> None:
    whole = equal_pipelines(2, 1, 4, layers_per_chunk=1, num_chunks=3)
    schedule = lower(compute_schedule(2, 3, 4))
    costs = Costs(((2.0, 1.0, 1.0), (1.0, 1.0, 2.0)), ((4.0, 2.0, 2.0), (2.0, 2.0, 4.0)))
    assert TIMES.of(plan_of(whole).pipelines) == simulate(schedule, costs).makespan


def test_after_a_takeover_iterations_are_those_of_the_schedule_that_follows() -> None:
    schedule = lower(add_redundancy(compute_schedule(4, 1, 8), Redundancy.LAZY))
    for node in nodes_of(4):
        after = plan_after_loss(FOUR, {node}, None)
        expected = simulate(take_over(schedule, int(node[4:]), {}), COSTS).makespan
        assert TIMES.of(after.pipelines) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_takeover_takes_what_its_rehearsal_takes(share: float) -> None:
    schedule = lower(add_redundancy(compute_schedule(4, 1, 8), Redundancy.LAZY))
    timeline = simulate(schedule, COSTS)
    whole = timeline.makespan
    loss = loss_at(timeline, 2, share * whole)
    stretch = rehearse(schedule, COSTS, loss).timeline.makespan - whole
    assert TIMES.stretch(FOUR.pipelines, {"node2"}, share * whole) == stretch > 0


def test_only_the_pipeline_that_is_hit_takes_longer() -> None:
    shapes = (PipelineShape(((0, 4), (4, 8)), 2), PipelineShape(((0, 4), (4, 8)), 20))
    plan = plan_of(Arrangement(shapes))
    # The first has so little to do that its takeover is over before the second is done.
    assert TIMES.stretch(plan.pipelines, {"node0"}, 10.0) == 0
    assert TIMES.stretch(plan.pipelines, {"node2"}, 10.0) > 0
    assert TIMES.stretch(plan.pipelines, set(), 10.0) == 0
