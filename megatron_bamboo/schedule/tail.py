"""The end of an iteration: reduce, tie, refresh, commit, step.

In this order everything that a step needs is complete on every holder before anyone commits. All
sends of a worker come before its waits, so that the tail cannot deadlock.
"""

from dataclasses import replace

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import Program, Schedule


def add_tail(schedule: Schedule, tied: bool) -> Schedule:
    """The schedule with the tail appended to each live rank's program.

    ``tied``: the first stage's embedding and the last stage's head are one weight. In a pipeline
    of one stage the two roles have one gradient already.
    """
    tie = tied and schedule.num_stages > 1
    programs = list(schedule.programs)
    for rank in schedule.live_ranks:
        programs[rank] += tail_program(schedule, rank, tie)
    return replace(schedule, programs=tuple(programs))


def tail_program(schedule: Schedule, rank: int, tie: bool) -> Program:
    """The tail of one rank."""
    stages = schedule.stages_of(rank)
    reduces = [_tail(stage, Op.REDUCE) for stage in stages]
    sends = [_tail(s, Op.SEND_REFRESH) for s in stages if schedule.replicas[s] is not None]
    receives = [_tail(stage, Op.RECV_REFRESH) for stage in schedule.replicas_of(rank)]
    ties = _tie_actions(schedule, rank) if tie else []
    end = [_tail(rank, Op.COMMIT), _tail(rank, Op.STEP)]
    return (*reduces, *ties, *sends, *receives, *end)


def tied_pair(schedule: Schedule, stage: int) -> int:
    """The stage with the other role of the tied embedding."""
    return schedule.num_stages - 1 - stage


def _tie_actions(schedule: Schedule, rank: int) -> list[Action]:
    ends = (0, schedule.num_stages - 1)
    roles = [stage for stage in ends if schedule.placement[stage] == rank]
    remote = [s for s in roles if schedule.placement[tied_pair(schedule, s)] != rank]
    return [_tail(s, Op.SEND_TIE) for s in remote] + [_tail(s, Op.TIE) for s in roles]


def _tail(stage: int, op: Op) -> Action:
    return Action(stage, None, op, None)
