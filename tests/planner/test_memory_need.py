"""What the planner counts is what a run's own prediction says after a takeover, and little more."""

from itertools import pairwise

import pytest

from megatron_bamboo.planner.layers import Unit, UnitBytes, UnitCosts
from megatron_bamboo.planner.memory import Memory
from megatron_bamboo.schedule.footprint import ChunkSizes, StageSizes, footprint, held_by_device
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.redundancy import Redundancy, shadows_of
from megatron_bamboo.schedule.steady import steady_schedule
from megatron_bamboo.schedule.tail import add_tail

MESSAGE = 5
SIZES = [UnitBytes(900 + 40 * n, 20 + 7 * n) for n in range(7)]
COSTS = UnitCosts(tuple(Unit(f"layer{n}", 1, 2, s) for n, s in enumerate(SIZES)), MESSAGE)


def stage_of(first: int, past: int) -> StageSizes:
    units = SIZES[first:past]
    saved = sum(unit.activations for unit in units) + MESSAGE * (past - first - 1)
    state = sum(unit.state for unit in units)
    return StageSizes(state, 0, 0, stepped=0, tied=0, chunks=(ChunkSizes(saved, 0),))


@pytest.mark.parametrize("bounds", [(0, 3, 7), (0, 2, 4, 7), (0, 1, 3, 4, 7), (0, 2, 3, 5, 6, 7)])
def test_it_covers_every_takeover(bounds: tuple[int, ...]) -> None:
    spans = list(pairwise(bounds))
    size, num_microbatches = len(spans), 4 * len(spans)
    stages = [stage_of(*span) for span in spans]
    for node, counted in enumerate(Memory(COSTS).of_cut(spans)):
        victim = (node + 1) % size
        placement = [node if stage == victim else stage for stage in range(size)]
        compute = one_f_one_b(size, num_microbatches)
        replicas = shadows_of(placement)
        schedule = steady_schedule(compute, placement, replicas, Redundancy.LAZY)
        whole = add_tail(schedule, tied=False)
        needs = held_by_device(footprint(whole, node, stages, MESSAGE).at_peak, on_host=False)
        total = counted.total(num_microbatches)
        assert 0.9 * total <= needs <= total


def test_without_a_loss_a_node_needs_less() -> None:
    spans = ((0, 2), (2, 4), (4, 7))
    stages = [stage_of(*span) for span in spans]
    compute = one_f_one_b(3, 12)
    schedule = steady_schedule(compute, (0, 1, 2), shadows_of((0, 1, 2)), Redundancy.LAZY)
    whole = add_tail(schedule, tied=False)
    for node, counted in enumerate(Memory(COSTS).of_cut(spans)):
        needs = held_by_device(footprint(whole, node, stages, MESSAGE).at_peak, on_host=False)
        assert needs + counted.next_replica <= counted.total(12)
