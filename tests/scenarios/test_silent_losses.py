"""Nodes that are lost without a process ending: no connection closes, and they may come back.

They are stopped whole, or their agent or worker alone, or they hang in the script.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from evidence import Expected
from forked_jobs import FinishedJob, RunningJob
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.schedule.actions import Action, Op

pytestmark = pytest.mark.multiprocess

LEASE_SECONDS = 3.0
LEASE = ("--bamboo-lease", f"{LEASE_SECONDS:g}")
BUSY_PER_CORE, BUSY_SECONDS = 3, 30.0
# Long enough to stop a process before the end.
SHAPE = Shape(3, 1, num_steps=15)
TWO_PIPELINES = Shape(2, 2, num_steps=15)
SHARED = Shape(2, 1, num_steps=15, tensor_size=2)
# Trains for longer than a lease, by sleeping: layers of a given time.
LONG = Shape(3, 1, num_steps=60, variant="emulated")


def stop(job: RunningJob, victim: str, what: str, step: int) -> float:
    """Stop a process of a node, or all, once it is in a step."""
    job.wait_for_step(victim, step)
    os.kill(job.processes(victim)[what], signal.SIGSTOP)
    return job.now()


def seconds_to_notice(job: FinishedJob, since: float) -> float:
    (loss,) = job.events("loss")
    return float(loss["time"]) - since


@pytest.mark.parametrize(
    ("shape", "victim", "what"),
    [
        pytest.param(SHAPE, "node1", "group", marks=pytest.mark.slow),
        pytest.param(LONG, "node2", "agent", marks=pytest.mark.slow),
        (TWO_PIPELINES, "node2", "group"),
    ],
)
def test_a_stopped_node_is_taken_over(
    scenarios: ScenarioRunner, shape: Shape, victim: str, what: str
) -> None:
    job = scenarios.start(shape, "eager", more_flags=LEASE)
    stopped = stop(job, victim, what, 3)
    finished = job.finish()
    assert finished.result.lost[0][1].startswith("nothing was heard of it for 3.")
    assert seconds_to_notice(finished, stopped) < LEASE_SECONDS + 10
    assert scenarios.complaints(finished, Expected(shape, "eager", [victim])) == []


@pytest.mark.parametrize("victim", in_ci(["node0", "node2"], "node2"))
def test_a_stopped_worker_is_ended_by_its_agent(scenarios: ScenarioRunner, victim: str) -> None:
    job = scenarios.start(SHAPE, "lazy", more_flags=LEASE)
    stopped = stop(job, victim, "worker", 3)
    finished = job.finish()
    assert finished.result.lost[0][1].startswith("its worker did not run for 3.")
    assert seconds_to_notice(finished, stopped) < LEASE_SECONDS + 10
    assert scenarios.complaints(finished, Expected(SHAPE, "lazy", [victim])) == []


def test_one_stopped_worker_of_two_is_ended_with_the_other(scenarios: ScenarioRunner) -> None:
    job = scenarios.start(SHARED, "lazy", more_flags=LEASE)
    job.wait_for_step("node1:1", 3)
    started = [e for e in job.events("worker_started") if "agent" in e]
    (worker,) = (e["pid"] for e in started if e["worker"] == "node1:1")
    os.kill(worker, signal.SIGSTOP)
    finished = job.finish()
    assert finished.result.lost[0][1].startswith("its worker did not run for 3.")
    assert scenarios.complaints(finished, Expected(SHARED, "lazy", ["node1"])) == []


def test_a_stuck_forward_is_ended_and_named(scenarios: ScenarioRunner) -> None:
    shape = Shape(3, 1, num_steps=4, variant="faulty")
    job = scenarios.run(shape, "lazy", more_flags=(*LEASE, "--fault", "node1:hang@7"))
    ((victim, cause),) = job.result.lost
    assert victim == "node1"
    assert re.fullmatch(r"its worker was stuck for \d+\.\d s in 1\.0F2 of step 2", cause)
    assert scenarios.complaints(job, Expected(shape, "lazy", ["node1"])) == []


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Three busy processes for each core."""
    command = ["timeout", f"{BUSY_SECONDS:g}", sys.executable, "-c", "while True: pass"]
    number = BUSY_PER_CORE * len(os.sched_getaffinity(0))
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def test_a_busy_machine_loses_nobody(scenarios: ScenarioRunner) -> None:
    with busy_machine():
        job = scenarios.run(TWO_PIPELINES, "eager")
    assert job.result.lost == []
    assert scenarios.complaints(job, Expected(TWO_PIPELINES, "eager", [])) == []


def test_a_node_that_comes_back_changes_nothing(scenarios: ScenarioRunner) -> None:
    job = scenarios.start(LONG, "lazy", more_flags=LEASE)
    stop(job, "node1", "group", 3)
    job.wait_for_event("takeover")
    os.kill(job.processes("node1")["group"], signal.SIGCONT)
    woken = job.now()
    finished = job.finish()
    late = [
        Action.parse(e["action"]).op
        for e in finished.events("action")
        if node_of(e["source"]) == "node1" and e["time"] > woken
    ]
    # What it had before it: nobody is there to take it, and it enters no commit.
    assert not {Op.COMMIT, Op.STEP} & set(late)
    log = (finished.job_dir / "logs" / "node1.log").read_text()
    assert "declared lost" in log
    assert scenarios.complaints(finished, Expected(LONG, "lazy", ["node1"])) == []
