"""A training loop of one's own whose steps are wrapped in the recovery hook: the example."""

import re

import pytest
from evidence import Expected
from scenario_runner import ScenarioRunner
from tiny_gpt import SCRIPTS, Shape

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(3, 2, num_steps=5, variant="own-loop")


def test_the_example_is_short() -> None:
    assert len(SCRIPTS["own-loop"].read_text().splitlines()) < 80


def test_the_loop_comes_back_with_plan_groups_and_where_to_go_on(
    scenarios: ScenarioRunner,
) -> None:
    job = scenarios.run(SHAPE, "lazy", "node1@iter2:1.0F2")
    logs = {n: (job.job_dir / "logs" / f"node{n}.log").read_text() for n in range(6)}
    # The loss changes no bit of what the same loop gives without it.
    assert scenarios.complaints(job, Expected(SHAPE, "lazy", ["node1"])) == []
    for node in (0, 2, 3, 4, 5):
        changes = re.findall(r"epoch (\d): (.*); on with (\d)", logs[node])
        (number, told, following), *_ = changes
        assert following == "3"
        # On a busy machine the new replicas may be there by the end of the step of the takeover.
        reasons = {
            "1": "node0 takes over stage 1 of pipeline 0 from node1",
            "2": "node2 shadows stage 1 of pipeline 0",
        }
        assert reasons[number] in told
        # Two live nodes of three, and new groups for the rest of the run, also after new replicas.
        last = re.findall(r"step (\d) took .* s, on (\d) nodes", logs[node])[-1]
        assert last == ("5", "2" if node < 3 else "3")


def test_a_loss_in_a_collective_of_the_loop_ends_only_that(scenarios: ScenarioRunner) -> None:
    shape = Shape(3, 1, num_steps=5, variant="hooked")
    job = scenarios.run(shape, "lazy", more_flags=("--vanish", "node2@2"))
    logs = [(job.job_dir / "logs" / f"node{n}.log").read_text() for n in range(2)]
    assert scenarios.complaints(job, Expected(shape, "lazy", ["node2"])) == []
    for log in logs:
        told = re.findall(r"step (\d): (\S+) nodes, epoch \d, next (\S+)", log)
        assert [(step, following) for step, _, following in told] == [
            ("1", "2"), ("2", "3"), ("3", "4"), ("4", "5"), ("5", "None"),
        ]  # fmt: skip
        assert [number for _, number, _ in told][:2] == ["3", "None"]
        assert told[-1][1] == "2"
