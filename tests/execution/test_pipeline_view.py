"""A worker's view of its pipeline, before and after losses."""

from collections.abc import Iterable

import pytest

from megatron_bamboo.execution import pipeline
from megatron_bamboo.execution.epochs import StepProgress
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.growing import Growth, grow
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.schedule.actions import COMPUTE_OPS, TAIL_OPS, Action, Op
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.takeover import Progress, take_over
from megatron_bamboo.schedule.validate import validate

STAGES, MICROBATCHES, STEP = 4, 4, 5
NODES = tuple(f"node{number}" for number in range(2 * STAGES))
START = initial_plan(NODES, equal_pipelines(STAGES, 2, MICROBATCHES), "lazy")


def view_of(
    node: str, mode: Redundancy = Redundancy.LAZY, tied: bool = True, num_mirrors: int = 0
) -> PipelineView:
    return PipelineView(node, START, mode, Costs(), tied, False, num_mirrors)


def actions(texts: str) -> list[Action]:
    return [Action.parse(text) for text in texts.split()]


def follow(
    view: PipelineView,
    plan: Plan,
    done: Iterable[Action] = (),
    published: dict[int, StepProgress] | None = None,
    step: int = STEP,
) -> list[Action]:
    """As the executor does, with nothing published if nothing is given."""
    kept = view.follow(view.victims(plan), published or {}, step, list(done))
    view.set_plan(plan)
    return kept


def compute_of(program: Iterable[Action]) -> set[str]:
    return {str(action) for action in program if action.op in COMPUTE_OPS}


def all_compute(*stages: int) -> set[str]:
    return {f"{s}.0{op}{m}" for s in stages for op in "FB" for m in range(MICROBATCHES)}


def test_the_program_is_that_of_its_stage_and_ends_with_its_tail() -> None:
    view = view_of("node6")
    program = view.begin_step(STEP)
    assert (view.number, view.rank) == (1, 2)
    assert compute_of(program) == all_compute(2)
    compute = [action for action in program if action.op not in TAIL_OPS]
    tail = program[len(compute) :]
    assert tail == view.tail(STEP)
    assert [str(a) for a in tail] == [
        "2REDUCE",
        "2SEND_REFRESH",
        "3RECV_REFRESH",
        "2COMMIT",
        "2STEP",
    ]


def test_redundant_forwards_are_run_where_the_mode_says_so() -> None:
    program = view_of("node1", Redundancy.EAGER).begin_step(STEP)
    redundant = [action for action in program if action.op is Op.RF]
    assert [str(action) for action in redundant] == [f"2.0RF{m}" for m in range(MICROBATCHES)]


@pytest.mark.parametrize(("node", "tied"), [("node0", True), ("node3", True), ("node1", False)])
def test_only_the_ends_of_a_tied_model_tie(node: str, tied: bool) -> None:
    assert tied == any(action.op is Op.TIE for action in view_of(node).tail(STEP))
    assert not any(action.op is Op.TIE for action in view_of(node, tied=False).tail(STEP))


def test_messages_come_from_who_runs_the_stage_before_or_after() -> None:
    view = view_of("node1")
    senders = {"1.0RECV_F0": "node0", "1.0RECV_B0": "node2", "2RECV_REFRESH": "node2"}
    assert {text: view.sender_of(Action.parse(text)) for text in senders} == senders
    assert view.sender_of(Action.parse("1.0F0")) == "node1"
    assert view_of("node0").sender_of(Action.parse("0TIE")) == "node3"
    follow(view, plan_after_loss(START, {"node2"}, None))
    assert view.sender_of(Action.parse("2.0RECV_B0")) == "node3"


def test_the_shadow_runs_both_stages_in_this_step_and_in_the_next() -> None:
    view = view_of("node1")
    view.begin_step(STEP)
    follow(view, plan_after_loss(START, {"node2"}, None))
    assert compute_of(view.remaining()) == all_compute(1, 2)
    assert view.in_force.placement == (0, 1, 1, 3) == view.pipeline.placement()
    program = view.begin_step(STEP + 1)
    assert compute_of(program) == all_compute(1, 2)
    assert list(view.tail(STEP)) == actions("1REDUCE 2REDUCE 1SEND_REFRESH 1COMMIT 1STEP")
    validate(view.in_force)


