"""Where nobody was left and nodes come again: when those who are there begin.

With the first who comes a job would begin on one node, and go back once more for those who come
some seconds later. So all wait for as many as run the job, but after each newcomer only a while:
whether anybody else comes nobody knows.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gathered:
    """What there is to be known while nodes come; times are seconds of one clock."""

    num_there: int
    num_wanted: int
    """So many have a place."""
    newest_at: float
    """When the last one came."""
    now: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether those who are there begin, and why."""

    begins: bool
    reason: str
    until: float
    """Without news this is to be asked again then."""


def decide_beginning(seen: Gathered, quiet_seconds: float, until: float) -> Verdict:
    """Whether those who have come begin now.

    Args:
        quiet_seconds: so long after the last newcomer they do, however few they are.
        until: from then on nobody is waited for.
    """
    there = f"{seen.num_there} of {seen.num_wanted} nodes are there"
    if seen.num_there == 0:
        return Verdict(False, "no node has come", until)
    if seen.num_there >= seen.num_wanted:
        return Verdict(True, f"all {seen.num_wanted} nodes are there", seen.now)
    if seen.now >= until:
        return Verdict(True, f"{there}, and the time for nodes to come is over", seen.now)
    if seen.now - seen.newest_at >= quiet_seconds:
        return Verdict(True, f"{there}, and for {quiet_seconds:g} s no other has come", seen.now)
    return Verdict(False, there, min(until, seen.newest_at + quiet_seconds))
