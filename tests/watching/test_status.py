"""The status of a job, and the text in which it is shown."""

import io
import json
from dataclasses import replace
from datetime import UTC

import pytest
from rich.console import Console
from story import LAST_STEP, NODES, Story

from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.membership.leaving import Notice
from megatron_bamboo.planner.draining import drain
from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.planner.plan import initial_plan
from megatron_bamboo.watching.render import render
from megatron_bamboo.watching.status import AwaitedStatus, JobStatus, Phase, StandbyStatus
from megatron_bamboo.watching.summary import status_of

UNPROTECTED = """\
job runs/tale: running
step 7 of 100, 0.25 s for it (median of the last 0.25 s), about 0:00:23 left
samples 112, loss 1.428571, learning rate 1.000E-03, gradient norm 1.500
epoch 2, coordinator 1 (process 4711) at 127.0.0.1:4242
6 nodes train; lost so far 1, drained 0, returned 0; takeovers 1, planned changes 0
standbys: node7
one node alone holds stage 1 of pipeline 0 since step 5 (01:46:55), stage 2 of pipeline 0 since
step 5 (01:46:55)

 pipeline   stage 0        stage 1                      stage 2
 ────────────────────────────────────────────────────────────────────────────────────
        0   node0          node0                        node2
            shadow node2   no replica                   no replica
            since step 0   since step 5                 since step 5
                           node6 runs it after step 8   node6 shadows it after step 8
        1   node3          node4                        node5
            shadow node5   shadow node3                 shadow node4
            since step 0   since step 0                 since step 0

last events
 [2001-09-09 01:46:40] lost node1 (its connection closed); epoch 1
"""


def shown(status: JobStatus, width: int = 95) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(status, width, UTC))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().split("\n"))


def healing() -> Story:
    story = Story(standbys=("node6", "node7")).begin().train(5).lose("node1").train(2)
    return story.heal((Vacancy(0, 1), "node6"))


def test_a_loss_and_what_is_to_mend_it_are_shown() -> None:
    assert shown(status_of(healing().view())) == UNPROTECTED


def test_a_job_of_which_nobody_is_left_waits_for_nodes_and_is_not_healthy() -> None:
    story = Story().begin().train(2).wait_for_nodes()
    story.join("node0.2")
    status = status_of(story.view())
    assert (status.phase, status.nodes) == (Phase.WAITING, ())
    assert status.awaited == AwaitedStatus(("node0.2",), 6, 3600.0)
    assert (len(status.unheld), status.unprotected) == (6, ())
    text = shown(status)
    assert "job runs/tale: waiting for nodes\n" in text
    assert "\n0 nodes train; lost so far 6," in text
    assert "\nwaits up to 3600 s for nodes; 1 of 6 are there: node0.2\n" in text
    assert "no live node holds stage 0 of pipeline 0, stage 1 of pipeline 0," in text
    assert text.count("no live holder") == 6 and "left" not in text
    told = json.loads(status.to_json())
    assert told["awaited"] == {"there": ["node0.2"], "wanted": 6, "seconds": 3600.0}
    assert not any(place["is_held"] for pipeline in told["pipelines"] for place in pipeline)


def test_a_job_that_has_begun_again_waits_no_more() -> None:
    story = Story().begin().train(2).wait_for_nodes()
    names = tuple(f"{node}.2" for node in NODES)
    for name in names:
        story.join(name)
    story.publish(replace(initial_plan(names, story.plan.arrangement, "lazy"), epoch=1))
    status = status_of(story.view())
    assert (status.phase, status.nodes, status.awaited) == (Phase.RUNNING, names, None)
    assert "every stage has two holders" in shown(status)


def test_a_job_that_has_waited_in_vain_waits_no_more() -> None:
    outcome = Outcome(Status.NO_HOLDER, "pipeline 0: stage 0 has no live holder", ())
    status = status_of(Story().begin().wait_for_nodes().view(outcome=outcome))
    assert (status.phase, status.nodes, status.awaited) == (Phase.ENDED, (), None)