def test_a_loss_in_another_pipeline_changes_nothing_here() -> None:
    view = view_of("node1")
    before = view.begin_step(STEP)
    plan = plan_after_loss(START, {"node6"}, None)
    assert view.victims(plan) == ()
    follow(view, plan)
    assert (*view.remaining(), *view.tail(STEP)) == before
    assert not view.runs_last_stage() and view_of("node3").runs_last_stage()


def test_what_is_done_counts_but_for_messages_to_the_victim() -> None:
    view = view_of("node1")
    view.begin_step(STEP)
    done = actions("1.0F0 1.0SEND_F0 1.0F1")
    received = actions("1.0RECV_F0 1.0RECV_F1")
    published = {1: StepProgress(STEP, Progress(frozenset(done), frozenset(received)))}
    kept = follow(view, plan_after_loss(START, {"node2"}, None), done, published)
    assert kept == actions("1.0F0 1.0F1")
    expected = all_compute(1, 2) - {"1.0F0", "1.0F1"}
    assert compute_of(view.remaining(kept)) == expected
    assert not any(action.op is Op.SEND_F and action.stage == 1 for action in view.remaining())


def test_work_done_since_progress_was_published_is_not_done_again() -> None:
    view = view_of("node0")
    view.begin_step(STEP)
    done = actions("0.0F0 0.0SEND_F0 0.0F1 0.0SEND_F1")
    published = {0: StepProgress(STEP, Progress(frozenset(done[:2])))}
    kept = follow(view, plan_after_loss(START, {"node2"}, None), done, published)
    assert kept == done
    assert {"0.0F1", "0.0SEND_F1"} <= set(map(str, view.remaining()))
    left = set(map(str, view.remaining(kept)))
    assert not {"0.0F0", "0.0SEND_F0", "0.0F1", "0.0SEND_F1"} & left
    assert compute_of(view.remaining(kept)) == all_compute(0) - {"0.0F0", "0.0F1"}


def test_no_message_is_waited_for_whose_work_is_done() -> None:
    view = view_of("node3")
    view.begin_step(STEP)
    done = actions("3.0F0 3.0B0")
    kept = follow(view, plan_after_loss(START, {"node1"}, None), done)
    left = set(map(str, view.remaining(kept)))
    assert "3.0RECV_F0" in set(map(str, view.remaining())) and "3.0RECV_F0" not in left
    assert "3.0RECV_F1" in left


def test_redundant_forwards_count_as_those_of_the_stage_taken_over() -> None:
    view = view_of("node1", Redundancy.EAGER)
    view.begin_step(STEP)
    done = actions("1.0F0 2.0RF0")
    published = {1: StepProgress(STEP, Progress(frozenset(done)))}
    kept = follow(view, plan_after_loss(START, {"node2"}, None), done, published)
    assert compute_of(view.remaining(kept)) == all_compute(1, 2) - {"1.0F0", "2.0F0"}


@pytest.mark.parametrize("published_anew", [True, False])
def test_two_losses_in_one_step_add_up(published_anew: bool) -> None:
    """node2's stage goes to this node, then node0's to the last one."""
    view = view_of("node1")
    view.begin_step(STEP)
    first = plan_after_loss(START, {"node2"}, None)
    done = actions("1.0F0 1.0SEND_F0")
    published = {1: StepProgress(STEP, Progress(frozenset(done)))}
    kept = follow(view, first, done, published)
    kept += actions("2.0F0 2.0SEND_F0")
    again = {1: StepProgress(STEP, Progress(frozenset(kept)))} if published_anew else {}
    kept = follow(view, plan_after_loss(first, {"node0"}, None), kept, again)
    assert view.in_force.placement == (3, 1, 1, 3) == view.pipeline.placement()
    assert kept == actions("1.0F0 2.0F0 2.0SEND_F0")
    assert compute_of(view.remaining(kept)) == all_compute(1, 2) - {"1.0F0", "2.0F0"}
    assert compute_of(view.begin_step(STEP + 1)) == all_compute(1, 2)
    validate(view.in_force)


