"""Plays actions in time: each worker takes the one of its next actions that can start first.

The simulator gives each worker one stream, its program. The takeover gives the shadow one more
for each stage that it takes over, and so finds the order in which to merge them.
"""

from collections import defaultdict
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
    ended = _Ended(needs, latency)
    free = free_at or [0.0] * len(streams_by_rank)
    workers = [
        _Worker(streams, rank, time, urgency or {})
        for rank, (streams, time) in enumerate(zip(streams_by_rank, free, strict=True))
    ]
    next_starts = {rank: start for rank, w in enumerate(workers) if (start := w.next(ended))}
    while next_starts:
        rank = min(next_starts, key=next_starts.__getitem__)
        action = workers[rank].run(next_starts[rank], seconds, ended)
        for affected in ended.waiters_of(action) | {rank}:
            next_starts.pop(affected, None)
            if start := workers[affected].next(ended):
                next_starts[affected] = start
    return tuple(tuple(worker.row) for worker in workers)


# When an action can start, how little it is urgent, the stream it is in, and its worker's rank:
# the least goes first.
_Start = tuple[float, float, int, int]


class _Ended:
    """When actions ended, and which workers wait for those that have not."""

    def __init__(self, needs: Mapping[Action, Sequence[Action]], latency: float) -> None:
        self._needs = needs
        self._latency = latency
        self._ends: dict[Action, float] = {}
        self._waiters: defaultdict[Action, set[int]] = defaultdict(set)

    def ready_at(self, action: Action, rank: int) -> float | None:
        """When an action's needs are met; None, and its worker waits, while one is not played."""
        ready = 0.0
        for need in self._needs[action]:
            if need not in self._ends:
                self._waiters[need].add(rank)
                return None
            ready = max(ready, self._ends[need])
        is_message = action.op in RECEIVE_OPS and self._needs[action]
        return ready + self._latency if is_message else ready

    def add(self, action: Action, end: float) -> None:
        """An action has been played."""
        self._ends[action] = end

    def waiters_of(self, action: Action) -> set[int]:
        """The ranks that waited for an action."""
        return self._waiters.pop(action, set())


class _Worker:
    """How far one rank has come in its streams."""

    def __init__(
        self, streams: Streams, rank: int, free: float, urgency: Mapping[Action, float]
    ) -> None:
        self._streams = streams
        self._rank = rank
        self._free = free
        self._urgency = urgency
        self._places = [0] * len(streams)
        self.row: list[Timed] = []

    def next(self, ended: _Ended) -> _Start | None:
        """What it would start next; None while it has to wait for others, and at its end."""
        starts = []
        for index, (stream, place) in enumerate(zip(self._streams, self._places, strict=True)):
            if place < len(stream):
                action = stream[place]
                ready = ended.ready_at(action, self._rank)
                if ready is not None:
                    urgency = self._urgency.get(action, 0.0)
                    starts.append((max(self._free, ready), -urgency, index, self._rank))
        return min(starts, default=None)

    def run(self, start: _Start, seconds: Callable[[Action], float], ended: _Ended) -> Action:
        """Play what ``next`` chose."""
        time, _, index, _ = start
        action = self._streams[index][self._places[index]]
        self._places[index] += 1
        self._free = time + seconds(action)
        self.row.append(Timed(action, time, self._free))
        ended.add(action, self._free)
        return action
