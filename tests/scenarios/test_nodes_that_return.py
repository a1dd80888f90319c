"""A lost node that is started again is another one: it waits as a standby, and takes a place."""

import os
import re
import signal
import time

import pytest
from evidence import Expected
from forked_jobs import JOB_SECONDS, RunningJob
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

ONE = Shape(3, 1, num_steps=120)
FOUR = Shape(4, 1, num_steps=300)
SHARED = Shape(3, 1, num_steps=24, num_chunks=2, tensor_size=2)
SHARING = Shape(2, 2, num_steps=120, variant="zero-bf16")
RESPAWN_SECONDS = 0.2

CASES = {
    "a first stage": (ONE, "lazy", ["node0@iter2:0.0B1"], {"node0.2": "node0"}),
    "with shared layers": (SHARED, "eager", ["node1@iter2:1.1B1"], {"node1.2": "node1"}),
    "with a share of the optimizer": (
        SHARING,
        "bubble",
        ["node3@iter2:1GATHER"],
        {"node3.2": "node3"},
    ),
    "in two pipelines": (
        SHARING,
        "lazy",
        ["node0@iter2:0.0F1", "node3@iter2:1.0B1"],
        {"node0.2": "node0", "node3.2": "node3"},
    ),
    "it is lost again": (
        ONE,
        "lazy",
        ["node1@iter2:1.0B1", "node1.2@change:1STEP"],
        {"node1.2": "node1", "node1.3": "node1.2"},
    ),
    "it is lost before it has joined": (
        ONE,
        "lazy",
        ["node1@iter2:1.0B1", "node1.2@change:1COMMIT"],
        {"node1.2": "node1", "node1.3": "node1"},
    ),
}


@pytest.mark.parametrize("name", in_ci(CASES, "it is lost again"))
def test_a_lost_node_comes_back_as_a_standby(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, injections, joined = CASES[name]
    job = scenarios.run(shape, redundancy, *injections, respawn_seconds=RESPAWN_SECONDS)
    lines = "\n".join(job.result.lines)
    lost = [injection.split("@")[0] for injection in injections]
    for node in joined:
        machine = node.split(".")[0]
        assert re.search(
            rf"{machine}\S* is back as {node}, with process group [0-9]+$", lines, re.M
        )
    # Of two that are lost at once, either may be back first, and takes the first place.
    told = re.findall(r"(\S+) takes stage (\d+) of pipeline (\d+)", lines)
    places = {node: shape.node(int(pipeline), int(stage)) for node, stage, pipeline in told}
    assert places.keys() == joined.keys()
    machines = {before.split(".")[0] for before in joined.values()}
    assert set(places.values()) == machines
    if len(machines) > 1:
        joined = places
    expected = Expected(shape, redundancy, lost, joined, knows_takeovers=False)
    assert scenarios.complaints(job, expected) == []


WRITES = ("after:lost/node1", "after:called/node1.2", "before:plan/3")


@pytest.mark.parametrize("write", in_ci(WRITES, WRITES[1]))
def test_a_coordinator_that_dies_meanwhile_changes_nothing(
    scenarios: ScenarioRunner, write: str
) -> None:
    faults = ("node1@iter2:1.0B1", f"coordinator@{write}")
    job = scenarios.run(ONE, "lazy", *faults, respawn_seconds=RESPAWN_SECONDS)
    assert sum("is back as" in line for line in job.result.lines) == 1
    joined = {"node1.2": "node1"}
    assert scenarios.complaints(job, Expected(ONE, "lazy", ["node1"], joined)) == []


def wait_for(job: RunningJob, event: str, *words: str) -> str:
    """The first of a coordinator's events that has some words in it."""
    log = job.request.job_dir / "events" / "coordinator.jsonl"
    until = time.monotonic() + JOB_SECONDS
    while time.monotonic() < until:
        for line in log.read_text().splitlines() if log.is_file() else ():
            if f'"event": "{event}"' in line and all(word in line for word in words):
                return line
        assert not job.ended.is_set(), f"it ended before {event} with {words}"
        time.sleep(0.02)
    raise TimeoutError(f"there was no {event} with {words}")


@pytest.mark.slow
@pytest.mark.parametrize("delay_seconds", [0.0, 0.02, 0.1])
def test_a_sender_may_be_lost_where_its_stage_has_a_shadow(
    scenarios: ScenarioRunner, delay_seconds: float
) -> None:
    """New shadows are there before the victim comes back: what moves has another holder."""
    job = scenarios.start(FOUR, "lazy", "node1@iter2:1.0B1", respawn_seconds=1.0)
    wait_for(job, "changed")
    wait_for(job, "plan", "node1.2 takes stage 1")
    time.sleep(delay_seconds)
    os.killpg(job.agents()["node0"], signal.SIGKILL)
    wait_for(job, "changed", "node1.2", "node0.2")
    joined = {"node1.2": "node1", "node0.2": "node0"}
    lost = sorted(node for node, _cause in job.finish().result.lost)
    # If it was to get its stage from node0 alone, it comes once more.
    assert lost in (["node0", "node1"], ["node0", "node1", "node1.2"])
    if lost[-1] == "node1.2":
        joined["node1.3"] = "node1.2"
    expected = Expected(FOUR, "lazy", lost, joined, knows_takeovers=False)
    assert scenarios.complaints(job.finish(), expected) == []


def test_a_stopped_node_is_ended_and_comes_back(scenarios: ScenarioRunner) -> None:
    flags = ("--bamboo-lease", "1")
    job = scenarios.start(ONE, "lazy", more_flags=flags, respawn_seconds=RESPAWN_SECONDS)
    job.wait_for_step("node2", 2)
    os.killpg(job.agents()["node2"], signal.SIGSTOP)
    finished = job.finish()
    expected = Expected(ONE, "lazy", ["node2"], {"node2.2": "node2"})
    assert scenarios.complaints(finished, expected) == []
