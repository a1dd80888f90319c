"""``bamboo plan``: what pipelines so many nodes should be, and what an iteration then takes."""

import argparse
from pathlib import Path

from rich.console import Console

from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.infeasible import Infeasible, Request
from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.planner.propose import Planner
from megatron_bamboo.planner.report import Report, make_report
from megatron_bamboo.planner.report_forms import (
    as_json,
    coverage,
    head,
    pipelines_table,
    placement_lines,
    templates_table,
    unproven,
)
from megatron_bamboo.planner.showing import (
    Showable,
    add_format_options,
    chosen_format,
    print_lines,
)

_WIDTH = 110
"""Columns of what is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo plan``."""
    add = parser.add_argument
    add_model_arguments(parser)
    add("--nodes", type=int, required=True, metavar="N", help="nodes, all of which are used")
    add("--microbatches", type=int, required=True, metavar="N", help="of the global batch")
    add(
        "--zones",
        metavar="ZONE=N,..",
        help="how many of the nodes are in which zone: says which node takes which place, so that "
        "as little as can be is lost with one zone",
    )
    add_format_options(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What pipelines of a model can be made from: its costs, and what each has to have."""
    add = parser.add_argument
    add(
        "--layers",
        type=Path,
        required=True,
        metavar="FILE",
        help="the costs of each unit, as bamboo profile writes them",
    )
    add(
        "--fault-tolerance",
        type=int,
        default=1,
        metavar="F",
        help="so many pipelines more than one, at least (1)",
    )
    add(
        "--min-stages",
        type=int,
        default=2,
        metavar="N",
        help="of a pipeline (2, so that the replica of a stage is on another node of its pipeline)",
    )
    add("--max-stages", type=int, metavar="N", help="of a pipeline (as many as there are units)")
    add(
        "--memory",
        type=float,
        metavar="BYTES",
        help="what a worker has for its tensors, like 70e9: no cut needs more, also after a "
        "takeover",
    )


def run(args: argparse.Namespace) -> int:
    """Plan and show."""
    form = chosen_format(args)
    zones = None if args.zones is None else _parse_zones(args.zones, args.nodes)
    costs = read_costs(args.layers)
    limit = None if args.memory is None else check_memory(args.memory, costs)
    try:
        request = Request(args.nodes, args.fault_tolerance, args.microbatches)
        planner = Planner(costs, args.min_stages, args.max_stages, limit)
        report = make_report(planner, request, zones)
    except Infeasible as error:
        raise UserError(str(error)) from error
    _showable(report).show(form, args.output)
    return 0


def read_costs(path: Path) -> UnitCosts:
    """The costs by unit in a file; UserError where there are none."""
    try:
        return UnitCosts.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--layers {path}: {error}") from error


def check_memory(limit: float, costs: UnitCosts) -> int:
    """The bytes that a worker has; UserError where they cannot be, or costs have none."""
    if not 0 < limit < float("inf"):
        raise UserError(f"--memory {limit:g}: give a number of bytes above 0, like 70e9")
    if not costs.has_bytes:
        raise UserError(
            "--memory: the costs do not say what the units take of memory; bamboo profile does"
        )
    return int(limit)


def _parse_zones(text: str, num_nodes: int) -> dict[str, str]:
    """By name of each node its zone."""
    zones: list[str] = []
    for word in text.split(","):
        zone, _, count = word.partition("=")
        if not zone or not count.isdecimal():
            raise UserError(f"--zones {text}: give each zone its number of nodes, like a=4,b=3")
        zones += [zone] * int(count)
    if len(zones) != num_nodes:
        raise UserError(f"--zones {text}: these are {len(zones)} nodes, not {num_nodes}")
    return {f"node{number}": zone for number, zone in enumerate(zones)}


def _showable(report: Report) -> Showable:
    return Showable(
        tuple(head(report)),
        lambda: as_json(report),
        lambda console: _print(report, console),
        lambda output: _draw(report, output),
        _WIDTH,
    )


def _print(report: Report, console: Console) -> None:
    console.print()
    console.print(templates_table(report))
    print_lines(console, (*unproven(report), coverage(report)))
    console.print()
    console.print(pipelines_table(report))
    if report.placement is not None:
        print_lines(console, placement_lines(report.placement))


def _draw(report: Report, output: Path) -> None:
    # Only a picture needs matplotlib, which takes a second to import.
    from megatron_bamboo.observe.pipelines_picture import save_picture

    save_picture(report, "\n".join(head(report)), output)
