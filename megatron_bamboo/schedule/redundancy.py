"""Which redundant forwards run, and where.

The shadow of a stage is the rank before it in the ring, since it has the stage's input: its own
output (Bamboo, section 4), for the first stage's later chunks that of the last stage. The input of
the first stage's first chunk is data, which the last rank can read too. A rank that has taken over
stages shadows the one after its last; of what it has taken over, the nearest rank before it holds
the replica, and runs its forwards only after another loss, since their input is elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.bubble import place_in_gaps
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.schedule import Program, Schedule


class Redundancy(StrEnum):
    """How much is done before a loss for the time after it."""

    NONE = "none"  # no replicas: a loss is not survived
    LAZY = "lazy"  # replicas, whose forwards run only after a loss
    BUBBLE = "bubble"  # replicas, whose forwards run where a predicted gap holds them whole
    EAGER = "eager"  # replicas, each forward of which runs as soon as its input is there


def shadows_of(placement: Sequence[int]) -> tuple[int | None, ...]:
    """By stage the rank that should hold its replica: the nearest before it on another rank.

    None where one rank runs all stages.
    """
    size = len(placement)
    before = ([placement[(s - back) % size] for back in range(1, size)] for s in range(size))
    return tuple(
        next((rank for rank in ranks if rank != placement[stage]), None)
        for stage, ranks in enumerate(before)
    )


def add_redundancy(
    schedule: Schedule, mode: Redundancy, costs: Costs = EQUAL_COSTS, num_mirrors: int = 0
) -> Schedule:
    """The schedule, so far forwards and backwards alone, with replicas and their forwards.

    ``costs`` are what ``bubble`` predicts the gaps from. Sends are not inserted yet, those of
    mirrors neither.

    Raises:
        ValueError: there is no place for replicas, or mirrors are asked for and replicas are not.
    """
    if num_mirrors < 0:
        raise ValueError(f"{num_mirrors} mirrored gradients: it must be 0 or above")
    if mode is Redundancy.NONE:
        if num_mirrors:
            raise ValueError(
                "mirrored gradients go to replicas, which there are none of: use lazy, bubble or "
                "eager redundancy"
            )
        return schedule
    if schedule.num_stages < 2:
        raise ValueError(
            f"{mode} redundancy needs at least 2 stages, since a stage's replica is on another "
            "stage's node: use more stages or no redundancy"
        )
    replicas = shadows_of(schedule.placement)
    return add_forwards(replace(schedule, replicas=replicas, num_mirrors=num_mirrors), mode, costs)


def add_forwards(protected: Schedule, mode: Redundancy, costs: Costs = EQUAL_COSTS) -> Schedule:
    """The redundant forwards of the replicas that a schedule has; arguments as above."""
    match mode:
        case Redundancy.NONE:
            return protected
        case Redundancy.LAZY:
            return protected
        case Redundancy.BUBBLE:
            costs.check_shape(protected.num_stages, protected.num_chunks)
            return place_in_gaps(protected, costs)
        case Redundancy.EAGER:
            return _place_eagerly(protected)


def redundant_forwards(
    schedule: Schedule, stage: int
) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """The redundant forwards of a stage that run in a schedule, and those that do not."""
    every = [
        Action(stage, chunk, Op.RF, microbatch)
        for chunk in range(schedule.num_chunks)
        for microbatch in range(schedule.num_microbatches)
    ]
    running = {action for program in schedule.programs for action in program}
    return (
        tuple(action for action in every if action in running),
        tuple(action for action in every if action not in running),
    )


def _place_eagerly(schedule: Schedule) -> Schedule:
    programs = tuple(
        tuple(_with_redundant(schedule, rank, program))
        for rank, program in enumerate(schedule.programs)
    )
    return replace(schedule, programs=programs)


def _with_redundant(schedule: Schedule, rank: int, program: Program) -> Iterator[Action]:
    for action in program:
        yield action
        if action.op is Op.F:
            yield from _forwards_enabled_by(schedule, rank, action)


def _forwards_enabled_by(schedule: Schedule, rank: int, forward: Action) -> Iterator[Action]:
    """The redundant forwards whose input is there once ``forward`` has run on ``rank``."""
    fed = schedule.downstream(forward, Op.RF)
    if fed is not None and schedule.replicas[fed.stage] == rank:
        yield fed
    # Data could be read at any time; with the forward of the same microbatch, as the others.
    is_first = (forward.stage, forward.chunk) == (min(schedule.stages_of(rank)), 0)
    if is_first and schedule.replicas[0] == rank:
        yield Action(0, 0, Op.RF, forward.microbatch)
