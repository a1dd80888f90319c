"""Networks that are slow, or away for a while: what counts as a loss, and what does not.

An independent watcher notes every write of plans and decisions. There is one plan an epoch, in the
store and in all logs.
"""

import time
from collections.abc import Sequence

import pytest
from evidence import Expected
from forked_jobs import FinishedJob
from namespaces import HUB, Namespaces, why_not
from needs import missing
from scenario_runner import ScenarioRunner
from slow_network import SlowNetwork
from slow_network import why_not as why_not_slow
from tiny_gpt import Shape
from write_watcher import WriteWatcher

from megatron_bamboo.agent.job import LEASE_SECONDS
from megatron_bamboo.membership.lives import first_life

pytestmark = pytest.mark.multiprocess

SHORT = Shape(3, 1, num_steps=15)
LONG = Shape(3, 1, num_steps=120)
# Nodes that do not hear the coordinator train on, and must do so for longer than a lease.
LASTING = Shape(3, 1, num_steps=80, variant="emulated")
FEW_STEPS = Shape(3, 1, num_microbatches=2, num_steps=3)
# Each message waits for others, and groups are made by many.
LONGEST_JOB_SECONDS, GROUP_MINUTES = 400.0, 4


def lease(seconds: float) -> tuple[str, str]:
    return "--bamboo-lease", f"{seconds:g}"


def joins(job: FinishedJob, node: str) -> int:
    """How often any life of a node has joined."""
    return sum(first_life(event["node"]) == node for event in job.events("agent_joined"))


@pytest.mark.parametrize(
    ("lease_seconds", "interruptions"),
    [
        pytest.param(4.0, (1.3,), id="once"),
        pytest.param(LEASE_SECONDS, (2.4,), id="half of the default", marks=pytest.mark.slow),
        pytest.param(4.0, (0.9, 0.9, 0.9), id="a flapping link", marks=pytest.mark.slow),
    ],
)
def test_interruptions_shorter_than_half_a_lease_decide_nothing(
    scenarios: ScenarioRunner, lease_seconds: float, interruptions: Sequence[float]
) -> None:
    if (reason := why_not()) is not None:
        missing("netns", reason)
    with Namespaces(SHORT.num_nodes) as network:
        flags = lease(lease_seconds)
        job = scenarios.start(SHORT, "eager", more_flags=flags, namespaces=network.prefix)
        watcher = WriteWatcher(job)
        job.wait_for_step("node1", 3)
        for seconds in interruptions:
            network.silence("node1")
            time.sleep(seconds)
            network.restore("node1")
            time.sleep(seconds / 2)
        finished = job.finish()
        assert list(watcher.complaints(finished, range(1))) == []
    assert scenarios.complaints(finished, Expected(SHORT, "eager", [])) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * LONGEST_JOB_SECONDS)
def test_what_is_lost_on_the_way_for_half_a_lease_decides_nothing(
    scenarios: ScenarioRunner,
) -> None:
    """The node's own link is up, so TCP waits ever longer before it repeats what it said: up to
    6.2 s, and after 4 s of which the way is free again."""
    if (reason := why_not()) is not None:
        missing("netns", reason)
    with Namespaces(LASTING.num_nodes) as network:
        job = scenarios.start(LASTING, "lazy", more_flags=lease(8.0), namespaces=network.prefix)
        watcher = WriteWatcher(job)
        job.wait_for_step("node1", 3)
        ways = (("node1", HUB), (HUB, "node1"))
        for way in ways:
            network.cut(*way)
        time.sleep(3.9)
        for way in ways:
            network.mend(*way)
        finished = job.finish(LONGEST_JOB_SECONDS)
        assert list(watcher.complaints(finished, range(1))) == []
    assert scenarios.complaints(finished, Expected(LASTING, "lazy", [])) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * LONGEST_JOB_SECONDS)
def test_a_longer_flap_is_one_loss_and_the_node_returns_as_another(
    scenarios: ScenarioRunner,
) -> None:
    if (reason := why_not()) is not None:
        missing("netns", reason)
    with Namespaces(LONG.num_nodes) as network:
        job = scenarios.start(
            LONG, "lazy", more_flags=lease(2.0), namespaces=network.prefix, respawn_seconds=0.5
        )
        watcher = WriteWatcher(job)
        job.wait_for_step("node1", 3)
        network.silence("node1")
        assert job.wait_for_event("loss")["node"] == "node1"
        network.restore("node1")
        finished = job.finish()
        # The loss, new shadows if there was time for them, and the newcomer.
        assert list(watcher.complaints(finished, range(2, 4))) == []
    (loss,) = finished.events("loss")
    assert loss["cause"].startswith("nothing was heard of it for 2.")
    assert joins(finished, "node1") == 2
    expected = Expected(LONG, "lazy", ["node1"], {"node1.2": "node1"})
    assert scenarios.complaints(finished, expected) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * LONGEST_JOB_SECONDS)
@pytest.mark.parametrize(("sender", "receiver"), [("node1", HUB), (HUB, "node1")])
def test_a_node_that_can_only_hear_or_only_send_is_one_loss(
    scenarios: ScenarioRunner, sender: str, receiver: str
) -> None:
    if (reason := why_not()) is not None:
        missing("netns", reason)
    with Namespaces(LASTING.num_nodes) as network:
        job = scenarios.start(LASTING, "lazy", more_flags=lease(3.0), namespaces=network.prefix)
        watcher = WriteWatcher(job)
        job.wait_for_step("node1", 3)
        network.cut(sender, receiver)
        finished = job.finish(LONGEST_JOB_SECONDS)
        assert list(watcher.complaints(finished, range(1, 3))) == []
    (loss,) = finished.events("loss")
    assert loss["cause"].startswith("nothing was heard of it for 3.")
    assert scenarios.complaints(finished, Expected(LASTING, "lazy", ["node1"])) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * LONGEST_JOB_SECONDS)
def test_a_delay_of_200_ms_decides_nothing(scenarios: ScenarioRunner) -> None:
    if (reason := why_not_slow()) is not None:
        missing("netns", reason)
    flags = (*lease(3.0), "--distributed-timeout-minutes", str(GROUP_MINUTES))
    with SlowNetwork(FEW_STEPS.num_nodes, delay_seconds=0.2) as network:
        job = scenarios.start(
            FEW_STEPS,
            "lazy",
            more_flags=flags,
            namespaces=network.prefix,
            stall_seconds=LONGEST_JOB_SECONDS,
        )
        watcher = WriteWatcher(job)
        finished = job.finish(LONGEST_JOB_SECONDS)
        assert list(watcher.complaints(finished, range(1))) == []
    assert scenarios.complaints(finished, Expected(FEW_STEPS, "lazy", [])) == []