def test_a_loss_that_ended_the_job_is_seen_though_no_plan_followed_it() -> None:
    story = Story().begin().train(2)
    story.event("loss", node="node4", cause="its connection closed")
    status = status_of(story.view(outcome=Outcome(Status.NO_PROGRESS, "nodes were lost")))
    # It ran one stage, and shadowed another.
    assert [(place.node, place.shadow) for place in status.pipelines[1]] == [
        ("node3", "node5"),
        ("node3", None),
        ("node5", None),
    ]
    assert [(number, stage) for number, stage, _ in status.unprotected] == [(1, 1), (1, 2)]


def test_after_the_end_nobody_trains_any_more() -> None:
    status = status_of(Story().begin().train(2).view(outcome=Outcome(Status.FINISHED)))
    assert "\n6 nodes trained at the end; lost so far 0," in shown(status)
    assert "\nevery stage had two holders\n" in shown(status)
    status = status_of(Story().view(outcome=Outcome(Status.INTERRUPTED)))
    assert "\nit ended before it began\n" in f"{shown(status)}\n"


def test_after_the_change_every_stage_has_two_holders() -> None:
    status = status_of(healing().make_change().train(1).view())
    assert status.unprotected == ()
    assert [place.node for place in status.pipelines[0]] == ["node0", "node6", "node2"]
    assert [place.since_step for place in status.pipelines[0]] == [0, 8, 8]
    text = shown(status)
    assert "every stage has two holders" in text
    assert "no replica" not in text and "after step" not in text


def test_stages_that_are_too_many_for_the_width_come_below_each_other() -> None:
    text = shown(status_of(Story().begin().train(1).view()), width=45)
    heads = [line.split() for line in text.splitlines() if "pipeline" in line]
    assert heads == [
        ["pipeline", "stage", "0", "stage", "1"],
        ["pipeline", "stage", "2"],
    ]
    assert text.count("shadow node") == 6


def test_a_standby_is_shown_with_the_place_that_it_is_called_for() -> None:
    story = Story(standbys=("node6", "node7")).begin().train(5).lose("node1")
    story.call("node6", 0, 1, is_ready=False)
    assert status_of(story.view()).standbys == (
        StandbyStatus("node6", 0, 1, False),
        StandbyStatus("node7"),
    )
    assert "standbys: node6 (gets ready for stage 1 of pipeline 0), node7\n" in shown(
        status_of(story.view())
    )
    story.call("node6", 0, 1, is_ready=True)
    assert "node6 (ready for stage 1 of pipeline 0)" in shown(status_of(story.view()))
    # Once nothing is vacant any more it waits like any other.
    story.heal((Vacancy(0, 1), "node7")).make_change()
    assert status_of(story.view()).standbys == (StandbyStatus("node6"),)


def test_a_node_that_leaves_is_no_standby_and_counts_when_it_has_left() -> None:
    story = Story(standbys=("node6",)).begin().train(5)
    story.keys["going/node6"] = b"0 5"
    assert status_of(story.view()).standbys == ()
    story.keys["drained/node6"] = b"bamboo drain"
    story.event("drained", node="node6", cause="bamboo drain", stays=False)
    status = status_of(story.view())
    assert (status.standbys, status.totals.drained) == ((), 1)


def test_a_node_that_is_to_leave_is_shown_until_it_is_gone() -> None:
    story = Story(standbys=("node6",)).begin().train(5)
    for node, notice in (
        ("node1", Notice("maintenance", 30.0)),
        ("node2", Notice("maintenance", 30.0, is_over=True)),
        ("node6", Notice("its user wants it back")),
        ("node9", Notice("it never came")),
    ):
        story.keys[f"noticed/{node}"] = notice.to_json().encode()
    line = "to leave: node1 (maintenance, in 30 s), node6 (its user wants it back)"
    assert f"\n{line}\n" in shown(status_of(story.view()))
    story.publish(drain(story.plan, story.decision(), LAST_STEP, ["node1"]))
    story.make_change()
    story.keys["going/node1"] = b"1 6"
    story.keys["drained/node6"] = b"its user wants it back"
    status = status_of(story.view())
    assert [leaving.node for leaving in status.leaving] == ["node1"]
    assert "node1" not in {place.node for row in status.pipelines for place in row}
    story.keys["drained/node1"] = b"maintenance"
    assert status_of(story.view()).leaving == ()


