"""What a pipeline that misses stages gets from the others, for all losses of small jobs."""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import combinations

import pytest

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, equal_pipelines
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.draining import drain
from megatron_bamboo.planner.healing import Vacancy, heal, unprotected
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.planner.repairing import deserted
from megatron_bamboo.planner.taking_over import NoHolder, plan_after_loss
from megatron_bamboo.schedule.redundancy import Redundancy

LAST = 100
STEPS = range(1, LAST + 1)
Held = Mapping[tuple[int, int], Set[str]]
"""By pipeline and stage the nodes that have its state for sure."""


def decided(step: int, applied: bool = False) -> StepDecision:
    return StepDecision(step, applied, ((0.5).hex(),) if applied else None, "as the test wants it")


def whole(num_stages: int = 3, num_pipelines: int = 2, redundancy: str = "lazy") -> Plan:
    nodes = tuple(f"node{number}" for number in range(num_stages * num_pipelines))
    return initial_plan(nodes, equal_pipelines(num_stages, num_pipelines, 4), redundancy)


def after(
    plan: Plan, *lost: str, step: int = 7, applied: bool = False, standbys: Sequence[str] = ()
) -> Plan:
    decision = decided(step, applied)
    empty = deserted(plan, set(lost), decision)
    crews = dict.fromkeys(empty, tuple(standbys)) if standbys else {}
    return go_on_after(plan, set(lost), decision, STEPS, None, crews)


def held_by(plan: Plan) -> Held:
    """Who has what under a plan nothing of which is still to come."""
    return {
        (number, stage): set(pipeline.holders(stage))
        for number, pipeline in enumerate(plan.pipelines)
        for stage in range(len(pipeline.stages))
    }


def test_a_live_node_gets_the_state_of_a_stage_whose_two_holders_are_lost() -> None:
    plan = after(whole(), "node0", "node1")
    (transfer,) = plan.change.transfers if plan.change else ()
    assert (transfer.pipeline, transfer.stage) == (0, 1)
    assert (transfer.source, transfer.target) == ("node4", "node2")
    assert plan.pipelines[0].stages == ("node2",) * 3
    assert plan.pipelines[0].replicas == (None,) * 3
    assert (plan.redone, plan.redoing, plan.dismissed) == (7, (0,), ())
    assert plan.arrangement == whole().arrangement
    assert plan.lacking == {(0, 1, "node2")}
    assert plan.reason == (
        "node2 takes over stage 0 of pipeline 0 from node0; "
        "node2 gets stage 1 of pipeline 0, which nobody else there has, from node4 of pipeline 1; "
        "step 7 is begun anew in pipeline 0"
    )
    assert Plan.from_json(plan.to_json()) == plan


def test_a_step_that_has_passed_stays_and_the_next_one_is_begun_anew() -> None:
    plan = after(whole(), "node0", "node1", applied=True)
    assert plan.redone == 8 and plan.change is not None and plan.change.step == 8


def test_once_its_step_has_passed_the_copy_is_a_holder_like_any_other() -> None:
    plan = after(whole(), "node0", "node1").after(decided(7, applied=True))
    assert plan.lacking == frozenset()
    assert plan.pipelines[0].stages == ("node2",) * 3
    assert plan.arrangement == whole().arrangement


def _losses(plan: Plan, most: int) -> Iterator[tuple[str, ...]]:
    for number in range(1, most + 1):
        yield from combinations(plan.nodes, number)


@pytest.mark.parametrize("redundancy", ["lazy", "none"])
@pytest.mark.parametrize(("num_stages", "num_pipelines"), [(2, 2), (3, 2), (4, 2), (2, 3)])
def test_it_goes_on_if_and_only_if_all_state_and_a_node_for_it_are_left(
    num_stages: int, num_pipelines: int, redundancy: str
) -> None:
    start = whole(num_stages, num_pipelines, redundancy)
    for lost in _losses(start, 4):
        _check(start, held_by(start), set(lost))


@pytest.mark.parametrize("is_passed", [True, False])
def test_so_it_is_after_a_second_loss_too(is_passed: bool) -> None:
    """What was to be sent in a step that did not pass counts as not there."""
    start = whole(3, 2)
    for first in _losses(start, 2):
        try:
            plan = after(start, *first)
        except NoHolder:
            continue
        held = held_by(plan)
        if not is_passed:
            held = {
                place: {node for node in nodes if (*place, node) not in plan.lacking}
                for place, nodes in held.items()
            }
        for second in _losses(plan, 2):
            _check(plan, held, set(second), applied=is_passed)


def _check(plan: Plan, held: Held, lost: Set[str], applied: bool = False) -> None:
    """Compare with a count of who is left."""
    left = {place: nodes - lost for place, nodes in held.items()}
    stages = range(len(plan.pipelines[0].stages))
    exists = all(any(left[n, s] for n in range(len(plan.pipelines))) for s in stages)
    has_nodes = all(set(pipe.stages) - lost for pipe in plan.pipelines)
    try:
        follows = after(plan, *sorted(lost), applied=applied)
    except NoHolder:
        assert not (exists and has_nodes), f"{lost} need not end it: {plan}"
        return
    assert exists and has_nodes, f"{lost} leave nobody with some state: {plan}"
    _check_sources(follows, left, lost)
    assert follows.arrangement == plan.arrangement


