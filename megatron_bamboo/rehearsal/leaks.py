"""Threads, descriptors and sockets that workers hold: the same after many losses as after one.

A takeover opens and closes much. Only times are compared in which the job is whole: each node runs
one stage and holds the replica of another. The time before the first loss in a worker's own
pipeline since it joined does not count: what the first takeover needs is kept. A group with an
operation that its backend does not end is held until that has timed out; so a worker leaks what it
goes on holding for longer.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

from megatron_bamboo.rehearsal.record import Event, Events

KINDS = ("threads", "descriptors", "sockets")
# What was released may still be ending.
STEPS_TO_SETTLE = 3


def leak_complaints(events: Events, timeout_seconds: float) -> Iterator[str]:
    """Every worker that goes on holding more than when the job was whole after its first loss.

    Args:
        timeout_seconds: how long a group that was left may be held at most.
    """
    times = list(_whole_times(events))
    for source in sorted({event["source"] for event in events.of("resources")}):
        own = [event for event in events.of("resources") if event["source"] == source]
        hit = _first_hit(events, own[0])
        settled = [_settled(own, start, end) for start, end in times if start > hit]
        known = [within for within in settled if within]
        for kind in KINDS if known else ():
            # For a moment there may be less: a connection whose other end is gone.
            first = median_low(event[kind] for event in known[0])
            more = _more_to_the_end([event for within in known for event in within], kind, first)
            if more and more[-1]["time"] - more[0]["time"] > timeout_seconds:
                last = min(event[kind] for event in more)
                yield f"{source} held {first} {kind} after a loss, and {last} after later ones"


def _more_to_the_end(own: Sequence[Event], kind: str, number: int) -> Sequence[Event]:
    """The last of a worker's events, without a gap, that say that it held more."""
    least = (place for place, event in enumerate(own) if event[kind] <= number)
    return own[max(least, default=-1) + 1 :]


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


def _settled(events: Sequence[Event], start: float, end: float) -> Sequence[Event]:
    """A worker's events of a time, without the first few."""
    return [event for event in events if start < float(event["time"]) < end][STEPS_TO_SETTLE:]
