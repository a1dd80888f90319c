"""A report as JSON for programs, and as lines and tables for people."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megatron_bamboo.planner.infeasible import counted
from megatron_bamboo.planner.placement import Placement
from megatron_bamboo.planner.report import Report, ShownPipeline, run_lengths

_GIGABYTE = 1e9
_UNPROVEN = "*"


def as_json(report: Report) -> dict[str, Any]:
    """All of it, in seconds and bytes."""
    best, request, placement = report.best, report.request, report.placement
    return {
        "nodes": request.num_nodes,
        "fault_tolerance": request.fault_tolerance,
        "microbatches": request.num_microbatches,
        "formula_seconds": best.formula_seconds,
        "simulated_seconds": best.simulated_seconds,
        "formula_rank": best.formula_rank,
        "num_simulated": report.num_simulated,
        "fewest_nodes": report.fewest_nodes,
        "uncovered": report.uncovered,
        "longest_needed": report.longest_needed,
        "templates": [
            {
                "spans": template.spans,
                "slowest_stage_seconds": template.slowest_seconds,
                "planned_seconds": template.planned_seconds,
                "is_proven": template.is_proven,
                "memory_bytes": template.memory,
            }
            for template in report.templates
        ],
        "pipelines": [
            {
                "spans": pipeline.shape.spans,
                "microbatches": pipeline.shape.num_microbatches,
                "formula_seconds": pipeline.formula_seconds,
                "simulated_seconds": pipeline.simulated_seconds,
                "memory_bytes": pipeline.memory,
                "nodes": None if placement is None else placement.pipelines[number],
            }
            for number, pipeline in enumerate(report.pipelines)
        ],
        "shared_zones": None if placement is None else list(zone_warnings(placement)),
    }


def head(report: Report) -> Iterator[str]:
    """What was chosen and how, in a few lines."""
    request, best = report.request, report.best
    yield (
        f"{counted(request.num_nodes, 'node')}, "
        f"{counted(request.num_microbatches, 'microbatch')}, fault tolerance "
        f"{request.fault_tolerance}: {counted(len(report.pipelines), 'pipeline')}, "
        f"{best.simulated_seconds:.6g} s an iteration by simulation, "
        f"{best.formula_seconds:.6g} s by the formula"
    )
    rank = best.formula_rank
    by_formula = "is not among the first" if rank is None else f"has place {rank}"
    yield (
        f"{counted(report.num_simulated, 'arrangement')} simulated and ranked by that; by the "
        f"formula this one {by_formula}"
    )


def coverage(report: Report) -> str:
    """What the templates are good for when nodes come and go."""
    request, fewest = report.request, report.fewest_nodes
    if fewest == request.num_nodes:
        return f"{counted(fewest, 'node')} are the fewest for so many pipelines"
    without = ""
    if report.uncovered:
        without = f", but not {', '.join(map(str, report.uncovered))}"
    return (
        f"they make up any number of nodes from {fewest} to {request.num_nodes}{without}; those of "
        f"up to {counted(report.longest_needed, 'node')} would do for that"
    )


def templates_table(report: Report) -> Table:
    """One row for each number of nodes that a pipeline may have."""
    heads = ["nodes", "units by stage", "slowest stage (s)", "planned (s)"]
    has_memory = report.templates[0].memory is not None
    table = _table("Templates, planned for 4 microbatches a stage", heads, has_memory)
    for template in report.templates:
        nodes = f"{len(template.spans)}{'' if template.is_proven else _UNPROVEN}"
        times = (f"{template.slowest_seconds:.6g}", f"{template.planned_seconds:.6g}")
        table.add_row(nodes, run_lengths(template.spans), *times, *_most(template.memory))
    return table


def unproven(report: Report) -> Iterator[str]:
    """What the mark at some templates means, if one has it."""
    if not all(template.is_proven for template in report.templates):
        yield f"{_UNPROVEN} the best found that fits into memory; a faster cut may have been missed"


def pipelines_table(report: Report) -> Table:
    """One row for pipelines that are alike."""
    heads = ["pipeline", "nodes", "units by stage", "microbatches", "simulated (s)", "formula (s)"]
    has_memory = report.pipelines[0].memory is not None
    table = _table("Pipelines", heads, has_memory)
    for numbers, pipeline in report.groups():
        table.add_row(named(numbers), *_cells(pipeline))
    return table


def named(numbers: range) -> str:
    """The numbers of pipelines that are alike."""
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first} to {last}"


def placement_lines(placement: Placement) -> Iterator[str]:
    """Which node has which place, and what the zones could not be made to do."""
    for number, nodes in enumerate(placement.pipelines):
        yield f"pipeline {number}: {' '.join(nodes)}"
    warnings = list(zone_warnings(placement))
    yield from warnings or ["the loss of one zone leaves a holder of each unit in each pipeline"]


def zone_warnings(placement: Placement) -> Iterator[str]:
    """What is lost with one zone."""
    for one in placement.one_zone:
        yield f"units {', '.join(map(str, one.units))} have no holder outside zone {one.zone}"
    for shared in placement.shared:
        yield (
            f"pipeline {shared.pipeline}: stage {shared.stage} on {shared.node} and its shadow "
            f"{shared.shadow} are both in zone {shared.zone}"
        )


def _table(title: str, heads: Sequence[str], has_memory: bool) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in [*heads, *(["memory (GB)"] if has_memory else [])]:
        table.add_column(name, justify="left" if name == "units by stage" else "right")
    return table


def _cells(pipeline: ShownPipeline) -> Iterator[str]:
    shape = pipeline.shape
    yield from (str(shape.num_stages), run_lengths(shape.spans), str(shape.num_microbatches))
    yield from (f"{pipeline.simulated_seconds:.6g}", f"{pipeline.formula_seconds:.6g}")
    yield from _most(pipeline.memory)


def _most(memory: Sequence[int] | None) -> Iterator[str]:
    """Of the worker that needs most, and its stage."""
    if memory is not None:
        most = max(memory)
        yield f"{most / _GIGABYTE:.3f} (stage {memory.index(most)})"
