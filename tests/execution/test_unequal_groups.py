"""Where pipelines are cut apart, all workers still meet in one order, and nobody waits for ever."""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.registry import holder_group, memberships, primary_group
from megatron_bamboo.planner.arrangement import (
    Arrangement,
    PipelineShape,
    equal_pipelines,
    spans_of_layers,
    unit_names,
)
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.schedule.actions import GATHER_OPS, Op
from megatron_bamboo.schedule.costs import EQUAL_COSTS
from megatron_bamboo.schedule.redundancy import Redundancy

Use = tuple[str, tuple[str, ...]]
"""What several do together, and who they are."""


def unequal(*cuts: tuple[int, ...]) -> Arrangement:
    return Arrangement(tuple(PipelineShape(spans_of_layers(cut), 2) for cut in cuts))


def plan_of(arrangement: Arrangement) -> Plan:
    nodes = [f"node{number}" for number in range(arrangement.num_nodes)]
    return initial_plan(nodes, arrangement, "lazy")


@st.composite
def arrangements(draw: st.DrawFn) -> Arrangement:
    if draw(st.booleans()):
        sizes = (draw(st.integers(2, 4)), draw(st.integers(1, 3)))
        return equal_pipelines(*sizes, num_microbatches=1, num_chunks=draw(st.integers(1, 2)))
    num_layers, cuts = draw(st.integers(2, 7)), []
    for _ in range(draw(st.integers(1, 3))):
        num_stages = draw(st.integers(2, min(4, num_layers)))
        borders = st.permutations(range(1, num_layers)).map(lambda p, n=num_stages: p[: n - 1])
        ends = [0, *sorted(draw(borders)), num_layers]
        cuts.append(tuple(b - a for a, b in pairwise(ends)))
    return unequal(*cuts)


def uses(plan: Plan, worker: str) -> Iterator[Use]:
    """What a worker does together with others in the tail of a step, unit by unit."""
    view = PipelineView(worker, plan, Redundancy.LAZY, EQUAL_COSTS, tied=True, sharded=True)
    groups = memberships(plan, worker, True, 1, sharded=True)
    names = unit_names(view.shape.num_units)
    for action in view.tail(1):
        if action.op not in GATHER_OPS | {Op.REDUCE}:
            continue
        group = primary_group if action.op is Op.REDUCE else holder_group
        for first, past in view.shape.spans_of(action.stage):
            for unit in names[first:past]:
                members = groups.get(group(plan.arrangement.stages_of(unit)), (worker,))
                yield f"{group.__name__} {unit}", tuple(sorted(members))


@settings(deadline=None, max_examples=80)
@given(arrangements(), st.data())
def test_whoever_was_lost_nobody_waits_for_ever(
    arrangement: Arrangement, data: st.DataObject
) -> None:
    plan = plan_of(arrangement)
    for pipeline in plan.pipelines:
        if data.draw(st.booleans()):
            plan = plan_after_loss(plan, {data.draw(st.sampled_from(pipeline.ranks))}, None)
    left = {worker: deque(uses(plan, worker)) for worker in plan.nodes}
    done: list[Use] = []
    while any(left.values()):
        heads = {worker: own[0] for worker, own in left.items() if own}
        able = [use for use in set(heads.values()) if all(heads.get(w) == use for w in use[1])]
        assert able, f"all wait: {heads}"
        done += able
        for use in able:
            for worker in use[1]:
                left[worker].popleft()
    sums = [name for name, _ in done if name.startswith("primary")]
    assert sorted(sums) == sorted(f"primary_group {u}" for u in unit_names(arrangement.num_units))


def test_a_group_has_a_primary_of_each_pipeline_and_then_the_shadows() -> None:
    plan = plan_of(unequal((1, 2, 1), (2, 2)))
    groups = memberships(plan, "node1", True, 1, sharded=True)
    assert {name: groups[name] for name in groups if name.startswith("primaries")} == {
        primary_group((1, 0)): ("node1", "node3"),
        primary_group((1, 1)): ("node1", "node4"),
    }
    assert groups[holder_group((1, 1))] == ("node1", "node4", "node0", "node3")
    assert groups[holder_group((2, 1))] == ("node2", "node4", "node1", "node3")
    assert holder_group((0, 0)) not in groups


def test_a_shadow_meets_whom_its_victim_met() -> None:
    plan = plan_after_loss(plan_of(unequal((1, 2, 1), (2, 2))), {"node1"}, None)
    groups = memberships(plan, "node0", True, 1)
    assert groups[primary_group((0, 0))] == groups[primary_group((1, 0))] == ("node0", "node3")
    assert groups[primary_group((1, 1))] == ("node0", "node4")
