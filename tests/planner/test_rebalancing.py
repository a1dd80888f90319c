"""Which shares of a batch are best when a pipeline has fewer nodes than it was cut for."""

from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.draining import drain
from megatron_bamboo.planner.healing import Vacancy, can_balance, heal
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.schedule.redundancy import Redundancy

LAST = 100
BALANCE = Balance((0, 1, 1, 1, 0), Redundancy.LAZY)
PASSED = StepDecision(4, True, (), "as the test wants it")


def whole(num_pipelines: int = 2, num_microbatches: int = 4) -> Plan:
    nodes = [f"node{number}" for number in range(3 * num_pipelines)]
    return initial_plan(nodes, equal_pipelines(3, num_pipelines, num_microbatches), "lazy")


def shares(plan: Plan) -> tuple[int, ...]:
    return plan.arrangement.microbatches


def test_whole_pipelines_keep_their_shares() -> None:
    assert BALANCE.better(whole().pipelines) is None
    assert not can_balance(whole(), BALANCE)


def test_a_pipeline_of_fewer_nodes_gets_fewer_microbatches_with_the_next_change() -> None:
    plan = plan_after_loss(whole(), {"node1"}, PASSED)
    assert shares(plan) == (4, 4) and can_balance(plan, BALANCE)
    healed = heal(plan, PASSED, LAST, balance=BALANCE)
    assert (shares(healed), shares(healed.made())) == ((4, 4), (3, 5))
    assert healed.reason.endswith(
        "microbatches 4, 4 become 3, 5, with which an iteration takes 22% less"
    )
    assert not can_balance(healed.made(), BALANCE)
    back = heal(healed.made(), PASSED, LAST, (Vacancy(0, 1), "node6"), BALANCE)
    assert shares(back.made()) == (4, 4)


def test_shares_change_by_themselves_where_no_state_has_to_move() -> None:
    nodes = [f"node{number}" for number in range(4)]
    plan = initial_plan(nodes, equal_pipelines(2, 2, 6), "lazy")
    plan = plan_after_loss(plan, {"node3"}, PASSED)
    assert heal(plan, PASSED, LAST).change is None
    healed = heal(plan, PASSED, LAST, balance=Balance((0, 1, 1, 0), Redundancy.LAZY))
    assert healed.change is not None and healed.change.transfers == ()
    assert shares(healed.made()) == (8, 4)
    assert healed.nodes == ("node0", "node1", "node2")
    # A loss before its step has passed undoes it; then it is planned anew.
    assert plan_after_loss(healed, {"node1"}, PASSED).change is None


def test_who_leaves_takes_microbatches_along() -> None:
    plan = drain(whole(), PASSED, LAST, ["node4"], BALANCE)
    assert shares(plan.made()) == (5, 3)
    assert "become 5, 3" in plan.reason


def test_a_change_of_shares_is_in_what_is_published() -> None:
    plan = heal(plan_after_loss(whole(), {"node1"}, PASSED), PASSED, LAST, balance=BALANCE)
    assert Plan.from_json(plan.to_json()) == plan


def test_eager_forwards_count_as_work() -> None:
    pipeline = whole().pipelines[0]
    lazy, eager = (
        Balance((0, 1, 1, 1, 0), mode).pace(pipeline)
        for mode in (Redundancy.LAZY, Redundancy.EAGER)
    )
    assert (lazy.each, lazy.before) == (3, 6)
    assert (eager.each, eager.before) == (4, 5)


@given(st.data())
def test_no_other_shares_are_better(data: st.DataObject) -> None:
    plan = whole(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)))
    for number in range(len(plan.pipelines)):
        victim = data.draw(st.sampled_from(["", *plan.pipelines[number].stages]))
        plan = plan_after_loss(plan, {victim} if victim else set(), PASSED)
    better = BALANCE.better(plan.pipelines)
    pipelines = plan.pipelines if better is None else better.apply(plan.pipelines)
    paces = [BALANCE.pace(pipeline) for pipeline in pipelines]

    def slowest(numbers: tuple[int, ...]) -> int:
        return max(pace.time(number) for pace, number in zip(paces, numbers, strict=True))

    found = tuple(pipeline.shape.num_microbatches for pipeline in pipelines)
    assert sum(found) == sum(shares(plan))
    assert slowest(found) == min(map(slowest, all_shares(sum(found), len(found))))


def all_shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations_with_replacement(range(total - parts + 1), parts - 1):
        ends = (0, *cuts, total - parts)
        yield tuple(1 + after - before for before, after in pairwise(ends))
