"""Nodes leave a running job: others have their state from the next step on, nothing is redone.

The evidence counts every forward and backward, so that one that is run twice is a complaint, and
compares all copies of the state at the end with those of an undisturbed run.
"""

import argparse
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from evidence import Expected
from forked_jobs import FinishedJob, RunningJob
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.agent import drain as drain_command
from megatron_bamboo.agent.asking import store_of
from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.workers import workers_of

# Far more than they take even on a busy machine.
SECONDS = 240.0
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

ONE = Shape(3, 1, num_steps=14)
BRIEF = Shape(3, 1, num_steps=8)
TWO = Shape(3, 2, num_steps=14)
PAIR = Shape(2, 1, num_steps=30)
SHARED = Shape(3, 1, num_steps=10, num_chunks=2, tensor_size=2)
SHARING_HALF = Shape(3, 2, num_steps=14, variant="zero-bf16")
VERIFIED = Shape(3, 2, num_steps=14, variant="zero-verify")


def drain(job: RunningJob, *words: str) -> int:
    return bamboo(["drain", *words, "--job-dir", str(job.request.job_dir)])


def run_drain(job: RunningJob, node: str) -> None:
    """Without the command line, which would turn the error into a line."""
    parser = argparse.ArgumentParser()
    drain_command.add_arguments(parser)
    drain_command.run(parser.parse_args([node, "--job-dir", str(job.request.job_dir)]))


def await_ready(job: RunningJob, shape: Shape, *standbys: str) -> None:
    """Wait until standbys have built what they are called for."""
    with store_of(job.request.job_dir, None) as client:
        client.wait([f"ready/{one}" for one in workers_of(standbys, shape.tensor_size)], SECONDS)


STOPPED = ("--bamboo-lease", "18")  # far longer than a node is stopped here


@contextmanager
def in_step_3(
    scenarios: ScenarioRunner,
    shape: Shape,
    redundancy: str,
    *injections: str,
    num_standbys: int = 0,
    more_flags: Sequence[str] = (),
) -> Iterator[RunningJob]:
    """A job that does not come past step 3 meanwhile."""
    faults, flags = (*injections, shape.pause(3)), (*STOPPED, *more_flags)
    job = scenarios.start(shape, redundancy, *faults, num_standbys=num_standbys, more_flags=flags)
    job.wait_for_event("fault")
    yield job
    job.wake(shape.node(0, shape.num_stages - 1))


CASES = {
    "a first stage": (ONE, "lazy", ["node0"], {}),
    "a last stage": (ONE, "bubble", ["node2"], {}),
    "a standby takes its place": (BRIEF, "eager", ["node1"], {"node3": "node1"}),
    "in two pipelines": (TWO, "eager", ["node1", "node5"], {}),
    "one of two": (PAIR, "lazy", ["node1"], {"node2": "node1"}),
    "with chunks and shared layers": (SHARED, "bubble", ["node1"], {"node3": "node1"}),
    "with a share of the optimizer": (SHARING_HALF, "lazy", ["node1", "node3"], {"node6": "node1"}),
    "while copies are compared": (VERIFIED, "eager", ["node4"], {}),
}


