"""Threads, descriptors and sockets that workers hold: the same after many losses as after one.

A takeover opens and closes much. Only times are compared in which the job is whole: each node runs
one stage and holds the replica of another. The time before the first loss in a worker's own
pipeline since it joined does not count: what the first takeover needs is kept. A group with an
operation that its backend never ends is held until that has timed out, longer than the job may be
whole; so a worker leaks only what it holds more of the last two times.
"""

from collections.abc import Iterator, Mapping, Sequence

from megatron_bamboo.rehearsal.record import Event, Events

KINDS = ("threads", "descriptors", "sockets")
# What was released may still be ending.
STEPS_TO_SETTLE = 3


def leak_complaints(events: Events) -> Iterator[str]:
    """Every worker that holds more the last times that the job was whole than the first."""
    times = list(_whole_times(events))
    for source in sorted({event["source"] for event in events.of("resources")}):
        own = [event for event in events.of("resources") if event["source"] == source]
        hit = _first_hit(events, own[0])
        counts = [_least(own, start, end) for start, end in times if start > hit]
        known = [count for count in counts if count is not None]
        for kind in KINDS if len(known) > 2 else ():
            first, last = known[0][kind], min(count[kind] for count in known[-2:])
            if last > first:
                yield f"{source} held {first} {kind} after a loss, and {last} after later ones"


def _first_hit(events: Events, joined: Event) -> float:
    """When a worker first saw a node of its pipeline taken over; never, if none was.

    Args:
        joined: the first that is known of the worker.
    """
    takeovers = [float(e["time"]) for e in events.of("takeover") if _same_pipeline(e, joined)]
    return min((time for time in takeovers if time > joined["time"]), default=float("inf"))


def _same_pipeline(one: Event, other: Event) -> bool:
    return bool(one["pipeline"] == other["pipeline"])


def _whole_times(events: Events) -> Iterator[tuple[float, float]]:
    """From a change that made the job whole to the next loss."""
    losses = [float(event["time"]) for event in events.of("loss")]
    for change in events.of("changed"):
        if all(map(_is_whole, change["pipelines"])):
            start = float(change["time"])
            yield start, min((time for time in losses if time > start), default=float("inf"))


def _is_whole(pipeline: Mapping[str, Sequence[str | None]]) -> bool:
    places = len(pipeline["stages"])
    return len(set(pipeline["stages"])) == places == len(set(pipeline["replicas"]) - {None})


def _least(events: Sequence[Event], start: float, end: float) -> Mapping[str, int] | None:
    """By kind the least that was held in a time; None if it was too short to tell."""
    within = [event for event in events if start < float(event["time"]) < end][STEPS_TO_SETTLE:]
    return {kind: min(event[kind] for event in within) for kind in KINDS} if within else None
