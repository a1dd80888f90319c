"""Why there is no arrangement, and the smallest change with which there would be one.

Each answer names what the user asked for, what it would need, and the options to change.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from megatron_bamboo.planner.cut import Cutter
from megatron_bamboo.planner.fitting import Fitter, planned_need
from megatron_bamboo.planner.instantiate import Instantiator
from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.planner.memory import Memory
from megatron_bamboo.planner.templates import Templates

_HALVINGS = 8
"""How closely the least memory is found: to one part in 256 of what is known to do."""


class Infeasible(ValueError):
    """There is no arrangement: the message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an arrangement is wanted for."""

    num_nodes: int
    fault_tolerance: int
    """So many pipelines more than one."""
    num_microbatches: int
    """Of the global batch."""

    def __post_init__(self) -> None:
        least = {"num_nodes": 1, "fault_tolerance": 0, "num_microbatches": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                flag = "--" + name.removeprefix("num_").replace("_", "-")
                raise Infeasible(f"{flag} {getattr(self, name)}: it must be {bound} or more")


def check_counts(request: Request, sizes: Collection[int]) -> None:
    """Refuse what no pipelines of these numbers of nodes can be.

    Raises:
        Infeasible: with the smallest change.
    """
    pipelines, least = request.fault_tolerance + 1, min(sizes)
    if request.num_nodes < pipelines * least:
        raise Infeasible(_too_few_nodes(request, least))
    if request.num_microbatches < pipelines:
        raise Infeasible(
            f"{counted(request.num_microbatches, 'microbatch')} for {pipelines} pipelines, each of "
            f"which needs one: use --microbatches {pipelines} or --fault-tolerance "
            f"{request.num_microbatches - 1}"
        )
    covered = covered_nodes(request, sizes, request.num_nodes + max(sizes))
    if request.num_nodes not in covered:
        raise Infeasible(_not_covered(request, sizes, covered))


def covered_nodes(request: Request, sizes: Collection[int], most_nodes: int) -> tuple[int, ...]:
    """The numbers of nodes that pipelines can have together, of these sizes and so many as asked.

    At least f + 1, and no more than there are microbatches.
    """
    fewest = request.fault_tolerance + 1
    allowed = (1 << (request.num_microbatches + 1)) - (1 << fewest)
    counts = pipeline_counts(sizes, most_nodes)
    return tuple(nodes for nodes, at in enumerate(counts) if at & allowed)


def pipeline_counts(sizes: Collection[int], most_nodes: int) -> list[int]:
    """By number of nodes how many pipelines they can be: bit n stands for n pipelines."""
    counts = [1]
    for nodes in range(1, most_nodes + 1):
        at = 0
        for size in sizes:
            if size <= nodes:
                at |= counts[nodes - size] << 1
        counts.append(at)
    return counts


def no_template(costs: UnitCosts, sizes: Collection[int], limit: int) -> str:
    """The reason when no cut fits into memory, with the least limit found with which one does."""
    cutter, memory = Cutter(costs.works().ticks), Memory(costs)
    needs = {size: planned_need(memory, cutter.best(size)) for size in sizes}
    size = min(needs, key=needs.__getitem__)
    free, needed, low = cutter.best(size), needs[size], limit
    for _ in range(_HALVINGS):
        middle = (low + needed) // 2
        fitted = Fitter(costs, middle).best(size, free)
        if fitted.cut is None:
            low = middle
        else:
            needed = planned_need(memory, fitted.cut)
    return (
        f"no cut into {_between(sizes)} fits into {limit:,} bytes a worker with room for a "
        f"takeover: {counted(size, 'stage')} need {needed:,}: use --memory {needed}, or more "
        "workers a node"
    )


def log_too_long(templates: Templates, request: Request) -> str:
    """The reason when pipelines that fit cannot log the messages of all microbatches."""
    paces = {size: template.pace for size, template in templates.items()}
    instantiate = partial(Instantiator, paces, request.num_nodes, request.fault_tolerance)
    low, high = request.fault_tolerance + 1, request.num_microbatches
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if instantiate(middle).best(1) else (low, middle - 1)
    return (
        f"no pipelines of {counted(request.num_nodes, 'node')} have memory for what is logged of "
        f"{counted(request.num_microbatches, 'microbatch')} until a step's end: "
        f"use --microbatches {low}, or more nodes"
    )


def counted(number: int, what: str) -> str:
    """A number of things in words."""
    plural = {"microbatch": "microbatches"}.get(what, what + "s")
    return f"{number} {what if number == 1 else plural}"


def _too_few_nodes(request: Request, least: int) -> str:
    pipelines = request.fault_tolerance + 1
    needed = pipelines * least
    reason = (
        f"{counted(request.num_nodes, 'node')}, {counted(pipelines, 'pipeline')} of at least "
        f"{least} need {needed}: add {counted(needed - request.num_nodes, 'node')}"
    )
    if request.num_nodes < least:
        return reason
    return f"{reason} or use --fault-tolerance {request.num_nodes // least - 1}"


def _not_covered(request: Request, sizes: Collection[int], covered: Collection[int]) -> str:
    nodes, batches = request.num_nodes, request.num_microbatches
    changes = []
    if fewer := max((n for n in covered if n < nodes), default=None):
        changes.append(f"leave {counted(nodes - fewer, 'node')} out")
    if more := min((n for n in covered if n > nodes), default=None):
        changes.append(f"add {counted(more - nodes, 'node')}")
    if nodes > batches * max(sizes):
        changes.append(f"use --microbatches {-(-nodes // max(sizes))}")
    return (
        f"{counted(nodes, 'node')} cannot be {request.fault_tolerance + 1} to "
        f"{counted(batches, 'pipeline')} of {_between(sizes, 'node')} each: {' or '.join(changes)}"
    )


def _between(sizes: Collection[int], what: str = "stage") -> str:
    low, high = min(sizes), max(sizes)
    return counted(low, what) if low == high else f"{low} to {counted(high, what)}"
