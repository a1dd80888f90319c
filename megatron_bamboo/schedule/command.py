"""``bamboo schedule``: shows a schedule, or what a takeover makes of it, with simulated times.

What is shown is built by the passes that training uses.
"""

import argparse
import json
import sys

from megatron_bamboo.errors import UserError
from megatron_bamboo.schedule.actions import TAIL_OPS, Action
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import Rehearsal, loss_before, rehearse
from megatron_bamboo.schedule.render import as_json, place_lines, program_lines, time_grid
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import Timeline, simulate
from megatron_bamboo.schedule.tail import add_tail
from megatron_bamboo.schedule.validate import validate

COSTS = Costs(forward=1.0, backward=2.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo schedule``."""
    parser.add_argument("--stages", type=int, required=True, help="pipeline stages, one a rank")
    parser.add_argument("--chunks", type=int, default=1, help="chunks of layers a stage")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches a pipeline")
    parser.add_argument(
        "--redundancy",
        choices=[mode.value for mode in Redundancy],
        default=Redundancy.LAZY.value,
        help="no replicas, replicas, or replicas with redundant forwards",
    )
    parser.add_argument(
        "--lose",
        metavar="ACTION",
        help="lose the worker that runs this action just before it, like 2.0B3, and show the rest "
        "of the iteration",
    )
    parser.add_argument("--format", choices=["text", "json"], default="text")


def run(args: argparse.Namespace) -> int:
    """Build, validate and show."""
    mode = Redundancy(args.redundancy)
    lost = None if args.lose is None else _parse_lost(args.lose, mode)
    body = _build(args.stages, args.chunks, args.microbatches, mode)
    whole = add_tail(body, tied=True)
    validate(whole)
    timeline = simulate(whole, COSTS)
    if lost is None:
        shown = _schedule_text(whole, timeline, mode)
        data: object = as_json(whole, timeline)
    else:
        rehearsal = _rehearse(body, lost)
        shown = _takeover_text(rehearsal, lost, timeline)
        data = _takeover_json(whole, timeline, rehearsal)
    sys.stdout.write((shown if args.format == "text" else json.dumps(data)) + "\n")
    return 0


def _build(num_stages: int, num_chunks: int, num_microbatches: int, mode: Redundancy) -> Schedule:
    try:
        compute = compute_schedule(num_stages, num_chunks, num_microbatches)
        return lower(add_redundancy(compute, mode))
    except ValueError as error:
        raise UserError(str(error)) from error


def _parse_lost(text: str, mode: Redundancy) -> Action:
    if mode is Redundancy.NONE:
        raise UserError("--lose needs replicas: use --redundancy lazy or eager")
    try:
        action = Action.parse(text)
    except ValueError as error:
        raise UserError(f"--lose: {error}") from error
    if action.op in TAIL_OPS:
        raise UserError(
            f"--lose {text}: there is no takeover once all backwards are done, the commit decides; "
            "name an action of the forward or backward part"
        )
    return action


def _rehearse(body: Schedule, lost: Action) -> Rehearsal:
    try:
        loss = loss_before(simulate(body, COSTS), lost)
    except ValueError as error:
        raise UserError(f"--lose: {error}; without --lose it is shown") from error
    return rehearse(body, COSTS, loss)


def _schedule_text(schedule: Schedule, timeline: Timeline, mode: Redundancy) -> str:
    title = (
        f"{schedule.num_stages} stages, {schedule.num_microbatches} microbatches, redundancy "
        f"{mode}: makespan {timeline.makespan:g} (a forward is 1, a backward 2)"
    )
    idle = "\n".join(
        f"rank {rank}: idle {timeline.idle(rank):g} of {timeline.makespan:g} "
        f"({timeline.idle(rank) / timeline.makespan:.1%})"
        for rank in schedule.live_ranks
    )
    parts = (title, place_lines(schedule), program_lines(schedule), time_grid(timeline), idle)
    return "\n\n".join(parts)


def _takeover_text(rehearsal: Rehearsal, lost: Action, before: Timeline) -> str:
    loss, remaining, timeline = rehearsal.loss, rehearsal.remaining, rehearsal.timeline
    moved = ", ".join(
        f"rank {remaining.placement[stage]} takes over stage {stage}"
        for stage in rehearsal.moved_stages
    )
    title = (
        f"rank {loss.rank} is lost at {loss.time:g}, before {lost}; {moved}\n"
        f"the iteration ends at {timeline.makespan:g} instead of {before.makespan:g} "
        f"({timeline.makespan / before.makespan - 1:+.1%}), without the pause"
    )
    grid = time_grid(timeline)
    return "\n\n".join((title, place_lines(remaining), program_lines(remaining), grid))


def _takeover_json(whole: Schedule, before: Timeline, rehearsal: Rehearsal) -> dict[str, object]:
    progress = {
        str(rank): {"done": _texts(made.done), "received": _texts(made.received)}
        for rank, made in rehearsal.progress.items()
    }
    takeover = {
        "victim_rank": rehearsal.loss.rank,
        "time": rehearsal.loss.time,
        "progress": progress,
        **as_json(rehearsal.remaining, rehearsal.timeline),
    }
    return {**as_json(whole, before), "takeover": takeover}


def _texts(actions: frozenset[Action]) -> list[str]:
    return [str(action) for action in sorted(actions)]
