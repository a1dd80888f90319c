"""Plans that let live nodes go: who takes their stages, and what a loss leaves of it."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.membership.decision import Record, StepDecision
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.draining import can_go, counting_records, drain, place_of
from megatron_bamboo.planner.healing import Vacancy, heal, stages_to_hold, unprotected, vacancies
from megatron_bamboo.planner.plan import Plan, Transfer, initial_plan
from megatron_bamboo.planner.taking_over import NoHolder, plan_after_loss

NODES = tuple(f"node{i}" for i in range(8))
LAST = 100


def decided(step: int, applied: bool) -> StepDecision:
    return StepDecision(step, applied, ((0.5).hex(),) if applied else None, "as the test wants it")


def whole() -> Plan:
    return initial_plan(NODES, equal_pipelines(4, len(NODES) // 4, 8), "lazy")


def test_a_shadow_runs_the_stage_of_a_node_that_leaves() -> None:
    plan = drain(whole(), decided(7, True), LAST, ["node2"])
    assert plan.change is not None
    assert plan.change.step == 8
    assert plan.change.transfers == (
        Transfer(0, 2, "node2", "node0"),
        Transfer(0, 3, "node3", "node1"),
    )
    # It takes part in the step, as whom the state comes from, and is in no place after it.
    assert plan.pipelines == whole().pipelines
    assert (plan.let_go, plan.nodes) == (("node2",), NODES)
    made = plan.made()
    assert made.pipelines[0].stages == ("node0", "node1", "node1", "node3")
    assert made.pipelines[0].replicas == ("node3", "node0", "node0", "node1")
    assert made.pipelines[0].ranks == NODES[:4]
    assert "node2" not in made.nodes
    assert vacancies(made) == (Vacancy(0, 2),)
    assert plan.reason == (
        "node1 runs stage 2 of pipeline 0 for node2; "
        "node0 shadows stage 2 of pipeline 0; node1 shadows stage 3 of pipeline 0"
    )


def test_several_nodes_leave_at_once() -> None:
    plan = drain(whole(), decided(7, False), LAST, ["node1", "node2", "node4"])
    assert plan.change is not None and plan.change.step == 7
    made = plan.made()
    # The shadow of node2 leaves too: its state goes to the next before it.
    assert made.pipelines[0].stages == ("node0", "node0", "node0", "node3")
    assert Transfer(0, 2, "node2", "node0") in plan.change.transfers
    assert made.pipelines[1].stages == ("node7", "node5", "node6", "node7")
    assert unprotected(made) == ()


def test_the_last_node_of_a_pipeline_stays_until_a_standby_has_come() -> None:
    leaving = NODES[:4]
    plan = drain(whole(), decided(7, True), LAST, leaving)
    assert can_go(whole(), leaving) == NODES[:3]
    made = plan.made()
    assert made.pipelines[0].stages == ("node3",) * 4
    again = drain(made, decided(9, True), LAST, leaving)
    assert (again.change, again.reason) == (None, "nothing is left to change")
    healed = heal(made, decided(9, True), LAST, (Vacancy(0, 1), "node8")).made()
    last = drain(healed, decided(11, True), LAST, leaving)
    assert last.let_go == ("node3",)
    assert last.made().pipelines[0].stages == ("node8",) * 4


def handed_over() -> Plan:
    return drain(whole(), decided(7, True), LAST, ["node2"], replacing=[(Vacancy(0, 2), "node8")])


def test_a_standby_takes_the_place_of_a_node_that_is_still_there() -> None:
    plan = handed_over()
    assert plan.change is not None
    assert plan.change.transfers == (
        Transfer(0, 2, "node2", "node8"),
        Transfer(0, 3, "node3", "node8"),
    )
    # Until the change is made the one has the rank, and the other one beyond all others.
    assert plan.pipelines[0].stages == NODES[:4]
    assert plan.pipelines[0].ranks == (*NODES[:4], "node8")
    assert (plan.let_go, plan.nodes) == (("node2",), (*NODES[:4], "node8", *NODES[4:]))
    made = plan.made().pipelines[0]
    assert made.ranks == made.stages == ("node0", "node1", "node8", "node3")
    assert made.replicas == ("node3", "node0", "node1", "node8")
    assert vacancies(plan.made()) == ()
    assert plan.reason == (
        "node8 takes stage 2 of pipeline 0 from node2; node8 shadows stage 3 of pipeline 0"
    )


def test_who_dies_while_a_standby_takes_its_place_is_followed_by_its_shadow_as_a_source() -> None:
    after = plan_after_loss(handed_over(), {"node2"}, decided(8, False))
    assert (after.lost, after.pipelines[0].stages) == (
        ("node2",),
        ("node0", "node1", "node1", "node3"),
    )
    assert after.change is not None
    assert after.change.transfers == (
        Transfer(0, 2, "node1", "node8"),
        Transfer(0, 3, "node3", "node8"),
    )
    made = after.made().pipelines[0]
    assert made.ranks == made.stages == ("node0", "node1", "node8", "node3")
    assert (made.replicas[2], made.replicas[3]) == ("node1", "node8")


def test_a_standby_that_dies_while_it_takes_a_place_leaves_it_as_it_was() -> None:
    after = plan_after_loss(handed_over(), {"node8"}, decided(8, False))
    assert (after.change, after.lost) == (None, ("node8",))
    assert after.pipelines[0].ranks == after.pipelines[0].stages == NODES[:4]


def test_with_a_standby_all_nodes_of_a_pipeline_can_leave_at_once() -> None:
    replacing = ((Vacancy(0, 1), "node8"),)
    assert can_go(whole(), NODES[:4], replacing) == NODES[:4]
    plan = drain(whole(), decided(7, True), LAST, NODES[:4], replacing=replacing)
    assert plan.made().pipelines[0].stages == ("node8",) * 4


def test_nothing_moves_after_the_last_step() -> None:
    for decision in (decided(LAST, True), None):
        plan = drain(whole(), decision, LAST, ["node2"])
        assert (plan.change, plan.pipelines) == (None, whole().pipelines)


def test_who_has_been_let_go_is_not_lost() -> None:
    plan = drain(whole(), decided(7, True), LAST, ["node2"])
    after = plan_after_loss(plan, {"node5"}, decided(8, True))
    assert (after.lost, plan.freed(decided(8, True))) == (("node5",), ("node2",))
    assert after.pipelines[0].stages == ("node0", "node1", "node1", "node3")


def test_who_dies_while_it_is_drained_is_lost() -> None:
    plan = drain(whole(), decided(7, True), LAST, ["node2"])
    before = plan_after_loss(plan, {"node2"}, decided(8, False))
    assert before.reason == "node1 takes over stage 2 of pipeline 0 from node2"
    after = plan_after_loss(plan, {"node2"}, decided(8, True))
    assert after.reason == "no stage was lost"
    assert before.lost == after.lost == ("node2",)


def test_a_loss_before_the_step_has_passed_leaves_the_node_where_it_is() -> None:
    plan = drain(whole(), decided(7, True), LAST, ["node2"])
    after = plan_after_loss(plan, {"node3"}, decided(8, False))
    assert "node2" in after.made().nodes
    again = drain(after, decided(8, True), LAST, ["node2"])
    assert "node2" not in again.made().nodes


def test_who_has_handed_over_its_only_stage_holds_nothing_more() -> None:
    alone = plan_after_loss(whole(), {"node1"}, decided(3, True))
    plan = drain(alone, decided(4, True), LAST, ["node2"])
    assert Transfer(0, 2, "node2", "node0") in (plan.change.transfers if plan.change else ())
    after = plan_after_loss(plan, {"node5"}, decided(5, False)).made()
    assert all("node2" not in pipe.stages + pipe.replicas for pipe in after.pipelines)


def test_the_record_of_one_let_go_does_not_hold_the_others_back() -> None:
    plan = drain(whole(), decided(7, True), LAST, ["node2"])
    waiting = Record("node2", 8, entered=True, passed=False)
    vector = ((0.5).hex(),)
    ahead = Record("node0", 9, True, False)
    assert counting_records(plan, {"node0": ahead, "node2": waiting}) == {"node0": ahead}
    beside = Record("node0", 8, True, False)
    assert counting_records(plan, {"node0": beside, "node2": waiting}).keys() == {"node0", "node2"}
    passed = Record("node2", 8, True, True, vector, gathered=7)
    counting = counting_records(plan, {"node0": beside, "node2": passed})
    assert counting["node2"] == Record("node2", 8, True, True, vector, gathered=8)


@given(st.data())
def test_any_course_of_drains_healings_and_losses_keeps_every_stage_held(
    data: st.DataObject,
) -> None:
    num_stages = data.draw(st.integers(2, 5))
    nodes = tuple(f"node{n}" for n in range(num_stages * data.draw(st.integers(1, 2))))
    arrangement = equal_pipelines(num_stages, len(nodes) // num_stages, 4)
    plan, step, gone = initial_plan(nodes, arrangement, "lazy"), 1, set[str]()
    for number in range(data.draw(st.integers(1, 8))):
        decision = decided(step, data.draw(st.booleans()))
        step += 2
        gone |= set(plan.freed(decision))
        match data.draw(st.sampled_from(["lose", "drain", "replace", "heal"])):
            case "lose":
                lost = data.draw(st.sets(st.sampled_from(plan.nodes), min_size=1, max_size=2))
                try:
                    plan = plan_after_loss(plan, lost, decision)
                except NoHolder:
                    return
                gone |= set(plan.lost)
            case "drain":
                live = plan.after(decision).nodes
                leaving = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
                plan = drain(plan, decision, LAST, leaving)
            case "replace":
                live = plan.after(decision).nodes
                leaving = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
                places = [place_of(plan.after(decision), node) for node in leaving]
                come = data.draw(st.integers(1, len(places)))
                replacing = [(place, f"new{number}.{n}") for n, place in enumerate(places[:come])]
                plan = drain(plan, decision, LAST, leaving, replacing=replacing)
            case "heal":
                places = vacancies(plan.after(decision))
                use = data.draw(st.booleans()) and bool(places)
                standby = (data.draw(st.sampled_from(places)), f"new{number}") if use else None
                plan = heal(plan, decision, LAST, standby)
        assert not gone & set(plan.nodes)
        assert Plan.from_json(plan.to_json()) == plan
        check(plan)


def check(plan: Plan) -> None:
    """Whoever runs or holds something has it or gets it from who runs it, and is a live node."""
    if plan.change is None:
        return
    given_to = {(t.pipeline, t.stage, t.target) for t in plan.change.transfers}
    for transfer in plan.change.transfers:
        assert transfer.source == plan.pipelines[transfer.pipeline].stages[transfer.stage]
    made = plan.made()
    for number, pipeline in enumerate(made.pipelines):
        for node in {*pipeline.stages, *pipeline.replicas} - {None}:
            assert node in made.nodes and node not in plan.let_go
            for stage in stages_to_hold(pipeline, node or ""):
                had = plan.pipelines[number]
                held = node in (had.stages[stage], had.replicas[stage])
                assert held or (number, stage, node) in given_to
