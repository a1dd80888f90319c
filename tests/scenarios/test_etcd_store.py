"""The store is in etcd: losses are survived as ever, and trainings go on while etcd is away."""

import os
import signal
import time

import pytest
from etcd_cluster import Cluster, cluster
from evidence import Expected
from scenario_runner import ScenarioRunner
from test_coordinator_away import LEASE, LONGER, SHAPE, SLOWLY, died, newest_step
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

# Some 0.3 s a step.
SHORT = Shape(3, 1, num_steps=20, variant="emulated")


def test_losses_of_nodes_and_coordinators_change_no_bit(
    scenarios: ScenarioRunner, etcd: Cluster
) -> None:
    faults = ("coordinator@before:ending/0", "coordinator@after:plan/1")
    losses = ("node1@iter3:1.0B1", "node5@iter5:2REDUCE")
    url = etcd.url("tests/scenarios/losses")
    job = scenarios.start(SHAPE, "eager", *losses, *faults, more_flags=LEASE, store=url).finish()
    assert died(job) == [*faults]
    assert scenarios.complaints(job, Expected(SHAPE, "eager", ["node1", "node5"])) == []


@pytest.mark.parametrize(
    ("shape", "seconds", "victim"),
    [
        pytest.param(SHORT, 5.0, "", id="for-longer-than-a-lease"),
        pytest.param(
            LONGER,
            30.0,
            "node1",
            id="for-30-seconds-with-a-loss",
            marks=[pytest.mark.slow, pytest.mark.timeout(300)],
        ),
    ],
)
def test_training_goes_on_while_etcd_is_away(
    scenarios: ScenarioRunner, shape: Shape, seconds: float, victim: str
) -> None:
    with cluster(1) as member:
        url = member.url("job")
        job = scenarios.start(shape, "eager", more_flags=(*LEASE, *SLOWLY), store=url)
        job.wait_for_step("node1", 5)
        member.suspend()
        step, began = newest_step(job), time.monotonic()
        if victim:
            os.kill(job.processes(victim)["group"], signal.SIGKILL)
        else:
            job.wait_for_step("node2", step + 5)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        assert not job.events("loss")
        member.resume()
        finished = job.finish(seconds=200.0)
    expected = Expected(shape, "eager", [victim] * bool(victim))
    assert scenarios.complaints(finished, expected) == []
