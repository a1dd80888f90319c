"""How a dissolved pipeline begins again on standbys, and what becomes of it when a loss comes."""

from dataclasses import replace

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, spans_of_layers
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.growing import Growth, grow, growable
from megatron_bamboo.planner.plan import Plan, Transfer, initial_plan
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.schedule.redundancy import Redundancy

LAST = 100
BALANCE = Balance((0, 1, 1, 0), Redundancy.LAZY)
NODES = tuple(f"node{number}" for number in range(6))
GROWTH = Growth(1, ("node6", "node7"))
ALIKE = PipelineShape(spans_of_layers((1, 1)), 4)


def decided(step: int, applied: bool) -> StepDecision:
    return StepDecision(step, applied, ((0.5).hex(),) if applied else None, "as the test wants it")


def without_one(*shapes: PipelineShape, lost: tuple[str, ...] = ("node2", "node3")) -> Plan:
    arrangement = Arrangement(shapes or (ALIKE,) * 3)
    start = initial_plan(NODES[: arrangement.num_nodes], arrangement, "lazy")
    return go_on_after(start, set(lost), decided(7, False), range(1, 101), BALANCE)


def growing() -> Plan:
    return grow(without_one(), decided(8, True), LAST, GROWTH, BALANCE)


def test_all_get_their_state_from_pipelines_that_are_cut_alike_in_turn() -> None:
    plan = growing()
    assert plan.change is not None
    assert plan.change.transfers == (
        Transfer(1, 0, "node0", "node6"),
        Transfer(1, 0, "node4", "node7"),
        Transfer(1, 1, "node5", "node7"),
        Transfer(1, 1, "node1", "node6"),
    )
    assert (plan.change.step, plan.redone) == (9, None)
    assert plan.reason == (
        "pipeline 1 begins again on node6, node7; from then on the microbatches are 4, 4, 4"
    )
    assert Plan.from_json(plan.to_json()) == plan


def test_it_has_its_nodes_at_once_and_microbatches_from_the_next_step_on() -> None:
    plan = growing()
    assert plan.nodes == ("node0", "node1", "node6", "node7", "node4", "node5")
    assert plan.pipelines[1].begins and not plan.made().pipelines[1].begins
    assert plan.arrangement.microbatches == (6, 0, 6)
    assert plan.made().arrangement.microbatches == (4, 4, 4)
    assert plan.made().pipelines[1].replicas == ("node7", "node6")


def test_the_first_pipeline_speaks_for_none_while_it_begins() -> None:
    plan = without_one(lost=("node0", "node1"))
    plan = grow(plan, decided(8, True), LAST, replace(GROWTH, pipeline=0), BALANCE)
    assert (plan.first_pipeline, plan.reporter) == (1, "node2")
    assert plan.made().first_pipeline == 0


def test_a_loss_before_it_has_its_state_lets_its_nodes_go() -> None:
    for lost in ("node6", "node4"):
        plan = go_on_after(growing(), {lost}, decided(9, False), range(1, 101), BALANCE)
        assert plan.lost == (lost,)
        assert "pipeline 1 cannot begin yet" in plan.reason
        assert set(plan.dismissed) == {"node6", "node7"} - {lost}
        assert (plan.pipelines[1].stages, plan.change, plan.redone) == ((), None, None)
        assert growable(plan) == (1,)


def test_a_loss_that_dissolves_another_one_then_does_so_too() -> None:
    plan = go_on_after(
        growing(), {"node4", "node5", "node6"}, decided(9, False), range(1, 101), BALANCE
    )
    assert plan.arrangement.microbatches == (12, 0, 0)
    assert (plan.redone, plan.dismissed) == (9, ("node7",))


def test_once_its_step_has_passed_it_is_like_the_others() -> None:
    plan = go_on_after(growing(), {"node6"}, decided(9, True), range(1, 101), BALANCE)
    assert plan.pipelines[1].stages == ("node7", "node7")
    assert plan.dismissed == ()


def test_without_a_like_it_begins_with_the_cut_of_another_one() -> None:
    other = PipelineShape(((0, 1), (1, 4)), 4)
    plan = grow(without_one(ALIKE, other, ALIKE), decided(8, True), LAST, GROWTH, BALANCE)
    assert plan.change is not None
    assert plan.pipelines[1].shape.spans == ALIKE.spans
    assert {t.source for t in plan.change.transfers} <= {"node0", "node1", "node4", "node5"}


def test_nothing_grows_that_could_not() -> None:
    assert growable(without_one()) == (1,)
    assert grow(without_one(), decided(LAST, True), LAST, GROWTH, BALANCE).change is None
