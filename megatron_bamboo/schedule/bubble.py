"""Redundant forwards in the gaps that a schedule has anyway.

Started on any small wait, a redundant forward delays the work behind it: 15 to 19 % an iteration.
So the schedule is simulated first, with the costs of its stages, and a redundant forward is placed
only where a gap of its worker holds it whole: as long as the costs are true, the iteration takes
what it takes without redundancy. The others run after a loss, as with lazy redundancy.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_bamboo.schedule.actions import COMPUTE_OPS, Action, Op
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import Timeline, simulate


def place_in_gaps(schedule: Schedule, costs: Costs) -> Schedule:
    """The schedule, so far forwards and backwards alone, with the redundant forwards that fit."""
    timeline = simulate(lower(schedule), costs)
    programs = tuple(
        tuple(_filled(schedule, rank, timeline, costs)) for rank in range(len(schedule.programs))
    )
    return replace(schedule, programs=programs)


def _filled(schedule: Schedule, rank: int, timeline: Timeline, costs: Costs) -> Iterator[Action]:
    """A rank's program with redundant forwards in its gaps, each in the first that holds it."""
    waiting = _redundant_forwards(schedule, rank, timeline)
    ended: set[Action] = set()
    now = 0.0
    for timed in timeline.rows[rank]:
        if timed.action.op in COMPUTE_OPS:
            yield from _fitting(schedule, waiting, ended, costs, (now, timed.start))
            yield timed.action
            ended.add(timed.action)
            now = timed.end
    yield from _fitting(schedule, waiting, ended, costs, (now, timeline.makespan))


def _redundant_forwards(schedule: Schedule, rank: int, timeline: Timeline) -> list[Action]:
    """Those of a rank's replicas, in the order in which the primaries need them."""
    replicas = schedule.replicas_of(rank)
    starts = [
        (timed.start, timed.action.with_op(Op.RF))
        for row in timeline.rows
        for timed in row
        if timed.action.op is Op.F and timed.action.stage in replicas
    ]
    return [action for _, action in sorted(starts)]


def _fitting(
    schedule: Schedule,
    waiting: list[Action],
    ended: set[Action],
    costs: Costs,
    gap: tuple[float, float],
) -> Iterator[Action]:
    """Takes out of ``waiting`` what has its input and fits into the gap one after the other."""
    now, end = gap
    if now == end:
        return
    for action in tuple(waiting):
        producer = schedule.producer_of(action)
        has_input = producer is None or producer in ended
        if has_input and now + costs.of(action) <= end:
            waiting.remove(action)
            yield action
            now += costs.of(action)
