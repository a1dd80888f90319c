"""A schedule and a takeover in words, for ``bamboo schedule``."""

from itertools import product

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.redundancy import Redundancy, redundant_forwards
from megatron_bamboo.schedule.rehearse import Rehearsal
from megatron_bamboo.schedule.render import (
    place_lines,
    program_lines,
    time_grid,
    wrapped,
)
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import Timeline


def schedule_head(schedule: Schedule, timeline: Timeline, mode: Redundancy, unit: str) -> str:
    """What it is and how long it takes; with ``bubble``, what fits into the gaps."""
    chunks = f" of {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    mirrors = f", {schedule.num_mirrors} mirrors" if schedule.num_mirrors else ""
    what = "forward only" if schedule.forward_only else f"redundancy {mode}{mirrors}"
    title = (
        f"{schedule.num_stages} stages{chunks}, {schedule.num_microbatches} microbatches, "
        f"{what}: makespan {timeline.makespan:g} ({unit})"
    )
    return f"{title}\n\n{_fitting_lines(schedule)}" if mode is Redundancy.BUBBLE else title


def schedule_body(schedule: Schedule, timeline: Timeline) -> str:
    """Places, programs, the grid in time, and who is idle for how long."""
    idle = "\n".join(
        f"rank {rank}: idle {timeline.idle(rank):g} of {timeline.makespan:g} "
        f"({timeline.idle(rank) / timeline.makespan:.1%})"
        for rank in schedule.live_ranks
    )
    return "\n\n".join((*_parts(schedule, timeline), idle))


def takeover_head(rehearsal: Rehearsal, lost: Action, undisturbed: Timeline) -> str:
    """Who is lost when, who takes over, and what it costs."""
    loss, remaining, makespan = rehearsal.loss, rehearsal.remaining, rehearsal.timeline.makespan
    moved = ", ".join(
        f"rank {remaining.placement[stage]} takes over stage {stage}"
        for stage in rehearsal.moved_stages
    )
    return (
        f"rank {loss.rank} is lost at {loss.time:g}, before {lost}; {moved}\n"
        f"{_mirror_lines(rehearsal)}"
        f"the iteration ends at {makespan:g} instead of {undisturbed.makespan:g} "
        f"({makespan / undisturbed.makespan - 1:+.1%}), without the pause"
    )


def takeover_body(rehearsal: Rehearsal) -> str:
    """Places, programs and the grid of what remains."""
    return "\n\n".join(_parts(rehearsal.remaining, rehearsal.timeline))


def _mirror_lines(rehearsal: Rehearsal) -> str:
    """For each chunk that the victim mirrored, what need not run again."""
    if not rehearsal.schedule.num_mirrors:
        return ""
    used = {(mirror.stage, mirror.chunk): mirror.microbatch for mirror in rehearsal.mirrors}
    lines = []
    for stage, chunk in product(rehearsal.moved_stages, range(rehearsal.schedule.num_chunks)):
        last = used.get((stage, chunk))
        known = "no mirror can be used" if last is None else f"a mirror holds 0 to {last}"
        left = rehearsal.schedule.num_microbatches - (0 if last is None else last + 1)
        lines.append(f"backward passes {stage}.{chunk}B: {known}, {left} run\n")
    return "".join(lines)


def _fitting_lines(schedule: Schedule) -> str:
    """For each stage with a replica, how many of its redundant forwards run, and which do not."""
    lines = []
    for stage in schedule.protected_stages:
        placed, left_out = redundant_forwards(schedule, stage)
        line = (
            f"stage {stage}: {len(placed)} of {len(placed) + len(left_out)} redundant forwards fit "
            f"on rank {schedule.replicas[stage]}"
        )
        rest = f", not {' '.join(map(str, left_out))}" if left_out else ""
        lines.append(wrapped(line + rest))
    return "\n".join(lines)


def _parts(schedule: Schedule, timeline: Timeline) -> tuple[str, str, str]:
    return place_lines(schedule), program_lines(schedule), time_grid(timeline)
