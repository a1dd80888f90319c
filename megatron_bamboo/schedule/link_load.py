"""Whether the links between nodes carry the mirrors that are asked for, by sizes and times alone.

A mirror that is late is of no use, and one that is in the way of activations slows down every
step. So each must be there within two backward passes, and all that a node receives in a step must
pass its link within that step.
"""

from collections.abc import Sequence

from megatron_bamboo.schedule.actions import RECEIVE_OPS, Action, Op
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.footprint import StageSizes
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import simulate

PASSES_UNTIL_THERE = 2
_MEGABYTE = 1e6


def mirrors_too_many(
    schedule: Schedule,
    costs: Costs,
    stages: Sequence[StageSizes],
    message: int,
    bytes_per_second: float,
) -> str | None:
    """Why the links do not carry a schedule's mirrors, and how many they would; None if they do.

    Args:
        costs: in seconds.
        stages: the sizes of every stage.
        message: bytes of an output of a chunk, and of a gradient of one.
        bytes_per_second: what each node's link brings it.
    """
    step_bytes = bytes_per_second * simulate(schedule, costs).makespan
    for stage in _shadowed(schedule):
        if (late := _lateness(stage, costs, stages[stage], bytes_per_second)) is not None:
            return late
    fits = {
        stage: _fitting(schedule, stage, stages, message, step_bytes)
        for stage in _shadowed(schedule)
    }
    worst = min(fits, key=fits.__getitem__, default=None)
    if worst is None or fits[worst] >= schedule.num_mirrors:
        return None
    return f"the link to the shadow of stage {worst} carries {fits[worst]} mirrors a step"


def _shadowed(schedule: Schedule) -> Sequence[int]:
    return schedule.protected_stages if schedule.num_mirrors else ()


def _fitting(
    schedule: Schedule, stage: int, stages: Sequence[StageSizes], message: int, step_bytes: float
) -> int:
    """How many mirrors of a stage pass its shadow's link in a step, beside all else."""
    shadow = schedule.replicas[stage]
    assert shadow is not None
    receives = sum(
        action.op in RECEIVE_OPS and action.op is not Op.RECV_MIRROR
        for action in schedule.programs[shadow]
    )
    others = receives * message + stages[stage].stepped + stages[stage].tied
    mirror = sum(chunk.mirror for chunk in stages[stage].chunks)
    return max(0, int((step_bytes - others) // mirror))


def _lateness(stage: int, costs: Costs, sizes: StageSizes, bytes_per_second: float) -> str | None:
    for number, chunk in enumerate(sizes.chunks):
        seconds = chunk.mirror / bytes_per_second
        limit = PASSES_UNTIL_THERE * costs.of(Action(stage, number, Op.B, 0))
        if seconds > limit:
            return (
                f"a mirror of stage {stage} has {chunk.mirror / _MEGABYTE:,.1f} MB and takes "
                f"{seconds:.3g} s on its way, more than two backward passes ({limit:.3g} s), "
                "so the link carries 0 mirrors a step"
            )
    return None
