"""The schedule of whole iterations for any placement of the stages.

A takeover in the middle of an iteration goes on from the schedule that it interrupts. When all
workers of a pipeline begin an iteration under a new placement, there is nothing to go on from, and
this one depends on the placement alone: whoever computes it, now or having just joined, gets the
same.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.merge import merge_streams
from megatron_bamboo.schedule.redundancy import Redundancy, add_forwards
from megatron_bamboo.schedule.schedule import NO_ACTIONS, Schedule


def steady_schedule(
    compute: Schedule,
    placement: Sequence[int],
    replicas: Sequence[int | None],
    mode: Redundancy,
    costs: Costs = EQUAL_COSTS,
    num_mirrors: int = 0,
) -> Schedule:
    """Forwards, backwards, redundant forwards, messages and mirrors.

    Args:
        compute: the forward and backward passes of each stage on the rank of its number.
        placement: by stage the rank that runs it.
        replicas: by stage the rank that holds its replica.
    """
    placed = replace(compute, placement=tuple(placement), replicas=(None,) * len(placement))
    if placed.placement != compute.placement:
        streams = [
            tuple(compute.programs[stage] for stage in placed.stages_of(rank))
            for rank in range(len(placement))
        ]
        placed = replace(placed, programs=merge_streams(placed, streams, NO_ACTIONS))
    protected = replace(placed, replicas=tuple(replicas), num_mirrors=num_mirrors)
    return lower(add_forwards(protected, mode, costs))
