"""The end of an iteration: reduce, tie, refresh, verify, commit, step, gather.

In this order everything that a step needs is complete on every holder before anyone commits. All
sends of a worker come before its waits, and all workers gather in one order of the stages, so that
the tail cannot deadlock.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import Program, Schedule


@dataclass(frozen=True, slots=True)
class Move:
    """The state of a stage goes from the rank that runs it to one that will hold it."""

    stage: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Handover:
    """One rank's part in a new cut, in units by their numbers."""

    given: tuple[int, ...] = ()
    """That go to other ranks."""
    taken: tuple[int, ...] = ()
    """That it will hold, also those that it has already."""


NO_HANDOVER = Handover()


def add_tail(
    schedule: Schedule, tied: bool, sharded: bool = False, verifies: bool = False
) -> Schedule:
    """The schedule with the tail appended to each live rank's program.

    Args:
        tied: the first stage's embedding and the last stage's head are one weight. In a pipeline
            of one stage the two roles have one gradient already.
        sharded: the pipelines share the optimizer's state, so that parameters are gathered.
        verifies: copies of the state are compared in this step.
    """
    tie = tied and schedule.num_stages > 1
    programs = list(schedule.programs)
    for rank in schedule.live_ranks:
        programs[rank] += tail_program(schedule, rank, tie, sharded, verifies=verifies)
    return replace(schedule, programs=tuple(programs))


def tail_program(
    schedule: Schedule,
    rank: int,
    tie: bool,
    sharded: bool = False,
    moves: Sequence[Move] = (),
    verifies: bool = False,
    cut_alike: bool = True,
    fetched: Collection[int] = (),
    handover: Handover = NO_HANDOVER,
) -> Program:
    """The tail of one rank.

    Where state moves in this step, its new holders get the final gradients as replicas do; where
    pipelines are cut anew, unit by unit, and from whoever holds one: so replicas come first.

    Args:
        cut_alike: all pipelines are cut into the same stages.
        fetched: the stages held here whose state comes from another pipeline in this step.
    """
    stages = schedule.stages_of(rank)
    joining = [move.stage for move in moves if move.target == rank]
    refreshed = {s for s in stages if schedule.replicas[s] is not None}
    refreshed |= {move.stage for move in moves} & set(stages)
    reduces = [_tail(stage, Op.REDUCE) for stage in stages]
    sends = [_tail(stage, Op.SEND_REFRESH) for stage in sorted(refreshed)]
    states = [_tail(stage, Op.RECV_STATE) for stage in (*joining, *sorted(fetched))]
    receives = [_tail(s, Op.RECV_REFRESH) for s in (*schedule.replicas_of(rank), *joining)]
    ties = _tie_actions(schedule, rank) if tie else []
    verify = [_tail(rank, Op.VERIFY)] * verifies
    sums = [_tail(unit, Op.SEND_UNIT_GRADIENT) for unit in handover.given]
    units = [_tail(unit, op) for unit in handover.taken for op in _TAKEN]
    end = [*verify, _tail(rank, Op.COMMIT), _tail(rank, Op.STEP)]
    gathers = gather_program(schedule, rank, cut_alike) if sharded else ()
    return (*reduces, *ties, *sends, *states, *receives, *sums, *units, *end, *gathers)


_TAKEN = (Op.RECV_UNIT, Op.RECV_UNIT_GRADIENT)


def state_sends(stages: Collection[int], units: Collection[int] = ()) -> Program:
    """What a rank sends first in a step in which the state of some of its stages moves, or of some
    units, so that it goes in the background."""
    return (
        *(_tail(stage, Op.SEND_STATE) for stage in sorted(stages)),
        *(_tail(unit, Op.SEND_UNIT) for unit in sorted(units)),
    )


def gather_program(schedule: Schedule, rank: int, cut_alike: bool = True) -> Program:
    """What one rank gathers after a step: the parameters of all that it holds."""
    held = (*schedule.stages_of(rank), *schedule.replicas_of(rank))
    return tuple(
        _tail(stage, Op.GATHER if schedule.placement[stage] == rank else Op.RGATHER)
        for stage in _in_turn(held, schedule, cut_alike)
    )


def mend_program(
    schedule: Schedule, rank: int, stages: Collection[int], cut_alike: bool = True
) -> Program:
    """A rank's part in giving some stages' right state to who has another, after all gathers.

    In the order of gathers, so that it cannot deadlock either.
    """
    return tuple(
        _tail(stage, Op.MEND if schedule.placement[stage] == rank else Op.RMEND)
        for stage in _in_turn(stages, schedule, cut_alike)
    )


def tied_pair(schedule: Schedule, stage: int) -> int:
    """The stage with the other role of the tied embedding."""
    return schedule.num_stages - 1 - stage


def gather_turn(stage: int, num_stages: int) -> tuple[int, int]:
    """The place of a stage in the order in which all workers gather, if they are cut alike.

    A worker holds two stages next to each other. In ascending order each would wait for the one
    before it, all around; like this a gather waits for one other, and for two at the ring's end.
    """
    closes_odd_ring = num_stages % 2 == 1 and stage == num_stages - 1
    return (2 if closes_odd_ring else stage % 2, stage)


def _in_turn(stages: Collection[int], schedule: Schedule, cut_alike: bool) -> list[int]:
    """Stages in the order in which their units are gathered: of pipelines that are cut apart only
    the order of the units is the same."""
    if not cut_alike:
        return sorted(stages)
    return sorted(stages, key=lambda stage: gather_turn(stage, schedule.num_stages))


def _tie_actions(schedule: Schedule, rank: int) -> list[Action]:
    ends = (0, schedule.num_stages - 1)
    roles = [stage for stage in ends if schedule.placement[stage] == rank]
    remote = [s for s in roles if schedule.placement[tied_pair(schedule, s)] != rank]
    return [_tail(s, Op.SEND_TIE) for s in remote] + [_tail(s, Op.TIE) for s in roles]


def _tail(stage: int, op: Op) -> Action:
    return Action(stage, None, op, None)
