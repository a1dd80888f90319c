"""Schedules and takeovers as JSON, for other programs."""

from collections.abc import Iterable, Mapping

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.play import Timed
from megatron_bamboo.schedule.redundancy import redundant_forwards
from megatron_bamboo.schedule.rehearse import Rehearsal
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import Timeline


def as_json(schedule: Schedule, timeline: Timeline) -> Mapping[str, object]:
    """The schedule and its simulated times, for ``json.dumps``."""
    return {
        "num_stages": schedule.num_stages,
        "num_chunks": schedule.num_chunks,
        "num_microbatches": schedule.num_microbatches,
        "num_mirrors": schedule.num_mirrors,
        "placement": list(schedule.placement),
        "replicas": list(schedule.replicas),
        "programs": [[str(action) for action in program] for program in schedule.programs],
        "timeline": [[_timed_as_json(timed) for timed in row] for row in timeline.rows],
        "makespan": timeline.makespan,
        "idle": {str(rank): timeline.idle(rank) for rank in schedule.live_ranks},
        "redundant": {
            str(stage): {"placed": _texts(placed), "left_out": _texts(left_out)}
            for stage in schedule.protected_stages
            for placed, left_out in [redundant_forwards(schedule, stage)]
        },
    }


def takeover_as_json(rehearsal: Rehearsal) -> Mapping[str, object]:
    """A takeover: what survivors had done, and the schedule and times of what remains."""
    progress = {
        str(rank): {"done": _texts(sorted(made.done)), "received": _texts(sorted(made.received))}
        for rank, made in rehearsal.progress.items()
    }
    return {
        "victim_rank": rehearsal.loss.rank,
        "time": rehearsal.loss.time,
        "progress": progress,
        "mirrors": _texts(rehearsal.mirrors),
        **as_json(rehearsal.remaining, rehearsal.timeline),
    }


def _timed_as_json(timed: Timed) -> dict[str, object]:
    return {"action": str(timed.action), "start": timed.start, "end": timed.end}


def _texts(actions: Iterable[Action]) -> list[str]:
    return [str(action) for action in actions]
