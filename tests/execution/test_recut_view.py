"""What each worker does in the step in which its pipeline is cut anew, and after it."""

from collections import Counter

import pytest

from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.registry import all_neighbours
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, spans_of_layers
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.holders import held_by, units_held
from megatron_bamboo.planner.new_cut import NewCut
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.rearranging import Rearranging, rearrange
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.schedule.actions import COMPUTE_OPS, Action, Op
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.redundancy import Redundancy

LAYERS, STEP = 6, 9
BALANCE = Balance((0, *[1] * LAYERS, 0), Redundancy.LAZY)
REARRANGING = Rearranging(BALANCE, (1,) * (LAYERS + 2))
THREE = PipelineShape(spans_of_layers((2, 2, 2)), 4)
TWO = PipelineShape(spans_of_layers((3, 3)), 4)
# What waits for a message, and what sends it.
PAIRS = {
    Op.RECV_UNIT: Op.SEND_UNIT,
    Op.RECV_UNIT_GRADIENT: Op.SEND_UNIT_GRADIENT,
    Op.RECV_REFRESH: Op.SEND_REFRESH,
    Op.TIE: Op.SEND_TIE,
}


def decided(step: int, applied: bool = True) -> StepDecision:
    return StepDecision(step, applied, ((0.5).hex(),), "as the test wants it")


def after_a_loss() -> tuple[Plan, Plan]:
    """Before the plan that has a new cut, and that plan."""
    nodes = [f"node{number}" for number in range(3)]
    start = initial_plan(nodes, Arrangement((THREE,)), "lazy")
    before = go_on_after(start, {"node1"}, decided(7, False), range(1, 101), BALANCE)
    return before, rearrange(before, decided(STEP - 1), 99, NewCut.of(before, 0), REARRANGING)


def at_an_arrival() -> tuple[Plan, Plan]:
    before = initial_plan(["node0", "node1"], Arrangement((TWO,)), "lazy")
    wanted = NewCut.of(before, 0, ("node2",))
    return before, rearrange(before, decided(STEP - 1), 99, wanted, REARRANGING)


def views(before: Plan, plan: Plan) -> dict[str, PipelineView]:
    """Of those who were there, and of who joins with the plan."""
    made = {}
    for node in plan.nodes:
        first = before if node in before.nodes else plan
        made[node] = PipelineView(node, first, Redundancy.LAZY, Costs(), True, False)
        made[node].set_plan(plan)
    return made


def run(programs: dict[str, tuple[Action, ...]], made: dict[str, PipelineView]) -> None:
    """Each does what it can until nobody can do anything: a wait is for what another has done."""
    done: dict[str, list[Action]] = {node: [] for node in programs}

    def can(node: str, action: Action) -> bool:
        sender = made[node].sender_of(action)
        if action.op is Op.COMMIT:
            return all(len(program) - len(done[n]) <= 2 for n, program in programs.items())
        if sender == node or action.op not in PAIRS:
            return True
        stage = action.stage
        if action.op is Op.TIE:
            stage = made[node].shape.num_stages - 1 - stage
        return Action(stage, None, PAIRS[action.op], None) in done[sender]

    moved = True
    while moved:
        moved = False
        for node, program in programs.items():
            while len(done[node]) < len(program) and can(node, program[len(done[node])]):
                done[node].append(program[len(done[node])])
                moved = True
    assert {node: len(d) for node, d in done.items()} == {n: len(p) for n, p in programs.items()}


@pytest.mark.parametrize("case", [after_a_loss, at_an_arrival])
def test_every_new_holder_has_its_units_before_the_commit(case) -> None:
    before, plan = case()
    assert plan.change is not None and plan.change.recut == (0,)
    made = views(before, plan)
    programs = {node: view.begin_step(STEP) for node, view in made.items()}
    for node, program in programs.items():
        sent = [a.stage for a in program if a.op is Op.SEND_UNIT]
        assert [a.op for a in program[: len(sent)]] == [Op.SEND_UNIT] * len(sent)
        ops = [a.op for a in program]
        assert ops[-2:] == [Op.COMMIT, Op.STEP] and Counter(ops)[Op.COMMIT] == 1
        held = units_held(plan.change.pipelines[0], node)
        for op in (Op.RECV_UNIT, Op.RECV_UNIT_GRADIENT):
            assert tuple(a.stage for a in program if a.op is op) == held
        for unit in held:
            source = made[node].unit_source(unit)
            assert (source is None) == (unit in held_by(before.pipelines).get(node, ()))
            assert source is None or node in made[source].unit_targets(unit)
            assert source is None or source in all_neighbours(plan, node, tied=True)
    run(programs, made)


