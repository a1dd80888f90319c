"""Plays actions in time: each worker takes the one of its next actions that can start first.

The simulator gives each worker one stream, its program. The takeover gives the shadow one more
for each stage that it takes over, and so finds the order in which to merge them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import Program

ReadyAt = Callable[[Action, Mapping[Action, float]], float | None]
Streams = Sequence[Program]


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with the times of its start and end."""

    action: Action
    start: float
    end: float


def play(
    streams_by_rank: Sequence[Streams],
    ready_at: ReadyAt,
    seconds: Callable[[Action], float],
    free_at: Sequence[float],
) -> tuple[tuple[Timed, ...], ...]:
    """The timed actions of each rank, stopping early where nothing can ever run.

    ``ready_at(action, ends)`` is when an action's needs are met, None while that is unknown. Of
    the actions that can start first a backward goes before a forward, and an earlier stream before
    a later one. The earliest start of all workers is always played next: what it enables ends
    later, so no choice is regretted.
    """
    places = [[0] * len(streams) for streams in streams_by_rank]
    free = list(free_at)
    ends: dict[Action, float] = {}
    played: list[list[Timed]] = [[] for _ in streams_by_rank]
    while True:
        choices = [
            (max(free[rank], ready), action.op is not Op.B, index, rank)
            for rank, streams in enumerate(streams_by_rank)
            for index, action in _heads(streams, places[rank])
            if (ready := ready_at(action, ends)) is not None
        ]
        if not choices:
            return tuple(map(tuple, played))
        start, _, index, rank = min(choices)
        action = streams_by_rank[rank][index][places[rank][index]]
        places[rank][index] += 1
        ends[action] = free[rank] = start + seconds(action)
        played[rank].append(Timed(action, start, ends[action]))


def _heads(streams: Streams, places: Sequence[int]) -> list[tuple[int, Action]]:
    return [
        (index, stream[place])
        for index, (stream, place) in enumerate(zip(streams, places, strict=True))
        if place < len(stream)
    ]
