"""``bamboo simulate``: a trace of spot nodes played by each policy, side by side."""

import argparse
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.command import add_model_arguments, check_memory, read_costs
from megatron_bamboo.planner.infeasible import Infeasible, Request, counted
from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.planner.propose import Planner
from megatron_bamboo.planner.showing import Showable, add_format_options, chosen_format
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.policy import Policy
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.recovery.times import IterationTimes
from megatron_bamboo.simulator.report import Simulation, as_json, head, time_table, work_table
from megatron_bamboo.simulator.run import run_through
from megatron_bamboo.simulator.trace import HOUR, Trace, read_trace

_WIDTH = 120
"""Columns of what is no terminal."""
_MEGABYTE = 1e6
_MICROBATCHES_A_NODE = 4
"""What templates are planned for, with a stage on each node."""
_PRICES = {
    "takeover_seconds": "from a loss until its shadow works in its place",
    "switch_seconds": "what a planned change holds up, its state having moved before",
    "reconfigure_seconds": "what a change takes for which all wait, beside moving state",
    "start_seconds": "from a node's arrival until it can take a place",
    "restore_seconds": "until all have started anew from a checkpoint",
    "save_seconds": "what a checkpoint holds up",
    "save_interval": "iterations from one checkpoint to the next",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo simulate``."""
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="rows `milliseconds,add or remove,node`, or `date, time, number of nodes`",
    )
    add(
        "--policy",
        default=",".join(PolicyName),
        metavar="NAME,..",
        help=f"which to compare ({','.join(PolicyName)})",
    )
    add("--nodes", type=int, metavar="N", help="at most, of those in the trace (all)")
    add("--from", type=float, default=0.0, dest="start", metavar="H", help="hour to begin with (0)")
    add("--hours", type=float, metavar="H", help="how long (to the end)")
    add_model_arguments(parser)
    add(
        "--microbatches",
        type=int,
        metavar="N",
        help=f"of the global batch ({_MICROBATCHES_A_NODE} for each node that there is at most)",
    )
    add("--micro-batch-size", type=int, default=1, metavar="N", help="samples of a microbatch (1)")
    standard = Prices()
    add(
        "--bandwidth",
        type=float,
        default=standard.bandwidth / _MEGABYTE,
        metavar="MB/S",
        help=f"of a node's link ({standard.bandwidth / _MEGABYTE:g})",
    )
    for name, text in _PRICES.items():
        value = getattr(standard, name)
        option = f"--{name.replace('_', '-')}"
        unit = "N" if isinstance(value, int) else "S"
        add(option, type=type(value), default=value, metavar=unit, help=f"{text} ({value:g})")
    add_format_options(parser)


def run(args: argparse.Namespace) -> int:
    """Play and show."""
    form = chosen_format(args)
    names, prices = _parse_policies(args.policy), _parse_prices(args)
    trace = _read_trace(args)
    _showable(_simulate(args, names, prices, trace)).show(form, args.output)
    return 0


def _simulate(
    args: argparse.Namespace, names: list[PolicyName], prices: Prices, trace: Trace
) -> Simulation:
    costs = read_costs(args.layers)
    if not costs.has_bytes:
        raise UserError(
            f"--layers {args.layers}: the costs do not say how many bytes of state the units have; "
            "bamboo profile does"
        )
    if args.micro_batch_size < 1:
        raise UserError(f"--micro-batch-size {args.micro_batch_size}: it must be 1 or more")
    most = max(number for _, number in trace.counts())
    num_microbatches = args.microbatches
    if num_microbatches is None:
        num_microbatches = _MICROBATCHES_A_NODE * most
    try:
        request = Request(most, args.fault_tolerance, num_microbatches)
        planner = _make_planner(args, costs, request)
    except Infeasible as error:
        raise UserError(str(error)) from error
    times = IterationTimes(costs)
    outcomes = {
        name: run_through(
            trace,
            Policy(name, planner, times, prices, num_microbatches, args.fault_tolerance),
            times,
            prices,
        )
        for name in names
    }
    return Simulation(
        args.trace.name,
        args.start,
        trace,
        prices,
        args.fault_tolerance,
        num_microbatches,
        args.micro_batch_size,
        outcomes,
    )


def _make_planner(args: argparse.Namespace, costs: UnitCosts, request: Request) -> Planner:
    """A planner with which at least all nodes that there are at most can train."""
    limit = None if args.memory is None else check_memory(args.memory, costs)
    planner = Planner(costs, args.min_stages, args.max_stages, limit)
    least = min(planner.templates(request))
    if least > request.num_nodes:
        raise Infeasible(
            f"the model needs {counted(least, 'node')}, and there are at most {request.num_nodes} "
            f"in this part of the trace: use --nodes {least} or more, or another part"
        )
    return planner


def _parse_policies(text: str) -> list[PolicyName]:
    try:
        names = [PolicyName(word) for word in text.split(",")]
    except ValueError as error:
        every = ", ".join(PolicyName)
        raise UserError(f"--policy {text}: give some of {every}, with commas between") from error
    if len(set(names)) < len(names):
        raise UserError(f"--policy {text}: name each once")
    return names


def _parse_prices(args: argparse.Namespace) -> Prices:
    values = {field.name: getattr(args, field.name) for field in fields(Prices)}
    try:
        return Prices(**values | {"bandwidth": args.bandwidth * _MEGABYTE})
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        raise UserError(f"--{name.replace('_', '-')} {problem}") from error


def _read_trace(args: argparse.Namespace) -> Trace:
    """The part of the trace that is asked for."""
    hours = None if args.hours is None else args.hours * HOUR
    try:
        trace = read_trace(args.trace.read_text(encoding="utf-8"))
        part = trace.window(args.start * HOUR, hours)
    except (OSError, ValueError) as error:
        raise UserError(f"--trace {args.trace}: {error}") from error
    if args.nodes is not None:
        if args.nodes < 1:
            raise UserError(f"--nodes {args.nodes}: it must be 1 or more")
        part = part.at_most(args.nodes)
    if not part.node_seconds:
        raise UserError(f"--trace {args.trace}: there is no node in this part of it")
    return part


def _showable(simulation: Simulation) -> Showable:
    return Showable(
        tuple(head(simulation)),
        lambda: as_json(simulation),
        lambda console: _print(simulation, console),
        lambda output: _draw(simulation, output),
        _WIDTH,
    )


def _print(simulation: Simulation, console: Console) -> None:
    for table in (work_table(simulation), time_table(simulation)):
        console.print()
        console.print(table)


def _draw(simulation: Simulation, output: Path) -> None:
    # Only a picture needs matplotlib, which takes a second to import.
    from megatron_bamboo.observe.trace_picture import save_picture

    save_picture(simulation, "\n".join(head(simulation)), output)
