"""Which nodes could change their pipeline, and what becomes of the pipelines when they do."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from least_moves import least_bytes

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, spans_of_layers
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.holders import held_by
from megatron_bamboo.planner.lending import lendings
from megatron_bamboo.planner.new_cut import NewCut, crew_of
from megatron_bamboo.planner.places import units_needed
from megatron_bamboo.planner.plan import PipelinePlan, Plan
from megatron_bamboo.planner.rearranging import Rearranging, rearrange
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.schedule import MAX_MICROBATCHES

LAYERS, STEP, LAST = 12, 9, 100
BALANCE = Balance((0, *[1] * LAYERS, 0), Redundancy.LAZY)
REARRANGING = Rearranging(BALANCE, (5, *[3] * LAYERS, 5))
DECISION = StepDecision(STEP, False, (), "as the test wants it")


def pipelines_of(*sizes: int) -> Plan:
    """Pipelines of so many nodes, each with as many stages; one of 1 has taken over all of two."""
    pipelines, first = [], 0
    for size in sizes:
        nodes = tuple(f"node{number}" for number in range(first, first + size))
        first += size
        stages = nodes * 2 if size == 1 else nodes
        count = max(len(stages), 2)
        layers = [LAYERS // count + (n < LAYERS % count) for n in range(count)]
        shape = PipelineShape(spans_of_layers(layers), 8 if nodes else 0)
        shadows = [stages[n - 1] if size > 1 else None for n in range(len(stages))]
        pipelines.append(PipelinePlan(stages, tuple(shadows), nodes, shape))
    return Plan(3, tuple(pipelines), lost=(), decision=None, reason="as the test wants it")


def found(*sizes: int) -> list[list[int]]:
    """By new cut the numbers of nodes that the pipelines have then."""
    plan = pipelines_of(*sizes)
    after = []
    for wanted in lendings(plan, 2, LAYERS):
        crews = {number: crew_of(pipe) for number, pipe in enumerate(plan.pipelines)}
        crews |= dict(wanted.crews)
        named = [node for nodes in crews.values() for node in nodes]
        assert sorted(named) == sorted(plan.nodes)
        after.append([len(nodes) for nodes in crews.values()])
    return after


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        # One that is alone borrows from the largest; where nobody can spare a node two merge.
        ([4, 1], [[3, 2]]),
        ([2, 1], [[3, 0]]),
        ([1, 1], [[2, 0]]),
        ([2, 2, 1], [[3, 2, 0]]),
        ([5, 1, 1], [[3, 2, 2], [4, 2, 1]]),
        # One that was dissolved is split off again from those that can spare nodes.
        ([4, 0], [[2, 2]]),
        ([3, 3, 0], [[2, 2, 2]]),
        # The largest lends the smallest a node where both are better off for it.
        ([5, 3], [[4, 4]]),
        ([4, 2], [[3, 3]]),
        # Nobody is short of anything.
        ([3, 3], []),
        ([3, 2], []),
        ([3, 0], []),
        ([1], []),
        ([2], []),
    ],
)
def test_the_ways_there_are(sizes: Sequence[int], wanted: list[list[int]]) -> None:
    assert found(*sizes) == wanted


def changed(*sizes: int) -> tuple[Plan, Plan]:
    """Some pipelines, and the plan by which nodes change among them, the fastest way."""
    before = pipelines_of(*sizes)
    proposal, *_ = REARRANGING.lent(before)
    return before, rearrange(before, DECISION, LAST, proposal.wanted, REARRANGING)


def test_a_node_changes_its_pipeline_and_stands_in_its_old_place_until_then() -> None:
    before, plan = changed(5, 3)
    assert plan.change is not None and plan.change.recut == (0, 1)
    assert plan.pipelines == before.pipelines and plan.nodes == before.nodes
    (lent,) = set(plan.made().pipelines[1].stages) - set(before.pipelines[1].stages)
    assert (plan.pipeline_of(lent), plan.pipeline_after(lent)) == (0, 1)
    assert plan.made().pipeline_of(lent) == 1
    assert [p.shape.num_stages for p in plan.made().pipelines] == [4, 4]
    assert plan.let_go == ()
    assert f"pipeline 1 is cut anew with {lent}: " in plan.reason
    assert "an iteration takes 8% less than without that" in plan.reason
    workers = plan.for_tensor_rank(1, 2)
    assert workers.pipeline_after(f"{lent}:1") == 1
    assert Plan.from_json(plan.to_json()) == plan


def test_pipelines_merge_and_one_is_split_off_again() -> None:
    _, merging = changed(2, 1)
    assert merging.change is not None
    merged = merging.made()
    assert set(merged.pipelines[0].stages) == {"node0", "node1", "node2"}
    assert (merged.pipelines[1].stages, merged.arrangement.microbatches) == ((), (16, 0))
    assert "; pipeline 1 is dissolved, and its nodes join others" in merging.reason
    before, splitting = changed(4, 0)
    assert splitting.pipelines == before.pipelines
    split = splitting.made()
    assert [len(set(p.stages)) for p in split.pipelines] == [2, 2]
    assert "; pipeline 1 begins again: " in splitting.reason


@pytest.mark.parametrize("sizes", [(5, 3), (4, 1), (2, 1), (4, 0)])
def test_a_loss_before_it_is_made_leaves_everybody_where_they_were(sizes: tuple[int, ...]) -> None:
    before, plan = changed(*sizes)
    for lost in plan.pipelines[0].stages:
        after = go_on_after(plan, {lost}, DECISION, range(1, LAST + 1), BALANCE)
        assert (after.change, after.redone, after.lost) == (None, STEP, (lost,))
        spans = [pipeline.shape.spans for pipeline in after.pipelines]
        assert spans == [pipeline.shape.spans for pipeline in before.pipelines]
        assert set(after.nodes) == set(before.nodes) - {lost}


@pytest.mark.parametrize("sizes", [(4, 2), (5, 3), (4, 1), (2, 1), (4, 0), (3, 3, 0)])
def test_no_way_to_put_the_nodes_on_the_new_places_moves_less(sizes: tuple[int, ...]) -> None:
    plan = pipelines_of(*sizes)
    unit_bytes = dict(enumerate(REARRANGING.unit_bytes))
    for proposal in REARRANGING.lent(plan):
        arrangement = Arrangement(tuple(p.shape for p in proposal.pipelines if p.stages))
        least = least_bytes(
            units_needed(arrangement), plan.nodes, held_by(plan.pipelines), unit_bytes
        )
        assert sum(unit_bytes[move.unit] for move in proposal.moves) == least


def test_pipelines_do_not_merge_that_together_have_too_many_microbatches() -> None:
    plan = pipelines_of(2, 1)
    (merging,) = lendings(plan, 2, LAYERS)
    for number, is_possible in ((MAX_MICROBATCHES // 2, True), (MAX_MICROBATCHES // 2 + 1, False)):
        many = [replace(p, shape=replace(p.shape, num_microbatches=number)) for p in plan.pipelines]
        proposal = REARRANGING.propose(replace(plan, pipelines=tuple(many)), merging)
        assert (proposal is not None) == is_possible


def test_no_pipeline_is_cut_anew_for_fewer_nodes_than_its_stages_need() -> None:
    many = replace(REARRANGING, least_nodes=3, is_needed=True)
    # Of five and two a node too few is borrowed, of four and two they merge, whatever is faster.
    (borrowed,) = many.lent(pipelines_of(5, 2))
    assert [len(crew_of(p)) for p in borrowed.pipelines] == [4, 3]
    (merged,) = many.lent(pipelines_of(3, 2))
    assert [len(crew_of(p)) for p in merged.pipelines] == [5, 0]
    assert borrowed.is_needed and merged.is_needed and borrowed.num_alone == (0, 0)
    assert not any(p.is_needed for p in replace(many, is_needed=False).lent(pipelines_of(5, 2)))
    # It may lose nobody, nor begin, but what it has it keeps.
    few = pipelines_of(2, 0)
    assert many.propose(few, NewCut.of(few, 0)) is not None
    assert many.propose(few, NewCut.of(few, 1, ("new0", "new1"))) is None
    assert many.propose(few, NewCut.of(few, 1, ("new0", "new1", "new2"))) is not None
    assert many.lent(few) == ()


def test_where_each_pipeline_has_a_share_of_the_optimizer_nobody_changes() -> None:
    sharing = Rearranging(BALANCE, REARRANGING.unit_bytes, shares_state=True)
    assert sharing.lent(pipelines_of(5, 3)) == ()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
def test_each_unit_that_a_node_lacks_comes_once_and_nobody_is_alone(sizes: list[int]) -> None:
    plan = pipelines_of(*sizes)
    for proposal in REARRANGING.lent(plan):
        after = rearrange(plan, DECISION, LAST, proposal.wanted, REARRANGING).made()
        held, needed = held_by(plan.pipelines), held_by(after.pipelines)
        assert set(after.nodes) == set(plan.nodes)
        lacking = sorted((u, node) for node in needed for u in needed[node] - held[node])
        assert sorted((move.unit, move.target) for move in proposal.moves) == lacking
        assert all(move.unit in held[move.source] for move in proposal.moves)
        assert after.arrangement.total_microbatches == plan.arrangement.total_microbatches
        alone = [sum(len(crew_of(p)) == 1 for p in some.pipelines) for some in (plan, after)]
        assert proposal.num_alone == tuple(alone) and alone[1] <= alone[0]
        assert proposal.gains or alone[1] < alone[0]
