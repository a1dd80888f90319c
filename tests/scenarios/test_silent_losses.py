"""Nodes that are lost without a process ending: no connection closes, and they may come back."""

import os
import signal

import pytest
from evidence import Expected
from forked_jobs import FinishedJob, RunningJob
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.membership.workers import node_of

pytestmark = pytest.mark.multiprocess

LEASE_SECONDS = 3.0
LEASE = ("--bamboo-lease", f"{LEASE_SECONDS:g}")
SHAPE = Shape(3, 1, num_steps=5)
TWO_PIPELINES = Shape(2, 2, num_steps=5)
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
    [(SHAPE, "node1", "group"), (LONG, "node2", "agent"), (TWO_PIPELINES, "node2", "group")],
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


def test_a_node_that_comes_back_changes_nothing(scenarios: ScenarioRunner) -> None:
    job = scenarios.start(LONG, "lazy", more_flags=LEASE)
    stop(job, "node1", "group", 3)
    job.wait_for_event("takeover")
    os.kill(job.processes("node1")["group"], signal.SIGCONT)
    woken = job.now()
    finished = job.finish()
    late = [e for e in finished.events("action") if node_of(e["source"]) == "node1"]
    # At most what it was in the middle of.
    assert sum(e["time"] > woken for e in late) <= 1
    log = (finished.job_dir / "logs" / "node1.log").read_text()
    assert "declared lost" in log
    assert scenarios.complaints(finished, Expected(LONG, "lazy", ["node1"])) == []
