"""A shadow first runs the backwards that others wait for; the sums keep their bits."""

import pytest
from evidence import Expected
from forked_jobs import FinishedJob
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.membership.workers import node_of

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(3, 1, num_steps=4)
TWO_CHUNKS = Shape(2, 1, num_steps=4, num_chunks=2, variant="bf16")
MIRRORED = Shape(3, 2, num_steps=4, num_mirrors=3)


def backwards(job: FinishedJob, shadow: str, place: str) -> list[int]:
    """The microbatches whose backward a shadow ran in the victim's place, in their order."""
    names = [e["action"] for e in job.events("action") if node_of(e["source"]) == shadow]
    return [int(name[len(place) + 1 :]) for name in names if name.startswith(f"{place}B")]


@pytest.mark.parametrize(
    ("deferred", "order"), [(None, [2, 3, 0, 1]), ("2", [2, 3, 0, 1]), ("0", [0, 1, 2, 3])]
)
def test_what_others_wait_for_comes_first(
    scenarios: ScenarioRunner, deferred: str | None, order: list[int]
) -> None:
    flags = () if deferred is None else ("--bamboo-max-deferred", deferred)
    job = scenarios.run(SHAPE, "lazy", "node2@iter2:2.0B2", more_flags=flags)
    assert backwards(job, "node1", "2.0")[:4] == order
    assert scenarios.complaints(job, Expected(SHAPE, "lazy", ["node2"])) == []


@pytest.mark.parametrize(
    ("shape", "mode", "injection"),
    [
        (TWO_CHUNKS, "eager", "node1@iter2:1.0B2"),
        (TWO_CHUNKS, "lazy", "node1@iter2:1.1B3"),
        (MIRRORED, "bubble", "node2@iter2:2.0B3"),
    ],
)
def test_so_it_is_with_chunks_and_mirrors(
    scenarios: ScenarioRunner, shape: Shape, mode: str, injection: str
) -> None:
    assert scenarios.survive(shape, mode, [injection.partition("@")[0]], injection) == []


def test_another_loss_may_come_before_the_sums_are_complete(scenarios: ScenarioRunner) -> None:
    shape = Shape(4, 1, num_steps=4)
    injections = ("node3@iter2:3.0B2", "node1@iter2:1.0B2")
    assert scenarios.survive(shape, "lazy", ["node3", "node1"], *injections) == []
