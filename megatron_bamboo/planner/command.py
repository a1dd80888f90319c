"""``bamboo plan``: what pipelines so many nodes should be, and what an iteration then takes."""

import argparse
import json
import sys
from enum import StrEnum
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

_WIDTH = 110
"""Columns of what is no terminal."""


class Format(StrEnum):
    """How a plan is shown."""

    TEXT = "text"  # tables
    JSON = "json"  # all of it, for other programs
    PNG = "png"  # a picture of the pipelines


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
    add("--format", choices=[shape.value for shape in Format], default=Format.TEXT.value)
    add("--json", action="store_const", const=Format.JSON.value, dest="format", help="as --format")
    add("--output", type=Path, metavar="FILE", help="write to a file; png needs it")


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
    shape = Format(args.format)
    if shape is Format.PNG and args.output is None:
        raise UserError("--format png needs --output FILE")
    zones = None if args.zones is None else _parse_zones(args.zones, args.nodes)
    costs = read_costs(args.layers)
    limit = None if args.memory is None else check_memory(args.memory, costs)
    try:
        request = Request(args.nodes, args.fault_tolerance, args.microbatches)
        planner = Planner(costs, args.min_stages, args.max_stages, limit)
        report = make_report(planner, request, zones)
    except Infeasible as error:
        raise UserError(str(error)) from error
    _show(report, shape, args.output)
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


def _show(report: Report, shape: Format, output: Path | None) -> None:
    """Print it, or write it to a file and print only the head."""
    if output is None:
        _write(report, shape, Console(width=None if sys.stdout.isatty() else _WIDTH))
        return
    try:
        if shape is Format.PNG:
            _draw(report, output)
        else:
            with output.open("w", encoding="utf-8") as file:
                _write(report, shape, Console(file=file, width=_WIDTH))
    except OSError as error:
        raise UserError(f"--output {output}: {error}") from error
    sys.stdout.write("".join(f"{line}\n" for line in head(report)))


def _write(report: Report, shape: Format, console: Console) -> None:
    if shape is Format.JSON:
        console.file.write(json.dumps(as_json(report)) + "\n")
        return
    for line in head(report):
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    console.print(templates_table(report))
    for line in (*unproven(report), coverage(report)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    console.print(pipelines_table(report))
    if report.placement is not None:
        for line in placement_lines(report.placement):
            console.print(line, highlight=False, soft_wrap=True)


def _draw(report: Report, output: Path) -> None:
    # Only a picture needs matplotlib, which takes a second to import.
    from megatron_bamboo.observe.pipelines_picture import save_picture

    save_picture(report, "\n".join(head(report)), output)
