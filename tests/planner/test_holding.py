"""After which step all wait for nodes, whatever is planned meanwhile."""

from dataclasses import replace

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.healing import Vacancy, heal
from megatron_bamboo.planner.holding import held, lonely
from megatron_bamboo.planner.plan import Checkpoint, Hold, Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss

LAST = 20
START = initial_plan(("node0", "node1", "node2", "node3"), equal_pipelines(2, 2, 4), "lazy")


def decided(step: int, applied: bool) -> StepDecision:
    return StepDecision(step, applied, ("0x0p0",) if applied else None, "a test")


def after_loss(before: Plan, node: str, decision: StepDecision) -> Plan:
    return held(before, plan_after_loss(before, {node}, decision), 1, LAST)


def test_all_wait_after_the_step_that_is_open() -> None:
    assert after_loss(START, "node1", decided(7, False)).hold == Hold(7)
    assert after_loss(START, "node1", decided(7, True)).hold == Hold(8)
    # In the first step no commit was entered yet; after the last one nothing comes.
    assert held(START, plan_after_loss(START, {"node1"}, decided(0, False)), 6, LAST).hold == (
        Hold(6)
    )
    assert after_loss(START, "node1", decided(LAST, False)).hold is None


def test_they_wait_after_the_same_step_when_others_are_lost_meanwhile() -> None:
    plan = after_loss(START, "node1", decided(7, False))
    assert lonely(plan) == (0,)
    again = after_loss(plan, "node3", decided(7, True))
    assert (lonely(again), again.hold) == ((0, 1), Hold(7))


def test_they_wait_again_until_each_pipeline_has_two_nodes() -> None:
    plan = after_loss(START, "node1", decided(7, False))
    plan = after_loss(plan, "node3", decided(7, True))
    first = held(plan, heal(plan, decided(7, True), LAST, (Vacancy(0, 1), "node4")), 1, LAST)
    assert first.change is not None and first.change.step == 8
    assert first.hold == Hold(8)
    made = first.made()
    second = held(made, heal(made, decided(8, True), LAST, (Vacancy(1, 1), "node5")), 1, LAST)
    # Who is late still learns after which step it is to save.
    assert second.hold == Hold(8, is_over=True)
    assert not Hold(8, is_over=True).stops(8) and Hold(8).stops(8) and not Hold(8).stops(9)
    assert Plan.from_json(second.to_json()) == second


def test_where_all_have_gone_back_one_step_is_done_first() -> None:
    lost = after_loss(START, "node1", decided(7, False))
    back = replace(lost, restored=Checkpoint(4, "/saves"), decision=None, hold=None)
    assert held(lost, back, 5, LAST).hold == Hold(5)