def test_progress_published_before_the_first_loss_was_followed_loses_no_message() -> None:
    """The second loss is announced while the main thread still computes by the first plan."""
    first = plan_after_loss(START, {"node2"}, None)
    second = plan_after_loss(first, {"node0"}, None)
    done = actions("3.0F0 3.0B0 3.0SEND_B0")
    both = {3: StepProgress(STEP, Progress(frozenset(done), frozenset(actions("3.0RECV_F0"))))}
    sender, receiver = view_of("node3"), view_of("node1")
    for view in (sender, receiver):
        view.begin_step(STEP)
    for plan in (first, second):
        done = follow(sender, plan, done, both)
        follow(receiver, plan, (), both)
        assert "3.0SEND_B0" in map(str, sender.remaining(done))
        assert "2.0RECV_B0" in map(str, receiver.remaining())
    done += actions("3.0SEND_B0")
    assert "3.0SEND_B0" not in map(str, sender.remaining(done))


def test_two_losses_at_once_are_followed_together() -> None:
    plan = plan_after_loss(START, {"node0", "node2"}, None)
    view = view_of("node3")
    view.begin_step(STEP)
    assert view.victims(plan) == (0, 2) and view.survivors(plan) == (1, 3)
    follow(view, plan)
    assert compute_of(view.remaining()) == all_compute(0, 3)


