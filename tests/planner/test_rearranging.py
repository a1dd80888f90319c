"""How a pipeline is cut anew for the nodes that it has: who holds what then, and what moves."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, spans_of_layers
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.growing import growable, to_begin
from megatron_bamboo.planner.healing import vacancies
from megatron_bamboo.planner.holders import held_by
from megatron_bamboo.planner.new_cut import NewCut
from megatron_bamboo.planner.places import units_needed
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.rearranging import Proposal, Rearranging, rearrange
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.planner.transfers import UnitTransfer
from megatron_bamboo.schedule.redundancy import Redundancy

LAST = 100
LAYERS = 6
WORKS = (0, *[1] * LAYERS, 0)
BALANCE = Balance(WORKS, Redundancy.LAZY)
REARRANGING = Rearranging(BALANCE, (5, *[3] * LAYERS, 5))
SHAPE = PipelineShape(spans_of_layers((2, 2, 2)), 8)


def decided(step: int, applied: bool) -> StepDecision:
    return StepDecision(step, applied, ((0.5).hex(),) if applied else None, "as the test wants it")


def started(*shapes: PipelineShape) -> Plan:
    arrangement = Arrangement(shapes or (SHAPE, SHAPE))
    nodes = [f"node{number}" for number in range(arrangement.num_nodes)]
    return initial_plan(nodes, arrangement, "lazy")


def without(plan: Plan, *lost: str) -> Plan:
    return go_on_after(plan, set(lost), decided(7, False), range(1, 101), BALANCE)


def cut_anew() -> Plan:
    hit = without(started(), "node1")
    return rearrange(hit, decided(8, True), LAST, NewCut.of(hit, 0), REARRANGING)


def test_those_who_are_left_get_even_stages_after_a_loss() -> None:
    plan = cut_anew()
    assert plan.change is not None
    assert (plan.change.step, plan.change.transfers, plan.change.recut) == (9, (), (0,))
    first, second = plan.made().pipelines
    assert first.shape.spans == ((0, 4), (4, 8))
    assert set(first.stages) == set(first.replicas) == {"node0", "node2"} == set(first.ranks)
    assert second.shape.spans == SHAPE.spans
    assert vacancies(plan.made()) == ()
    assert plan.pipelines[0].shape.spans == SHAPE.spans
    assert Plan.from_json(plan.to_json()) == plan
    workers = plan.for_tensor_rank(1, 2).change
    assert workers is not None
    assert {move.target for move in workers.moves} <= {"node0:1", "node2:1"}


def test_the_line_says_who_holds_how_much_and_what_it_gains() -> None:
    plan = cut_anew()
    assert plan.change is not None
    order = ", ".join(plan.change.pipelines[0].stages)
    assert plan.reason == (
        f"pipeline 0 is cut anew: {order} have stages of 4, 4 units instead of 3 stages, for which "
        f"{len(plan.change.moves)} units move; an iteration takes 8% less than without that; "
        "microbatches 8, 8 become 7, 9"
    )


def test_a_standby_joins_behind_the_ranks_and_has_a_stage_once_the_change_is_made() -> None:
    before = cut_anew().made()
    wanted = REARRANGING.widened(before, "node9")
    assert wanted is not None and wanted.wanted == NewCut.of(before, 0, ("node9",))
    plan = rearrange(before, decided(11, False), LAST, wanted.wanted, REARRANGING)
    assert plan.pipelines[0].ranks[2:] == ("node9",) and "node9" not in plan.pipelines[0].stages
    assert "node9" in plan.nodes and plan.pipeline_of("node9") == 0
    after = plan.made().pipelines[0]
    assert "node9" in after.stages and after.ranks == after.stages
    assert after.shape.spans == SHAPE.spans


@pytest.mark.parametrize("lost", ["node9", "node2", "node4"])
def test_a_loss_before_it_is_made_gives_the_new_cut_up(lost: str) -> None:
    before = cut_anew().made()
    plan = rearrange(
        before, decided(11, False), LAST, NewCut.of(before, 0, ("node9",)), REARRANGING
    )
    after = go_on_after(plan, {lost}, decided(11, False), range(1, 101), BALANCE)
    assert (after.change, after.redone) == (None, 11)
    assert "the new cut is given up, and step 11 is begun anew" in after.reason
    assert after.pipelines[0].shape.spans == ((0, 4), (4, 8))
    assert set(after.lost) == {lost, "node9"}
    assert after.pipelines[0].ranks == before.pipelines[0].ranks


def test_a_loss_after_it_is_made_is_a_takeover_in_the_new_cut() -> None:
    plan = cut_anew()
    after = go_on_after(plan, {"node2"}, decided(9, True), range(1, 101), BALANCE)
    assert (after.redone, after.change) == (None, None)
    assert after.pipelines[0].stages == ("node0", "node0")
    assert after.pipelines[0].shape.spans == ((0, 4), (4, 8))


def test_a_loss_of_both_holders_before_it_is_made_dissolves_the_old_pipeline() -> None:
    after = go_on_after(cut_anew(), {"node0", "node2"}, decided(9, False), range(1, 101), BALANCE)
    assert (after.redone, after.change, after.dismissed) == (9, None, ())
    assert after.arrangement.microbatches == (0, 16)


def test_a_dissolved_pipeline_begins_with_the_cut_of_another_where_none_is_like_it() -> None:
    plan = cut_anew().made()
    gone = go_on_after(plan, {"node3", "node4"}, decided(11, False), range(1, 101), BALANCE)
    assert growable(gone) == (1,)
    assert to_begin(gone, 1).shape.spans == ((0, 4), (4, 8))


def test_with_a_share_of_the_optimizers_state_it_comes_from_the_own_pipeline_alone() -> None:
    plan = without(started(), "node1")
    assert any(m.source in plan.pipelines[1].stages for m in _moves(REARRANGING, plan))
    sharing = replace(REARRANGING, shares_state=True)
    assert {m.source for m in _moves(sharing, plan)} <= {"node0", "node2"}


def _moves(rearranging: Rearranging, plan: Plan) -> tuple[UnitTransfer, ...]:
    proposal = rearranging.shrunk(plan)
    assert proposal is not None
    return proposal.moves


def test_chunks_are_cut_anew_too() -> None:
    layers = 8
    shape = PipelineShape(spans_of_layers((2,) * 4), 4, num_chunks=2)
    rearranging = Rearranging(Balance((0, *[1] * layers, 0), Redundancy.LAZY), (1,) * (layers + 2))
    proposal = rearranging.widened(started(shape), "new")
    assert proposal is not None
    after = proposal.first
    assert (after.shape.num_stages, after.shape.num_chunks) == (3, 2)
    lacking = {unit for unit, node in _lacking(started(shape), proposal) if node == "new"}
    stage = after.stages.index("new")
    held = {
        unit
        for number in (stage, (stage + 1) % 3)
        for span in after.shape.spans_of(number)
        for unit in range(*span)
    }
    assert lacking == held


def _lacking(plan: Plan, proposal: Proposal) -> list[tuple[int, str]]:
    held, needed = held_by(plan.pipelines), held_by(proposal.pipelines)
    return [(u, node) for node in needed for u in needed[node] - held.get(node, frozenset())]


def test_a_dissolved_pipeline_begins_again_on_fewer_nodes() -> None:
    gone = without(without(started(), "node4"), "node3", "node5")
    assert growable(gone) == (1,)
    proposal = REARRANGING.begun(gone, 1, ["new0", "new1"])
    assert proposal is not None
    plan = rearrange(gone, decided(9, False), LAST, proposal.wanted, REARRANGING)
    joining = plan.pipelines[1]
    assert (joining.stages, joining.joining) == ((), ("new0", "new1"))
    assert set(plan.nodes) == {"node0", "node1", "node2", "new0", "new1"}
    assert plan.change is not None and len(plan.change.moves) == 2 * (LAYERS + 2)
    assert {move.source for move in plan.change.moves} == {"node0", "node1", "node2"}
    after = plan.made().pipelines[1]
    assert after.shape.spans == ((0, 4), (4, 8)) and None not in after.replicas
    assert plan.arrangement.microbatches == (16, 0)
    assert plan.made().arrangement.microbatches == (10, 6)
    assert plan.reason.startswith("pipeline 1 begins again: new0, new1 have stages of 4, 4 units")
    undone = go_on_after(plan, {"new0"}, decided(9, False), range(1, 101), BALANCE)
    assert (undone.pipelines[1].ranks, undone.redone) == ((), 9)
    assert REARRANGING.begun(gone, 1, ["new0"]) is None


def test_nothing_is_cut_anew_that_gains_nothing_or_cannot_be() -> None:
    whole = started()
    assert REARRANGING.shrunk(whole) is None
    assert REARRANGING.propose(whole, NewCut.of(whole, 0, "abcd")) is None
    two = PipelineShape(spans_of_layers((3, 3)), 4)
    assert REARRANGING.shrunk(without(started(two, two), "node0")) is None
    hit = without(whole, "node1")
    last = rearrange(hit, decided(LAST, True), LAST, NewCut.of(hit, 0), REARRANGING)
    assert (last.change, last.reason) == (None, "nothing is left to change")


@st.composite
def proposals(draw: st.DrawFn) -> tuple[Plan, Proposal]:
    """A pipeline of some job, after a loss or before an arrival, with costs as they may be."""
    layers = draw(st.integers(4, 9))
    works = tuple(draw(st.lists(st.integers(1, 9), min_size=layers + 2, max_size=layers + 2)))
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=layers + 2, max_size=layers + 2)))
    rearranging = Rearranging(Balance(works, Redundancy.LAZY), sizes)
    shapes = []
    for _ in range(draw(st.integers(1, 2))):
        stages = draw(st.integers(2, min(6, layers)))
        ends = sorted(draw(st.permutations(range(1, layers)))[: stages - 1])
        pairs = zip([0, *ends], [*ends, layers], strict=True)
        shapes.append(PipelineShape(spans_of_layers([b - a for a, b in pairs]), 4))
    plan = started(*shapes)
    joining: tuple[str, ...] = ()
    if draw(st.booleans()):
        joining = ("new0", "new1")[: draw(st.integers(1, 2))]
    elif len(shapes[0].spans) > 2:
        plan = without(plan, f"node{draw(st.integers(0, len(shapes[0].spans) - 1))}")
    proposal = rearranging.propose(plan, NewCut.of(plan, 0, joining))
    if proposal is None:
        assert len(plan.pipelines[0].ranks) + len(joining) > layers
        proposal = rearranging.propose(plan, NewCut.of(plan, 0))
    assert proposal is not None
    return plan, proposal


@settings(max_examples=40, deadline=None)
@given(proposals())
def test_each_unit_has_one_primary_and_a_replica_elsewhere(case: tuple[Plan, Proposal]) -> None:
    plan, proposal = case
    after = proposal.first
    assert after.shape.spans[0][0] == 0 and after.shape.num_units == plan.arrangement.num_units
    assert len(set(after.stages)) == after.shape.num_stages == len(after.ranks)
    pairs = zip(after.stages, after.replicas, strict=True)
    assert all(replica not in (None, primary) for primary, replica in pairs)
    assert sum(Arrangement(tuple(p.shape for p in proposal.pipelines)).microbatches) == (
        plan.arrangement.total_microbatches
    )


@settings(max_examples=40, deadline=None)
@given(proposals())
def test_each_unit_that_a_node_lacks_comes_once_from_a_live_holder(
    case: tuple[Plan, Proposal],
) -> None:
    plan, proposal = case
    held = held_by(plan.pipelines)
    moves = sorted((move.unit, move.target) for move in proposal.moves)
    assert moves == sorted(_lacking(plan, proposal))
    assert all(move.unit in held[move.source] for move in proposal.moves)
    assert {move.source for move in proposal.moves} <= set(plan.nodes)


@settings(max_examples=15, deadline=None)
@given(proposals())
def test_no_assignment_of_nodes_to_places_moves_less(case: tuple[Plan, Proposal]) -> None:
    plan, proposal = case
    sizes = {unit: 1 + unit % 3 for unit in range(plan.arrangement.num_units)}
    rearranging = Rearranging(
        Balance(tuple(sizes.values()), Redundancy.LAZY), tuple(sizes.values())
    )
    again = rearranging.propose(plan, proposal.wanted)
    assert again is not None
    held, nodes = held_by(plan.pipelines), again.first.stages
    missing = [
        [sum(sizes[unit] for unit in units - held.get(node, frozenset())) for node in nodes]
        for units in units_needed(Arrangement((again.first.shape,)))
    ]
    orders = permutations(range(len(nodes)))
    least = min(sum(missing[place][n] for place, n in enumerate(order)) for order in orders)
    assert sum(sizes[move.unit] for move in again.moves) == least


def test_shares_are_those_with_which_the_slowest_pipeline_is_fastest() -> None:
    plan = without(started(), "node1")
    proposal = REARRANGING.shrunk(plan)
    assert proposal is not None
    assert proposal.ticks < proposal.ticks_healed < proposal.ticks_before
    for number in (6, 8):
        shares = zip(proposal.pipelines, (number, 16 - number), strict=True)
        other = tuple(replace(p, shape=replace(p.shape, num_microbatches=n)) for p, n in shares)
        assert BALANCE.ticks(other) >= proposal.ticks
