"""What heals a job: pure changes of plans, and what becomes of them when a loss comes first."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.healing import (
    Vacancy,
    can_protect,
    heal,
    stages_to_hold,
    unprotected,
    vacancies,
)
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan, Transfer, initial_plan
from megatron_bamboo.planner.taking_over import NoHolder, plan_after_loss

NODES = tuple(f"node{i}" for i in range(8))
LAST = 100


def decided(step: int, applied: bool) -> StepDecision:
    return StepDecision(step, applied, ((0.5).hex(),) if applied else None, "as the test wants it")


def degraded(*lost: str) -> Plan:
    plan = initial_plan(NODES, equal_pipelines(4, 2, 8), "lazy")
    return plan_after_loss(plan, set(lost), decided(3, True))


def test_a_loss_leaves_two_stages_with_one_holder() -> None:
    plan = degraded("node2")
    assert unprotected(plan) == ((0, 2), (0, 3))
    assert vacancies(plan) == (Vacancy(0, 2),)
    assert can_protect(plan) and not can_protect(heal(plan, decided(4, True), LAST).made())


def test_new_shadows_get_their_state_in_the_first_step_that_is_not_applied() -> None:
    plan = degraded("node2")
    for decision, step in ((decided(7, True), 8), (decided(7, False), 7)):
        healed = heal(plan, decision, LAST)
        assert healed.change is not None
        assert healed.change.step == step
        assert healed.change.transfers == (
            Transfer(0, 2, "node1", "node0"),
            Transfer(0, 3, "node3", "node1"),
        )
        assert healed.pipelines == plan.pipelines
        assert healed.made().pipelines[0].replicas == ("node3", "node0", "node0", "node1")
        assert (healed.epoch, healed.lost, healed.decision) == (plan.epoch + 1, (), decision)
    assert (
        healed.reason == "node0 shadows stage 2 of pipeline 0; node1 shadows stage 3 of pipeline 0"
    )


def test_a_standby_gets_the_victims_rank_its_stage_and_its_replica() -> None:
    plan = degraded("node2")
    healed = heal(plan, decided(7, True), LAST, (Vacancy(0, 2), "node8"))
    assert healed.change is not None
    assert healed.change.transfers == (
        Transfer(0, 2, "node1", "node8"),
        Transfer(0, 3, "node3", "node8"),
    )
    assert healed.pipelines[0].stages == ("node0", "node1", "node1", "node3")
    assert healed.nodes == ("node0", "node1", "node8", "node3", *NODES[4:])
    assert healed.reporter == "node0"
    made = healed.made()
    assert made.pipelines[0] == PipelinePlan(
        stages=("node0", "node1", "node8", "node3"),
        replicas=("node3", "node0", "node1", "node8"),
        ranks=("node0", "node1", "node8", "node3"),
        shape=plan.pipelines[0].shape,
    )
    assert stages_to_hold(made.pipelines[0], "node8") == (2, 3)
    assert unprotected(made) == vacancies(made) == ()


def test_nothing_moves_after_the_last_step_or_when_nobody_knows_the_step() -> None:
    plan = degraded("node2")
    for decision in (decided(LAST, True), None):
        later = heal(plan, decision, LAST, (Vacancy(0, 2), "node8"))
        assert (later.change, later.pipelines) == (None, plan.pipelines)
        assert (later.epoch, later.reason) == (plan.epoch + 1, "nothing is left to change")


def test_a_loss_elsewhere_before_the_step_has_passed_leaves_the_change() -> None:
    plan = heal(degraded("node2"), decided(7, True), LAST, (Vacancy(0, 2), "node8"))
    after = plan_after_loss(plan, {"node5"}, decided(8, False))
    assert plan.change is not None and after.change is not None
    assert (after.lost, after.change.step) == (("node5",), 8)
    assert after.change.transfers == plan.change.transfers
    assert after.change.pipelines[0] == plan.change.pipelines[0]
    assert after.pipelines[1].stages == ("node4", "node4", "node6", "node7")
    assert unprotected(after.made()) == ((1, 1), (1, 2))


def test_a_standby_that_cannot_get_its_stage_is_let_go() -> None:
    plan = heal(degraded("node2"), decided(7, True), LAST)
    plan = heal(plan.made(), decided(9, True), LAST, (Vacancy(0, 2), "node8"))
    # Its stage was to come from node1; that of its replica comes from node3 in vain.
    after = plan_after_loss(plan, {"node1"}, decided(10, False))
    assert after.change is None
    assert after.lost == ("node1", "node8")
    assert after.pipelines[0].stages == ("node0", "node0", "node0", "node3")


def test_a_standby_joins_without_the_replica_that_it_cannot_get() -> None:
    plan = heal(degraded("node2"), decided(7, True), LAST)
    plan = heal(plan.made(), decided(9, True), LAST, (Vacancy(0, 2), "node8"))
    after = plan_after_loss(plan, {"node3"}, decided(10, False))
    assert after.lost == ("node3",)
    made = after.made().pipelines[0]
    assert made.stages == ("node0", "node1", "node8", "node1")
    assert made.replicas == (None, "node0", "node1", None)


def test_new_shadows_go_on_between_those_who_live() -> None:
    """Else one waits for ever for a gradient of a stage that it no longer is to shadow."""
    plan = heal(degraded("node0"), decided(2, True), LAST)
    assert plan.change is not None
    assert plan.change.transfers == (
        Transfer(0, 0, "node3", "node2"),
        Transfer(0, 1, "node1", "node3"),
    )
    after = plan_after_loss(plan, {"node2"}, decided(3, False))
    assert after.change is not None
    assert after.change.transfers == (Transfer(0, 1, "node1", "node3"),)
    assert after.made().pipelines[0].stages == ("node3", "node1", "node1", "node3")
    assert after.made().pipelines[0].replicas == (None, "node3", None, None)


def test_a_loss_after_the_step_has_passed_finds_the_change_made() -> None:
    plan = heal(degraded("node2"), decided(7, True), LAST, (Vacancy(0, 2), "node8"))
    for decision in (decided(8, True), decided(9, False)):
        after = plan_after_loss(plan, {"node1"}, decision)
        assert after.pipelines[0].stages == ("node0", "node0", "node8", "node3")
        assert after.lost == ("node1",)


def test_a_standby_that_is_lost_before_it_has_joined_costs_nothing() -> None:
    plan = heal(degraded("node2"), decided(7, True), LAST, (Vacancy(0, 2), "node8"))
    after = plan_after_loss(plan, {"node8"}, decided(8, False))
    assert (after.reason, after.change, after.lost) == ("no stage was lost", None, ("node8",))
    assert after.pipelines[0].stages == ("node0", "node1", "node1", "node3")


def holders(plan: Plan, transfer: Transfer) -> set[str | None]:
    pipeline = plan.pipelines[transfer.pipeline]
    return {pipeline.stages[transfer.stage], pipeline.replicas[transfer.stage]}


def check_change(plan: Plan, change: Change) -> None:
    """State comes from a holder, and each new holder gets it."""
    for transfer in change.transfers:
        assert transfer.source == plan.pipelines[transfer.pipeline].stages[transfer.stage]
        assert transfer.target in plan.nodes and transfer.target not in holders(plan, transfer)
    given = {(t.pipeline, t.stage, t.target) for t in change.transfers}
    for number, pipeline in enumerate(change.pipelines):
        assert pipeline.ranks == plan.pipelines[number].ranks
        for stage, pair in enumerate(zip(pipeline.stages, pipeline.replicas, strict=True)):
            before = plan.pipelines[number]
            had = {before.stages[stage], before.replicas[stage]}
            for node in pair:
                assert node is None or node in had or (number, stage, node) in given


@given(st.data())
def test_any_course_of_losses_and_healings_keeps_its_word(data: st.DataObject) -> None:
    """After each healing that is made, whatever came before, every stage that can have two holders
    has two; whoever is named is alive."""
    num_stages = data.draw(st.integers(2, 5))
    nodes = tuple(f"node{n}" for n in range(num_stages * data.draw(st.integers(1, 2))))
    plan, step, dead = (
        initial_plan(nodes, equal_pipelines(num_stages, len(nodes) // num_stages, 4), "lazy"),
        1,
        set[str](),
    )
    for number in range(data.draw(st.integers(1, 8))):
        decision = decided(step, data.draw(st.booleans()))
        step += 2
        if data.draw(st.booleans()):
            lost = data.draw(st.sets(st.sampled_from(plan.nodes), min_size=1, max_size=2))
            try:
                plan = plan_after_loss(plan, lost, decision)
            except NoHolder:
                return
            dead |= set(plan.lost)
        else:
            places = vacancies(plan.after(decision))
            use = data.draw(st.booleans()) and bool(places)
            standby = (data.draw(st.sampled_from(places)), f"standby{number}") if use else None
            plan = heal(plan, decision, LAST, standby)
            if plan.change is not None:
                check_change(plan, plan.change)
                made = plan.made()
                assert all(
                    len(set(made.pipelines[pipeline].stages)) == 1
                    for pipeline, _stage in unprotected(made)
                )
        assert not dead & set(plan.nodes)
        assert Plan.from_json(plan.to_json()) == plan
        shared = plan.for_tensor_rank(1, 2)
        assert shared.nodes == tuple(f"{node}:1" for node in plan.nodes)
