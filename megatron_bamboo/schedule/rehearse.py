"""Plays a loss in the simulator: what was done by then, and how the takeover goes on from there.

For looking at takeovers and for measuring them, before anything runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_bamboo.schedule.actions import COMPUTE_OPS, SEND_OPS, Action
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.play import Timed
from megatron_bamboo.schedule.schedule import Actions, Schedule
from megatron_bamboo.schedule.simulate import Timeline, simulate
from megatron_bamboo.schedule.tail import add_tail
from megatron_bamboo.schedule.takeover import (
    Progress,
    mirrors_used,
    surviving_progress,
    take_over,
)

Row = tuple[Timed, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank lost at a moment, when it had run that many actions of its program."""

    rank: int
    time: float
    num_done: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What ran before a loss, what the survivors knew then, and the remainder played from it on."""

    schedule: Schedule
    loss: Loss
    moved_stages: tuple[int, ...]
    mirrors: tuple[Action, ...]
    """The receives of the mirrors from which the shadow goes on."""
    before: Timeline
    progress: Mapping[int, Progress]
    remaining: Schedule
    timeline: Timeline

    @property
    def bound(self) -> float:
        """When the shadow ends at the earliest: it waits for nobody once it is free.

        The iteration ends no earlier, in whatever order the remainder is done.
        """
        shadows = {self.remaining.placement[stage] for stage in self.moved_stages}
        return max(
            _free_at(self.before.rows[rank], self.loss.time) + self.timeline.busy(rank)
            for rank in shadows
        )


def loss_before(timeline: Timeline, action: Action) -> Loss:
    """The loss of the worker that runs an action, as it comes to it."""
    for rank, row in enumerate(timeline.rows):
        actions = [timed.action for timed in row]
        if action in actions:
            place = actions.index(action)
            return Loss(rank, row[place - 1].end if place else 0.0, place)
    raise ValueError(f"{action} is in no program of this schedule")


def loss_at(timeline: Timeline, rank: int, time: float) -> Loss:
    """The loss of a rank at any moment; what it is in the middle of is lost too."""
    return Loss(rank, time, sum(timed.end <= time for timed in timeline.rows[rank]))


def rehearse(schedule: Schedule, costs: Costs, loss: Loss) -> Rehearsal:
    """The takeover after a loss in a schedule without tail; the remainder has one.

    Survivors finish what they are in; no pause is counted.
    """
    rows = list(simulate(schedule, costs).rows)
    rows[loss.rank] = rows[loss.rank][: loss.num_done]
    started = [_started_by(row, loss.time) for row in rows]
    arrived = _arrived_by(schedule, started, loss.time - costs.latency)
    progress = {
        rank: _progress_of(schedule, rank, row, arrived)
        for rank, row in enumerate(started)
        if rank in schedule.live_ranks and rank != loss.rank
    }
    remaining = add_tail(take_over(schedule, loss.rank, progress), tied=True)
    received = surviving_progress(schedule, loss.rank, progress).received
    free_at = [_free_at(row, loss.time) for row in started]
    return Rehearsal(
        schedule=schedule,
        loss=loss,
        moved_stages=schedule.stages_of(loss.rank),
        mirrors=mirrors_used(schedule, loss.rank, progress),
        before=Timeline(tuple(started)),
        progress=progress,
        remaining=remaining,
        timeline=simulate(remaining, costs, received, free_at),
    )


def _free_at(row: Row, time: float) -> float:
    """When a worker has ended what it was in at a moment."""
    return max([time, *(timed.end for timed in row)])


def _started_by(row: Row, time: float) -> Row:
    return tuple(timed for timed in row if timed.start < time or timed.end <= time)


def _arrived_by(schedule: Schedule, started: list[Row], time: float) -> Actions:
    """The receives whose message was sent by a moment."""
    return frozenset(
        schedule.receive_of(timed.action)
        for row in started
        for timed in row
        if timed.action.op in SEND_OPS and timed.end <= time
    )


def _progress_of(schedule: Schedule, rank: int, row: Row, arrived: Actions) -> Progress:
    return Progress(
        done=frozenset(t.action for t in row if t.action.op in COMPUTE_OPS | SEND_OPS),
        received=frozenset(a for a in arrived if schedule.rank_of(a) == rank),
    )
