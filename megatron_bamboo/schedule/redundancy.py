"""Which redundant forwards run, and where.

The shadow of a stage is the rank before it in the ring, since it has the stage's input: its own
output (Bamboo, section 4). The first stage's input is data, which the last rank can read too.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import Program, Schedule


class Redundancy(StrEnum):
    """How much is done before a loss for the time after it."""

    NONE = "none"  # no replicas: a loss is not survived
    LAZY = "lazy"  # replicas, whose forwards run only after a loss
    EAGER = "eager"  # replicas, each forward of which runs as soon as its input is there


def shadow_of(stage: int, num_stages: int) -> int:
    """The rank that holds the replica of a stage."""
    return (stage - 1) % num_stages


def add_redundancy(schedule: Schedule, mode: Redundancy) -> Schedule:
    """The schedule with replicas and, if eager, their forwards; sends are not inserted yet."""
    if mode is Redundancy.NONE:
        return schedule
    num_stages = schedule.num_stages
    if num_stages < 2:
        raise ValueError(
            f"{mode} redundancy needs at least 2 stages, since a stage's replica is on another "
            "stage's node: use more stages or no redundancy"
        )
    replicas = tuple(shadow_of(stage, num_stages) for stage in range(num_stages))
    protected = replace(schedule, replicas=replicas)
    if mode is Redundancy.LAZY:
        return protected
    programs = tuple(
        tuple(_with_redundant(protected, rank, program))
        for rank, program in enumerate(schedule.programs)
    )
    return replace(protected, programs=programs)


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
    if forward.chunk == 0 and schedule.replicas[0] == rank:
        yield Action(0, 0, Op.RF, forward.microbatch)
