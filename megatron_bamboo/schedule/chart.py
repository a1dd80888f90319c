"""A played schedule as bars in time: what a trace and a picture show.

A bar is work or a wait of one worker. Sends and receives take their worker no time: they are
arrows from bar to bar, and mirrors, which no work takes, marks where they leave.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_bamboo.schedule.actions import (
    COMPUTE_OPS,
    RECEIVE_BEFORE,
    SEND_AFTER,
    Action,
    Op,
)
from megatron_bamboo.schedule.play import Timed
from megatron_bamboo.schedule.rehearse import Loss, Rehearsal
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import Timeline

Rows = Sequence[Sequence[Timed]]


class Kind(StrEnum):
    """What a worker is seen doing."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUNDANT = "redundant forward"
    WAIT = "waiting"


_KIND_OF = {Op.F: Kind.FORWARD, Op.B: Kind.BACKWARD, Op.RF: Kind.REDUNDANT}
_MADE_BY = {send: op for op, send in SEND_AFTER.items()}
_TAKEN_BY = {receive: op for op, receive in RECEIVE_BEFORE.items()}


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that a rank does for a time."""

    rank: int
    start: float
    end: float
    kind: Kind
    action: Action | None  # of a wait, what comes after it
    taken_over: bool = False  # work on a stage that was another rank's at the start


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message, from the work that made it to the work that takes it."""

    sender: Bar
    receiver: Bar


@dataclass(frozen=True, slots=True)
class Mark:
    """The moment at which a rank sends a mirror."""

    rank: int
    time: float
    action: Action


@dataclass(frozen=True, slots=True)
class Chart:
    """All bars, arrows and marks, and the loss if there is one."""

    num_ranks: int
    num_chunks: int
    bars: tuple[Bar, ...]
    arrows: tuple[Arrow, ...]
    marks: tuple[Mark, ...]
    loss: Loss | None
    makespan: float


def chart_of(schedule: Schedule, timeline: Timeline) -> Chart:
    """The chart of an undisturbed iteration."""
    bars = tuple(_bars_of(timeline.rows, timeline.makespan, None))
    arrows = tuple(_arrows(schedule, timeline.rows, _work_of(bars)))
    marks = tuple(_marks(timeline.rows))
    num_ranks = len(timeline.rows)
    return Chart(num_ranks, schedule.num_chunks, bars, arrows, marks, None, timeline.makespan)


def chart_of_takeover(rehearsal: Rehearsal) -> Chart:
    """The chart of a hit iteration: what ran before the loss, and the takeover."""
    before, after = rehearsal.before.rows, rehearsal.timeline.rows
    rows = [(*first, *rest) for first, rest in zip(before, after, strict=True)]
    makespan = rehearsal.timeline.makespan
    bars = tuple(_bars_of(rows, makespan, rehearsal.loss))
    work = _work_of(bars)
    arrows = (
        *_arrows(rehearsal.schedule, before, work),
        *_arrows(rehearsal.remaining, after, work),
    )
    num_chunks, marks = rehearsal.schedule.num_chunks, tuple(_marks(rows))
    return Chart(len(rows), num_chunks, bars, arrows, marks, rehearsal.loss, makespan)


def _bars_of(rows: Rows, makespan: float, loss: Loss | None) -> Iterator[Bar]:
    """Work, and the waits before, between and after it as long as a rank lives."""
    for rank, row in enumerate(rows):
        now = 0.0
        for timed in row:
            if timed.start > now:
                yield Bar(rank, now, timed.start, Kind.WAIT, timed.action)
            if timed.action.op in COMPUTE_OPS:
                yield _work(rank, timed)
            now = timed.end
        end = loss.time if loss is not None and loss.rank == rank else makespan
        if end > now:
            yield Bar(rank, now, end, Kind.WAIT, None)


def _work(rank: int, timed: Timed) -> Bar:
    kind = _KIND_OF[timed.action.op]
    taken_over = kind is not Kind.REDUNDANT and timed.action.stage != rank
    return Bar(rank, timed.start, timed.end, kind, timed.action, taken_over)


def _marks(rows: Rows) -> Iterator[Mark]:
    for rank, row in enumerate(rows):
        for timed in row:
            if timed.action.op is Op.SEND_MIRROR:
                yield Mark(rank, timed.end, timed.action)


def _work_of(bars: Sequence[Bar]) -> Mapping[tuple[int, Action], Bar]:
    return {
        (bar.rank, bar.action): bar
        for bar in bars
        if bar.kind is not Kind.WAIT and bar.action is not None
    }


def _arrows(
    schedule: Schedule, rows: Rows, work: Mapping[tuple[int, Action], Bar]
) -> Iterator[Arrow]:
    """The messages that are sent in some rows and taken, sooner or later, by their receiver."""
    for rank, row in enumerate(rows):
        for send in (timed.action for timed in row if timed.action.op in _MADE_BY):
            made = send.with_op(_MADE_BY[send.op])
            # A takeover sends what was a redundant forward when it ran.
            sender = work.get((rank, made)) or work[rank, made.with_op(Op.RF)]
            receive = schedule.receive_of(send)
            taken = receive.with_op(_TAKEN_BY[receive.op])
            receiver = work.get((schedule.placement[receive.stage], taken))
            if receiver is not None:
                yield Arrow(sender, receiver)
