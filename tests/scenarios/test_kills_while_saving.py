"""Nodes are killed from outside while each step is saved: no bit is lost in memory or on disk [9].

The moments are as they come; those that are known to matter are in ``test_losses_in_a_save.py``.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from evidence import Expected
from saved_checkpoints import complaints
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(2, 2)
STEPS = tuple(range(1, SHAPE.num_steps + 1))
LONGEST_PAUSE_SECONDS = 0.6  # about what a step and its save take


def flags(root: Path) -> tuple[str, ...]:
    return ("--save", str(root), "--save-interval", "1")


@pytest.fixture(scope="module")
def undisturbed_save(scenarios: ScenarioRunner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed") / "save"
    assert scenarios.run(SHAPE, "none", more_flags=flags(root)).result.status == 0
    return root


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 25))]
)
def test_a_kill_at_any_time_changes_no_bit(
    scenarios: ScenarioRunner, undisturbed_save: Path, tmp_path: Path, seed: int
) -> None:
    chosen = random.Random(seed)
    victims = [f"node{chosen.randrange(2)}", f"node{2 + chosen.randrange(2)}"]
    job = scenarios.start(SHAPE, "lazy", more_flags=flags(tmp_path / "save"))
    for victim in victims[: 1 + seed % 2]:
        job.wait_for_step(victim, chosen.randint(1, 5))
        time.sleep(chosen.uniform(0, LONGEST_PAUSE_SECONDS))
        os.killpg(job.agents()[victim], signal.SIGKILL)
    finished = job.finish()
    expected = Expected(SHAPE, "lazy", victims[: 1 + seed % 2])
    assert scenarios.complaints(finished, expected) == []
    assert list(complaints(tmp_path / "save", STEPS, undisturbed_save)) == []
