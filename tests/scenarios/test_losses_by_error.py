"""A worker raises or leaves: its node is lost like any other, unless the script can run nowhere."""

import pytest
from evidence import Expected
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(3, 1, num_steps=4, variant="faulty")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("node1:raise@7", "its worker raised RuntimeError: a bug (in 1.0F2 of step 2)"),
        ("node1:leave@6", "its worker ended with status 0 before the training was over"),
        ("node2:vanish@5", "its worker ended with status 0 before the training was over"),
    ],
)
def test_the_error_of_one_worker_is_survived(
    scenarios: ScenarioRunner, fault: str, cause: str
) -> None:
    victim = fault.partition(":")[0]
    job = scenarios.run(SHAPE, "lazy", more_flags=("--fault", fault))
    assert job.result.lost == [[victim, cause]]
    assert any(f"lost {victim} ({cause}); epoch 1" in line for line in job.result.lines)
    assert scenarios.complaints(job, Expected(SHAPE, "lazy", [victim])) == []


@pytest.mark.parametrize("how", ["raise", "twice"])
def test_the_error_of_the_script_ends_the_job(scenarios: ScenarioRunner, how: str) -> None:
    job = scenarios.run(SHAPE, "eager", more_flags=("--fault", f"all:{how}@1"))
    assert job.result.status == 1
    error = {
        "raise": "RuntimeError: a bug",
        "twice": "ValueError: a forward step can take one microbatch, and has asked for a second",
    }[how]
    assert f"node0 raised {error} (in 0.0F0 of step 1)" in job.result.message
    log = job.job_dir / "logs" / "node0.log"
    assert f"its traceback is in {log}, and node2 raised it too" in job.result.message
    assert error in log.read_text().splitlines()
    assert job.result.left_behind == []
