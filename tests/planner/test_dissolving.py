"""What becomes of a pipeline that has lost all holders of a stage, and of its work."""

import pytest

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.healing import can_protect, heal, unprotected, vacancies
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.planner.taking_over import NoHolder, plan_after_loss
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.schedule import MAX_MICROBATCHES

LAST = 100
STEPS = range(1, LAST + 1)
BALANCE = Balance((0, 1, 1, 1, 0), Redundancy.LAZY)
NODES = tuple(f"node{number}" for number in range(9))


def decided(step: int, applied: bool) -> StepDecision:
    return StepDecision(step, applied, ((0.5).hex(),) if applied else None, "as the test wants it")


def whole(redundancy: str = "lazy") -> Plan:
    return initial_plan(NODES, equal_pipelines(3, 3, 4), redundancy)


def after(plan: Plan, *lost: str, applied: bool = False) -> Plan:
    return go_on_after(plan, set(lost), decided(7, applied), STEPS, BALANCE)


def test_others_do_the_work_of_a_pipeline_that_lost_both_holders_of_a_stage() -> None:
    plan = after(whole(), "node3", "node4")
    assert plan.arrangement.microbatches == (6, 0, 6)
    assert (plan.epoch, plan.redone, plan.lost) == (1, 7, ("node3", "node4"))
    assert plan.dismissed == ("node5",)
    assert plan.nodes == (*NODES[:3], *NODES[6:])
    assert plan.reason == (
        "pipeline 1: stage 1 has no live holder (node4 and node3 are both lost), so it is "
        "dissolved; step 7 is begun anew, with microbatches 6, 0, 6"
    )
    assert Plan.from_json(plan.to_json()) == plan


def test_a_step_that_has_passed_stays_as_it_is() -> None:
    assert after(whole(), "node3", "node4", applied=True).redone == 8


def test_before_any_commit_the_first_step_is_the_one_that_is_begun_anew() -> None:
    """What survivors have said then is about step 0, also where a checkpoint was loaded."""
    plan = go_on_after(whole("none"), {"node0"}, decided(0, False), range(21, 40), BALANCE)
    assert plan.redone == 21


def test_the_first_pipeline_may_be_the_one() -> None:
    plan = after(whole(), "node0", "node2")
    assert plan.arrangement.microbatches == (0, 6, 6)
    assert (plan.first_pipeline, plan.reporter) == (1, "node3")
    assert plan.arrangement.global_microbatches(0) == ()
    assert plan.arrangement.global_microbatches(2) == (1, 3, 5, 7, 9, 11)


def test_a_takeover_elsewhere_counts_in_the_shares() -> None:
    plan = after(whole(), "node3", "node4", "node7")
    assert plan.pipelines[2].stages == ("node6", "node6", "node8")
    assert plan.arrangement.microbatches == (8, 0, 4)
    assert plan.reason.startswith("node6 takes over stage 1 of pipeline 2 from node7; pipeline 1:")


def test_what_is_dissolved_is_neither_healed_nor_vacant() -> None:
    plan = after(whole(), "node3", "node4")
    assert vacancies(plan) == unprotected(plan) == ()
    assert not can_protect(plan)
    healed = heal(after(plan, "node1"), decided(9, True), LAST, balance=BALANCE)
    assert healed.change is not None and {t.pipeline for t in healed.change.transfers} == {0}
    assert (healed.redone, healed.dismissed) == (None, ())


def test_one_after_the_other_is_dissolved_until_one_is_left() -> None:
    plan = after(after(whole("none"), "node4"), "node0")
    assert plan.arrangement.microbatches == (0, 0, 12)
    assert plan.dismissed == ("node1", "node2")
    with pytest.raises(NoHolder, match="pipeline 2: stage 2 has no live holder"):
        after(plan, "node8")


def test_what_moves_elsewhere_goes_on_moving() -> None:
    healing = heal(plan_after_loss(whole(), {"node1"}, decided(6, True)), decided(6, True), LAST)
    plan = after(healing, "node3", "node4")
    assert plan.change is not None and healing.change is not None
    assert plan.change.transfers == healing.change.transfers
    assert plan.made().arrangement == plan.arrangement


def test_where_the_others_cannot_have_so_many_microbatches_it_is_none_of_theirs() -> None:
    for total, is_dissolved in ((MAX_MICROBATCHES, True), (MAX_MICROBATCHES + 2, False)):
        plan = initial_plan(NODES[:6], equal_pipelines(3, 2, total // 2), "lazy")
        if is_dissolved:
            assert after(plan, "node3", "node4").arrangement.microbatches == (total, 0)
            continue
        with pytest.raises(NoHolder):
            after(plan, "node3", "node4")


def test_without_a_balance_it_is_the_end() -> None:
    with pytest.raises(NoHolder, match="pipeline 1: stage 1 has no live holder"):
        go_on_after(whole(), {"node3", "node4"}, decided(7, True), STEPS, None)
