"""``bamboo schedule``: shows a schedule, or what a takeover makes of it, with simulated times.

What is shown is built by the passes that training uses.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_bamboo.errors import UserError
from megatron_bamboo.schedule.actions import TAIL_OPS, Action
from megatron_bamboo.schedule.chart import Chart, chart_of, chart_of_takeover
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.describe import (
    schedule_body,
    schedule_head,
    takeover_body,
    takeover_head,
)
from megatron_bamboo.schedule.forward_only import forward_only_schedule
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.json_form import as_json, takeover_as_json
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import Rehearsal, loss_before, rehearse
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import Timeline, simulate
from megatron_bamboo.schedule.tail import add_tail
from megatron_bamboo.schedule.trace import as_trace
from megatron_bamboo.schedule.validate import validate


class Format(StrEnum):
    """How a schedule is shown."""

    TEXT = "text"  # programs, and a grid of time and ranks
    JSON = "json"  # all of it, for other programs
    TRACE = "trace"  # for ui.perfetto.dev or chrome://tracing
    PNG = "png"  # a picture


@dataclass(frozen=True, slots=True)
class _Shown:
    """What there is to show, and the words at its head."""

    head: str
    schedule: Schedule
    timeline: Timeline
    rehearsal: Rehearsal | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo schedule``."""
    parser.add_argument("--stages", type=int, required=True, help="pipeline stages, one a rank")
    parser.add_argument(
        "--chunks", type=int, default=1, help="chunks of layers a stage; interleaved if above 1"
    )
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches a pipeline")
    parser.add_argument(
        "--forward-only",
        action="store_true",
        help="the schedule of an evaluation, which has no backwards and nothing redundant",
    )
    parser.add_argument(
        "--redundancy",
        choices=[mode.value for mode in Redundancy],
        default=Redundancy.LAZY.value,
        help="no replicas, replicas, replicas with the redundant forwards that fit into predicted "
        "gaps, or with all of them",
    )
    parser.add_argument(
        "--mirror-gradients",
        type=int,
        default=0,
        metavar="K",
        help="each stage sends its replica the gradient so far, so often an iteration",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="JSON with the times of forwards and backwards by stage, or by stage and chunk; "
        "without it a forward is 1 and a backward 2",
    )
    parser.add_argument(
        "--lose",
        metavar="ACTION",
        help="lose the worker that runs this action just before it, like 2.0B3, and show the rest "
        "of the iteration",
    )
    parser.add_argument("--format", choices=[shape.value for shape in Format], default="text")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to a file; png needs it")


def run(args: argparse.Namespace) -> int:
    """Build, validate and show."""
    shape, mode = Format(args.format), Redundancy(args.redundancy)
    if shape is Format.PNG and args.output is None:
        raise UserError("--format png needs --output FILE")
    lost = None if args.lose is None else _parse_lost(args.lose, mode)
    costs = EQUAL_COSTS if args.costs is None else _read_costs(args.costs)
    unit = "a forward is 1, a backward 2" if args.costs is None else f"costs of {args.costs.name}"
    sizes = (args.stages, args.chunks, args.microbatches)
    if args.forward_only:
        _check_forward_only(mode, args.mirror_gradients, lost)
        mode = Redundancy.NONE
        body = whole = _build_forwards(sizes, costs)
    else:
        body = _build(sizes, mode, costs, args.mirror_gradients)
        whole = add_tail(body, tied=True)
    validate(whole)
    timeline = simulate(whole, costs)
    if lost is None:
        head = schedule_head(whole, timeline, mode, unit)
        shown = _Shown(head, whole, timeline, None)
    else:
        rehearsal = _rehearse(body, costs, lost)
        shown = _Shown(takeover_head(rehearsal, lost, timeline), whole, timeline, rehearsal)
    _show(shown, shape, args.output)
    return 0


def _build(
    sizes: tuple[int, int, int], mode: Redundancy, costs: Costs, num_mirrors: int
) -> Schedule:
    num_stages, num_chunks, num_microbatches = sizes
    try:
        costs.check_shape(num_stages, num_chunks)
        compute = compute_schedule(num_stages, num_chunks, num_microbatches)
        return lower(add_redundancy(compute, mode, costs, num_mirrors))
    except ValueError as error:
        raise UserError(str(error)) from error


def _build_forwards(sizes: tuple[int, int, int], costs: Costs) -> Schedule:
    num_stages, num_chunks, num_microbatches = sizes
    try:
        costs.check_shape(num_stages, num_chunks)
        return forward_only_schedule(compute_schedule(num_stages, num_chunks, num_microbatches))
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_forward_only(mode: Redundancy, num_mirrors: int, lost: Action | None) -> None:
    """UserError for what an evaluation has not."""
    if mode not in (Redundancy.NONE, Redundancy.LAZY) or num_mirrors:
        raise UserError(
            "--forward-only: nothing is redundant in an evaluation; leave --redundancy and "
            "--mirror-gradients out"
        )
    if lost is not None:
        raise UserError(
            "--forward-only: after a loss an evaluation is done again, there is no takeover to "
            "show; leave --lose out"
        )


def _read_costs(path: Path) -> Costs:
    try:
        return Costs.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--costs {path}: {error}") from error


def _parse_lost(text: str, mode: Redundancy) -> Action:
    if mode is Redundancy.NONE:
        raise UserError("--lose needs replicas: use --redundancy lazy, bubble or eager")
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


def _rehearse(body: Schedule, costs: Costs, lost: Action) -> Rehearsal:
    try:
        loss = loss_before(simulate(body, costs), lost)
    except ValueError as error:
        raise UserError(f"--lose: {error}; without --lose it is shown") from error
    return rehearse(body, costs, loss)


def _show(shown: _Shown, shape: Format, output: Path | None) -> None:
    """Print it, or write it to a file and print only the head."""
    if output is None:
        sys.stdout.write(_as_text(shown, shape))
        return
    try:
        if shape is Format.PNG:
            _draw(shown, output)
        else:
            output.write_text(_as_text(shown, shape), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output}: {error}") from error
    sys.stdout.write(f"{shown.head}\n")


def _as_text(shown: _Shown, shape: Format) -> str:
    match shape:
        case Format.TEXT:
            return f"{shown.head}\n\n{_body(shown)}\n"
        case Format.JSON:
            return json.dumps(_as_json(shown)) + "\n"
        case _:
            return json.dumps(as_trace(_chart(shown))) + "\n"


def _body(shown: _Shown) -> str:
    if shown.rehearsal is not None:
        return takeover_body(shown.rehearsal)
    return schedule_body(shown.schedule, shown.timeline)


def _as_json(shown: _Shown) -> Mapping[str, object]:
    undisturbed = as_json(shown.schedule, shown.timeline)
    if shown.rehearsal is not None:
        return {**undisturbed, "takeover": takeover_as_json(shown.rehearsal)}
    return undisturbed


def _draw(shown: _Shown, output: Path) -> None:
    # Only a picture needs matplotlib, which takes a second to import.
    from megatron_bamboo.observe.schedule_picture import save_picture

    title, _, _ = shown.head.partition("\n\n")
    save_picture(_chart(shown), title, output)


def _chart(shown: _Shown) -> Chart:
    if shown.rehearsal is not None:
        return chart_of_takeover(shown.rehearsal)
    return chart_of(shown.schedule, shown.timeline)
