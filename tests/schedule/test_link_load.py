"""Mirrors that a link cannot carry are found by arithmetic alone."""

import pytest

from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.footprint import ChunkSizes, StageSizes
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.link_load import mirrors_too_many
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import simulate

STAGES, MICROBATCHES, MESSAGE, STEPPED = 4, 8, 1000, 50_000
COSTS = Costs(0.1, 0.2)
# The first worker, which shadows stage 1, gets a gradient of each microbatch.
OTHERS = MICROBATCHES * MESSAGE + STEPPED
SECONDS = (MICROBATCHES + STAGES - 1) * 0.3


def schedule(num_mirrors: int, num_chunks: int = 1) -> Schedule:
    compute = compute_schedule(STAGES, num_chunks, MICROBATCHES)
    return lower(add_redundancy(compute, Redundancy.LAZY, num_mirrors=num_mirrors))


def sizes(mirror: int, num_chunks: int = 1) -> StageSizes:
    return StageSizes(0, 0, 0, STEPPED, 0, (ChunkSizes(0, mirror),) * num_chunks)


def judged(num_mirrors: int, mirrors: list[int], bytes_per_second: float) -> str | None:
    stages = [sizes(mirror) for mirror in mirrors]
    return mirrors_too_many(schedule(num_mirrors), COSTS, stages, MESSAGE, bytes_per_second)


def simulated_seconds(made: Schedule) -> float:
    return simulate(made, COSTS).makespan


@pytest.mark.parametrize(("num_mirrors", "fit"), [(1, True), (4, True), (5, False), (8, False)])
def test_all_that_a_node_receives_must_pass_within_the_step(num_mirrors: int, fit: bool) -> None:
    bandwidth = (OTHERS + 4.5 * 10_000) / SECONDS
    told = judged(num_mirrors, [1000, 10_000, 1000, 1000], bandwidth)
    expected = "the link to the shadow of stage 1 carries 4 mirrors a step"
    assert told == (None if fit else expected)


def test_a_mirror_must_be_there_within_two_backward_passes() -> None:
    assert judged(1, [40_000] * STAGES, 100_000) is None
    told = judged(1, [40_000, 40_000, 40_010, 40_000], 100_000)
    assert told is not None
    assert told.startswith("a mirror of stage 2 has 0.0 MB and takes 0.4 s on its way, more than")
    assert told.endswith("carries 0 mirrors a step")


def test_each_chunk_has_a_mirror_of_its_own() -> None:
    stages = [sizes(10_000, num_chunks=2)] * STAGES
    made = schedule(4, num_chunks=2)
    assert mirrors_too_many(made, COSTS, stages, MESSAGE, 1e6) is None
    bandwidth = (4 * MICROBATCHES * MESSAGE + STEPPED + 3.5 * 20_000) / simulated_seconds(made)
    told = mirrors_too_many(made, COSTS, stages, MESSAGE, bandwidth)
    assert told is not None and "carries 3 mirrors" in told


def test_without_mirrors_nothing_is_too_much() -> None:
    assert judged(0, [10**9] * STAGES, 1.0) is None
