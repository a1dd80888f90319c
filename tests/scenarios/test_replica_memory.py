"""Wherever redundant forwards leave what they save, a takeover changes no bit."""

import pytest
from evidence import Expected
from in_ci import several_in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

PLAIN = Shape(3, 1, num_steps=4)
TWO_CHUNKS = Shape(2, 2, 3, num_steps=4, num_chunks=2)
SHARED = Shape(2, 1, 2, num_steps=4, variant="sequence-parallel", tensor_size=2)
HALF = Shape(2, 3, num_steps=4, variant="zero-bf16")
RECOMPUTING = Shape(2, 1, num_steps=4, variant="recompute")
MIRRORED = Shape(3, 1, num_steps=4, num_mirrors=2)

CASES = [
    (PLAIN, "eager", "node1@iter2:1.0B2"),
    # The model's end, whose losses the redundant forwards have reported.
    (PLAIN, "bubble", "node2@iter2:2.0B1"),
    (TWO_CHUNKS, "eager", "node3@iter3:1.1B1"),
    (SHARED, "eager", "node1@iter2:1.0B1"),
    (HALF, "eager", "node2@iter2:0.0B3"),
    (RECOMPUTING, "eager", "node0@iter2:0.0B1"),
    (MIRRORED, "eager", "node1@iter2:1.0B3"),
]


@pytest.mark.parametrize("memory", ["host", "recompute"])
@pytest.mark.parametrize(
    ("shape", "redundancy", "injection"), several_in_ci(CASES, *CASES[1::2]), ids=str
)
def test_a_loss_changes_no_bit(
    scenarios: ScenarioRunner, shape: Shape, redundancy: str, injection: str, memory: str
) -> None:
    flags = ("--bamboo-replica-memory", memory)
    job = scenarios.run(shape, redundancy, injection, more_flags=flags)
    victims = [injection.partition("@")[0]]
    assert scenarios.complaints(job, Expected(shape, redundancy, victims)) == []