@pytest.mark.parametrize(
    "name", in_ci(CASES, "a standby takes its place", "with a share of the optimizer")
)
def test_nodes_leave_and_nothing_is_done_again(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, leaving, joined = CASES[name]
    with in_step_3(scenarios, shape, redundancy, num_standbys=len(joined)) as job:
        for node in leaving:
            assert drain(job, node, "--wait", "0") == 0
        await_ready(job, shape, *joined)
    finished = job.finish(SECONDS)
    assert sorted(event["node"] for event in finished.events("drained")) == leaving
    lines = "\n".join(finished.result.lines)
    for node in leaving:
        assert f"drained {node} (bamboo drain)" in lines
    for standby in joined:
        assert f"{standby} takes stage" in lines
    if len(joined) == len(leaving):
        assert not has_merged(finished)
    assert scenarios.complaints(finished, Expected(shape, redundancy, (), joined)) == []


def has_merged(finished: FinishedJob) -> bool:
    """Whether one node ever ran two stages."""
    arranged = [*finished.events("plan"), *finished.events("changed")]
    pipelines = [pipe for event in arranged for pipe in event.get("pipelines", ())]
    return any(len(set(pipe["stages"])) < len(pipe["stages"]) for pipe in pipelines)


WRITES = ("noticed/node1", "going/node1", "released/node1", "plan/1")


@pytest.mark.parametrize("write", in_ci(WRITES, "going/node1", "plan/1"))
def test_a_coordinator_that_dies_meanwhile_changes_nothing_of_a_drain(
    scenarios: ScenarioRunner, write: str
) -> None:
    with in_step_3(scenarios, ONE, "lazy", f"coordinator@after:{write}") as job:
        assert drain(job, "node1", "--wait", "0") == 0
    finished = job.finish(SECONDS)
    assert sum("drained node1" in line for line in finished.result.lines) == 1
    assert scenarios.complaints(finished, Expected(ONE, "lazy", ())) == []


def test_the_last_node_of_a_pipeline_waits_for_a_standby(scenarios: ScenarioRunner) -> None:
    with in_step_3(scenarios, PAIR, "lazy") as job:
        for node in ("node0", "node1"):
            assert drain(job, node, "--wait", "0") == 0
    finished = job.finish(SECONDS)
    lines = "\n".join(finished.result.lines)
    (drained,) = (event["node"] for event in finished.events("drained"))
    (other,) = {"node0", "node1"} - {drained}
    wanted = "it is the last node that could run stage 0 of pipeline 0, stage 1 of pipeline 0"
    assert f"{other} waits for a standby: {wanted}" in lines
    assert finished.result.status == 0
    assert finished.result.lost == []


def test_a_notice_that_is_taken_back_in_time_changes_nothing(scenarios: ScenarioRunner) -> None:
    """Nothing moves before the first step has passed, and that one waits for this node."""
    job = scenarios.start(ONE, "lazy", "node1@iter1:1.0B1:stop", more_flags=STOPPED)
    job.wait_for_event("fault")
    assert drain(job, "node1", "--wait", "0") == drain(job, "node1", "--stay") == 0
    job.wake("node1")
    finished = job.finish(SECONDS)
    assert "node1 stays (bamboo drain)" in "\n".join(finished.result.lines)
    assert finished.events("changed") == finished.events("drained") == []
    assert scenarios.complaints(finished, Expected(ONE, "lazy", ())) == []


def test_a_notice_that_proves_false_too_late_gives_a_standby(scenarios: ScenarioRunner) -> None:
    """The node hands over in step 3, and nobody can let it end before step 4 has passed."""
    shape = replace(ONE, num_steps=50)
    stops = ("node1@iter3:1.0B1:stop", "node0@iter4:0.0F1:stop")
    job = scenarios.start(shape, "lazy", *stops, more_flags=STOPPED)
    job.wait_for_event("fault")
    assert drain(job, "node1", "--wait", "0") == 0
    job.wake("node1")
    job.wait_for_event("let_go")
    assert drain(job, "node1", "--stay") == 0
    while len(job.events("fault")) < 2:
        time.sleep(0.02)
    job.wake("node0")
    finished = job.finish(SECONDS)
    lines = "\n".join(finished.result.lines)
    assert "node1 is back as node1.2" in lines and "node1.2 takes stage 1 of pipeline 0" in lines
    expected = Expected(shape, "lazy", (), {"node1.2": "node1"})
    assert scenarios.complaints(finished, expected) == []


@pytest.mark.parametrize(
    "moment", in_ci(["1SEND_STATE", "1COMMIT", "1STEP"], "1SEND_STATE", "1COMMIT")
)
def test_who_dies_while_it_is_drained_is_lost_like_any_other(
    scenarios: ScenarioRunner, moment: str
) -> None:
    with in_step_3(scenarios, ONE, "eager", f"node1@change:{moment}") as job:
        assert drain(job, "node1", "--wait", "0") == 0
    finished = job.finish(SECONDS)
    expected = Expected(ONE, "eager", ["node1"], knows_takeovers=False)
    assert scenarios.complaints(finished, expected) == []


@pytest.mark.parametrize("moment", in_ci(["1SEND_STATE", "1REDUCE", "1COMMIT"], "1REDUCE"))
def test_who_dies_while_a_standby_takes_its_place_is_lost_and_the_standby_joins(
    scenarios: ScenarioRunner, moment: str
) -> None:
    """It gets from the shadow what it has not got yet."""
    shape = BRIEF
    with in_step_3(scenarios, shape, "lazy", f"node1@change:{moment}", num_standbys=1) as job:
        assert drain(job, "node1", "--wait", "0") == 0
        await_ready(job, shape, "node3")
    finished = job.finish(SECONDS)
    assert [loss["node"] for loss in finished.events("loss")] == ["node1"]
    expected = Expected(shape, "lazy", ["node1"], {"node3": "node1"}, knows_takeovers=False)
    assert scenarios.complaints(finished, expected) == []


@pytest.mark.slow
def test_a_standby_that_was_called_in_vain_takes_the_place_of_another_node(
    scenarios: ScenarioRunner,
) -> None:
    shape = replace(ONE, num_steps=24)
    with in_step_3(scenarios, shape, "lazy", num_standbys=1) as job:
        os.killpg(job.agents()["node3"], signal.SIGSTOP)
        assert drain(job, "node1", "--wait", "0") == 0
        with store_of(job.request.job_dir, None) as client:
            client.wait(["called/node3"], SECONDS)
        assert drain(job, "node1", "--stay") == 0
        job.wake("node3")
        await_ready(job, shape, "node3")
        os.killpg(job.agents()["node0"], signal.SIGKILL)
    finished = job.finish(SECONDS)
    assert finished.events("drained") == []
    expected = Expected(shape, "lazy", ["node0"], {"node3": "node0"})
    assert scenarios.complaints(finished, expected) == []


@pytest.mark.slow
def test_a_standby_that_dies_while_it_takes_a_place_leaves_the_node_to_its_shadow(
    scenarios: ScenarioRunner,
) -> None:
    shape = replace(ONE, num_steps=24)
    with in_step_3(scenarios, shape, "eager", "node3@change:1RECV_STATE", num_standbys=1) as job:
        assert drain(job, "node1", "--wait", "0") == 0
        await_ready(job, shape, "node3")
    finished = job.finish(SECONDS)
    assert [event["node"] for event in finished.events("drained")] == ["node1"]
    assert [loss["node"] for loss in finished.events("loss")] == ["node3"]


def test_a_loss_meanwhile_is_handled_first_and_the_drain_comes_after(
    scenarios: ScenarioRunner,
) -> None:
    shape = replace(ONE, num_stages=4, num_steps=24)
    with in_step_3(scenarios, shape, "lazy", "node2@change:2COMMIT") as job:
        assert drain(job, "node0", "--wait", "0") == 0
    finished = job.finish(SECONDS)
    assert [event["node"] for event in finished.events("drained")] == ["node0"]
    expected = Expected(shape, "lazy", ["node2"], knows_takeovers=False)
    assert scenarios.complaints(finished, expected) == []


def test_a_node_leaves_a_job_that_saves_every_step(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    """It may be the one that leads the save of the very step in which it is let go."""
    flags = ("--save", str(tmp_path / "save"), "--save-interval", "1")
    with in_step_3(scenarios, ONE, "lazy", more_flags=flags) as job:
        assert drain(job, "node0", "--wait", "0") == 0
    finished = job.finish(SECONDS)
    saved = {event["step"]: event["failure"] for event in finished.events("checkpoint")}
    assert saved == dict.fromkeys(range(1, ONE.num_steps + 1))
    assert [event["node"] for event in finished.events("drained")] == ["node0"]
    assert scenarios.complaints(finished, Expected(ONE, "lazy", ())) == []


def test_a_standby_leaves_at_once(scenarios: ScenarioRunner) -> None:
    with in_step_3(scenarios, ONE, "lazy", num_standbys=1) as job:
        assert drain(job, "node3") == 0
        with pytest.raises(UserError, match="node3 has left already"):
            run_drain(job, "node3")
        with pytest.raises(UserError, match="no node node9; it runs on node0, node1, node2"):
            run_drain(job, "node9")
    finished = job.finish(SECONDS)
    assert finished.events("changed") == []
    assert scenarios.complaints(finished, Expected(ONE, "lazy", ())) == []
