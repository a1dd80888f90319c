"""The schedule of an evaluation: forward passes alone, for any placement of the stages.

Its order is that of the forwards of an iteration, so each stage computes microbatches in ascending
order and chunks in the groups of interleaving. Nothing is redundant in it: an evaluation changes
nothing, so after a loss it is done again, by whoever holds the stages then, with the same bits.
With equal stages and no latency it takes the time of ``max(C * M + P - 1, C * P + M - 1)``
forwards, which no order can beat (see ``interleaved.py``).
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_bamboo.schedule.actions import Op
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.merge import merge_streams
from megatron_bamboo.schedule.schedule import NO_ACTIONS, Schedule


def forward_only_schedule(compute: Schedule, placement: Sequence[int] | None = None) -> Schedule:
    """The forwards of a pipeline, with their messages.

    Args:
        compute: the forward and backward passes of each stage on the rank of its number.
        placement: by stage the rank that runs it; each its own if None.
    """
    forwards = tuple(
        tuple(action for action in program if action.op is Op.F) for program in compute.programs
    )
    alone = replace(compute, programs=forwards, forward_only=True)
    if placement is None or tuple(placement) == alone.placement:
        return lower(alone)
    placed = replace(alone, placement=tuple(placement))
    streams = [
        tuple(forwards[stage] for stage in placed.stages_of(rank)) for rank in range(len(forwards))
    ]
    return lower(replace(placed, programs=merge_streams(placed, streams, NO_ACTIONS)))