def test_all_survivors_see_the_same_schedule() -> None:
    progress = {
        0: StepProgress(STEP, Progress(frozenset(actions("0.0F0 0.0SEND_F0 0.0F1")))),
        1: StepProgress(
            STEP, Progress(frozenset(actions("1.0F0 1.0SEND_F0")), frozenset(actions("1.0RECV_F0")))
        ),
        3: StepProgress(STEP, Progress(frozenset(), frozenset(actions("3.0RECV_F0")))),
    }
    seen = []
    for rank in progress:
        view = view_of(f"node{rank}")
        view.begin_step(STEP)
        follow(
            view, plan_after_loss(START, {"node2"}, None), progress[rank].progress.done, progress
        )
        seen.append(view.in_force)
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_takeover_that_was_prepared_is_the_same(
    monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    plan = plan_after_loss(START, {"node2"}, None)
    done = actions("1.0F0 1.0SEND_F0 1.0F1")
    now = {1: StepProgress(STEP, Progress(frozenset(done)))}
    then = {1: StepProgress(STEP, Progress(frozenset(done[:1])))} if is_changed else now
    view, other = view_of("node1"), view_of("node1")
    for each in (view, other):
        each.begin_step(STEP)
    follow(other, plan, done, now)
    view.prepare(view.victims(plan), then, STEP)
    calls = []
    monkeypatch.setattr(pipeline, "take_over", lambda *known: calls.append(1) or take_over(*known))
    follow(view, plan, done, now)
    assert view.in_force == other.in_force
    assert len(calls) == is_changed


def test_where_others_were_a_step_ahead_their_work_in_it_counts() -> None:
    view = view_of("node1")
    view.begin_step(STEP)
    ahead = actions("0.0F0 0.0SEND_F0")
    published = {
        0: StepProgress(STEP + 1, Progress(frozenset(ahead))),
        1: StepProgress(STEP, Progress()),
    }
    follow(view, plan_after_loss(START, {"node2"}, None), (), published)
    view.begin_step(STEP + 1)
    other = view_of("node0")
    other.begin_step(STEP + 1)
    kept = follow(other, plan_after_loss(START, {"node2"}, None), ahead, published, STEP + 1)
    assert view.in_force == other.in_force
    assert kept == ahead and not set(ahead) & set(other.remaining())
    view.begin_step(STEP + 2)
    other.begin_step(STEP + 2)
    assert view.in_force == other.in_force
    assert compute_of(view.in_force.programs[0]) == all_compute(0)


def test_with_others_ahead_a_second_loss_is_part_of_their_step_too() -> None:
    view, other = view_of("node1"), view_of("node3")
    view.begin_step(STEP)
    other.begin_step(STEP + 1)
    first = plan_after_loss(START, {"node2"}, None)
    ahead = actions("3.0F0")
    published = {3: StepProgress(STEP + 1, Progress(frozenset(ahead)))}
    for plan, known in ((first, published), (plan_after_loss(first, {"node0"}, None), published)):
        follow(view, plan, (), known)
        follow(other, plan, ahead, known, STEP + 1)
    view.begin_step(STEP + 1)
    assert view.in_force == other.in_force
    assert "3.0F0" not in compute_of(view.in_force.programs[3])


def test_losses_before_a_step_are_not_in_it() -> None:
    view = view_of("node1")
    view.begin_step(STEP)
    published = {0: StepProgress(STEP, Progress(frozenset(actions("0.0F0"))))}
    follow(view, plan_after_loss(START, {"node2"}, None), (), published)
    view.begin_step(STEP + 1)
    assert "0.0F0" in compute_of(view.in_force.programs[0])


def test_mirrors_come_from_the_primary_of_the_replica_held() -> None:
    view = view_of("node0", num_mirrors=2)
    view.begin_step(STEP)
    mirrors = [(str(a), node) for a, node in view.awaited(STEP) if a.op is Op.RECV_MIRROR]
    assert mirrors == [("1.0RECV_MIRROR1", "node1"), ("1.0RECV_MIRROR2", "node1")]
    assert [str(a) for a in view.last_mirrors(1)] == ["1.0RECV_MIRROR2"]
    assert view_of("node0").last_mirrors(1) == ()


def test_a_shadow_adopts_the_mirror_that_all_see_it_has() -> None:
    """node2 is lost as it comes to its last backward but one; its shadow has the first mirror."""
    done = {
        1: actions("1.0F0 1.0F1 1.0F2 1.0B0"),
        3: actions("3.0F0 3.0B0 3.0SEND_B0 3.0F1 3.0B1 3.0SEND_B1"),
    }
    received = frozenset(actions("1.0RECV_B0 1.0RECV_B1 2.0RECV_MIRROR1"))
    published = {
        1: StepProgress(STEP, Progress(frozenset(done[1]), received)),
        3: StepProgress(STEP, Progress(frozenset(done[3]))),
    }
    shadow, other = view_of("node1", num_mirrors=2), view_of("node3", num_mirrors=2)
    covered = {f"2.0{op}{m}" for op in "FB" for m in (0, 1)}
    for view in (shadow, other):
        view.begin_step(STEP)
        kept = follow(view, plan_after_loss(START, {"node2"}, None), done[view.rank], published)
        added = set(kept) - set(done[view.rank])
        assert set(map(str, added)) == (covered if view is shadow else set())
        assert [str(a) for a in view.adopted] == ["2.0RECV_MIRROR1"] * (view is shadow)
        assert not covered & compute_of(view.remaining(kept))
    assert shadow.in_force == other.in_force
    # And a plan that hits nobody here adopts nothing once more.
    again = plan_after_loss(plan_after_loss(START, {"node2"}, None), {"node7"}, None)
    assert follow(shadow, again, done[1], published) == done[1]
    assert shadow.adopted == ()


def test_what_was_done_before_a_step_was_begun_anew_counts_for_nothing() -> None:
    """Neither here nor of others who have not come to it; in the same attempt it does."""
    passed = StepDecision(STEP - 1, True, (), "as the test wants it")
    balance = Balance((0, 1, 1, 1, 1, 0), Redundancy.LAZY)
    begun = go_on_after(START, {"node4", "node5"}, passed, range(1, 101), balance)
    assert begun.redone == STEP
    after = plan_after_loss(begun, {"node2"}, passed)
    done = Progress(frozenset(actions("0.0F0 0.0SEND_F0 0.0F1 0.0SEND_F1")))
    remaining = []
    for attempt in (0, begun.epoch):
        view = view_of("node3")
        view.begin_step(STEP)
        view.begin_again(begun)
        assert len([a for a in view.begin_step(STEP) if a.op is Op.F]) == 2 * MICROBATCHES
        follow(view, after, (), {0: StepProgress(STEP, done, attempt)})
        assert (view.attempt(STEP), view.attempt(STEP + 1)) == (begun.epoch, 0)
        remaining.append([str(a) for a in view.in_force.programs[0] if a.op is Op.F])
    assert remaining[0][:3] == ["0.0F0", "0.0F1", "0.0F2"]
    assert remaining[1][0] == "0.0F2"


def test_who_gets_a_stage_needs_its_state_before_it_computes_anything() -> None:
    """The step is begun anew in its pipeline alone; who sends the state does so first, again if the
    next loss comes before it has passed."""
    passed = StepDecision(STEP - 1, True, (), "as the test wants it")
    lost = {"node4", "node5"}
    plan = go_on_after(START, lost, passed, range(1, 101), None, {})
    assert plan.redoing == (1,) and plan.pipelines[1].stages[1] == "node7"
    views = {node: view_of(node) for node in ("node7", "node1", "node2")}
    for node, view in views.items():
        view.begin_step(STEP)
        (view.begin_again if node == "node7" else view.set_plan)(plan)
    taker = views["node7"]
    program = [str(action) for action in taker.begin_step(STEP)]
    assert program[0] == "1RECV_STATE" and program.count("1RECV_STATE") == 1
    assert dict(taker.awaited(STEP))[Action.parse("1RECV_STATE")] == "node1"
    assert [str(action) for action in taker.state_needed(STEP + 1)] == []
    attempts = [view.attempt(STEP) for view in views.values()]
    assert attempts == [plan.epoch, 0, 0]
    assert views["node1"].given(1, STEP) == ("node7",) and views["node2"].given(1, STEP) == ()
    assert str(views["node1"].state_sends(STEP)[0]) == "1SEND_STATE"
    taker.make_change(plan.made(), STEP)
    assert "1RECV_STATE" not in map(str, taker.begin_step(STEP + 1))


def test_a_pipeline_that_begins_gets_its_state_and_has_only_a_tail() -> None:
    """Its stages' state comes from another one's, its replicas' too; in the next step it works."""
    passed = StepDecision(STEP - 1, True, (), "as the test wants it")
    balance = Balance((0, 1, 1, 1, 1, 0), Redundancy.LAZY)
    lost = go_on_after(START, {"node4", "node5"}, passed, range(1, 101), balance)
    growth = Growth(1, tuple(f"node{number}" for number in range(8, 12)))
    plan = grow(lost, passed, 9, growth, balance)
    view = PipelineView("node9", plan, Redundancy.EAGER, Costs(), True, False, 2)
    assert [str(action) for action in view.begin_step(STEP)] == [
        "1REDUCE",
        "1SEND_REFRESH",
        "1RECV_STATE",
        "2RECV_STATE",
        "2RECV_REFRESH",
        "1COMMIT",
        "1STEP",
    ]
    senders = {str(action): sender for action, sender in view.awaited(STEP)}
    assert senders == {"1RECV_STATE": "node1", "2RECV_STATE": "node2", "2RECV_REFRESH": "node10"}
    source = PipelineView("node1", lost, Redundancy.EAGER, Costs(), True, False, 2)
    source.set_plan(plan)
    assert str(source.begin_step(STEP)[0]) == "1SEND_STATE"
    assert source.given(1, STEP) == ("node9", "node8")
    assert source.given(1, STEP + 1) == ()
    view.make_change(plan.made(), STEP)
    assert compute_of(view.begin_step(STEP + 1)) >= all_compute(1)
