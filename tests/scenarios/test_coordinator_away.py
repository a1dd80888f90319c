"""The coordinator dies, is stopped or is away: training goes on, and no bit of it changes."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence

import psutil
import pytest
from evidence import Expected
from forked_jobs import FinishedJob, RunningJob
from in_ci import in_ci
from moments import MODES
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.membership.address import ADDRESS_FILE

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(3, 2, num_steps=9)
HEALED = Shape(3, 1, num_steps=90, variant="emulated")  # time for a standby to join
LEASE_SECONDS = 3.0
LEASE = ("--bamboo-lease", f"{LEASE_SECONDS:g}")
# Some 0.1 s a step.
LONG = Shape(3, 1, num_steps=90, variant="emulated")
# Some 0.3 s a step, with these.
LONGER = Shape(3, 1, num_steps=150, variant="emulated")
SLOWLY = ("--bamboo-emulated-forward-ms", "15", "--bamboo-emulated-backward-ms", "30")
AWAY = [
    pytest.param(LONG, (), 4.0, id="for-longer-than-a-lease"),
    pytest.param(
        LONGER,
        SLOWLY,
        30.0,
        id="for-30-seconds",
        marks=[pytest.mark.slow, pytest.mark.timeout(300)],
    ),
]


def leader(job: RunningJob) -> int:
    """The process that leads."""
    return int(json.loads((job.request.job_dir / ADDRESS_FILE).read_text())["pid"])


def newest_step(job: RunningJob) -> int:
    """The newest step that a worker has done something in."""
    return max(int(event["step"]) for event in job.events("action"))


def died(job: FinishedJob) -> list[str]:
    return [event["fault"] for event in job.events("coordinator_kill")]


# What is written in a loss, from its first sign to the next plan, and at the start and the end.
WRITES = [
    ("before:plan/0", "after:plan/0"),
    ("before:lost/node1", "after:lost/node1"),
    ("before:ending/0", "after:ending/0"),
    ("before:plan/1", "after:plan/1"),
    ("before:ending/0", "before:plan/1", "after:lost/node5"),
    ("after:ending/1", "after:plan/2", "before:outcome"),
]


@pytest.mark.parametrize("writes", in_ci(WRITES, *WRITES[4:]), ids="-".join)
def test_deaths_at_writes_change_no_bit(scenarios: ScenarioRunner, writes: Sequence[str]) -> None:
    faults = [f"coordinator@{write}" for write in writes]
    losses = ("node1@iter3:1.0B1", "node5@iter5:2REDUCE")
    job = scenarios.run(SHAPE, "eager", *losses, *faults, more_flags=LEASE)
    assert died(job) == faults
    assert scenarios.complaints(job, Expected(SHAPE, "eager", ["node1", "node5"])) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "writes",
    [
        (f"before:{key}", f"after:{key}")
        for key in ("called/node3", "ending/1", "plan/2", "said/changed/2")
    ],
    ids="-".join,
)
def test_deaths_while_a_standby_joins_change_no_bit(
    scenarios: ScenarioRunner, writes: Sequence[str]
) -> None:
    faults = [f"coordinator@{write}" for write in writes]
    job = scenarios.run(
        HEALED, "lazy", "node1@iter2:1.0B1", *faults, more_flags=LEASE, num_standbys=1
    )
    assert died(job) == faults
    expected = Expected(HEALED, "lazy", ["node1"], {"node3": "node1"})
    assert scenarios.complaints(job, expected) == []


@pytest.mark.parametrize("number", in_ci(range(4), 0))
def test_a_kill_at_any_moment_around_a_loss_changes_no_bit(
    scenarios: ScenarioRunner, number: int
) -> None:
    chosen = random.Random(number)
    victim = f"node{chosen.randrange(SHAPE.num_nodes)}"
    scenarios.undisturbed(SHAPE)
    job = scenarios.start(SHAPE, MODES[number % 2], more_flags=LEASE)
    job.wait_for_step(victim, chosen.randint(1, 4))
    time.sleep(chosen.uniform(0.0, 0.1))
    os.kill(job.processes(victim)["group"], signal.SIGKILL)
    for _ in range(2):
        time.sleep(chosen.uniform(0.0, 0.1))
        # The next one may not have said yet where it is.
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader(job), signal.SIGKILL)
    finished = job.finish()
    assert scenarios.complaints(finished, Expected(SHAPE, MODES[number % 2], [victim])) == []


@pytest.mark.parametrize(("shape", "flags", "seconds"), AWAY)
@pytest.mark.parametrize("victim", in_ci(["", "node1"], "node1"))
def test_training_goes_on_while_it_is_away(
    scenarios: ScenarioRunner, shape: Shape, flags: Sequence[str], seconds: float, victim: str
) -> None:
    """The launcher is stopped, so that nobody starts another one."""
    job = scenarios.start(shape, "eager", more_flags=(*LEASE, *flags))
    job.wait_for_step("node1", 5)
    os.kill(job.pid, signal.SIGSTOP)
    os.kill(leader(job), signal.SIGKILL)
    step, began = newest_step(job), time.monotonic()
    if not victim:
        job.wait_for_step("node2", step + 15)
    else:
        os.kill(job.processes(victim)["group"], signal.SIGKILL)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    assert not job.events("loss")
    os.kill(job.pid, signal.SIGCONT)
    finished = job.finish(seconds=100.0)
    if victim:
        ((_, cause),) = finished.result.lost
        assert cause.startswith(f"nothing was heard of it for {LEASE_SECONDS:g}")
    assert sum("coordinator 2 goes on" in line for line in finished.result.lines) == 1
    expected = Expected(shape, "eager", [victim] * bool(victim))
    assert scenarios.complaints(finished, expected) == []


@pytest.mark.parametrize("victim", in_ci(["", "node2"]))
def test_one_who_was_stopped_for_two_leases_changes_nothing(
    scenarios: ScenarioRunner, victim: str
) -> None:
    job = scenarios.start(LONG, "lazy", more_flags=LEASE)
    job.wait_for_step("node1", 5)
    first = psutil.Process(leader(job))
    first.suspend()
    if victim:
        os.kill(job.processes(victim)["group"], signal.SIGKILL)
    time.sleep(2 * LEASE_SECONDS)
    assert leader(job) != first.pid
    first.resume()
    psutil.wait_procs([first], timeout=10)
    assert not first.is_running()
    finished = job.finish()
    log = (finished.job_dir / "logs" / "coordinator.log").read_text()
    assert "Deposed: coordinator 1 is deposed: coordinator 2 leads" in log
    expected = Expected(LONG, "lazy", [victim] * bool(victim))
    assert scenarios.complaints(finished, expected) == []
