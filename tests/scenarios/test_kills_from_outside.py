"""``kill -9`` at moments that nobody chose, and Ctrl-C."""

import os
import random
import signal
import time

import psutil
import pytest
from evidence import Expected
from in_ci import in_ci
from moments import MODES
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(3, 2, num_steps=9)
NUM_KILLS = 8
LONGEST_DELAY_SECONDS = 0.15


@pytest.mark.parametrize("number", in_ci(range(NUM_KILLS), *range(4)))
def test_a_kill_at_any_moment_changes_no_bit(scenarios: ScenarioRunner, number: int) -> None:
    chosen = random.Random(number)
    victim = f"node{chosen.randrange(SHAPE.num_nodes)}"
    what = chosen.choice(["group", "agent", "worker"])
    scenarios.undisturbed(SHAPE)
    job = scenarios.start(SHAPE, MODES[number % 2])
    job.wait_for_step(victim, chosen.randint(1, 5))
    time.sleep(chosen.uniform(0.0, LONGEST_DELAY_SECONDS))
    os.kill(job.processes(victim)[what], signal.SIGKILL)
    expected = Expected(SHAPE, MODES[number % 2], [victim])
    assert scenarios.complaints(job.finish(), expected) == []


@pytest.mark.parametrize("step", [1, 3])
def test_an_interrupt_leaves_no_process(scenarios: ScenarioRunner, step: int) -> None:
    job = scenarios.start(SHAPE, "eager")
    job.wait_for_step("node1", step)
    os.kill(job.pid, signal.SIGINT)
    result = job.finish(seconds=20.0).result
    assert (result.status, result.left_behind) == (130, [])


def test_a_killed_launcher_leaves_no_process(scenarios: ScenarioRunner) -> None:
    job = scenarios.start(SHAPE, "lazy")
    job.wait_for_step("node2", 2)
    launcher = psutil.Process(job.pid)
    descendants = launcher.children(recursive=True)
    # Agents, guards and workers, and the coordinator.
    assert len(descendants) == 3 * SHAPE.num_nodes + 1
    launcher.kill()
    assert job.ended.wait(10.0)
    _, alive = psutil.wait_procs(descendants, timeout=10.0)
    assert alive == []
