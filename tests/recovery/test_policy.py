"""What each policy decides, and from which numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recovering import QUIET, STATE_BYTES, nodes_of, policy_of, started

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import NoHolder, plan_after_loss
from megatron_bamboo.recovery.decision import Action, Decision, Verdict
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.policy import Policy
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.recovery.view import History, Joined, Lost, Passed, View
from megatron_bamboo.schedule.redundancy import Redundancy

AUTO, BAMBOO, OOBLECK, CHECKPOINT = PolicyName


def sizes_of(decision: Decision) -> list[tuple[int, int]]:
    """By pipeline its nodes and microbatches."""
    return sorted((p.shape.num_stages, p.shape.num_microbatches) for p in decision.pipelines)


def lose(policy: Policy, plan: Plan, *lost: str, standbys: tuple[str, ...] = ()) -> Verdict:
    """What is decided when nodes are lost in step 8, the newest checkpoint being of step 5."""
    view = View(plan, QUIET, standbys, frozenset(lost), step=7, saved_step=5)
    return policy.decide(view, Lost(lost), 100.0)


def pause(policy: Policy, plan: Plan, *standbys: str, history: History = QUIET) -> Verdict:
    """What is decided when step 7 has passed, just after a checkpoint."""
    view = View(plan, history, standbys, step=7, saved_step=7)
    return policy.decide(view, Passed(7), 100.0)


def after(plan: Plan, *lost: str) -> Plan:
    """The plan once shadows have taken over."""
    return plan_after_loss(plan, set(lost), None)


@pytest.mark.parametrize("name", PolicyName)
def test_all_begin_alike_with_what_is_fastest(name: PolicyName) -> None:
    """24 layers, 24 microbatches, 7 nodes: pipelines of 2, 2 and 3 with 7, 7 and 10 (Oobleck)."""
    plan = started(policy_of(name), nodes_of(7))
    shapes = [(p.shape.num_stages, p.shape.num_microbatches) for p in plan.pipelines]
    assert shapes == [(2, 7), (2, 7), (3, 10)]
    has_replicas = all(None not in p.replicas for p in plan.pipelines)
    assert has_replicas == (name in (AUTO, BAMBOO))


@pytest.mark.parametrize("name", [AUTO, BAMBOO])
def test_a_shadow_takes_over_at_once(name: PolicyName) -> None:
    policy = policy_of(name)
    plan = started(policy, nodes_of(7))
    decision, reason = lose(policy, plan, "node1")
    assert decision == Decision(Action.TAKE_OVER, after(plan, "node1").pipelines)
    assert reason.words == "lost node1; node0 takes over stage 1 of pipeline 0 from node1"
    assert reason.numbers["iteration_seconds"] == 288
    # One node does for seven microbatches what two did.
    assert reason.numbers["iteration_seconds_then"] == 7 * 24 * 3
    assert str(reason).endswith(
        "(iteration_seconds 288, iteration_seconds_then 504, pause_seconds 1)"
    )


def test_oobleck_does_the_step_again_in_pipelines_by_its_rules() -> None:
    policy = policy_of(OOBLECK)
    plan = started(policy, nodes_of(7))
    decision, reason = lose(policy, plan, "node5")
    assert decision.action is Action.RECONFIGURE
    assert not decision.in_background
    assert sizes_of(decision) == [(2, 8), (2, 8), (2, 8)]
    assert "pipeline 2 takes the template for 2 nodes, not 3" in reason.words
    # Two nodes share what three had: a node that keeps 8 units gets 4, one sender has all of them.
    assert reason.numbers["moved_bytes"] == 8 * STATE_BYTES
    assert decision.move_seconds == reason.numbers["move_seconds"] > 0
    assert reason.numbers["iteration_seconds_then"] == 324


def test_with_checkpoints_alone_all_start_anew_as_the_fastest_pipelines() -> None:
    policy = policy_of(CHECKPOINT)
    decision, reason = lose(policy, started(policy, nodes_of(7)), "node5", standbys=("node7",))
    assert decision.action is Action.RESTORE
    assert sizes_of(decision) == [(2, 7), (2, 7), (3, 10)]
    assert reason.numbers["lost_steps"] == 2
    assert "from step 5" in reason.words


def test_a_stage_without_holder_in_its_pipeline_comes_from_another_one() -> None:
    for name, action in ((AUTO, Action.RECONFIGURE), (BAMBOO, Action.RESTORE)):
        policy = policy_of(name)
        decision, reason = lose(policy, started(policy, nodes_of(7)), "node0", "node1")
        assert decision.action is action
        assert "pipeline 0: stage 0 has no live holder" in reason.words
        assert {"node0", "node1"}.isdisjoint(n for p in decision.pipelines for n in p.stages)


@pytest.mark.parametrize("name", [AUTO, OOBLECK])
def test_what_nobody_holds_any_more_comes_from_the_checkpoint(name: PolicyName) -> None:
    policy = policy_of(name)
    # Of two pipelines the first stages are gone, with their shadows.
    decision, reason = lose(policy, started(policy, nodes_of(4)), *nodes_of(4), standbys=("a", "b"))
    assert decision.action is Action.RESTORE
    assert sizes_of(decision) == [(2, 24)]
    assert "live nodes hold the state of no pipelines" in reason.words


@pytest.mark.parametrize("name", PolicyName)
def test_too_few_wait_and_save_what_they_have(name: PolicyName) -> None:
    policy = policy_of(name, least_stages=3)
    plan = started(policy, nodes_of(6))
    view = View(plan, QUIET, (), frozenset(nodes_of(6)[2:]), step=7, saved_step=5)
    decision, reason = policy.decide(view, Joined(()), 100.0)
    assert decision.action is Action.WAIT
    # Two neighbours with replicas have the stages of three.
    assert decision.saves == (name in (AUTO, BAMBOO))
    assert reason.numbers == {"nodes": 2}


def test_bamboo_heals_and_keeps_its_microbatches() -> None:
    policy = policy_of(BAMBOO)
    plan = started(policy, nodes_of(7))
    hit = after(plan, "node5")
    assert pause(policy, plan, "node7")[0] == Decision(Action.STAY)
    decision, reason = pause(policy, hit, "node7")
    assert (decision.action, decision.in_background) == (Action.HEAL, True)
    assert reason.words == "step 7 has passed; node7 takes stage 1 of pipeline 2"
    assert [p.shape for p in decision.pipelines] == [p.shape for p in plan.pipelines]
    # It gets its stage and a replica, from two nodes; the others have theirs still.
    assert (reason.numbers["moved_bytes"], decision.move_seconds) == (16 * STATE_BYTES, 16.0)
    decision, reason = pause(policy, hit)
    assert reason.words == "step 7 has passed; replicas are made anew"
    assert all(None not in p.replicas for p in decision.pipelines)
    # One node alone has nobody to shadow it.
    assert pause(policy, after(plan, "node1"))[0] == Decision(Action.STAY)


def test_auto_shares_the_batch_out_anew_at_the_next_iteration() -> None:
    policy = policy_of(AUTO)
    hit = after(started(policy, nodes_of(7)), "node1")
    decision, reason = pause(policy, hit)
    assert (decision.action, decision.in_background) == (Action.REBALANCE, True)
    assert decision.move_seconds == reason.numbers["moved_bytes"] == 0
    assert "microbatches 7, 7, 10 become" in reason.words
    assert sum(p.shape.num_microbatches for p in decision.pipelines) == 24
    assert reason.numbers["iteration_seconds_then"] < reason.numbers["iteration_seconds"]


def test_state_that_moves_for_longer_than_an_iteration_comes_after_the_shares() -> None:
    for bandwidth, moved in ((1e6, 16 * STATE_BYTES), (1.0, 0)):
        policy = policy_of(AUTO, prices=Prices(bandwidth=bandwidth))
        hit = after(started(policy, nodes_of(7)), "node5")
        decision, reason = pause(policy, hit)
        assert decision.action is (Action.HEAL if moved else Action.REBALANCE)
        assert reason.numbers["moved_bytes"] == moved
        assert "microbatches" in reason.words


def test_auto_makes_other_pipelines_where_they_pay_until_the_next_event() -> None:
    policy = policy_of(AUTO)
    plan = started(policy, nodes_of(6))
    decision, reason = pause(policy, plan, "node6")
    assert (decision.action, decision.in_background) == (Action.RECONFIGURE, True)
    assert sizes_of(decision) == [(2, 7), (2, 7), (3, 10)]
    assert reason.numbers["iterations_then"] > reason.numbers["iterations"]
    assert reason.numbers["expected_seconds"] == 700  # 100 s old, and 600 s are assumed
    busy = History(0.0, tuple(float(n) for n in range(1, 100)))
    decision, reason = pause(policy, plan, "node6", history=busy)
    assert decision == Decision(Action.STAY)
    assert reason.words == "step 7 has passed; no other pipelines pay"
    assert reason.numbers["expected_seconds"] == 7
    assert reason.numbers["iterations_then"] <= reason.numbers["iterations"]


def test_oobleck_takes_in_whoever_comes_while_all_wait() -> None:
    policy = policy_of(OOBLECK)
    plan = started(policy, nodes_of(6))
    assert pause(policy, plan)[0] == Decision(Action.STAY)
    decision, reason = pause(policy, plan, "node6")
    assert (decision.action, decision.in_background) == (Action.RECONFIGURE, False)
    assert "node6 joins pipeline 0, which has the fewest nodes" in reason.words


def test_a_job_with_checkpoints_alone_starts_anew_where_that_pays() -> None:
    policy = policy_of(CHECKPOINT, prices=Prices(restore_seconds=10.0))
    plan = started(policy, nodes_of(6))
    assert pause(policy, plan)[0] == Decision(Action.STAY)
    assert pause(policy, plan, "node6", "node7")[0].action is Action.RESTORE
    # The same with five iterations to be done again.
    view = View(plan, QUIET, ("node6", "node7"), step=7, saved_step=2)
    decision, reason = policy.decide(view, Passed(7), 100.0)
    assert decision == Decision(Action.STAY)
    assert reason.numbers["pause_seconds"] == 10 + 5 * reason.numbers["iteration_seconds"]


def test_oobleck_borrows_as_in_its_paper() -> None:
    """Pipelines [0,1] [2,3,4] [5-8] [9-13] and n0=2: node 2 lost leaves [0,1] [3,4] .."""
    spans = {
        2: ((0, 12), (12, 24)),
        3: ((0, 8), (8, 16), (16, 24)),
        4: ((0, 6), (6, 12), (12, 18), (18, 24)),
        5: ((0, 5), (5, 10), (10, 15), (15, 20), (20, 24)),
    }
    arrangement = Arrangement(tuple(PipelineShape(spans[n], 10) for n in (2, 3, 4, 5)))
    plan = initial_plan(nodes_of(14), arrangement, Redundancy.NONE)
    decision, _ = lose(policy_of(OOBLECK, num_microbatches=40), plan, "node2")
    assert [len(p.stages) for p in decision.pipelines] == [2, 2, 4, 5]


@settings(max_examples=40)
@given(data=st.data())
def test_every_decision_says_why_and_can_be_carried_out(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(PolicyName)))
    policy = policy_of(name, num_units=6, num_microbatches=8)
    plan = started(policy, nodes_of(data.draw(st.integers(2, 9))))
    lost = data.draw(st.sets(st.sampled_from(sorted(plan.nodes))))
    standbys = tuple(f"new{n}" for n in range(data.draw(st.integers(0, 3))))
    moments = sorted(data.draw(st.lists(st.floats(0, 100), max_size=5)))
    view = View(plan, History(0.0, tuple(moments)), standbys, frozenset(lost), 7, 5)
    event = Lost(tuple(sorted(lost))) if lost else Passed(7)
    decision, reason = policy.decide(view, event, 100.0)
    assert reason.words.startswith(f"{event}; ")
    assert reason.numbers or decision.action is Action.STAY
    assert policy.decide(view, event, 100.0) == (decision, reason)
    if decision.action is Action.TAKE_OVER:
        assert decision.pipelines == plan_after_loss(plan, lost, None).pipelines
    elif lost and policy.name in (AUTO, BAMBOO):
        with pytest.raises(NoHolder):
            plan_after_loss(plan, lost, None)
    if decision.action in (Action.STAY, Action.WAIT):
        assert not decision.pipelines
        return
    assert {n for p in decision.pipelines for n in p.stages} <= {*view.nodes}
    assert sum(p.shape.num_microbatches for p in decision.pipelines) == 8
    if policy.name is BAMBOO and decision.action in (Action.TAKE_OVER, Action.HEAL):
        assert [p.shape for p in decision.pipelines] == [p.shape for p in plan.pipelines]
