"""A node hears that its machine is to be taken, at any moment, and leaves in time.

The evidence counts every forward and backward: nothing is run twice.
"""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from evidence import Expected
from forked_jobs import RunningJob
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.checkpoint.moments import SaveMoment

# Far more than they take even on a busy machine.
SECONDS = 240.0
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

ONE = Shape(3, 1, num_steps=14)
SHARED = Shape(3, 1, num_steps=14, num_chunks=2, tensor_size=2)
LONG = Shape(4, 1, num_steps=40)


def file_of(folder: Path) -> str:
    return f"file:{folder}/{{node}}.notice"


STOPPED = ("--bamboo-lease", "18")  # far longer than a node is stopped here


def heard_of(job: RunningJob, shape: Shape) -> None:
    """Let a paused job go on when its coordinator has heard of a notice."""
    job.wait_for_event("notice")
    stopped = shape.node(0, shape.num_stages - 1)
    # Its fault is told just before it strikes.
    agent, until = psutil.Process(job.agents()[stopped]), time.monotonic() + SECONDS
    while agent.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.01)
    job.wake(stopped)


def test_a_file_says_that_a_node_is_to_leave(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    job = scenarios.start(ONE, "eager", ONE.pause(3), more_flags=STOPPED, notices=file_of(tmp_path))
    job.wait_for_event("fault")
    (tmp_path / "node1.notice").write_text("30")
    heard_of(job, ONE)
    finished = job.finish(SECONDS)
    (drained,) = finished.events("drained")
    assert drained["node"] == "node1"
    lines = "\n".join(finished.result.lines)
    assert f"node1 is to leave (file {tmp_path}/node1.notice, in 30 s)" in lines
    assert scenarios.complaints(finished, Expected(ONE, "eager", ())) == []


@pytest.mark.parametrize("who", ["group", "agent", "worker"])
def test_sigterm_to_any_process_of_a_node_lets_it_leave(
    scenarios: ScenarioRunner, who: str
) -> None:
    job = scenarios.start(ONE, "lazy", ONE.pause(3), more_flags=STOPPED)
    job.wait_for_event("fault")
    os.kill(job.processes("node1")[who], signal.SIGTERM)
    heard_of(job, ONE)
    finished = job.finish(SECONDS)
    (drained,) = finished.events("drained")
    assert (drained["node"], drained["cause"]) == ("node1", "SIGTERM")
    assert scenarios.complaints(finished, Expected(ONE, "lazy", ())) == []


def test_sigterm_to_a_node_with_several_workers(scenarios: ScenarioRunner) -> None:
    job = scenarios.start(SHARED, "lazy", SHARED.pause(3), more_flags=STOPPED)
    job.wait_for_event("fault")
    os.killpg(job.agents()["node1"], signal.SIGTERM)
    heard_of(job, SHARED)
    finished = job.finish(SECONDS)
    assert [event["node"] for event in finished.events("drained")] == ["node1"]
    assert scenarios.complaints(finished, Expected(SHARED, "lazy", ())) == []


def test_a_notice_before_the_first_step_waits_for_it(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    (tmp_path / "node2.notice").touch()
    job = scenarios.start(ONE, "bubble", notices=file_of(tmp_path))
    finished = job.finish(SECONDS)
    assert [event["node"] for event in finished.events("drained")] == ["node2"]
    assert scenarios.complaints(finished, Expected(ONE, "bubble", ())) == []


def test_a_notice_in_the_middle_of_a_save_lets_it_be_done_by_those_who_stay(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    """The node that leaves leads the save, which waits for another writer."""
    flags = (*STOPPED, "--save", str(tmp_path / "save"), "--save-interval", "2")
    stop = f"node2@iter2:{SaveMoment.BEGIN}:stop"
    job = scenarios.start(ONE, "lazy", stop, more_flags=flags, notices=file_of(tmp_path))
    job.wait_for_event("fault")
    (tmp_path / "node0.notice").touch()
    heard_of(job, ONE)
    finished = job.finish(SECONDS)
    assert [event["node"] for event in finished.events("drained")] == ["node0"]
    saved = {event["step"]: event["failure"] for event in finished.events("checkpoint")}
    assert saved == dict.fromkeys(range(2, ONE.num_steps + 1, 2))
    assert scenarios.complaints(finished, Expected(ONE, "lazy", ())) == []


def test_notices_while_a_standby_takes_a_victims_place(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    """One at the start, for another node of the pipeline; one in the very step of that change."""
    (tmp_path / "node2.notice").touch()
    kill = "node1@iter1:1.0B1"
    job = scenarios.start(LONG, "lazy", kill, num_standbys=1, notices=file_of(tmp_path))
    job.wait_for_event("changed")
    (tmp_path / "node0.notice").touch()
    finished = job.finish(SECONDS)
    assert {event["node"] for event in finished.events("drained")} == {"node0", "node2"}
    joined = {"node4": "node1"}
    expected = Expected(LONG, "lazy", ["node1"], joined, knows_takeovers=False)
    assert scenarios.complaints(finished, expected) == []


def test_a_node_whose_notice_proves_false_after_it_has_left_waits_as_a_standby(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    """The launcher starts it again, as it would a machine that was taken for a while."""
    notice = tmp_path / "node1.notice"
    notice.touch()
    job = scenarios.start(LONG, "lazy", notices=file_of(tmp_path), respawn_seconds=0.1)
    job.wait_for_event("drained")
    notice.unlink()
    finished = job.finish(SECONDS)
    lines = "\n".join(finished.result.lines)
    assert "node1 is back as node1.2" in lines
    assert finished.result.lost == []