def test_a_node_that_is_lost_or_has_finished_is_no_standby() -> None:
    story = Story(standbys=("node6", "node7")).begin().train(5)
    story.event("loss", node="node6", cause="its connection closed")
    story.keys["finished/node7"] = b"its connection closed"
    assert status_of(story.view()).standbys == ()


def test_the_phase_follows_from_who_leads_and_how_it_ended() -> None:
    story = Story()
    assert status_of(story.view(leader=None)).phase is Phase.STARTING
    assert status_of(story.view()).phase is Phase.STARTING
    story.begin().train(1)
    assert status_of(story.view()).phase is Phase.RUNNING
    for silent, is_there in ((9.0, True), (3.0, False), (600.0, True)):
        view = story.view(silent_seconds=silent, is_there=is_there)
        assert status_of(view).phase is Phase.LEADERLESS
    gone = story.view(silent_seconds=3.0, is_there=False, address=None)
    long_gone = story.view(silent_seconds=61.0, is_there=False)
    before_the_machine_was_started = story.view(silent_seconds=-5.0, is_there=False)
    for view in (gone, long_gone, before_the_machine_was_started):
        assert status_of(view).phase is Phase.ABANDONED
        assert "ended without an outcome" in shown(status_of(view))


@pytest.mark.parametrize("status", list(Status))
def test_each_ending_has_its_word(status: Status) -> None:
    ended = status_of(Story().begin().train(2).view(outcome=Outcome(status, "so it is")))
    assert ended.phase is Phase.ENDED and ended.is_over
    headline = shown(ended).splitlines()[0]
    assert headline == f"job runs/tale: {ended.ending}"
    assert headline.endswith(": so it is")
    assert " left" not in shown(ended)


def test_before_the_first_step_only_what_is_known_is_shown() -> None:
    text = shown(status_of(Story().view(leader=None)))
    assert text == (
        "job runs/tale: starting\n"
        "step 0 of 100\n"
        "no coordinator yet\n"
        "0 nodes train; lost so far 0, drained 0, returned 0; takeovers 0, planned changes 0\n"
        "no plan yet\n"
    )


def test_a_run_from_a_checkpoint_counts_on_from_it() -> None:
    story = Story()
    story.shape = replace(story.shape, start_step=40)
    status = status_of(story.begin().view())
    assert (status.progress.step, status.progress.samples) == (40, 640)
    assert {place.since_step for row in status.pipelines for place in row} == {40}


def test_without_redundancy_each_stage_is_shown_as_unprotected() -> None:
    story = Story()
    pipelines = (replace(pipe, replicas=(None,) * 3) for pipe in story.plan.pipelines)
    story.plan = replace(story.plan, pipelines=tuple(pipelines))
    assert len(status_of(story.begin().view()).unprotected) == 6


def test_json_holds_all_of_it_and_no_number_that_is_none() -> None:
    story = healing()
    report = json.loads(story.keys["passed/7"])
    story.keys["passed/7"] = json.dumps(report | {"grad_norm": "inf"}).encode()
    values = json.loads(status_of(story.view()).to_json())
    assert values["phase"] == "running"
    assert values["progress"]["gradient_norm"] is None
    assert values["progress"]["loss"] == 10 / 7
    assert values["pipelines"][0][1] == {
        "node": "node0",
        "shadow": None,
        "since_step": 5,
        "since_unix": 1_000_000_015.0,
        "planned": ["node6 runs it after step 8"],
        "is_held": True,
    }
    assert values["totals"]["losses"][0]["node"] == "node1"