def _check_sources(plan: Plan, left: Held, lost: Set[str]) -> None:
    """Whoever runs a stage has it, or gets it from one who has it, in the step begun anew."""
    moves = plan.change.transfers if plan.change else ()
    comes = {(t.pipeline, t.stage, t.target): t for t in moves}
    for number, pipeline in enumerate(plan.pipelines):
        for stage, node in enumerate(pipeline.stages):
            assert node not in lost
            if node in left[number, stage]:
                continue
            transfer = comes[number, stage, node]
            assert transfer.source in left[plan.pipeline_of(transfer.source), stage]
            assert number in plan.redoing
            assert plan.change is not None and plan.change.step == plan.redone


def test_two_pipelines_may_repair_each_other() -> None:
    plan = after(whole(3, 2), "node0", "node1", "node4", "node5")
    assert plan.change is not None
    moves = {(t.pipeline, t.stage): (t.source, t.target) for t in plan.change.transfers}
    assert moves == {(0, 1): ("node3", "node2"), (1, 2): ("node2", "node3")}
    assert plan.redoing == (0, 1)


def test_standbys_become_a_pipeline_that_has_no_node_left() -> None:
    lost = ("node0", "node1", "node2")
    with pytest.raises(NoHolder, match=r"stage 0 .* both lost.*; others have its state, but none"):
        after(whole(), *lost)
    plan = after(whole(), *lost, standbys=("node6", "node7", "node8"))
    assert plan.pipelines[0].stages == plan.pipelines[0].ranks == ("node6", "node7", "node8")
    assert plan.change is not None
    assert [(t.source, t.target) for t in plan.change.transfers] == [
        ("node3", "node6"),
        ("node4", "node7"),
        ("node5", "node8"),
    ]
    assert plan.nodes == ("node6", "node7", "node8", "node3", "node4", "node5")
    assert plan.lost == lost
    assert {place[0] for place in unprotected(plan)} == {0}


def test_what_is_sent_is_shared_out_among_those_who_have_it() -> None:
    lost = ("node0", "node1", "node2")
    plan = after(whole(3, 3), *lost, standbys=("node9", "node10", "node11"))
    assert plan.change is not None
    sources = [t.source for t in plan.change.transfers]
    assert len(set(sources)) == 3


def test_a_standby_that_is_just_joining_takes_the_stage_of_its_place() -> None:
    """The only holder of the stage that it was to get is lost."""
    degraded = plan_after_loss(whole(), {"node1"}, decided(5, True))
    joining = heal(degraded, decided(6, True), LAST, (Vacancy(0, 1), "node6"))
    plan = after(joining, "node0")
    assert plan.pipelines[0].stages == ("node2", "node6", "node2")
    assert plan.change is not None
    assert {(t.stage, t.source, t.target) for t in plan.change.transfers} == {
        (1, "node4", "node6"),
        (2, "node2", "node6"),
    }
    assert plan.lost == ("node0",)


def test_who_was_to_replace_a_leaving_node_cannot_where_its_state_is_lost() -> None:
    """It would have got what the taker itself is still to get."""
    replacing = ((Vacancy(0, 1), "node6"),)
    leaving = drain(whole(), decided(6, True), LAST, ["node1"], replacing=replacing)
    assert leaving.pipelines[0].joining == ("node6",)
    plan = after(leaving, "node0", "node1")
    assert plan.pipelines[0].stages == ("node2",) * 3
    assert plan.change is not None
    assert [(t.stage, t.source, t.target) for t in plan.change.transfers] == [(1, "node4", "node2")]
    assert plan.lost == ("node0", "node1", "node6")


def test_pipelines_that_are_cut_apart_do_not_give_each_other_stages() -> None:
    nodes = tuple(f"node{number}" for number in range(5))
    cuts = (((0, 2), (2, 3), (3, 5)), ((0, 3), (3, 5)))
    arrangement = Arrangement(tuple(PipelineShape(cut, 4, 1) for cut in cuts))
    plan = initial_plan(nodes, arrangement, "lazy")
    with pytest.raises(NoHolder, match="pipeline 0: stage 1 has no live holder"):
        after(plan, "node0", "node1")


def test_after_the_last_step_a_pipeline_that_misses_a_stage_is_left_out() -> None:
    balance, lost = Balance((0, 1, 1, 1, 0), Redundancy.LAZY), {"node0", "node1"}
    plan = go_on_after(whole(), lost, decided(LAST, True), STEPS, balance)
    assert plan.pipelines[0].stages == ()
    assert plan.dismissed == ("node2",)
    assert plan.reason.endswith("so it is dissolved")


def test_where_others_may_do_the_work_of_a_pipeline_they_do() -> None:
    balance = Balance((0, 1, 1, 1, 0), Redundancy.LAZY)
    lost, decision = {"node0", "node1"}, decided(7)
    plan = go_on_after(whole(), lost, decision, STEPS, balance, {})
    assert plan.arrangement.microbatches == (0, 8)
    both = lost | {"node4", "node5"}
    plan = go_on_after(whole(), both, decision, STEPS, balance, {})
    assert plan.redoing == (0, 1) and plan.arrangement.microbatches == (4, 4)


def test_where_no_state_may_be_copied_it_is_the_end() -> None:
    with pytest.raises(NoHolder, match="pipeline 0: stage 1 has no live holder"):
        go_on_after(whole(), {"node0", "node1"}, decided(7), STEPS, None)