@pytest.mark.parametrize("case", [after_a_loss, at_an_arrival])
def test_the_step_after_it_is_one_of_the_new_cut(case) -> None:
    before, plan = case()
    made = views(before, plan)
    for view in made.values():
        view.begin_step(STEP)
        view.make_change(plan.made(), STEP)
    after = plan.made().pipelines[0]
    work = Counter(
        action
        for node, view in made.items()
        for action in view.begin_step(STEP + 1)
        if action.op in COMPUTE_OPS and action.stage == after.stages.index(node)
    )
    assert set(work.values()) == {1}
    assert len(work) == 2 * after.shape.num_stages * after.shape.num_microbatches
    assert {view.rank for view in made.values()} == set(range(after.shape.num_stages))
    assert not any(a.op is Op.RECV_UNIT for v in made.values() for a in v.begin_step(STEP + 2))


def test_who_joins_waits_for_its_units_alone() -> None:
    _, plan = at_an_arrival()
    view = views(*at_an_arrival())["node2"]
    assert view.rank == 2 and plan.pipelines[0].shape.num_stages == 2
    program = view.begin_step(STEP)
    assert {a.op for a in program} == {
        *(Op.RECV_UNIT, Op.RECV_UNIT_GRADIENT),
        *(Op.COMMIT, Op.STEP),
    }
    senders = {sender for _, sender in view.awaited(STEP)}
    assert senders <= {"node0", "node1"} and senders


def test_when_it_is_given_up_the_step_begins_anew_with_the_old_cut() -> None:
    before, plan = at_an_arrival()
    made = views(before, plan)
    for view in made.values():
        view.begin_step(STEP)
    again = go_on_after(plan, {"node2"}, decided(STEP, False), range(1, 101), BALANCE)
    assert (again.redone, again.nodes) == (STEP, ("node0", "node1"))
    for node in again.nodes:
        made[node].begin_again(again)
        program = made[node].begin_step(STEP)
        assert not any(a.op in (Op.SEND_UNIT, Op.RECV_UNIT) for a in program)
        assert made[node].attempt(STEP) == again.epoch


def test_who_begins_a_dissolved_pipeline_again_has_nothing_to_do_before() -> None:
    nodes = [f"node{number}" for number in range(6)]
    start = initial_plan(nodes, Arrangement((THREE, THREE)), "lazy")
    gone = go_on_after(
        start, {"node3", "node4", "node5"}, decided(7, False), range(1, 101), BALANCE
    )
    wanted = NewCut.of(gone, 1, ("new0", "new1"))
    plan = rearrange(gone, decided(STEP - 1), 99, wanted, REARRANGING)
    made = views(gone, plan)
    programs = {node: view.begin_step(STEP) for node, view in made.items()}
    assert {a.op for a in programs["new1"]} == {
        *(Op.RECV_UNIT, Op.RECV_UNIT_GRADIENT),
        *(Op.COMMIT, Op.STEP),
    }
    assert not made["new1"].runs_last_stage() and made["new1"].shape.num_microbatches == 0
    run(programs, made)
    for view in made.values():
        view.make_change(plan.made(), STEP)
    assert {made[node].number for node in ("new0", "new1")} == {1}
    assert any(a.op is Op.B for a in made["new1"].begin_step(STEP + 1))


@pytest.mark.parametrize("giver", [0, 1])
def test_who_changes_the_pipeline_works_in_the_old_one_until_the_step_has_passed(
    giver: int,
) -> None:
    four = PipelineShape(spans_of_layers((2, 2, 1, 1)), 5)
    two = PipelineShape(spans_of_layers((3, 3)), 3)
    shapes = (four, two) if giver == 0 else (two, four)
    start = initial_plan([f"node{n}" for n in range(6)], Arrangement(shapes), "lazy")
    proposal, *_ = REARRANGING.lent(start)
    plan = rearrange(start, decided(STEP - 1), 99, proposal.wanted, REARRANGING)
    later = plan.made().pipelines[1 - giver]
    (lent,) = set(later.stages) - set(start.pipelines[1 - giver].stages)
    made = views(start, plan)
    programs = {node: view.begin_step(STEP) for node, view in made.items()}
    assert made[lent].number == giver and any(a.op is Op.B for a in programs[lent])
    taken = tuple(a.stage for a in programs[lent] if a.op is Op.RECV_UNIT)
    assert taken == units_held(later, lent)
    near = all_neighbours(plan, lent, tied=True)
    assert near & set(start.pipelines[giver].stages) and near & set(later.stages)
    run(programs, made)
    for view in made.values():
        view.make_change(plan.made(), STEP)
    assert (made[lent].number, made[lent].pipeline) == (1 - giver, later)
    work = Counter(a for a in made[lent].begin_step(STEP + 1) if a.op is Op.B)
    assert len(work) == later.shape.num_microbatches
