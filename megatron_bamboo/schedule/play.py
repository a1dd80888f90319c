"""Plays actions in time: each worker takes the one of its next actions that can start first.

The simulator gives each worker one stream, its program. The takeover gives the shadow one more
for each stage that it takes over, and so finds the order in which to merge them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_bamboo.schedule.actions import RECEIVE_OPS, Action
from megatron_bamboo.schedule.schedule import Program

Streams = Sequence[Program]


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with the times of its start and end."""

    action: Action
    start: float
    end: float


def play(
    streams_by_rank: Sequence[Streams],
    needs: Mapping[Action, Sequence[Action]],
    seconds: Callable[[Action], float],
    urgency: Mapping[Action, float] | None = None,
    latency: float = 0.0,
    free_at: Sequence[float] = (),
) -> tuple[tuple[Timed, ...], ...]:
    """The timed actions of each rank; it stops early where nothing more can ever run.

    ``needs``: what must end before an action starts, for a receive ``latency`` before. ``free_at``:
    when each rank is free to start. Of the actions that can start first the most urgent goes
    first, else that of an earlier stream. The earliest start of all workers is always played next:
    what it enables starts later, so no choice is regretted.
    """
    urgency = urgency or {}
    places = [[0] * len(streams) for streams in streams_by_rank]
    free = list(free_at) or [0.0] * len(streams_by_rank)
    ends: dict[Action, float] = {}
    rows: list[list[Timed]] = [[] for _ in streams_by_rank]
    while True:
        choices = [
            (max(free[rank], ready), -urgency.get(action, 0.0), index, rank)
            for rank, streams in enumerate(streams_by_rank)
            for index, action in _heads(streams, places[rank])
            if (ready := _ready_at(action, needs[action], ends, latency)) is not None
        ]
        if not choices:
            return tuple(map(tuple, rows))
        start, _, index, rank = min(choices)
        action = streams_by_rank[rank][index][places[rank][index]]
        places[rank][index] += 1
        ends[action] = free[rank] = start + seconds(action)
        rows[rank].append(Timed(action, start, ends[action]))


def _heads(streams: Streams, places: Sequence[int]) -> list[tuple[int, Action]]:
    return [
        (index, stream[place])
        for index, (stream, place) in enumerate(zip(streams, places, strict=True))
        if place < len(stream)
    ]


def _ready_at(
    action: Action, needs: Sequence[Action], ends: Mapping[Action, float], latency: float
) -> float | None:
    """When an action's needs are met; None while one of them has not been played."""
    if not all(need in ends for need in needs):
        return None
    ready = max((ends[need] for need in needs), default=0.0)
    return ready + latency if needs and action.op in RECEIVE_OPS else ready
